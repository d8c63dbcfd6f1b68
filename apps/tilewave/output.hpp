#pragma once

#include <cstdio>
#include <string>

namespace tw::cli {

/// A file for results. It is opened before anything is measured, so that an unwritable path is found early.
class Output {
 public:
  /// Throws Error.
  explicit Output(const std::string& path);
  /// Removes a new file if there are no results.
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// Replaces the contents of the file. At most once. Throws Error.
  void write(const std::string& text);

 private:
  std::string path_;
  bool is_new_;
  std::FILE* file_;
};

}  // namespace tw::cli
