#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "models/tokenizer/utf8.hpp"

namespace tw::speech {

/// Whether a word of `text` (valid UTF-8) ends at byte `at`: before a space, and at the end. Each character from U+2E80 on (Chinese,
/// Japanese) is a word, because these scripts have no spaces.
inline bool ends_word(std::string_view text, std::size_t at) {
  constexpr char32_t kFirstIdeograph = 0x2E80;
  if (at == 0 || at == text.size() || text[at] == ' ') return true;
  if ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) return false;  // within a character
  std::size_t last = models::previous_character(text, at);
  return models::next_character(text, last) >= kFirstIdeograph || models::next_character(text, at) >= kFirstIdeograph;
}

/// The length in bytes of the longest sequence of words with which both texts begin.
inline std::size_t agreed_length(std::string_view a, std::string_view b) {
  const auto differs = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first;
  auto length = static_cast<std::size_t>(differs - a.begin());
  while (!ends_word(a, length) || !ends_word(b, length)) --length;
  return length;
}

/// The text of speech that goes on, from hypotheses about all of it so far: local agreement of two (Macháček et al., arXiv 2307.14743).
class LocalAgreement {
 public:
  /// Takes the next hypothesis. Returns the words that it adds to the text: those that the last hypothesis has, too. Nothing is added
  /// while the hypothesis does not begin with the text.
  std::string add(std::string hypothesis) {
    const std::size_t agreed = agreed_length(hypothesis_, hypothesis);
    hypothesis_ = std::move(hypothesis);
    if (!hypothesis_.starts_with(text_) || agreed <= text_.size()) return "";
    std::string added = hypothesis_.substr(text_.size(), agreed - text_.size());
    text_ += added;
    return added;
  }

  /// What `complete`, the text of all of the speech, adds to the text: nothing if it does not begin with it.
  std::string rest(std::string_view complete) const {
    return complete.starts_with(text_) ? std::string(complete.substr(text_.size())) : "";
  }

  /// What the last hypothesis has after the text.
  std::string tentative() const { return rest(hypothesis_); }

 private:
  std::string text_;        // all that was added
  std::string hypothesis_;  // the last one
};

}  // namespace tw::speech
