#include "models/decode_graphs.hpp"

#include <algorithm>
#include <bit>

namespace tw::models {

namespace {

/// `n` rounded up to a quarter of a power of two, and to a multiple of `least`.
int rounded_up(int n, int least) {
  const int step = std::max(least, static_cast<int>(std::bit_ceil(static_cast<unsigned>(n))) / 8);
  return (n + step - 1) / step * step;
}

}  // namespace

DecodeGraphs::Size DecodeGraphs::size_for(int sequences, int pages) {
  const int rows = sequences <= 16 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(sequences))) : rounded_up(sequences, 8);
  return {rows, rounded_up(pages, 4)};
}

}  // namespace tw::models
