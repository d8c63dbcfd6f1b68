#pragma once

#include "tilewave/tile/language.tile.hpp"

// Kernels with operands that are decoded, converted to 8 bits, gathered, scattered or grouped. copy_test.cpp runs them.

namespace tw::test {

inline constexpr const char* kCopyKernels = "tests/copy_kernels.tile.hpp";

/// Where the scales of a PackedProduct come from. `Order`: a tile of them is [rows, groups] or, with Contract::rows, [groups, rows].
template <class Element, int Group, Contract Order>
struct ByGroup {
  using Scale = Element;
  static constexpr int group = Group;
  static constexpr Contract order = Order;
};
struct ByRow {};
struct WithoutScales {};

/// number * scale, or with a zero point (number - kZero) * scale.
template <int kZero>
struct Affine {
  TW_INLINE auto operator()(auto number, auto scale) const { return (number - static_cast<float>(kZero)) * scale; }
};

/// out[m, n] = sum over k of W[m, k] X[n, k], with W in codes of 4 or 2 bits: weights times activations. The codes are decoded into the
/// left operand, 64 columns at a time, while the tensor cores multiply the 64 columns before.
template <class T, class Sum, class Codes, class Scaling, class Decode, int BM, int BN>
struct PackedProduct {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    static constexpr int BK = 128, half = BK / 2;
    static constexpr bool by_group = requires { Scaling::group; };
    using W = Shared<Target, Codes, BM, BK / codes_in<Codes>>;
    using X = Shared<Target, T, BN, half>;
    using Acc = Fragment<Target, Sum, BM, BN>;
    template <class S, bool>
    struct GroupTile {
      static constexpr int least = 32 / static_cast<int>(sizeof(typename S::Scale));
      using Type = conditional<S::order == Contract::rows, Shared<Target, typename S::Scale, 8, BM, Contract::rows>,
                               Shared<Target, typename S::Scale, BM, least>>;
    };
    template <class S>
    struct GroupTile<S, false> {
      using Type = X;  // not used
    };
    using Scales = typename GroupTile<Scaling, by_group>::Type;
    static constexpr int rows = BM;
    struct WithScales {
      W w;
      X x[2];
      Scales scales;
    };
    struct NoScales {
      W w;
      X x[2];
    };
    using Slot = conditional<by_group, WithScales, NoScales>;
    struct Params {
      Global<Target, const Codes, W> w;
      Global<Target, const T, X> x;
      Global<Target, const typename Scales::Element, Scales> scales;
      Global<Target, const float> row_scales;
      Global<Target, Sum> out;
      int depth;
    };
    struct Memory {
      Ring<Target, Slot, 3> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Acc acc;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.depth, BK); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        copy.tile(p.w, slot.w, t.m * BM, step * (BK / codes_in<Codes>));
        for (int n = 0; n < 2; ++n) copy.tile(p.x, slot.x[n], t.n * BN, step * BK + n * half);
        if constexpr (by_group) {
          constexpr int groups = BK / Scaling::group;
          if constexpr (Scaling::order == Contract::rows)
            copy.tile(p.scales, slot.scales, step * groups, t.m * BM);
          else
            copy.tile(p.scales, slot.scales, t.m * BM, step * groups);
        }
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      RowVector<Target, float, Acc> row_scales;
      if constexpr (is_same<Scaling, ByRow>) block.load(row_scales, p.row_scales, t.m * BM, 0);
      const auto decode = [&](auto& to, const Slot& slot, int first) {
        if constexpr (by_group)
          block.load(to, slot.w, group_scales<Scaling::group>(slot.scales), Decode{}, first);
        else if constexpr (is_same<Scaling, ByRow>)
          block.load(to, slot.w, row_scales, Decode{}, first);
        else
          block.load(to, slot.w, Unscaled{}, Decode{}, first);
      };
      Operand<Target, T, BM, half> low, high;
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.ring);
        decode(low, slot, 0);  // while the product of the step before may go on
        block.mma(state.acc, low, slot.x[0], step == 0);
        if (step > 0) {
          block.wait(leave<1>, state.acc);
          block.release(memory.ring);
        }
        decode(high, slot, half);
        block.mma(state.acc, high, slot.x[1], false);
        block.wait(leave<1>, state.acc);
      }
      block.wait(leave<0>, state.acc);
      block.release(memory.ring);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) {
      block.store(state.acc, p.out, t.m * BM, t.n * BN);
    }
  };
};

/// Q = A B^T, halved `p.shift` times and rounded to T, 8 bits; out = Q C^T. A goes through registers, and so does Q: 8-bit left operands
/// from shared memory and from accumulators.
template <class T, class Sum, int M, int N, int D>
struct NarrowChain {
  static constexpr const char* source = kCopyKernels;
  template <class Target>
  struct On {
    using A = Shared<Target, T, M, D>;
    using B = Shared<Target, T, N, D>;
    using C = Shared<Target, T, D, N>;
    static constexpr int rows = M;
    struct Params {
      Global<Target, const T, A> a;
      Global<Target, const T, B> b;
      Global<Target, const T, C> c;
      Global<Target, Sum> out;
      float factor;
    };
    struct Slot {
      B b;
      C c;
    };
    struct Memory {
      Ring<Target, A, 1> a;
      Ring<Target, Slot, 2> bc;
      explicit constexpr Memory(auto& block) : a(block), bc(block) {}
    };
    struct State {
      Fragment<Target, Sum, M, D> out;
    };
    TW_INLINE static int steps(const Params& p, Tile) { return ceil_div(p.b.rows, N); }
    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      if (step == 0) producer.put(memory.a, [&](auto copy, A& a) { copy.tile(p.a, a, t.m * M, 0); });
      producer.put(memory.bc, [&](auto copy, Slot& slot) {
        copy.tile(p.b, slot.b, step * N, 0);
        copy.tile(p.c, slot.c, 0, step * N);
      });
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      Operand<Target, T, M, D> a;
      Operand<Target, T, M, N> q;
      block.load(a, block.take(memory.a));
      block.release(memory.a);
      const int n = steps(p, t);
      for (int step = 0; step < n; ++step) {
        const Slot& slot = block.take(memory.bc);
        Fragment<Target, Sum, M, N> scores;
        block.mma(scores, a, slot.b, true);
        block.wait(leave<0>, scores, state.out);
        block.for_each(scores, [&](int, int, auto& x) { x = to<Sum>(static_cast<float>(x) * p.factor); });
        block.convert(q, scores);
        block.mma(state.out, q, slot.c, step == 0);
        block.wait(leave<0>, state.out);
        block.release(memory.bc);
      }
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State& state) { block.store(state.out, p.out, t.m * M, 0); }
  };
};

}  // namespace tw::test
