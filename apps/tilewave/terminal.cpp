#include "apps/tilewave/terminal.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
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

/// At most: no character is wider than two.
int columns_of(char32_t character) { return character < 0x300 ? 1 : 2; }

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
    columns -= columns_of(models::next_character(text, at));
    if (columns < 0) break;
  }
  return text.substr(0, end);
}

std::string_view fit_end(std::string_view text, int columns) {
  std::size_t begin = text.size();
  while (begin > 0) {
    const std::size_t before = models::previous_character(text, begin);
    std::size_t at = before;
    columns -= columns_of(models::next_character(text, at));
    if (columns < 0) break;
    begin = before;
  }
  return text.substr(begin);
}

bool has_colors() {
  const char* unwanted = std::getenv("NO_COLOR");
  return is_terminal(stdout) && has_cursor_control() && (unwanted == nullptr || *unwanted == '\0');
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e9) + 0.5);
  if (whole < 3600) return tw::format("{}:{:02}", whole / 60, whole % 60);
  return tw::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
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

void Screen::progress(double fraction, std::string_view line) {
  constexpr int kShortestBar = 8, kLongestBar = 30, kTextColumns = 60;  // of usual lines: a bar of one length does not jump
  fraction = std::clamp(fraction, 0.0, 1.0);
  const std::string text = tw::format("{:.0f} %, {}", std::floor(100 * fraction), line);
  const int room = columns() - 1 - 3, width = std::min(kLongestBar, room - std::max(kTextColumns, static_cast<int>(text.size())));
  if (width < kShortestBar) return progress(text);
  const auto filled = static_cast<std::size_t>(fraction * width);
  progress(tw::format("[{}{}] {}", std::string(filled, '#'), std::string(static_cast<std::size_t>(width) - filled, ' '), text));
}

void Screen::progress_end(std::string_view line) {
  const std::string text = escaped_line(line);
  const int room = columns() - 1 - 2;  // a terminal shows ^C, and on the next line what does not fit would stay
  if (fit(text, room).size() == text.size()) return progress(text);
  progress(tw::format("...{}", fit_end(text, room - 3)));
}

void Screen::clear_progress() {
  if (!std::exchange(drawn_, false)) return;
  tw::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

void Screen::text(std::string_view text, Color color) {
  if (text.empty()) return;
  if (shared_) clear_progress();
  std::string bytes = shown(stdout, text);
  if (color != Color::none) bytes = tw::format("\033[{}m{}\033[m", color == Color::red ? 31 : color == Color::yellow ? 33 : 32, bytes);
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
