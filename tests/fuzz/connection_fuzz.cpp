// A real server on a socket, with handlers of its own: whatever a client sends, as HTTP or as frames of a WebSocket, the connection ends,
// answers are HTTP and errors OpenAI's objects, messages are UTF-8, frames are a server's, and the log has printable lines alone.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/serve/server.hpp"
#include "models/tokenizer/utf8.hpp"

namespace tw::serve {

struct Metrics::State {};
Metrics::Metrics() = default;
Metrics::~Metrics() = default;
void Metrics::answered(std::string_view, int, double) {}
void Metrics::refused(std::string_view) {}
void Metrics::connections(int) {}
void Metrics::websockets(int) {}

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

bool is_utf8(std::string_view text) {
  std::string repaired;
  models::append_repaired(repaired, text);
  return repaired == text;
}

/// Sends each message back, and closes when it is told to.
class Echo final : public WebSocketSession {
 public:
  explicit Echo(std::shared_ptr<WebSocket> socket) : socket_(std::move(socket)) {}
  void on_text(std::string message) override {
    require(is_utf8(message));
    if (message == "close") socket_->close(1000, "as you wish");
    socket_->send(std::move(message));
  }
  void on_binary(std::string message) override { socket_->send(std::to_string(message.size())); }

 private:
  std::shared_ptr<WebSocket> socket_;
};

/// Answers in chunks, with everything that a client sent.
void echo(const std::shared_ptr<const HttpRequest>& request, const std::shared_ptr<Responder>& responder) {
  responder->begin(200, {{"Content-Type", "application/octet-stream"}, {"X-Path", request->path}});
  for (const auto& [name, value] : request->query) responder->write(name + "=" + value);
  responder->write(request->body);
  responder->end();
}

struct Fixture {
  Fixture() : file(std::tmpfile()), log(LogFormat::text, LogLevel::debug, file) {
    require(file != nullptr);
    fcntl(fileno(file), F_SETFL, fcntl(fileno(file), F_GETFL) | O_APPEND);
    service.limits.upload_bytes = 1 << 15;
    service.limits.websocket_message_bytes = 1 << 15;
    service.limits.idle_seconds = service.limits.header_seconds = 0.1;  // of an input that is no whole request
    ServerOptions options;
    options.port = 0;
    options.io_threads = options.workers = 1;
    options.cors = Cors({"https://a.example"});
    const Handler empty = [](const auto&, const auto& responder) { responder->send(200, {}, "{}"); };
    const WebSocketHandler open = [](const auto&, auto socket) { return std::make_unique<Echo>(std::move(socket)); };
    server = std::make_unique<Server>(service, log,
                                      std::vector<Route>{{.method = "GET", .path = "/", .handler = empty, .quick = true},
                                                         {.method = "GET", .path = "/a/{id}", .handler = echo},
                                                         {.method = "POST", .path = "/b", .handler = echo},
                                                         {.method = "GET", .path = "/w", .websocket = open}},
                                      std::move(options));
  }

  /// What was logged since the last call has one printable line for each event.
  void check_log() {
    const int descriptor = fileno(file);
    std::string text(1 << 16, '\0');
    for (ssize_t got; (got = pread(descriptor, text.data(), text.size(), checked)) > 0; checked += got)
      for (ssize_t i = 0; i < got; ++i) {
        const auto byte = static_cast<unsigned char>(text[static_cast<std::size_t>(i)]);
        require(byte == '\n' || (byte >= ' ' && byte < 0x7F));
        // A line begins with the time.
        require(!at_begin || byte == '2');
        at_begin = byte == '\n';
      }
    if (checked < 1 << 20) return;
    require(ftruncate(descriptor, 0) == 0);
    checked = 0;
  }

  std::FILE* file;
  off_t checked = 0;
  bool at_begin = true;
  Log log;
  Service service;
  std::unique_ptr<Server> server;
};

/// One connection.
class Client {
 public:
  explicit Client(int port) : descriptor_(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int on = 1;
    setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    const linger at_once{1, 0};  // leaves no port waiting
    setsockopt(descriptor_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    connect(descriptor_, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  }
  ~Client() { close(descriptor_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  /// Sends `text`, and reads meanwhile.
  void send(std::string_view text) {
    while (!text.empty() && !ended_) {
      wait(POLLIN | POLLOUT);
      const ssize_t sent = ::send(descriptor_, text.data(), text.size(), MSG_NOSIGNAL);
      if (sent > 0) text.remove_prefix(static_cast<std::size_t>(sent));
      read();
    }
  }

  /// Reads until `end` was received, or the server has closed the connection.
  void read_to(std::string_view end) {
    while (!ended_ && received.find(end) == std::string::npos) more();
  }
  void read_all() {
    while (!ended_) more();
  }

  std::string received;

 private:
  void more() {
    wait(POLLIN);
    read();
  }

  void wait(short events) {
    pollfd poll_for{descriptor_, events, 0};
    int ready;
    while ((ready = poll(&poll_for, 1, 15'000)) < 0 && errno == EINTR) {  // by libFuzzer's timer
    }
    require(ready > 0);  // every connection ends, and soon
  }

  void read() {
    char buffer[1 << 16];
    const ssize_t got = recv(descriptor_, buffer, sizeof buffer, 0);
    if (got > 0) received.append(buffer, static_cast<std::size_t>(got));
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR && errno != ENOTCONN)) ended_ = true;
  }

  int descriptor_;
  bool ended_ = false;
};

/// The first answer; the client may have left before it was complete.
void check_answer(std::string_view answer, bool bodiless) {
  const std::size_t end = answer.find("\r\n\r\n");
  if (end == std::string_view::npos) return;
  const std::string_view head = answer.substr(0, end);
  require(head.starts_with("HTTP/1.1 ") && head.size() > 12);
  for (std::size_t at = 0; at < head.size(); ++at) {
    const auto byte = static_cast<unsigned char>(head[at]);
    require((byte >= ' ' && byte != 0x7F) || byte == '\t' || byte == '\r' || byte == '\n');
    if (byte == '\r') require(head.substr(at).starts_with("\r\n"));
    if (byte == '\n') require(head[at - 1] == '\r');
  }
  const int status = std::atoi(head.data() + 9);
  if (status == 100 || status == 101) return;
  require(head.find("\r\nX-Request-Id: ") != std::string_view::npos);
  if (status < 400 || bodiless) return;
  const std::size_t length = head.find("\r\nContent-Length: ");
  require(length != std::string_view::npos);
  const auto size = static_cast<std::size_t>(std::atoi(head.data() + length + 18));
  const std::string_view body = answer.substr(end + 4, size);
  if (body.size() < size) return;
  const nlohmann::json error = nlohmann::json::parse(body).at("error");
  require(error.size() == 4 && error.at("message").is_string() && error.contains("param") && error.contains("code") &&
          error.at("type").is_string());
}

/// Frames of a server: not masked, without reserved bits, whole.
void check_frames(std::string_view frames) {
  while (frames.size() >= 2) {
    const int opcode = frames[0] & 0x0F;
    require((frames[0] & 0x70) == 0 && (frames[1] & 0x80) == 0);
    require(opcode <= 1 || (opcode >= 8 && opcode <= 10));
    std::size_t size = static_cast<unsigned char>(frames[1]), head = 2;
    if (size >= 126) head += size == 126 ? 2 : 8;
    if (frames.size() < head) return;
    if (head > 2) size = 0;
    for (std::size_t i = 2; i < head; ++i) size = size << 8 | static_cast<unsigned char>(frames[i]);
    frames.remove_prefix(std::min(frames.size(), head + size));
  }
}

constexpr std::string_view kUpgrade =
    "GET /w HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
constexpr std::string_view kLastRequest = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
constexpr std::string_view kClose = {"\x88\x80\0\0\0\0", 6};

}  // namespace
}  // namespace tw::serve

/// A byte: bit 0: the rest are frames of a WebSocket that is open, otherwise requests; bit 1: the client leaves when it has sent
/// everything, otherwise it sends the end of the conversation. Another byte: where what is sent is divided.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tw::serve;
  if (size < 2) return 0;
  static auto& fixture = *new Fixture;  // the process ends without it
  const bool frames = data[0] & 1, leaves = data[0] & 2;
  const std::string_view sent(reinterpret_cast<const char*>(data) + 2, size - 2);
  const std::size_t middle = sent.size() * data[1] / 255;
  {
    Client client(fixture.server->port());
    std::size_t begin = 0;
    if (frames) {
      client.send(kUpgrade);
      client.read_to("\r\n\r\n");
      if (!client.received.starts_with("HTTP/1.1 101 ")) {  // the machine is busy: the time for the headers is over
        require(client.received.empty() || client.received.starts_with("HTTP/1.1 408 "));
        return 0;
      }
      begin = client.received.find("\r\n\r\n") + 4;
    }
    client.send(sent.substr(0, middle));
    client.send(sent.substr(middle));
    if (!leaves) {
      client.send(frames ? kClose : kLastRequest);
      client.read_all();
    }
    frames ? check_frames(std::string_view(client.received).substr(begin)) : check_answer(client.received, sent.starts_with("HEAD "));
  }
  fixture.check_log();
  return 0;
}
