#pragma once

// Rows of activations rounded to 8-bit integers, as quantized_library.hpp says: what the instruction sets have in common; internal to each
// file that includes it.

#include "microkernels/microkernel.hpp"
#include "microkernels/quantized_library.hpp"

namespace tw::cpu {
namespace {

/// RoundRow in blocks of kElements. V::scale_for(x, n) is the scale of n elements, and V::round_codes(codes, x, n, scale) rounds them.
/// Blocks of int4 are put in the order of its codes: even elements, then odd ones.
template <class V, int kElements>
void round_row(const RoundedRows& to, int at, const float* x, int depth) {
  signed char* codes = to.codes + static_cast<long>(at) * to.blocks * kElements;
  float* scales = to.scales + static_cast<long>(at) * to.blocks * (kElements == kInt8Block ? 1 : 4);
  float row_sum = 0;
  for (int block = 0; block < to.blocks; ++block, codes += kElements) {
    const int first = block * kElements, n = least(depth - first, kElements);
    const float scale = V::scale_for(x + first, n);
    signed char rounded[kElements] = {};
    V::round_codes(rounded, x + first, n, scale);
    if constexpr (kElements == kInt8Block) {
      scales[block] = scale;
      int sum = 0;
      for (int k = 0; k < kElements; ++k) codes[k] = rounded[k], sum += rounded[k];
      row_sum += scale * static_cast<float>(sum);
    } else {
      for (int part = 0; part < 4; ++part) {
        int sum = 0;
        for (int k = 32 * part; k < 32 * part + 32; ++k) sum += rounded[k];
        scales[4 * block + part] = scale;
        to.sums[(static_cast<long>(at) * to.blocks + block) * 4 + part] = scale * static_cast<float>(sum);
      }
      for (int k = 0; k < kElements / 2; ++k) {
        codes[k] = rounded[2 * k];
        codes[kElements / 2 + k] = rounded[2 * k + 1];
      }
    }
  }
  if constexpr (kElements == kInt8Block) to.sums[at] = row_sum;
}

/// Calls f<Rows>(at) for `count` rows of x, with at most kMost, 4 or 8, of them.
template <int kMost, class F>
void in_parts(int count, F f) {
  int at = 0;
  for (; at + kMost <= count; at += kMost) f.template operator()<kMost>(at);
  if (count - at >= 4) f.template operator()<4>(at), at += 4;
  if (count - at >= 2) f.template operator()<2>(at), at += 2;
  if (count - at >= 1) f.template operator()<1>(at);
}

}  // namespace
}  // namespace tw::cpu
