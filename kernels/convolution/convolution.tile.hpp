#pragma once

#include "tilewave/tile/epilogue.tile.hpp"

namespace tw::kernels::convolution {

/// The parameters of one dimension of the image.
struct Axis {
  int stride, padding, dilation;
};

/// y[n, oh, ow, f] = epilogue(sum over kh, kw, c of x[n, oh SH + kh DH - PH, ow SW + kw DW - PW, c] w[f, kh, kw, c]), where x is 0 outside
/// the image: a matrix product over K = (kh, kw, c) whose left operand is never stored (implicit GEMM).
///
/// The rows of a tile are BM output pixels, a window of one or several images; its columns are BN channels. A step is one tap (kh, kw) and
/// BK channels, so the input pixels also form a window, with an offset and the convolution's stride. Copies give 0 outside the image, which
/// implements the padding. `w_contract`: columns for weights stored [.., F, C], rows for [.., C, F]. `Cluster` blocks, neighbours in the
/// image, share each tile of the weights.
template <class T, Contract w_contract, class Epilogue, int BM, int BN, int BK, int Stages, int Cluster>
struct Convolution {
  static constexpr const char* source = "kernels/convolution/convolution.tile.hpp";
  using WarpTile = SquareWarpTile<BM, BN>;

  template <class Target>
  struct On {
    using X = Shared<Target, T, BM, BK>;
    using W = conditional<w_contract == Contract::columns, Shared<Target, T, BN, BK>, Shared<Target, T, BK, BN, Contract::rows>>;
    using Acc = Fragment<Target, float, BM, BN>;
    using End = typename Epilogue::template On<Target, Acc>;
    using Schedule = Banded<16>;  // channel tiles of the same pixels run at the same time
    static constexpr int rows = BM;
    static constexpr int cluster = Cluster;

    struct Params {
      Windowed<Target, const T, X> x;         ///< [N, H, W, C]
      Global<Target, const T, W, Cluster> w;  ///< [KH, KW, F, C], or [KH, KW, C, F]
      typename End::Params epilogue;          ///< its D is a Windowed [N, OH, OW, F]
      Axis vertical, horizontal;
      int tiles_across;   ///< tiles in a row of the image
      int kernel_width;   ///< KW
      int channel_steps;  ///< per tap
      int steps;          ///< channel_steps KH KW; 0 if the sum is empty
    };

    struct Slot {
      X x;
      W w;
    };
    struct Memory {
      Ring<Target, Slot, Stages> operands;
      typename End::Memory out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      Acc acc;
    };

    /// The tile's first pixel.
    struct Pixel {
      int image, row, col;
    };
    TW_INLINE static Pixel origin(const Params& p, Tile t) {
      const Window& window = p.epilogue.d.window;
      const int down = t.m / p.tiles_across;
      return {t.batch * (BM >> (window.log_width + window.log_height)), down << window.log_height,
              (t.m - down * p.tiles_across) << window.log_width};
    }

    TW_INLINE static int steps(const Params& p, Tile) { return p.steps; }

    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      const int tap = step / p.channel_steps;
      const int channel = (step - tap * p.channel_steps) * BK;
      const int kh = tap / p.kernel_width;
      const int kw = tap - kh * p.kernel_width;
      const Pixel out = origin(p, t);
      producer.put(memory.operands, [&](auto copy, Slot& slot) {
        copy.window(p.x, slot.x, out.col * p.horizontal.stride + kw * p.horizontal.dilation - p.horizontal.padding, channel,
                    out.row * p.vertical.stride + kh * p.vertical.dilation - p.vertical.padding, out.image);
        if constexpr (w_contract == Contract::columns)
          copy.tile_for_cluster(p.w, slot.w, t.n * BN, channel, kw, kh);
        else
          copy.tile_for_cluster(p.w, slot.w, channel, t.n * BN, kw, kh);
      });
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile, Memory& memory, State& state) {
      if (p.steps == 0) {
        block.fill(state.acc, 0.0f);
        return;
      }
      // If products are asynchronous, one is always in flight: a slot is released after the next product has been issued.
      for (int step = 0; step < p.steps; ++step) {
        const Slot& slot = block.take(memory.operands);
        block.mma(state.acc, slot.x, slot.w, step == 0);
        if (step >= in_flight<Target>) {
          block.wait(leave<in_flight<Target>>, state.acc);
          block.release(memory.operands);
        }
      }
      if constexpr (in_flight < Target >> 0) {
        block.wait(leave<0>, state.acc);
        block.release(memory.operands);
      }
    }

    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const Pixel out = origin(p, t);
      End::apply(block, state.acc, p.epilogue, memory.out, WindowPlace{out.col, t.n * BN, out.row, out.image});
    }
  };
};

}  // namespace tw::kernels::convolution
