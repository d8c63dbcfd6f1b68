#pragma once

#include <bit>
#include <cstdint>

#include "kernels/rows.hpp"

namespace tw::kernels::hadamard {

inline constexpr int kLongestRow = 32768;
/// The orders of the matrices that are not powers of two.
inline constexpr int kSmallOrders[] = {12, 20, 28};

/// n = order * 2^log2; order is 0 if there is no such Hadamard matrix here.
struct Factors {
  int order, log2;
};
constexpr Factors factors_of(std::int64_t n) {
  if (n < 2 || n > kLongestRow) return {0, 0};
  const auto size = static_cast<unsigned>(n);
  if (std::has_single_bit(size)) return {1, std::countr_zero(size)};
  for (const int order : kSmallOrders) {
    const unsigned power = size / static_cast<unsigned>(order);
    if (n % order == 0 && std::has_single_bit(power)) return {order, std::countr_zero(power)};
  }
  return {0, 0};
}

/// Rows that a warp holds, of one pass.
constexpr bool is_held(int n) { return factors_of(n).order == 1 && n <= 2048; }

/// The tile of HeldRows for rows of n elements, whose lanes hold `width` neighbours: 32 elements for each thread, or 64 of rows of 2048.
constexpr RowTile held_tile(int n, int width) {
  constexpr int kWarps = 4;
  const int cols = n < 8 ? 8 : n;
  const int lanes = cols / width < 32 ? cols / width : 32, share = cols / lanes;
  return {kWarps * (32 / lanes) * (share < 32 ? 32 / share : 1), cols, kWarps};
}

/// The parameters of SharedRows for rows of n elements.
struct SharedPlan {
  int order, span, first, second, warps;
};
constexpr SharedPlan shared_plan(int n) {
  const auto [order, log2] = factors_of(n);
  const int warps = n <= 4096 ? 4 : n <= 8192 ? 8 : 16;  // 32 to 64 elements for each thread
  if (order == 1) {
    const int span = log2 < 13 ? 3 : log2 - 10, first = (log2 - span) / 2;  // two passes of 16 or 32 elements
    return {1, 1 << span, 1 << first, 1 << (log2 - span - first), warps};
  }
  // One pass of at most 32 elements, and one with the small matrix.
  const int span = log2 < 3 ? log2 : log2 < 8 ? 3 : log2 - 5;
  return {order, 1 << span, 1 << (log2 - span), 1, warps};
}

}  // namespace tw::kernels::hadamard
