#pragma once

// What the server's connections share. For server.cpp, connection.cpp and websocket.cpp alone: Boost takes seconds to compile.

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "apps/serve/server.hpp"
#include "apps/serve/workers.hpp"

namespace tw::serve {

namespace net = boost::asio;
using net::ip::tcp;
using Clock = std::chrono::steady_clock;
using UpgradeRequest = boost::beast::http::request<boost::beast::http::empty_body>;

inline Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

/// A connection, as the server sees it; any thread.
class Closable {
 public:
  virtual ~Closable() = default;
  virtual void drain() = 0;  ///< end soon
  virtual void shut() = 0;   ///< nothing is left to do: end now
  /// No thread runs any more: releases what may refer to the connection.
  virtual void abandon() = 0;
};

struct Core {
  Core(Service& the_service, Log& the_log, std::vector<Route> the_routes, ServerOptions the_options)
      : service(the_service),
        log(the_log),
        routes(std::move(the_routes)),
        options(std::move(the_options)),
        workers(options.workers),
        websocket_workers(options.workers) {}

  Service& service;
  Log& log;
  const std::vector<Route> routes;
  const ServerOptions options;
  std::atomic<int> connections = 0;
  std::atomic<std::size_t> body_bytes = 0;  ///< of all requests and messages in memory

  std::atomic<Clock::rep> drain_end = Clock::time_point::max().time_since_epoch().count();  ///< later requests are refused

  /// Open connections and WebSockets.
  std::mutex mutex;
  std::unordered_map<Closable*, std::weak_ptr<Closable>> closables;

  /// What is to be finished before a draining server ends, the server's own being the last; then `idle` is called, from any thread, perhaps
  /// more than once.
  std::atomic<int> work = 0;
  std::function<void()> idle;

  net::io_context io;
  Workers workers, websocket_workers;  // end first, then sockets
};

/// Counts a connection as open.
class Registration {
 public:
  Registration(Core& core, const std::shared_ptr<Closable>& closable);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  Core& core_;
  Closable* closable_;
};

/// One piece of work.
class Work {
 public:
  Work() = default;
  explicit Work(Core& core) : core_(&core) { ++core.work; }
  Work(Work&& other) noexcept : core_(std::exchange(other.core_, nullptr)) {}
  Work& operator=(Work&& other) noexcept {
    Work old(std::move(*this));
    core_ = std::exchange(other.core_, nullptr);
    return *this;
  }
  ~Work() {
    if (core_ != nullptr && --core_->work == 0) core_->idle();
  }
  explicit operator bool() const { return core_ != nullptr; }

 private:
  Core* core_ = nullptr;
};

/// Serves HTTP on a socket whose executor is a strand. `refused`: there are too many connections; answers 503.
void serve_connection(Core& core, tcp::socket socket, bool refused);

/// A WebSocket before and after its handshake.
class UpgradedSocket : public WebSocket, public Closable {
 public:
  /// Answers the handshake. On the strand.
  virtual void open(tcp::socket socket, const UpgradeRequest& upgrade, std::shared_ptr<WebSocketSession> session, Work work) = 0;
};

std::shared_ptr<UpgradedSocket> make_websocket(Core& core, std::shared_ptr<const HttpRequest> request,
                                               const tcp::socket::executor_type& strand);

/// Logs the exception that is being handled, at request `id`.
void log_exception(Log& log, const std::string& id);

}  // namespace tw::serve
