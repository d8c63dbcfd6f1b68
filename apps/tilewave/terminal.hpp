#pragma once

// Output on a terminal: text, progress and messages that do not overwrite each other, and no control sequences from file names or text.

#include <cstdio>
#include <string>
#include <string_view>

namespace tw::cli {

/// `text` as valid UTF-8 with control characters (ASCII except line ends and tabs, and C1) escaped like \x1B, so that none reaches a
/// terminal.
std::string escaped(std::string_view text);
/// The same for names: also escapes line ends and tabs.
std::string escaped_line(std::string_view text);

/// The text to write to `stream`: escaped if it is a terminal, otherwise unchanged, as programs and files expect it.
std::string shown(std::FILE* stream, std::string_view text);
std::string shown_line(std::FILE* stream, std::string_view text);

/// The same for the file `path`.
std::string shown_at(const std::string& path, std::string_view text);

/// The longest beginning of `text` (valid UTF-8) that is sure to fit into `columns`.
std::string_view fit(std::string_view text, int columns);
/// The same for the end.
std::string_view fit_end(std::string_view text, int columns);

/// Whether standard output is a terminal with colours, and the user wants them: NO_COLOR is not set.
bool has_colors();

/// "0:07", "12:30", "1:02:03".
std::string duration_text(double seconds);

/// Standard output and standard error of a running command. If both are the same terminal, progress is drawn only while no line of text is
/// open, and messages begin on new lines. Progress never overwrites other lines.
class Screen {
 public:
  enum class Progress { shown, hidden };
  enum class Color { none, red, yellow, green };

  explicit Screen(Progress progress = Progress::shown);
  /// Removes the progress line and ends an open line.
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  /// Replaces the progress line by `line`, cut to the terminal's width. Does nothing if standard error is not a terminal, or one without
  /// cursor control (TERM=dumb).
  void progress(std::string_view line);
  /// The same with a bar before the line, if the terminal is wide enough: "[#####     ] 50 %, line". `fraction` is 0 to 1.
  void progress(double fraction, std::string_view line);
  /// The same with the end of `line` where it is too long, after "...".$
  void progress_end(std::string_view line);
  bool shows_progress() const { return live_; }
  void clear_progress();
  /// Writes to standard output without buffering. Throws std::system_error.
  void text(std::string_view text, Color color = Color::none);
  /// Writes a line to standard error.
  void message(std::string_view line);

 private:
  bool live_;    ///< progress can be drawn
  bool shared_;  ///< standard output and standard error are the same terminal
  bool drawn_ = false;
  bool line_open_ = false;  ///< the last line of text has not ended yet
};

}  // namespace tw::cli
