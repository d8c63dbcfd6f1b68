#pragma once

#include "kernels/topk/row.tile.hpp"

namespace tw::kernels::topk {

/// The first k elements of each row by radix select. The digits of the k-th element's key are determined from the highest to the lowest,
/// each with a histogram of the elements that agree in the higher digits. The search ends when few enough elements are left to be sorted.
template <class T, class Index, Stage stage, int Warps, int Capacity>
struct Topk {
  static constexpr const char* source = "kernels/topk/topk.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    static constexpr int C = Warps * 32 * 8;
    static constexpr int digit_bits = 11;
    using ThisRow = Row<Target, T, Index, stage>;
    using In = typename ThisRow::In;
    using Params = typename ThisRow::Params;
    struct Memory {
      Histogram<Target, 1 << digit_bits> digits;
      List<Target, u64, Capacity> taken;
      explicit constexpr Memory(auto& block) : digits(block), taken(block) {}
    };

    /// f(key) for every element.
    TW_INLINE static void for_keys(auto& block, const ThisRow& row, auto f) {
      const auto columns = row.columns();
      Rows<Target, In, 1, C, Warps> x;
      for (int col = columns.begin / 8 * 8; col < columns.end; col += C) {  // pieces of 8 columns are loaded whole
        row.load(block, x, col);
        block.for_each(x, [&](int, int c, auto& value) {
          if (col + c >= columns.begin && col + c < columns.end) f(row.key(to<In>(value), col + c));
        });
      }
    }

    /// Finds a threshold: at least `wanted` and at most p.limit elements have keys at or above it.
    TW_INLINE static u64 threshold(auto& block, const Params& p, const ThisRow& row, int wanted, Memory& memory) {
      u64 low = 0;  // the wanted element's key is in [low, low + 2^open)
      int open = p.order.bits();
      int above = 0;                                           // elements with larger keys than these
      int held = min(row.columns().count(), row.own.count());  // elements from low on, at most
      while (held > p.limit) {
        const int shift = max(open - digit_bits, 0);
        block.clear(memory.digits);
        for_keys(block, row, [&](u64 key) {
          if (key > 0 && key >> open == low >> open) block.count(memory.digits, static_cast<int>((key - low) >> shift));
        });
        const Located digit = block.locate(memory.digits, wanted - above);
        low += static_cast<u64>(digit.counter) << shift;
        above += digit.above;
        held = above + digit.count;
        open = shift;
      }
      return max(low, u64{1});
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const ThisRow row(p, t);
      const int wanted = min(p.k, row.own.count());
      const u64 first = threshold(block, p, row, wanted, memory);
      block.clear(memory.taken);
      for_keys(block, row, [&](u64 key) {
        if (key >= first) block.append(memory.taken, stage != Stage::part && p.by_index ? p.order.column_part(key) : key);
      });
      if constexpr (stage == Stage::part) {
        const int taken = block.size(memory.taken);
        block.parallel(p.limit, [&](int n) { row.put_candidate(t.n, n, n < taken ? memory.taken[n] : 0); });
      } else {
        block.sort(memory.taken, wanted);
        block.parallel(p.k, [&](int n) {
          if (n < wanted)
            row.put(n, memory.taken[n]);
          else
            row.put_none(n);
        });
      }
    }
  };
};

}  // namespace tw::kernels::topk
