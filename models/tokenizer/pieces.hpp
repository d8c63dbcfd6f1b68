#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tw::models {

/// A text in non-empty pieces, contiguous in one string.
class Pieces {
 public:
  Pieces() = default;
  explicit Pieces(std::string_view text) { add(text); }

  void add(std::string_view piece) {
    if (piece.empty()) return;
    text_ += piece;
    ends_.push_back(text_.size());
  }
  std::size_t bytes() const { return text_.size(); }
  template <class F>
  void for_each(F f) const {
    std::size_t begin = 0;
    for (const std::size_t end : ends_) {
      f(std::string_view(text_).substr(begin, end - begin));
      begin = end;
    }
  }

 private:
  std::string text_;
  std::vector<std::size_t> ends_;
};

}  // namespace tw::models
