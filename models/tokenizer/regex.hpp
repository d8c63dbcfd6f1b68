#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/tokenizer/budget.hpp"
#include "models/tokenizer/fields.hpp"

namespace tw::models {

struct Match {
  std::size_t begin, end;  // bytes
};

/// A regular expression of a tokenizer.json, in Oniguruma's syntax. The constructs that such files use are translated to PCRE2's where the
/// two differ (\s, \w, \h, scripts, characters missing in PCRE2's Unicode tables); others are refused.
class Regex {
 public:
  /// Messages begin with `file`. Throws FileError.
  Regex(const std::string& pattern, const std::string& file);
  /// Matches this text and nothing else.
  static Regex literal(const std::string& text, const std::string& file);

  /// All matches in valid UTF-8, left to right, none overlapping, none empty at the end of another. Throws FileError if that takes more
  /// steps than `budget` has, or a match needs too much memory.
  void find_all(std::string_view text, std::vector<Match>& matches, Budget& budget) const;

 private:
  Regex() = default;
  void compile(const std::string& translated);

  std::string file_, pattern_;
  std::shared_ptr<void> code_;
};

/// The pattern of an object {"String": "..."} or {"Regex": "..."}.
Regex pattern_of(const Fields& pattern);

}  // namespace tw::models
