#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tw::models {

constexpr std::size_t kMostSteps = 64;  // of a normalizer, a pre-tokenizer and a decoder: those of published files have up to 6

/// What one text may take, whatever a file's regular expressions and replacements make of it: steps of matching, and bytes by which it
/// becomes longer. Both are far more than the text needs with files of published models.
class Budget {
 public:
  /// Of `bytes` of text. `file` begins the messages.
  explicit Budget(std::string file, std::size_t bytes = 0) : file_(std::move(file)) { add(bytes); }

  /// There are that many more bytes of text.
  void add(std::size_t bytes) {
    steps_ += kStepsPerByte * static_cast<std::int64_t>(bytes);
    growth_ += kGrowthPerByte * static_cast<std::int64_t>(bytes);
  }
  /// Takes steps; whether there were enough.
  bool take(std::int64_t steps) {
    steps_ -= steps;
    return steps_ >= 0;
  }
  /// Throws FileError when texts became too long; `what` made one of `before` bytes one of `after`.
  void grow(std::size_t before, std::size_t after, const char* what);

 private:
  static constexpr std::int64_t kSteps = 1 << 24, kStepsPerByte = 512;
  static constexpr std::int64_t kGrowth = 1 << 20, kGrowthPerByte = 16;  // a normal form needs up to 11, byte-level words 2

  std::string file_;
  std::int64_t steps_ = kSteps, growth_ = kGrowth;
};

}  // namespace tw::models
