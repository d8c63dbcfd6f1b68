#pragma once

#include "kernels/hadamard/matrices.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

// y = scale (x * factors) H of rows of N elements, where H is the Kronecker product of a Hadamard matrix of order M (1, 12, 20 or 28) and
// the Walsh-Hadamard matrix of order N / M. Sums in f32, rounded once.

namespace tw::kernels::hadamard {

template <class In, class Out>
struct Types {
  template <class Target, class Values>
  struct Params {
    Global<Target, const In, Values> x;
    Global<Target, Out, Values> y;
    Global<Target, const float> factors;  ///< [1, N], or absent; not read by kernels without kFactors
    float scale;

    TW_INLINE void store(auto& block, Values& from, int row0, int i, int j) const {
      block.map_store(
          from, y, row0, 0, i, j, [](auto v, auto s) { return v * s; }, scale);
    }
  };
};

/// Rows of C elements, a power of two, each in the registers of one warp. Shorter rows are padded with zeros.
template <class In, class Out, bool kFactors, int R, int C, int Warps, int Width>
struct HeldRows {
  static constexpr const char* source = "kernels/hadamard/hadamard.tile.hpp";
  static constexpr bool has_factors = kFactors;

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    /// 1024 threads per SM, with 64 registers each, so that some load while others compute. Rows of 2048 need twice as many registers.
    /// The factors of a thread's 16, 32 or 64 columns need more.
    static constexpr int min_blocks = C > 1024 ? (kFactors ? 2 : 4) : kFactors&& C > 256 ? 4 : 8;
    using Values = Rows<Target, float, R, C, Warps, Width>;
    using Params = typename Types<In, Out>::template Params<Target, Values>;

    static void compute(auto& block, const Params& p, Tile t) {
      const int row0 = t.m * R, j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      Values x;
      block.load(x, p.x, row0, 0, i, j);
      if (kFactors && p.factors.cols > 0) {
        ColumnVector<Target, float, Values> by_column;
        block.load(by_column, p.factors, 0, 0);
        block.map(x, by_column, [](auto v, auto f) { return v * f; });
      }
      block.template row_hadamard<C>(x);
      p.store(block, x, row0, i, j);
    }
  };
};

/// Where element n of a row is in a GPU's shared memory. Both in registers and in the passes the elements that a warp accesses at once are
/// in different banks: bits 5 to 7 and the two bits above the first pass are mixed into the five bits that choose the bank. `first_pass`:
/// the number of elements that have been combined after it.
TW_INLINE constexpr int place_in_banks(int n, int first_pass) {
  const int above = n / max(first_pass, 32);
  return n ^ (n >> 5 & 7) ^ (above & 1) << 4 ^ (above & 2) << 2;
}
/// The same of element n + apart, where no bit is set in both n and `apart`. A constant `apart` makes most of it an offset in the
/// instruction.
TW_INLINE constexpr int place_in_banks_after(int place_of_n, int apart, int first_pass) {
  return (place_of_n ^ (place_in_banks(apart, first_pass) & 31)) + (apart & ~31);
}

/// One row of M * Span * R1 * R2 elements. In passes through shared memory a thread transforms R1, R2 or M elements that are Span, Span R1
/// and N / M apart. The factors are applied in the first of them. Runs of Span neighbours follow in registers.
template <class In, class Out, bool kFactors, int M, int Span, int R1, int R2, int Warps, int Width>
struct SharedRows {
  static constexpr const char* source = "kernels/hadamard/hadamard.tile.hpp";
  static constexpr bool has_factors = kFactors;

  template <class Target>
  struct On {
    static constexpr int N = M * Span * R1 * R2;
    static constexpr int warps = Warps;
    /// At most 128 registers: a pass holds up to 64 elements.
    static constexpr int min_blocks = Warps < 16 ? 16 / Warps : 1;
    static constexpr int C = ceil_div(N, 32 * Warps * Width) * 32 * Warps * Width;
    using Values = Rows<Target, float, 1, C, Warps, Width>;
    using Params = typename Types<In, Out>::template Params<Target, Values>;
    using Row = VectorBuffer<Target, float, ceil_div(N, 32) * 32>;
    struct Memory {
      Row row;
      explicit constexpr Memory(auto& block) : row(block) {}
    };

    TW_INLINE static constexpr int place(int n) { return TW_ON_GPU ? place_in_banks(n, Span * R1) : n; }
    TW_INLINE static constexpr int place_after(int place_of_n, int apart) {
      return TW_ON_GPU ? place_in_banks_after(place_of_n, apart, Span * R1) : place_of_n + apart;
    }

    /// Transforms every group of `Count` elements that are `Step` apart.
    template <int Step, int Count>
    TW_INLINE static void pass(auto& block, const Params& p, const Row& row, auto transform) {
      if constexpr (Count > 1) {
        constexpr bool first_pass = Step == Span;
        // Neighbouring groups that are transformed together: the threads of a GPU are neighbours, a CPU has vectors.
        constexpr int together = TW_ON_GPU ? 1 : Step % 32 == 0 ? 32 : Step % 8 == 0 ? 8 : 1;
        const bool multiply = kFactors && first_pass && p.factors.cols > 0;
        block.sync();
        block.parallel(N / Count / together, [&](int i) {
          const int group = i * together, first = group / Step * (Step * Count) + group % Step, place_of_first = place(first);
          Columns<remove_const_reference<decltype(row[0])>, together> x[Count];
          TW_UNROLL
          for (int n = 0; n < Count; ++n) {
            for (int k = 0; k < together; ++k) x[n].x[k] = row[place_after(place_of_first, n * Step) + k];
          }
          if (multiply) {
            TW_UNROLL
            for (int n = 0; n < Count; ++n) {
              for (int k = 0; k < together; ++k) x[n].x[k] *= block.value(p.factors, 0, first + n * Step + k);
            }
          }
          transform(x);
          TW_UNROLL
          for (int n = 0; n < Count; ++n) {
            for (int k = 0; k < together; ++k) row[place_after(place_of_first, n * Step) + k] = x[n].x[k];
          }
        });
      }
    }

    static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const int j = p.x.size_j == 1 ? 0 : t.batch / p.x.size_i, i = t.batch - j * p.x.size_i;
      Values x;
      block.load(x, p.x, t.m, 0, i, j);
      block.for_each(x, [&](int, int col, auto& v) {
        if (C == N || col < N) memory.row[place(col)] = v;
      });
      const auto butterflies = [](auto& elements) { walsh_hadamard(elements); };
      pass<Span, R1>(block, p, memory.row, butterflies);
      pass<Span * R1, R2>(block, p, memory.row, butterflies);
      pass<Span * R1 * R2, M>(block, p, memory.row, [](auto& elements) { small_hadamard(elements); });
      block.sync();
      block.for_each(x, [&](int, int col, auto& v) {
        if (C == N || col < N) v = memory.row[place(col)];
      });
      block.template row_hadamard<Span>(x);
      p.store(block, x, t.m, i, j);
    }
  };
};

}  // namespace tw::kernels::hadamard
