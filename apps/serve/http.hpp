#pragma once

// HTTP and WebSocket as the handlers of the server see them. server.cpp has the sockets.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tw::serve {

using Headers = std::vector<std::pair<std::string, std::string>>;

/// A complete request.
struct HttpRequest {
  std::string method;                                      ///< GET, POST, ...
  std::string path;                                        ///< decoded, without the query
  std::vector<std::pair<std::string, std::string>> query;  ///< decoded
  Headers headers;
  std::string body;
  std::string id;            ///< of the request, in logs and in the header X-Request-Id
  std::uint64_t client = 0;  ///< the same for requests with the same API key, or else from the same address

  /// The first header of that name, in any case; "" if there is none.
  std::string_view header(std::string_view name) const;
};

/// Answers one request, from any thread: send(), or begin(), write() any number of times, and end(). After the client has gone they do
/// nothing. A responder that is destroyed without an answer answers 500.
class Responder {
 public:
  virtual ~Responder() = default;

  virtual void send(int status, Headers headers, std::string body) = 0;

  virtual void begin(int status, Headers headers) = 0;  ///< the body follows in chunks
  virtual void write(std::string chunk) = 0;            ///< queues it. A client that does not read for a while is disconnected
  virtual void end() = 0;

  /// `gone` is called once if the client goes away, or does not read, before the answer is complete; at once if it has gone already.
  virtual void on_gone(std::function<void()> gone) = 0;
};

using Handler = std::function<void(std::shared_ptr<const HttpRequest>, std::shared_ptr<Responder>)>;

/// The server's side of a WebSocket; any thread.
class WebSocket {
 public:
  virtual ~WebSocket() = default;
  virtual void send(std::string text) = 0;  ///< queues a text message. A client that does not read for a while is disconnected
  virtual void close(int code, std::string reason) = 0;
};

/// What the server does with one WebSocket. It is called from one thread at a time.
class WebSocketSession {
 public:
  virtual ~WebSocketSession() = default;  ///< the connection has ended
  virtual void on_text(std::string message) = 0;
  virtual void on_binary(std::string message) = 0;
  /// The server is ending. Returns whether to close the socket now; else the session closes it when the work that it has begun is done.
  virtual bool on_drain() { return true; }
};

/// Begins a session, or throws ApiError (error.hpp) to refuse the upgrade.
using WebSocketHandler =
    std::function<std::unique_ptr<WebSocketSession>(std::shared_ptr<const HttpRequest> upgrade, std::shared_ptr<WebSocket> socket)>;

}  // namespace tw::serve
