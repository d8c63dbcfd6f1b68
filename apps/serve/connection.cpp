#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/buffer_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <boost/beast/http/status.hpp>
#include <boost/beast/websocket/rfc6455.hpp>
#include <boost/optional.hpp>
#include <cstdint>
#include <ctime>
#include <deque>
#include <optional>
#include <random>

#include "apps/serve/core.hpp"
#include "apps/serve/url.hpp"
#include "models/one_line.hpp"
#include "runtime/format.hpp"

namespace tw::serve {

namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::system::error_code;

constexpr std::uint32_t kHeaderBytes = 16 << 10;
constexpr std::size_t kStep = 64 << 10;            // of a body, read at a time
constexpr std::size_t kAhead = 64 << 10;           // of later requests, read while one is processed
constexpr std::size_t kUnsent = 8 << 20;           // of a streamed answer that waits for its reader
constexpr std::size_t kNonceDigits = 24;           // of a WebSocket's handshake: 16 bytes in Base64
constexpr auto kLinger = std::chrono::seconds(2);  // for a client to read an answer after which the connection is closed

std::string new_id() {
  thread_local std::mt19937_64 random{(std::uint64_t{std::random_device()()} << 32) ^ std::random_device()()};
  return tw::format("req_{:016x}{:08x}", random(), static_cast<std::uint32_t>(random()));
}

/// A client's X-Request-Id is kept if it is a word of reasonable length.
bool sane_id(std::string_view id) {
  const auto good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  };
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), good);
}

std::string http_date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 40> text{};
  std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &utc);
  return text.data();
}

bool has(const Headers& headers, std::string_view name) {
  return std::any_of(headers.begin(), headers.end(),
                     [&](const auto& header) { return beast::iequals(header.first, beast::string_view(name.data(), name.size())); });
}

std::string_view view(beast::string_view text) { return {text.data(), text.size()}; }

/// Whether `path` is what the route is for. "/v1/models/{id}" stands for all longer paths with its beginning.
bool matches(const Route& route, std::string_view path) {
  const std::size_t brace = route.path.find('{');
  if (brace == std::string::npos) return path == route.path;
  return path.size() > brace && path.substr(0, brace) == std::string_view(route.path).substr(0, brace);
}

/// One connection, request after request. Its functions run on the strand of its socket; public ones post to that strand.
class Connection final : public std::enable_shared_from_this<Connection>, public Closable {
 public:
  Connection(Core& core, tcp::socket socket)
      : core_(core), socket_(std::move(socket)), timer_(socket_.get_executor()), buffer_(2 * kAhead) {
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
    address_ = socket_.remote_endpoint(ignored).address().to_string();
  }

  ~Connection() override { core_.body_bytes -= body_.size(); }

  void start(bool refused) {
    registration_.emplace(core_, shared_from_this());
    net::post(socket_.get_executor(), [self = shared_from_this(), refused] {
      self->work_ = Work(self->core_);
      self->started_ = Clock::now();
      if (refused) {
        self->id_ = new_id();
        self->refuse({503, "the server has too many connections", "", "too_many_connections"});
        return;
      }
      self->deadline(self->seconds(self->limits().header_seconds));
      self->watch();
    });
  }

  void drain() override {
    net::post(socket_.get_executor(), [self = shared_from_this()] {
      if (self->phase_ == Phase::idle && self->fresh_)
        self->deadline(std::min(self->deadline_, self->seconds(self->limits().grace_seconds)));
    });
  }

  void shut() override {
    net::post(socket_.get_executor(), [self = shared_from_this()] {
      if (self->phase_ == Phase::lingering) self->close();
      if (self->phase_ != Phase::idle) return;  // ends by itself
      // A request may have arrived just now, whose answer is 503.
      error_code error;
      if (self->socket_.available(error) > 0 && !error)
        self->deadline(self->seconds(self->limits().grace_seconds));
      else
        self->close();
    });
  }

  void abandon() override { on_gone_.clear(); }

  // Of the answer to request `number`; any thread. Nothing happens when that answer is complete.
  void send(std::uint64_t number, int status, Headers headers, std::string body) {
    on_strand(number, [this, status, headers = std::move(headers), body = std::move(body)]() mutable {
      if (!begun_) answer(status, std::move(headers), std::move(body));
    });
  }
  void begin(std::uint64_t number, int status, Headers headers) {
    on_strand(number, [this, status, headers = std::move(headers)]() mutable {
      if (begun_) return;
      // HTTP/1.0 has no chunks: the end of the connection ends the answer.
      chunked_ = version_ >= 11;
      if (!chunked_) close_after_ = true;
      head(status, std::move(headers), chunked_ ? Length::chunked : Length::unknown, 0);
      flush();
    });
  }
  void write(std::uint64_t number, std::string chunk) {
    on_strand(number, [this, chunk = std::move(chunk)] {
      if (!begun_ || chunk.empty() || head_only_) return;
      put(chunked_ ? tw::format("{:x}\r\n", chunk.size()) + chunk + "\r\n" : chunk);
      if (unsent_ > kUnsent)
        lost("slow_client");
      else
        flush();
    });
  }
  void end(std::uint64_t number) {
    on_strand(number, [this] {
      if (!begun_) return;
      if (chunked_ && !head_only_) put("0\r\n\r\n");
      ended_ = true;
      flush();
    });
  }
  void on_gone(std::uint64_t number, std::function<void()> gone) {
    net::post(socket_.get_executor(), [self = shared_from_this(), number, gone = std::move(gone)]() mutable {
      if (self->number_ != number || self->ended_) return;
      if (self->gone_)
        gone();
      else
        self->on_gone_.push_back(std::move(gone));
    });
  }
  void abandoned(std::uint64_t number) {
    on_strand(number, [this] {
      if (ended_) return;
      if (begun_)
        lost("unfinished");
      else
        refuse({500, "the server did not answer", "", "internal_error"}, false);
    });
  }

 private:
  enum class Phase { idle, head, body, handling, lingering, closed };
  enum class Length { known, chunked, unknown };

  const Limits& limits() const { return core_.service.limits; }
  Clock::time_point seconds(double count) const { return Clock::now() + duration_of(count); }

  template <class Function>
  void on_strand(std::uint64_t number, Function function) {
    net::post(socket_.get_executor(), [self = shared_from_this(), number, function = std::move(function)]() mutable {
      if (self->number_ == number && self->phase_ == Phase::handling && !self->ended_ && !self->gone_) function();
    });
  }

  // Time

  void deadline(Clock::time_point time) {
    deadline_ = time;
    timer_.expires_at(time);
    timer_.async_wait([self = shared_from_this()](error_code error) {
      // One that expired just before it was set anew comes too early.
      if (!error && Clock::now() >= self->deadline_) self->expired();
    });
  }

  void expired() {
    switch (phase_) {
      case Phase::idle:
      case Phase::lingering:
        close();
        break;
      case Phase::head:
      case Phase::body:
        late_ = true;  // the read, which ends now, sees it
        cancel();
        break;
      case Phase::handling:
        if (begun_) {
          lost("timeout");
        } else {
          call_gone();
          gone_ = false;
          refuse({503, "the request took too long", "", "request_timeout"});
        }
        break;
      case Phase::closed:
        break;
    }
  }

  // Reading

  /// Reads whatever comes: the beginning of a request; or, while one is processed, later requests and the connection's end.
  void watch() {
    if (reading_ || buffer_.size() >= kAhead) return;
    reading_ = true;
    socket_.async_read_some(buffer_.prepare(4096), [self = shared_from_this()](error_code error, std::size_t bytes) {
      self->reading_ = false;
      self->buffer_.commit(bytes);
      self->watched(error);
    });
  }

  void watched(error_code error) {
    if (phase_ == Phase::lingering) {
      buffer_.clear();
      error ? close() : watch();
    } else if (phase_ == Phase::handling) {
      if (!error)
        watch();
      else if (ended_)
        close_after_ = true;  // but the answer may still be read
      else if (error != net::error::operation_aborted)
        lost("");
    } else if (phase_ == Phase::idle) {
      if (buffer_.size() > 0)
        read_head();
      else if (!error)
        watch();
      else
        close();
    }
  }

  void read_head() {
    phase_ = Phase::head;
    if (!work_) work_ = Work(core_);
    started_ = Clock::now();
    parser_.emplace();
    parser_->header_limit(kHeaderBytes);
    parser_->body_limit(boost::optional<std::uint64_t>(limits().upload_bytes));
    deadline(seconds(limits().header_seconds));
    http::async_read_header(socket_, buffer_, *parser_,
                            [self = shared_from_this()](error_code error, std::size_t) { self->have_head(error); });
  }

  void have_head(error_code error) {
    if (phase_ != Phase::head) return;
    const auto& head = parser_->get();
    version_ = head.version() == 10 ? 10 : 11;
    // The bytes of its body count until the handler is done with it.
    const std::shared_ptr<HttpRequest> request(new HttpRequest, [&core = core_](const HttpRequest* done) {
      core.body_bytes -= done->body.size();
      delete done;
    });
    request->method = std::string(view(head.method_string()));
    for (const auto& field : head) request->headers.emplace_back(view(field.name_string()), view(field.value()));
    const std::string_view given = request->header("X-Request-Id");
    id_ = request->id = sane_id(given) ? std::string(given) : new_id();
    method_ = request->method;
    path_ = view(head.target());
    head_only_ = method_ == "HEAD";
    cors_ = core_.options.cors.headers(*request);
    request_ = request;
    if (late_) return refuse({408, "the request's headers took too long", "", "request_timeout"});
    if (error == http::error::header_limit || error == http::error::buffer_overflow)
      return refuse({431, tw::format("the request's headers have more than {} bytes", kHeaderBytes), "", "headers_too_large"});
    if (ended(error)) return close();
    const std::string_view target = view(head.target());
    if (error && error != http::error::body_limit)
      return refuse({400, tw::format("malformed HTTP request: {}", error.message()), "", "bad_request"});
    if (version_ == 11 && request->header("Host").empty() && head.count(http::field::host) == 0)
      return refuse({400, "the request has no Host", "", "bad_request"});
    const bool whole_server = target == "*" && request->method == "OPTIONS";
    std::optional<Target> parsed = parse_target(whole_server ? "/" : target);
    if (!parsed) return refuse({400, "malformed path or query", "", "bad_request"});
    path_ = request->path = std::move(parsed->path);
    request->query = std::move(parsed->query);
    find_route();
    keep_alive_ = head.keep_alive();
    if (request->method == "OPTIONS") {
      preflight_ = true;
    } else if (route_ == nullptr) {
      return refuse_path();
    } else if (!authorize(*request)) {
      return;
    }
    if (error == http::error::body_limit)
      return refuse({413, tw::format("the request has more than {} bytes", limits().upload_bytes), "", "request_too_large"});
    if (!preflight_ && !route_->quick && Clock::now().time_since_epoch().count() > core_.drain_end)
      return refuse({503, "the server is ending", "", "server_ending"});
    if (const std::string_view expect = request->header("Expect"); !expect.empty()) {
      if (!beast::iequals("100-continue", beast::string_view(expect.data(), expect.size())))
        return refuse({417, "Expect may only be 100-continue", "", "bad_request"});
      if (!parser_->is_done() && version_ == 11) {
        put("HTTP/1.1 100 Continue\r\n\r\n");
        flush();
      }
    }
    phase_ = Phase::body;
    if (parser_->is_done())
      have_request();
    else
      read_body();
  }

  /// Whether the connection ended, rather than that the request is malformed.
  static bool ended(error_code error) {
    return error && (error == http::error::end_of_stream || error == http::error::partial_message ||
                     error.category() != error_code(http::error::end_of_stream).category());
  }

  void find_route() {
    route_ = nullptr;
    methods_.clear();
    route_name_ = "other";
    const auto allow = [&](std::string_view method) {
      if (!methods_.empty()) methods_ += ", ";
      methods_ += method;
    };
    for (const Route& route : core_.routes) {
      if (!matches(route, path_)) continue;
      allow(route.method);
      if (route.method == "GET" && !route.websocket) allow("HEAD");
      route_name_ = route.path;
      if (route.method == method_ || (route.method == "GET" && head_only_ && !route.websocket)) route_ = &route;
    }
    if (!methods_.empty()) allow("OPTIONS");
  }

  void refuse_path() {
    if (methods_.empty())
      refuse({404, tw::format("there is no {} {}", method_, path_), "", "not_found"}, reusable());
    else
      refuse({405, tw::format("{} does not allow {}; it allows {}", path_, method_, methods_), "", "method_not_allowed"}, reusable(),
             {{"Allow", methods_}});
  }

  /// Whether the next request can follow a refused one: its body, if any, has not been read.
  bool reusable() const { return parser_ && parser_->is_done(); }

  /// Sets the request's client. False: the request is answered.
  bool authorize(HttpRequest& request) {
    const std::string_view key = api_key(request);
    const bool keyed = !core_.options.keys.empty() && !route_->open;
    if (keyed && !core_.options.keys.contain(key)) {
      refuse({401, key.empty() ? "no API key: the request needs the header Authorization: Bearer KEY" : "incorrect API key", "",
              "invalid_api_key"},
             reusable(), {{"WWW-Authenticate", "Bearer"}});
      return false;
    }
    request.client = std::hash<std::string_view>()(keyed ? key : std::string_view(address_));
    if (!route_->websocket) return true;
    const auto& head = parser_->get();
    if (!beast::websocket::is_upgrade(head) || !reusable()) {
      refuse({426, tw::format("{} is for WebSockets", request.path), "", "upgrade_required"}, reusable(),
             {{"Upgrade", "websocket"}, {"Connection", "Upgrade"}});
      return false;
    }
    // Beast checks these as well, but its answer is not OpenAI's error object.
    if (const std::string_view version = request.header("Sec-WebSocket-Version"); version != "13") {
      refuse({426, tw::format("Sec-WebSocket-Version is {}; it must be 13", models::in_quotes(version)), "Sec-WebSocket-Version",
              "upgrade_required"},
             true, {{"Upgrade", "websocket"}, {"Connection", "Upgrade"}, {"Sec-WebSocket-Version", "13"}});
      return false;
    }
    if (const std::string_view nonce = request.header("Sec-WebSocket-Key"); nonce.empty() || nonce.size() > kNonceDigits) {
      refuse({400, tw::format("Sec-WebSocket-Key is {}; it must be 16 bytes in Base64", models::in_quotes(nonce)), "Sec-WebSocket-Key",
              "bad_request"},
             true);
      return false;
    }
    if (!core_.options.cors.allow_websocket(request)) {
      refuse({403, "pages of this origin may not use the server (--cors)", "", "origin_not_allowed"}, reusable());
      return false;
    }
    return true;
  }

  void read_body() {
    const std::size_t size = body_.size();
    body_.resize(size + kStep);
    auto& body = parser_->get().body();
    body.data = body_.data() + size;
    body.size = kStep;
    body.more = true;
    const auto whole = started_ + duration_of(limits().request_seconds);
    deadline(std::min(whole, seconds(limits().idle_seconds)));
    http::async_read_some(socket_, buffer_, *parser_, [self = shared_from_this(), size](error_code error, std::size_t) {
      const std::size_t bytes = kStep - self->parser_->get().body().size;
      self->body_.resize(size + bytes);
      const std::size_t all = self->core_.body_bytes += bytes;
      self->have_body(error, all);
    });
  }

  void have_body(error_code error, std::size_t all) {
    if (phase_ != Phase::body) return;
    if (error == http::error::need_buffer) error = {};
    if (late_) return refuse({408, "the request's body took too long", "", "request_timeout"});
    if (error == http::error::body_limit)
      return refuse({413, tw::format("the request has more than {} bytes", limits().upload_bytes), "", "request_too_large"});
    if (ended(error)) return close();
    if (error) return refuse({400, tw::format("malformed HTTP request: {}", error.message()), "", "bad_request"});
    if (all > limits().upload_memory_bytes) return refuse({503, "the server is busy with other uploads", "", "uploads_full"});
    if (parser_->is_done())
      have_request();
    else
      read_body();
  }

  // Handling

  void have_request() {
    phase_ = Phase::handling;
    ++number_;
    request_->body = std::move(body_);
    body_ = {};
    request_bytes_ = request_->body.size();
    std::shared_ptr<const HttpRequest> request = std::move(request_);
    deadline(started_ + duration_of(limits().request_seconds));
    if (preflight_) {
      Headers headers = core_.options.cors.preflight(*request, methods_.empty() ? "GET, HEAD, POST, OPTIONS" : methods_);
      headers.emplace_back("Allow", methods_.empty() ? "GET, HEAD, POST, OPTIONS" : methods_);
      answer(204, std::move(headers), "");
    } else if (route_->websocket) {
      upgrade(request);
    } else {
      auto responder = std::make_shared<Exchange>(shared_from_this(), number_);
      if (!route_->quick) watch();
      auto handle = [route = route_, request, responder, id = id_, &core = core_]() mutable {
        try {
          route->handler(std::move(request), responder);
        } catch (...) {
          fail(core, *responder, id);
        }
      };
      if (route_->quick)
        handle();
      else
        core_.workers.post(std::move(handle));
    }
  }

  static void fail(Core& core, Responder& responder, const std::string& id) {
    const ApiError error = api_error(std::current_exception());
    if (error.status >= 500) log_exception(core.log, id);
    send_error(responder, error);
  }

  void upgrade(const std::shared_ptr<const HttpRequest>& request) {
    if (buffer_.size() > 0) return refuse({400, "a WebSocket's client has to wait for the answer", "", "bad_request"});
    core_.websocket_workers.post([self = shared_from_this(), number = number_, route = route_, request] {
      const auto websocket = make_websocket(self->core_, request, self->socket_.get_executor());
      std::shared_ptr<WebSocketSession> session;
      std::optional<ApiError> refused;
      try {
        session = route->websocket(request, websocket);
      } catch (...) {
        refused = api_error(std::current_exception());
        if (refused->status >= 500) log_exception(self->core_.log, request->id);
      }
      net::post(self->socket_.get_executor(), [self, number, websocket, session = std::move(session), refused]() mutable {
        if (self->number_ == number && self->phase_ == Phase::handling && !self->ended_) {
          if (!refused) return self->open(*websocket, std::move(session));
          self->refuse(*refused, true);
        }
        // Sessions end on their workers.
        self->core_.websocket_workers.post([last = std::move(session)] {});
      });
    });
  }

  void open(UpgradedSocket& websocket, std::shared_ptr<WebSocketSession> session) {
    status_ = 101;
    report("");
    websocket.open(std::move(socket_), UpgradeRequest(parser_->get().base()), std::move(session), std::move(work_));
    phase_ = Phase::closed;
    timer_.cancel();
    registration_.reset();
  }

  // Answering

  void refuse(const ApiError& error, bool keep_alive = false, Headers headers = {}) {
    if (!keep_alive) close_after_ = true;
    if (phase_ != Phase::handling) {
      phase_ = Phase::handling;
      ++number_;
      deadline(started_ + duration_of(limits().request_seconds));
    }
    core_.service.metrics.refused(error.code);
    core_.body_bytes -= body_.size();
    body_ = {};
    headers.emplace_back("Content-Type", "application/json");
    answer(error.status, std::move(headers), error_json(error));
    if (!close_after_) watch();
  }

  void answer(int status, Headers headers, std::string body) {
    head(status, std::move(headers), Length::known, body.size());
    const bool bodiless = head_only_ || status == 204 || status == 304;
    if (!bodiless && !body.empty()) put(std::move(body));
    ended_ = true;
    flush();
  }

  void head(int status, Headers headers, Length length, std::size_t bytes) {
    begun_ = true;
    status_ = status;
    if (core_.service.draining || !keep_alive_) close_after_ = true;
    headers.emplace_back("Date", http_date());
    headers.emplace_back("Server", "tilewave");
    headers.emplace_back("X-Request-Id", id_);
    headers.emplace_back("X-Content-Type-Options", "nosniff");
    if ((status == 429 || status == 503) && !has(headers, "Retry-After")) headers.emplace_back("Retry-After", "1");
    if (length == Length::chunked) headers.emplace_back("Transfer-Encoding", "chunked");
    if (length == Length::known && status != 204 && status != 304) headers.emplace_back("Content-Length", std::to_string(bytes));
    if (close_after_)
      headers.emplace_back("Connection", "close");
    else if (version_ == 10)
      headers.emplace_back("Connection", "keep-alive");
    if (!preflight_) headers.insert(headers.end(), cors_.begin(), cors_.end());
    std::string text =
        tw::format("HTTP/1.1 {} {}\r\n", status, view(http::obsolete_reason(http::int_to_status(static_cast<unsigned>(status)))));
    for (auto& [name, value] : headers) {
      // What a handler took from a request must not become a header of its own.
      std::replace_if(
          value.begin(), value.end(), [](unsigned char c) { return c < ' ' && c != '\t'; }, ' ');
      text += tw::format("{}: {}\r\n", name, value);
    }
    put(text + "\r\n");
  }

  void put(std::string bytes) {
    unsent_ += bytes.size();
    // Little pieces travel together.
    if (!output_.empty() && (output_.size() > 1 || !writing_) && output_.back().size() + bytes.size() <= kStep)
      output_.back() += bytes;
    else
      output_.push_back(std::move(bytes));
  }

  void flush() {
    if (writing_ || phase_ == Phase::closed) return;
    if (output_.empty()) {
      if (ended_) complete();
      return;
    }
    writing_ = true;
    if (phase_ == Phase::handling) deadline(std::min(started_ + duration_of(limits().request_seconds), seconds(limits().idle_seconds)));
    const std::string& front = output_.front();
    socket_.async_write_some(net::buffer(front.data() + sent_, front.size() - sent_),
                             [self = shared_from_this()](error_code error, std::size_t bytes) {
                               self->writing_ = false;
                               self->wrote(error, bytes);
                             });
  }

  void wrote(error_code error, std::size_t bytes) {
    if (phase_ == Phase::closed) return;
    if (error) return lost("");
    sent_ += bytes;
    unsent_ -= bytes;
    answer_bytes_ += bytes;
    if (sent_ == output_.front().size()) {
      output_.pop_front();
      sent_ = 0;
    }
    if (output_.empty() && phase_ == Phase::handling && !ended_) deadline(started_ + duration_of(limits().request_seconds));
    flush();
  }

  void complete() {
    report("");
    on_gone_.clear();
    if (close_after_) return linger();
    reset();
    if (buffer_.size() > 0) {
      // watch() may be reading after the beginning of the next request: that ends, and comes back to read_head().
      if (reading_)
        cancel();
      else
        read_head();
      return;
    }
    work_ = {};
    deadline(seconds(limits().idle_seconds));
    watch();
  }

  /// For the next request.
  void reset() {
    phase_ = Phase::idle;
    fresh_ = false;
    ++number_;
    request_.reset();
    parser_.reset();
    route_ = nullptr;
    route_name_ = "other";
    preflight_ = begun_ = ended_ = chunked_ = head_only_ = false;
    answer_bytes_ = request_bytes_ = 0;
  }

  /// The client is gone, or does not read: nothing more can be answered.
  void lost(const char* reason) {
    if (phase_ == Phase::closed) return;
    if (*reason != '\0') core_.service.metrics.refused(reason);
    if (phase_ == Phase::handling) report(*reason != '\0' ? reason : "client_gone");
    call_gone();
    close();
  }

  void call_gone() {
    gone_ = true;
    for (const auto& gone : std::exchange(on_gone_, {})) gone();
  }

  void report(std::string_view lost) {
    const double seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    const int status = lost.empty() ? status_ : 499;
    core_.service.metrics.answered(route_name_, status, seconds);
    const LogLevel level = status >= 500 ? LogLevel::warning : route_ != nullptr && route_->quick ? LogLevel::debug : LogLevel::info;
    if (!core_.log.writes(level)) return;
    core_.log.write(level, "request",
                    {{"id", id_},
                     {"client", address_},
                     {"method", method_},
                     {"path", path_},
                     {"status", std::int64_t{status}},
                     {"received", static_cast<std::int64_t>(request_bytes_)},
                     {"sent", static_cast<std::int64_t>(answer_bytes_)},
                     {"seconds", seconds},
                     {"lost", std::string(lost)}});
  }

  /// Closes when the client has closed, or soon: what was sent would be lost if the client's bytes were met by a closed socket.
  void linger() {
    phase_ = Phase::lingering;
    work_ = {};
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    deadline(Clock::now() + kLinger);
    buffer_.clear();
    watch();
  }

  void cancel() {
    error_code ignored;
    socket_.cancel(ignored);
  }

  void close() {
    if (phase_ == Phase::closed) return;
    phase_ = Phase::closed;
    error_code ignored;
    socket_.close(ignored);
    timer_.cancel();
    output_.clear();
    on_gone_.clear();
    registration_.reset();
    work_ = {};
  }

  class Exchange final : public Responder {
   public:
    Exchange(std::shared_ptr<Connection> connection, std::uint64_t number) : connection_(std::move(connection)), number_(number) {}
    ~Exchange() override { connection_->abandoned(number_); }
    void send(int status, Headers headers, std::string body) override {
      connection_->send(number_, status, std::move(headers), std::move(body));
    }
    void begin(int status, Headers headers) override { connection_->begin(number_, status, std::move(headers)); }
    void write(std::string chunk) override { connection_->write(number_, std::move(chunk)); }
    void end() override { connection_->end(number_); }
    void on_gone(std::function<void()> gone) override { connection_->on_gone(number_, std::move(gone)); }

   private:
    std::shared_ptr<Connection> connection_;
    std::uint64_t number_;
  };

  Core& core_;
  tcp::socket socket_;
  net::steady_timer timer_;
  std::string address_;
  std::optional<Registration> registration_;
  Work work_;
  Phase phase_ = Phase::idle;
  Clock::time_point deadline_, started_;

  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::buffer_body>> parser_;
  std::string body_;
  bool fresh_ = true;  // no request yet
  bool reading_ = false, late_ = false;

  std::uint64_t number_ = 0;  // of the request, so that late answers to earlier ones are ignored
  std::shared_ptr<HttpRequest> request_;
  std::string id_, method_, path_, methods_, route_name_ = "other";
  Headers cors_;
  const Route* route_ = nullptr;
  int version_ = 11, status_ = 0;
  bool keep_alive_ = true, preflight_ = false, head_only_ = false;

  std::deque<std::string> output_;
  std::size_t sent_ = 0, unsent_ = 0;  // of output_.front(); of all
  std::size_t request_bytes_ = 0, answer_bytes_ = 0;
  bool writing_ = false, begun_ = false, chunked_ = false, ended_ = false, close_after_ = false, gone_ = false;
  std::vector<std::function<void()>> on_gone_;
};

}  // namespace

void serve_connection(Core& core, tcp::socket socket, bool refused) {
  std::make_shared<Connection>(core, std::move(socket))->start(refused);
}

}  // namespace tw::serve
