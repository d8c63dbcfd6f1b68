#pragma once

#include "tilewave/tile/gemm.tile.hpp"

namespace tw::kernels::gemm {

/// D = A B + bias with rotary position embedding in half-split pairs (tilewave/rope.hpp): D's columns are heads of kDim, and in those
/// before `rotated` columns k and k + kHalf of each head are turned by the angle of the row's position. Results are rounded once.
template <class T, int kHalf, int kDim>
struct RotaryLinear {
  static constexpr const char* source = "kernels/gemm/rotary_linear.tile.hpp";
  template <class Target, class Acc>
  struct On {
    using Ends = epilogue::Ends<Target, T, Acc>;
    using Memory = typename Ends::Memory;
    struct Params {
      Global<Target, T, typename Ends::Out> d;
      typename Ends::Bias bias;                     ///< [N]
      Pointer<Target, const float> cosines, sines;  ///< [positions, kHalf]
      int positions;                                ///< of a sequence: row r is at position r % positions
      int rotated;
      bool has_bias;
    };

    TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory& memory, const Place& at) {
      if (p.has_bias) epilogue::add_bias<Target>(block, acc, p.bias, at, p.d.cols);
      block.template for_pairs<kHalf, kDim>(acc, [&](int row, int col, auto& x, auto& y) {
        const int angle = (at.row + row) % p.positions * kHalf + col % kDim;
        const bool turns = at.col + col < p.rotated;
        const float cosine = turns ? p.cosines[angle] : 1.0f, sine = turns ? p.sines[angle] : 0.0f;
        const auto turned = x * cosine - y * sine;
        y = y * cosine + x * sine;
        x = turned;
      });
      epilogue::store(block, acc, p.d, memory, at);
    }
  };
};

}  // namespace tw::kernels::gemm
