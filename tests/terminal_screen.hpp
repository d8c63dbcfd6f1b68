#pragma once

// A program in a terminal, and what a person in front of it sees.

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utmp.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tw::test {

/// The lines of a terminal `columns` wide that scrolls back without end: carriage return, line feed, wrapping at the last column, and
/// "erase to the end of the line" (CSI K). Whatever else begins with ESC, and any other control character, is remembered as unknown:
/// nothing that is run here has reason to send it.
class TerminalScreen {
 public:
  explicit TerminalScreen(int columns) : columns_(static_cast<std::size_t>(columns)) {}

  void write(std::string_view bytes) {
    for (const char c : bytes) put(c);
  }

  /// As they can be seen, without blanks at their ends and without empty ones at the end. A line that was wrapped is several.
  std::vector<std::string> lines() const {
    std::vector<std::string> seen;
    for (const std::string& line : lines_) seen.push_back(line.substr(0, line.find_last_not_of(' ') + 1));
    while (!seen.empty() && seen.back().empty()) seen.pop_back();
    return seen;
  }
  /// The same with wrapped lines joined again.
  std::vector<std::string> unwrapped() const {
    std::vector<std::string> joined;
    bool open = false;
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      if (!open) joined.emplace_back();
      joined.back() += lines_[i];
      open = wrapped_[i];
    }
    for (std::string& line : joined) line.erase(line.find_last_not_of(' ') + 1);
    while (!joined.empty() && joined.back().empty()) joined.pop_back();
    return joined;
  }
  std::size_t column() const { return column_; }
  const std::string& unknown() const { return unknown_; }

 private:
  void put(char c) {
    if (!sequence_.empty()) {
      sequence_ += c;
      const bool begun = sequence_.size() == 2 && c == '[';
      if (begun || (sequence_.size() > 2 && (c < '@' || c > '~'))) return;
      if (sequence_ == "\033[K")
        lines_[row_].resize(std::min(lines_[row_].size(), column_));
      else
        unknown_ += "<ESC>" + sequence_.substr(1);
      sequence_.clear();
      return;
    }
    if (c == '\033') {
      sequence_ = c;
    } else if (c == '\r') {
      column_ = 0;
    } else if (c == '\n') {
      next_row();
    } else if (c == '\t') {
      column_ = std::min((column_ / 8 + 1) * 8, columns_ - 1);
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      unknown_ += c;
    } else {
      if (column_ == columns_) {  // terminals wrap when the next character comes, not before
        wrapped_[row_] = true;
        next_row();
        column_ = 0;
      }
      std::string& line = lines_[row_];
      if (line.size() <= column_) line.resize(column_ + 1, ' ');
      line[column_++] = c;
    }
  }
  void next_row() {
    if (++row_ == lines_.size()) {
      lines_.emplace_back();
      wrapped_.push_back(false);
    }
  }

  std::size_t columns_, row_ = 0, column_ = 0;
  std::vector<std::string> lines_{""};
  std::vector<bool> wrapped_{false};
  std::string sequence_, unknown_;
};

struct TerminalOptions {
  int columns = 80;
  bool out_is_terminal = true, err_is_terminal = true;  ///< where they are not, they are pipes
  std::vector<std::pair<std::string, std::string>> environment = {{"TERM", "xterm"}};
  /// Each is typed when the terminal's text ends with `prompt`. Without any standard input is empty.
  std::vector<std::string> typed = {};
  std::string prompt = {};
};

struct TerminalRun {
  int code = -1;
  std::string terminal;  ///< all bytes that reached the terminal
  std::string out, err;  ///< what a stream that is no terminal was given
};

/// Runs a program in a terminal of its own.
inline TerminalRun run_in_terminal(const std::vector<std::string>& command, const TerminalOptions& options = {}) {
  const auto check = [](int result, const char* what) {
    if (result < 0) throw std::runtime_error(what);
    return result;
  };
  winsize size{};
  size.ws_row = 24;
  size.ws_col = static_cast<unsigned short>(options.columns);
  int terminal[2], out[2], err[2];
  check(openpty(&terminal[0], &terminal[1], nullptr, nullptr, &size), "openpty");
  check(pipe(out), "pipe");
  check(pipe(err), "pipe");
  const pid_t child = check(fork(), "fork");
  if (child == 0) {
    login_tty(terminal[1]);
    if (!options.out_is_terminal) dup2(out[1], STDOUT_FILENO);
    if (!options.err_is_terminal) dup2(err[1], STDERR_FILENO);
    if (options.typed.empty()) dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
    for (int descriptor = 3; descriptor < 64; ++descriptor) close(descriptor);
    for (const auto& [name, value] : options.environment) setenv(name.c_str(), value.c_str(), 1);
    std::vector<char*> arguments;
    for (const std::string& each : command) arguments.push_back(const_cast<char*>(each.c_str()));
    arguments.push_back(nullptr);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  close(terminal[1]);
  close(out[1]);
  close(err[1]);
  TerminalRun run;
  std::string* const texts[] = {&run.terminal, &run.out, &run.err};
  std::size_t typed = 0;
  pollfd sources[] = {{terminal[0], POLLIN, 0}, {out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
  while (std::any_of(std::begin(sources), std::end(sources), [](const pollfd& each) { return each.fd >= 0; })) {
    ::poll(sources, std::size(sources), -1);
    for (std::size_t i = 0; i < std::size(sources); ++i) {
      if (sources[i].fd < 0 || sources[i].revents == 0) continue;
      char bytes[4096];
      const ssize_t n = ::read(sources[i].fd, bytes, sizeof bytes);
      if (n > 0) {
        texts[i]->append(bytes, static_cast<std::size_t>(n));
        if (i == 0 && typed < options.typed.size() && run.terminal.ends_with(options.prompt)) {
          const std::string& line = options.typed[typed++];
          check(static_cast<int>(::write(terminal[0], line.data(), line.size())), "write");
        }
        continue;
      }
      close(sources[i].fd);  // a terminal that nobody has open any more reads as an I/O error
      sources[i].fd = -1;
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  run.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return run;
}

}  // namespace tw::test
