#include <algorithm>
#include <cstdint>

#include "kernels/check.hpp"
#include "tilewave/attention.hpp"

namespace tw {

int decode_splits(int sequences, int seqlen_k, int block, int multiprocessors, int most) {
  require(sequences >= 0 && seqlen_k >= 0, "decode_splits: sequences is {} and seqlen_k {}; they must not be negative", sequences,
          seqlen_k);
  require(block > 0 && multiprocessors > 0 && most > 0, "decode_splits: block is {}, multiprocessors {} and most {}; they must be positive",
          block, multiprocessors, most);
  // Parts are worked on in rounds of `multiprocessors`; in the last round some are idle.
  const auto busy = [&](int splits) {
    const std::int64_t parts = std::int64_t{sequences} * splits, rounds = (parts + multiprocessors - 1) / multiprocessors;
    return static_cast<double>(parts) / static_cast<double>(rounds * multiprocessors);
  };
  const int limit = std::clamp(seqlen_k / block, 1, most);
  if (sequences == 0) return 1;
  double best = 0;
  for (int splits = 1; splits <= limit; ++splits) best = std::max(best, busy(splits));
  int splits = 1;
  while (busy(splits) < 0.96 * best) ++splits;
  return splits;
}

}  // namespace tw
