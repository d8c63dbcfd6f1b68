#pragma once

#include <cstddef>
#include <span>

namespace tw::speech {

/// Detects an endless repetition at the end of `tokens`: a cycle of 1 to 32 tokens, repeated at least 8 times and over at least 64 tokens.
/// Returns the cycle's length, or 0.
inline std::size_t repeated_cycle(std::span<const int> tokens) {
  constexpr std::size_t kLongest = 32, kTimes = 8, kTokens = 64;
  for (std::size_t cycle = 1; cycle <= kLongest; ++cycle) {
    const std::size_t needed = cycle * kTimes > kTokens ? cycle * kTimes : kTokens;
    if (needed > tokens.size()) break;
    const std::span<const int> end = tokens.last(needed);
    std::size_t i = cycle;
    while (i < needed && end[i] == end[i - cycle]) ++i;
    if (i == needed) return cycle;
  }
  return 0;
}

}  // namespace tw::speech
