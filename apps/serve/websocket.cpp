#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/buffers_to_string.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/websocket/stream.hpp>
#include <deque>
#include <optional>

#include "apps/serve/core.hpp"

namespace tw::serve {

namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;
namespace websocket = boost::beast::websocket;
using boost::system::error_code;

constexpr std::size_t kUnsent = 16 << 20;  // of messages that wait for their reader
constexpr std::size_t kStep = 64 << 10;    // of a message, read at a time
constexpr std::size_t kKept = 256 << 10;   // of memory, between messages
constexpr auto kHandshake = std::chrono::seconds(10);
constexpr auto kGoodbye = std::chrono::seconds(2);  // for a client to close its side, too

/// The first of the client's subprotocols that is not there to carry a key; browsers want one of theirs.
std::string_view subprotocol(std::string_view offered) {
  while (!offered.empty()) {
    std::string_view name = offered.substr(0, offered.find(','));
    offered.remove_prefix(std::min(name.size() + 1, offered.size()));
    while (name.starts_with(' ')) name.remove_prefix(1);
    while (name.ends_with(' ')) name.remove_suffix(1);
    if (!name.empty() && !name.starts_with("openai-")) return name;
  }
  return "";
}

/// At most 123 bytes, whole characters.
std::string_view close_reason(std::string_view text) {
  if (text.size() <= 123) return text;
  std::size_t size = 123;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return text.substr(0, size);
}

/// All functions run on the strand of the socket, but for those of WebSocket and Closable, and tasks, which run on a worker.
class Socket final : public std::enable_shared_from_this<Socket>, public UpgradedSocket {
 public:
  Socket(Core& core, std::shared_ptr<const HttpRequest> request, const tcp::socket::executor_type& strand)
      : core_(core), request_(std::move(request)), strand_(strand), write_timer_(strand), drain_timer_(strand) {}

  void send(std::string text) override {
    net::post(strand_, [self = shared_from_this(), text = std::move(text)]() mutable {
      if (self->over_ || self->closing_) return;
      self->unsent_ += text.size();
      self->queue_.push_back(std::move(text));
      if (self->unsent_ > kUnsent) {
        self->core_.service.metrics.refused("slow_client");
        self->abort();
      } else {
        self->write();
      }
    });
  }

  void close(int code, std::string reason) override {
    net::post(strand_, [self = shared_from_this(), code, reason = std::move(reason)] { self->finish(code, reason); });
  }

  void drain() override {
    net::post(strand_, [self = shared_from_this()] {
      if (self->over_ || self->closing_ || std::exchange(self->draining_, true)) return;
      self->task([self = self.get()](WebSocketSession& session) {
        if (session.on_drain()) self->close(websocket::close_code::going_away, "the server is ending");
      });
      self->drain_timer_.expires_after(duration_of(self->core_.service.limits.request_seconds));
      self->drain_timer_.async_wait([self](error_code error) {
        if (!error) self->finish(websocket::close_code::going_away, "the server is ending");
      });
    });
  }

  void shut() override {
    net::post(strand_, [self = shared_from_this()] { self->abort(); });
  }

  void abandon() override { session_.reset(); }

  void open(tcp::socket socket, const UpgradeRequest& upgrade, std::shared_ptr<WebSocketSession> session, Work work) override {
    const Limits& limits = core_.service.limits;
    work_ = std::move(work);
    session_ = std::move(session);
    registration_.emplace(core_, shared_from_this());
    core_.service.metrics.websockets(1);
    stream_.emplace(std::move(socket));
    // Pings a silent client, and ends the connection if that does not help.
    stream_->set_option(websocket::stream_base::timeout{kHandshake, duration_of(limits.idle_seconds), true});
    stream_->read_message_max(limits.websocket_message_bytes);
    stream_->set_option(websocket::stream_base::decorator([request = request_](websocket::response_type& response) {
      response.set(http::field::server, "tilewave");
      response.set("X-Request-Id", request->id);
      const std::string_view protocol = subprotocol(request->header("Sec-WebSocket-Protocol"));
      if (!protocol.empty()) response.set(http::field::sec_websocket_protocol, std::string(protocol));
    }));
    reading_ = true;
    stream_->async_accept(upgrade, [self = shared_from_this()](error_code error) {
      self->reading_ = false;
      if (error) return self->abort();
      self->open_ = true;
      // It may have begun to drain before this was known as open.
      if (self->core_.service.draining) self->drain();
      self->write();
      self->next();
    });
  }

 private:
  using Task = std::function<void(WebSocketSession&)>;

  void task(Task task) {
    tasks_.push_back(std::move(task));
    next();
  }

  /// Starts the next task; when there is none, reads.
  void next() {
    if (working_ || !open_) return;
    if (over_) return end();
    if (tasks_.empty()) return read();
    working_ = true;
    core_.websocket_workers.post([self = shared_from_this(), task = std::move(tasks_.front())] {
      try {
        task(*self->session_);
      } catch (...) {
        log_exception(self->core_.log, self->request_->id);
        self->close(websocket::close_code::internal_error, "internal error");
      }
      net::post(self->strand_, [self] {
        self->working_ = false;
        self->next();
      });
    });
    tasks_.pop_front();
  }

  void read() {
    if (reading_ || goodbye_) return;  // async_close() reads by itself
    reading_ = true;
    stream_->async_read_some(buffer_, kStep, [self = shared_from_this()](error_code error, std::size_t bytes) {
      self->reading_ = false;
      const std::size_t all = self->core_.body_bytes += bytes;
      self->message_bytes_ += bytes;
      if (error) {
        if (error == websocket::error::message_too_big) self->core_.service.metrics.refused("message_too_large");
        return self->abort();
      }
      if (all > self->core_.service.limits.upload_memory_bytes) {
        self->core_.service.metrics.refused("uploads_full");
        self->release();
        self->finish(websocket::close_code::try_again_later, "the server is busy with other uploads");
        return self->read();
      }
      if (!self->stream_->is_message_done()) return self->read();
      self->have_message();
    });
  }

  void have_message() {
    std::string message = beast::buffers_to_string(buffer_.data());
    const std::size_t bytes = message_bytes_;
    message_bytes_ = 0;
    buffer_.clear();
    if (buffer_.capacity() > kKept) buffer_.shrink_to_fit();
    if (closing_) {
      core_.body_bytes -= bytes;
      return read();
    }
    auto shared = std::make_shared<std::string>(std::move(message));
    task([&core = core_, bytes, shared, text = stream_->got_text()](WebSocketSession& session) {
      core.body_bytes -= bytes;
      text ? session.on_text(std::move(*shared)) : session.on_binary(std::move(*shared));
    });
  }

  void release() {
    core_.body_bytes -= std::exchange(message_bytes_, 0);
    buffer_.clear();
  }

  void write() {
    if (writing_ || !open_ || over_) return;
    if (queue_.empty()) {
      if (closing_) say_goodbye();
      return;
    }
    writing_ = true;
    write_timer_.expires_after(duration_of(core_.service.limits.idle_seconds));
    write_timer_.async_wait([self = shared_from_this()](error_code error) {
      if (error || !self->writing_ || Clock::now() < self->write_timer_.expiry()) return;
      self->core_.service.metrics.refused("slow_client");
      self->abort();
    });
    stream_->text(true);
    stream_->async_write(net::buffer(queue_.front()), [self = shared_from_this()](error_code error, std::size_t) {
      self->writing_ = false;
      self->write_timer_.cancel();
      if (error) return self->abort();
      self->unsent_ -= self->queue_.front().size();
      self->queue_.pop_front();
      self->write();
    });
  }

  void finish(int code, std::string_view reason) {
    if (over_ || closing_) return;
    const bool valid = (code >= 1000 && code <= 1014 && (code < 1004 || code > 1006)) || (code >= 3000 && code < 5000);
    closing_.emplace(static_cast<websocket::close_code>(valid ? code : 1000));
    const std::string_view kept = close_reason(reason);
    closing_->reason.assign(kept.data(), kept.size());
    write();
  }

  void say_goodbye() {
    writing_ = goodbye_ = true;
    write_timer_.expires_after(kGoodbye);
    write_timer_.async_wait([self = shared_from_this()](error_code error) {
      if (!error) self->abort();
    });
    stream_->async_close(*closing_, [self = shared_from_this()](error_code) {
      self->writing_ = false;
      self->abort();
    });
  }

  /// Nothing more is read or written.
  void abort() {
    over_ = true;
    if (stream_) {
      error_code ignored;
      beast::get_lowest_layer(*stream_).close(ignored);
    }
    open_ = true;  // even if the handshake failed, the session has to end
    next();
  }

  void end() {
    if (reading_ || working_ || !session_) return;
    drain_timer_.cancel();
    write_timer_.cancel();
    release();
    tasks_.clear();
    core_.service.metrics.websockets(-1);
    core_.log.write(LogLevel::info, "websocket closed", {{"id", request_->id}, {"path", request_->path}});
    working_ = true;  // for good
    core_.websocket_workers.post([self = shared_from_this()] {
      self->session_.reset();
      net::post(self->strand_, [self] {
        self->registration_.reset();
        self->work_ = {};
      });
    });
  }

  Core& core_;
  std::shared_ptr<const HttpRequest> request_;
  tcp::socket::executor_type strand_;
  net::steady_timer write_timer_, drain_timer_;
  std::optional<Registration> registration_;
  Work work_;
  std::optional<websocket::stream<tcp::socket, false>> stream_;
  std::shared_ptr<WebSocketSession> session_;

  beast::flat_buffer buffer_;
  std::size_t message_bytes_ = 0;
  std::deque<Task> tasks_;
  bool open_ = false, reading_ = false, working_ = false, over_ = false, draining_ = false;

  std::deque<std::string> queue_;
  std::size_t unsent_ = 0;
  bool writing_ = false, goodbye_ = false;
  std::optional<websocket::close_reason> closing_;
};

}  // namespace

std::shared_ptr<UpgradedSocket> make_websocket(Core& core, std::shared_ptr<const HttpRequest> request,
                                               const tcp::socket::executor_type& strand) {
  return std::make_shared<Socket>(core, std::move(request), strand);
}

}  // namespace tw::serve
