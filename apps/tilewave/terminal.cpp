#include "apps/tilewave/terminal.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::cli {
namespace {

bool is_control(char32_t c) { return c < 0x20 || (c >= 0x7F && c < 0xA0); }

std::string escape(std::string_view text, std::string_view kept) {
  std::string valid, result;
  models::append_repaired(valid, text);
  for (std::size_t at = 0; at < valid.size();) {
    const std::size_t begin = at;
    const char32_t c = models::next_character(valid, at);
    if (is_control(c) && kept.find(valid[begin]) == std::string_view::npos)
      result += tw::format("\\x{:02X}", static_cast<unsigned>(c));
    else
      result.append(valid, begin, at - begin);
  }
  return result;
}

bool is_terminal(std::FILE* stream) { return isatty(fileno(stream)) != 0; }

/// If both are terminals and one of them was opened as /dev/tty, they count as the same.
bool same_terminal() {
  const dev_t kControllingTerminal = makedev(5, 0);  // /dev/tty
  struct stat out {
  }, err{};
  if (!is_terminal(stdout) || !is_terminal(stderr) || fstat(STDOUT_FILENO, &out) != 0 || fstat(STDERR_FILENO, &err) != 0) return false;
  return out.st_rdev == err.st_rdev || out.st_rdev == kControllingTerminal || err.st_rdev == kControllingTerminal;
}

/// A terminal that supports carriage return and "erase to the end of the line".
bool has_cursor_control() {
  const char* type = std::getenv("TERM");
  return type != nullptr && *type != '\0' && std::string_view(type) != "dumb";
}

int columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string escaped(std::string_view text) { return escape(text, "\n\t"); }
std::string escaped_line(std::string_view text) { return escape(text, ""); }

std::string shown(std::FILE* stream, std::string_view text) { return is_terminal(stream) ? escaped(text) : std::string(text); }
std::string shown_line(std::FILE* stream, std::string_view text) { return is_terminal(stream) ? escaped_line(text) : std::string(text); }

std::string shown_at(const std::string& path, std::string_view text) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0 || !S_ISCHR(status.st_mode)) return std::string(text);  // opening a FIFO would wait for a reader
  const int descriptor = open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  const bool terminal = descriptor >= 0 && isatty(descriptor) != 0;
  if (descriptor >= 0) close(descriptor);
  return terminal ? escaped(text) : std::string(text);
}

std::string_view fit(std::string_view text, int columns) {
  std::size_t end = 0;
  for (std::size_t at = 0; at < text.size(); end = at) {
    columns -= models::next_character(text, at) < 0x300 ? 1 : 2;  // no character is wider than two
    if (columns < 0) break;
  }
  return text.substr(0, end);
}

Screen::Screen(Progress progress)
    : live_(progress == Progress::shown && is_terminal(stderr) && has_cursor_control()), shared_(same_terminal()) {}

Screen::~Screen() {
  try {
    clear_progress();
    if (line_open_) text("\n");
  } catch (const std::system_error&) {  // neither can be written to, so nobody can see it
  }
}

void Screen::progress(std::string_view line) {
  if (!live_ || (shared_ && line_open_)) return;
  // In some terminals a full line moves the cursor to the next line.
  tw::print(stderr, "\r{}\033[K", fit(escaped_line(line), columns() - 1));
  std::fflush(stderr);
  drawn_ = true;
}

void Screen::clear_progress() {
  if (!std::exchange(drawn_, false)) return;
  tw::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

void Screen::text(std::string_view text) {
  if (text.empty()) return;
  if (shared_) clear_progress();
  const std::string bytes = shown(stdout, text);
  line_open_ = text.back() != '\n';
  if (std::fwrite(bytes.data(), 1, bytes.size(), stdout) != bytes.size() || std::fflush(stdout) != 0)
    throw std::system_error(errno, std::generic_category(), "standard output");
}

void Screen::message(std::string_view line) {
  clear_progress();
  if (shared_ && line_open_) text("\n");
  tw::print(stderr, "{}\n", shown_line(stderr, line));
}

}  // namespace tw::cli
