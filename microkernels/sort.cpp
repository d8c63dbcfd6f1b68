#include <algorithm>
#include <functional>

#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::cpu {

void sort_descending(u64* values, int count, int n) {
  if (n < count) std::nth_element(values, values + n, values + count, std::greater<>());
  std::sort(values, values + std::min(n, count), std::greater<>());
}

}  // namespace tw::cpu
