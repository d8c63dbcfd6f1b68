#include "apps/serve/server.hpp"

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <optional>
#include <thread>

#include "apps/serve/core.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::serve {

namespace {

using boost::system::error_code;

constexpr int kRefused = 64;                             // connections beyond the limit that are told so; others are closed at once
constexpr int kBacklog = 4096;                           // the kernel's limit is lower, as a rule
constexpr auto kPause = std::chrono::milliseconds(100);  // when the process has no descriptor for a connection

}  // namespace

Registration::Registration(Core& core, const std::shared_ptr<Closable>& closable) : core_(core), closable_(closable.get()) {
  ++core_.connections;
  core_.service.metrics.connections(1);
  const std::lock_guard lock(core_.mutex);
  core_.closables.emplace(closable_, closable);
}

Registration::~Registration() {
  {
    const std::lock_guard lock(core_.mutex);
    core_.closables.erase(closable_);
  }
  core_.service.metrics.connections(-1);
  --core_.connections;
}

void log_exception(Log& log, const std::string& id) {
  try {
    throw;
  } catch (const std::exception& error) {
    log.write(LogLevel::error, "exception", {{"id", id}, {"what", std::string(error.what())}});
  } catch (...) {
    log.write(LogLevel::error, "exception", {{"id", id}});
  }
}

struct Server::State {
  State(Service& service, Log& log, std::vector<Route> routes, ServerOptions options)
      : core(service, log, std::move(routes), std::move(options)) {
    core.idle = [this] { net::post(strand, [this] { end(); }); };
    work = Work(core);
    listen();
    net::post(strand, [this] { accept(); });
    for (int i = 0; i < core.options.io_threads; ++i) threads.emplace_back([this] { run(); });
  }

  ~State() {
    core.io.stop();
    threads.clear();
    core.workers.stop();
    core.websocket_workers.stop();
    for (const auto& open : all()) open->abandon();
    core.idle = [] {};
  }

  void listen() {
    const auto fail = [&](const std::string& what) {
      throw Error(tw::format("cannot listen on {}:{}: {}", core.options.host, core.options.port, what));
    };
    error_code error;
    tcp::resolver resolver(core.io);
    const auto found = resolver.resolve(core.options.host, std::to_string(core.options.port), tcp::resolver::passive, error);
    if (error || found.empty()) fail(error ? error.message() : "no such host");
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(kBacklog, error);
    if (error) fail(error.message());
    local = acceptor.local_endpoint();
  }

  void run() {
    for (;;) {
      try {
        core.io.run();
        return;
      } catch (...) {  // out of memory: that connection is lost
        log_exception(core.log, "");
      }
    }
  }

  void accept() {
    acceptor.async_accept(net::make_strand(core.io), net::bind_executor(strand, [this](error_code error, tcp::socket socket) {
                            if (!error) {
                              serve(std::move(socket));
                            } else if (!acceptor.is_open()) {
                              return;
                            } else if (error != net::error::connection_aborted) {
                              core.log.write(LogLevel::warning, "cannot accept a connection", {{"reason", error.message()}});
                              pause.expires_after(kPause);
                              return pause.async_wait(net::bind_executor(strand, [this](error_code) {
                                if (acceptor.is_open()) accept();
                              }));
                            }
                            accept();
                          }));
  }

  void serve(tcp::socket socket) {
    const int open = core.connections, limit = core.service.limits.connections;
    try {
      if (open < limit + kRefused) return serve_connection(core, std::move(socket), open >= limit);
    } catch (...) {
      log_exception(core.log, "");
    }
    core.service.metrics.refused("too_many_connections");
  }

  void drain() {
    if (core.service.draining.exchange(true)) return;
    core.drain_end = (Clock::now() + duration_of(core.service.limits.grace_seconds)).time_since_epoch().count();
    // Connections that the kernel has taken already.
    error_code error;
    acceptor.non_blocking(true, error);
    while (!error) {
      tcp::socket socket(net::make_strand(core.io));
      acceptor.accept(socket, error);
      if (!error) serve(std::move(socket));
    }
    acceptor.close(error);
    pause.cancel();
    for (const auto& open : all()) open->drain();
    work = {};
  }

  std::vector<std::shared_ptr<Closable>> all() {
    std::vector<std::shared_ptr<Closable>> open;
    const std::lock_guard lock(core.mutex);
    for (const auto& [_, closable] : core.closables)
      if (auto alive = closable.lock()) open.push_back(std::move(alive));
    return open;
  }

  void end() {
    for (const auto& open : all()) open->shut();
    guard.reset();
  }

  Core core;
  net::strand<net::io_context::executor_type> strand = net::make_strand(core.io);
  tcp::acceptor acceptor{strand};
  tcp::endpoint local;
  net::steady_timer pause{strand};
  net::executor_work_guard<net::io_context::executor_type> guard = net::make_work_guard(core.io);
  Work work;
  std::vector<std::jthread> threads;
};

Server::Server(Service& service, Log& log, std::vector<Route> routes, ServerOptions options)
    : state_(std::make_unique<State>(service, log, std::move(routes), std::move(options))) {}
Server::~Server() = default;

int Server::port() const { return state_->local.port(); }

std::string Server::url() const {
  const net::ip::address address = state_->local.address();
  const std::string host = address.to_string();
  return tw::format("http://{}:{}", address.is_v6() ? "[" + host + "]" : host, port());
}

void Server::drain() {
  net::post(state_->strand, [state = state_.get()] { state->drain(); });
}

void Server::wait() {
  state_->threads.clear();
  // Handlers of clients that are gone.
  state_->core.workers.stop();
  state_->core.websocket_workers.stop();
}

}  // namespace tw::serve
