#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tw::models {

constexpr std::size_t kMostSteps = 64;  // of a normalizer, a pre-tokenizer and a decoder: those of published files have up to 6

/// Limits for one text, for any regular expressions and replacements in a file: steps of matching, and added bytes. Both are far more than
/// the files of published models need.
class Budget {
 public:
  /// The budget for `bytes` of text. Messages begin with `file`.
  explicit Budget(std::string file, std::size_t bytes = 0) : file_(std::move(file)) { add(bytes); }

  /// Adds the budget of that many more bytes of text.
  void add(std::size_t bytes) {
    steps_ += kStepsPerByte * static_cast<std::int64_t>(bytes);
    growth_ += kGrowthPerByte * static_cast<std::int64_t>(bytes);
  }
  /// Uses steps. Returns false if there were not enough.
  bool take(std::int64_t steps) {
    steps_ -= steps;
    return steps_ >= 0;
  }
  /// Throws FileError if texts became too long; `what` changed one from `before` to `after` bytes.
  void grow(std::size_t before, std::size_t after, const char* what);

 private:
  static constexpr std::int64_t kSteps = 1 << 24, kStepsPerByte = 512;
  static constexpr std::int64_t kGrowth = 1 << 20, kGrowthPerByte = 16;  // a normal form needs up to 11, byte-level words 2

  std::string file_;
  std::int64_t steps_ = kSteps, growth_ = kGrowth;
};

}  // namespace tw::models
