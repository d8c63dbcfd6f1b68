#pragma once

// What a person sees in a terminal: text, progress and messages that leave each other alone, and nothing that commands the terminal.

#include <cstdio>
#include <string>
#include <string_view>

namespace tw::cli {

/// `text` as valid UTF-8 with its control characters (ASCII's, but for line ends and tabs, and C1) as \x1B, so that none reaches a
/// terminal.
std::string escaped(std::string_view text);
/// The same with line ends and tabs as \x0A and \x09: for names.
std::string escaped_line(std::string_view text);

/// What to write to `stream`: escaped when it is a terminal, else the text itself, as other programs and files expect it.
std::string shown(std::FILE* stream, std::string_view text);
std::string shown_line(std::FILE* stream, std::string_view text);

/// What to write to the file `path`: the same.
std::string shown_at(const std::string& path, std::string_view text);

/// As much of `text`, valid UTF-8, as surely fits into `columns`.
std::string_view fit(std::string_view text, int columns);

/// Standard output and standard error as a command uses them while it works. When both are the same terminal, progress is drawn only while
/// no line of text is open, and messages begin on lines of their own. Nothing is drawn over a line that stays.
class Screen {
 public:
  enum class Progress { shown, hidden };

  explicit Screen(Progress progress = Progress::shown);
  /// Removes the progress, and ends an open line.
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  /// Shows `line` in place of the one before, cut to the terminal's width; does nothing where standard error is no terminal, or one without
  /// cursor control (TERM=dumb).
  void progress(std::string_view line);
  void clear_progress();
  /// Writes to standard output, at once. Throws std::system_error.
  void text(std::string_view text);
  /// Writes a line to standard error.
  void message(std::string_view line);

 private:
  bool live_;    ///< progress can be drawn
  bool shared_;  ///< standard output and standard error are one terminal
  bool drawn_ = false;
  bool line_open_ = false;  ///< the text so far does not end with a line end
};

}  // namespace tw::cli
