#pragma once

#include <string>
#include <string_view>

namespace tw::speech {

/// Joins the texts of segments while they are produced: drops white space around a segment and puts one space between segments.
class TextStream {
 public:
  /// Takes the next piece of the current segment and returns its addition to the joined text.
  std::string push(std::string_view piece) {
    std::string added;
    for (const char c : piece) {
      const bool space = c == ' ' || c == '\n' || c == '\r' || c == '\t';
      if (space) {
        held_ += c;  // emitted if text follows
        continue;
      }
      if (begun_) {
        added += held_;
      } else if (any_) {
        added += ' ';
      }
      held_.clear();
      begun_ = any_ = true;
      added += c;
    }
    return added;
  }
  /// The current segment has no more text.
  void end_segment() {
    begun_ = false;
    held_.clear();
  }

 private:
  std::string held_;    ///< white space at the end so far
  bool begun_ = false;  ///< the segment has text
  bool any_ = false;    ///< some segment has text
};

}  // namespace tw::speech
