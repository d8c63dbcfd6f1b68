#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "apps/serve/cors.hpp"
#include "apps/serve/http.hpp"
#include "apps/serve/keys.hpp"
#include "apps/serve/log.hpp"
#include "apps/serve/service.hpp"

namespace tw::serve {

/// What the server does with one method and path. GET answers HEAD, too.
struct Route {
  std::string method, path;         ///< a path may end in a name in braces, "/v1/models/{id}", which stands for the rest
  Handler handler = {};             ///< called on a worker. What it throws becomes an answer: api_error() in service.hpp
  WebSocketHandler websocket = {};  ///< instead of `handler`
  bool open = false;                ///< needs no API key
  bool quick = false;               ///< does not wait: called on the thread of the socket, also while the server drains
};

struct ServerOptions {
  std::string host = "127.0.0.1";  ///< a name or address
  int port = 8080;                 ///< 0: any that is free
  int io_threads = 2;              ///< for sockets
  int workers = 4;                 ///< for handlers; as many again for WebSockets
  ApiKeys keys = {};
  Cors cors = {};
};

/// An HTTP/1.1 server: keep-alive, pipelining, WebSockets, a limit and a timeout for everything that a client does.
class Server {
 public:
  /// Listens, and serves from now on. `service` and `log` must outlive it. Throws Error if the address cannot be used.
  Server(Service& service, Log& log, std::vector<Route> routes, ServerOptions options);
  /// Ends what has not ended.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::string url() const;  ///< http://127.0.0.1:8080
  int port() const;

  /// Stops to accept connections. Requests that have arrived, or are on the way (Limits::grace_seconds), are answered. Later ones get 503
  /// (quick routes work), and when none is left the server has ended. Any thread.
  void drain();
  /// Returns when the server has ended: no handler runs any more.
  void wait();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tw::serve
