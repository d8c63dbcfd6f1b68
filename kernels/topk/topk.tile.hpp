#pragma once

#include "kernels/topk/row.tile.hpp"

namespace tw::kernels::topk {

/// The first k elements of each row by radix select. The digits of the k-th element's key are determined from the highest to the lowest,
/// each with a histogram of the elements that agree in the higher digits. When few enough elements are left, they are listed in the order
/// of their columns, and the search goes on in the list.
template <class T, class Index, Stage stage, int Warps, int Capacity>
struct Topk {
  static constexpr const char* source = "kernels/topk/topk.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    static constexpr int min_blocks = Warps < 16 ? 1 : 2;
    static constexpr int C = Warps * 32 * 8;  ///< columns at a time: 8 of each thread
    static constexpr int digit_bits = 11;
    static constexpr int few_keys = 512;  ///< sorting these takes less time than to find out which are needed
    using ThisRow = Row<Target, T, Index, stage>;
    using In = typename ThisRow::In;
    using Params = typename ThisRow::Params;
    struct Memory {
      Histogram<Target, 1 << digit_bits> digits;
      List<Target, u64, Capacity> taken;     ///< keys, in the order of their columns
      List<Target, u64, Capacity / 2> best;  ///< the `wanted` best of them
      explicit constexpr Memory(auto& block) : digits(block), taken(block), best(block) {}
    };

    /// What is known of the wanted element's key.
    struct Search {
      u64 low;  ///< it is in [low, low + 2^open)
      int open;
      int above;  ///< elements with larger keys than these
      int held;   ///< elements from low on, at most
    };

    /// f(x, first column, whether all columns of x are the row's) for C columns at a time.
    TW_INLINE static void for_pieces(auto& block, const ThisRow& row, auto f) {
      const auto columns = row.columns();
      Rows<Target, In, 1, C, Warps> x;
      for (int col = columns.begin / 8 * 8; col < columns.end; col += C) {  // pieces of 8 columns are loaded whole
        row.load(block, x, col);
        f(x, col, col >= columns.begin && col + C <= columns.end);
      }
    }

    /// Counts the highest digit of every element.
    TW_INLINE static void count_first_digits(auto& block, const ThisRow& row, Memory& memory) {
      constexpr int shift = Order<T>::value_bits - digit_bits;
      const auto columns = row.columns();
      for_pieces(block, row, [&](auto& x, int col, bool whole) {
        const auto count = [&](auto& value) { block.count(memory.digits, static_cast<int>(row.value(to<In>(value)) >> shift)); };
        if (whole) {
          block.for_each(x, [&](int, int, auto& value) { count(value); });
        } else {
          block.for_each(x, [&](int, int c, auto& value) {
            if (col + c >= columns.begin && col + c < columns.end) count(value);
          });
        }
      });
    }

    /// Goes on with the next digit: count_all() has counted it, of every key that is still possible.
    TW_INLINE static void narrow(auto& block, Search& search, int wanted, Memory& memory, auto count_all) {
      const int shift = max(search.open - digit_bits, 0);
      block.clear(memory.digits);
      count_all([&](u64 key) {
        if (key > 0 && key >> search.open == search.low >> search.open)
          block.count(memory.digits, static_cast<int>((key - search.low) >> shift));
      });
      const Located digit = block.locate(memory.digits, wanted - search.above);
      search.low += static_cast<u64>(digit.counter) << shift;
      search.above += digit.above;
      search.held = search.above + digit.count;
      search.open = shift;
    }

    /// Finds a threshold: at least `wanted` and at most p.limit elements have keys at or above it.
    TW_INLINE static Search search_row(auto& block, const Params& p, const ThisRow& row, int wanted, Memory& memory) {
      const auto columns = row.columns();
      Search search{0, p.order.bits(), 0, min(columns.count(), row.own.count())};
      if (search.held > p.limit) {
        block.clear(memory.digits);
        count_first_digits(block, row, memory);
        const Located digit = block.locate(memory.digits, wanted);
        search.open -= digit_bits;
        search = {static_cast<u64>(digit.counter) << search.open, search.open, digit.above, digit.above + digit.count};
      }
      while (search.held > p.limit) {
        narrow(block, search, wanted, memory, [&](auto count) {
          for_pieces(block, row, [&](auto& x, int col, bool) {
            block.for_each(x, [&](int, int c, auto& value) {
              if (col + c >= columns.begin && col + c < columns.end) count(row.key(to<In>(value), col + c));
            });
          });
        });
      }
      return search;
    }

    /// Lists the elements from search.low on: their columns first, because few threads have one at the same time.
    TW_INLINE static void take(auto& block, const Params& p, const ThisRow& row, const Search& search, Memory& memory) {
      const auto columns = row.columns();
      const u64 low = max(search.low, u64{1});
      const u32 low_value = static_cast<u32>(low >> p.order.column_bits);
      const bool by_value = (low & ((u64{1} << p.order.column_bits) - 1)) == 0;  // so keys need not be compared
      block.clear(memory.taken);
      for_pieces(block, row, [&](auto& x, int col, bool whole) {
        const auto append = [&](auto chosen) { block.append_in_order(memory.taken, x, chosen, [&](int c) { return col + c; }); };
        if (whole && by_value) {
          append([&](int, auto value) { return row.value(to<In>(value)) >= low_value; });
        } else {
          append([&](int c, auto value) {
            return col + c >= columns.begin && col + c < columns.end && row.key(to<In>(value), col + c) >= low;
          });
        }
      });
      block.parallel(block.size(memory.taken), [&](int i) { memory.taken[i] = row.key_at(static_cast<int>(memory.taken[i])); });
      block.sync();
    }

    /// Lists the `wanted` best of those taken.
    TW_INLINE static void keep(auto& block, Search search, int wanted, Memory& memory) {
      const int n = block.size(memory.taken);
      while (search.held > wanted && search.open > 0) {
        narrow(block, search, wanted, memory, [&](auto count) { block.parallel(n, [&](int i) { count(memory.taken[i]); }); });
      }
      block.clear(memory.best);
      Rows<Target, u64, 1, C, Warps> keys;
      TW_NO_UNROLL
      for (int first = 0; first < n; first += C) {
        block.for_each(keys, [&](int, int col, auto& key) { key = first + col < n ? memory.taken[first + col] : u64{0}; });
        block.append_in_order(
            memory.best, keys, [&](int, u64 key) { return key > 0 && key >= search.low; },
            [&](int col) { return memory.taken[first + col]; });
      }
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const ThisRow row(p, t);
      const int wanted = min(p.k, row.own.count());
      const Search search = search_row(block, p, row, wanted, memory);
      take(block, p, row, search, memory);
      if constexpr (stage == Stage::part) {
        const int taken = block.size(memory.taken);
        block.parallel(p.limit, [&](int n) { row.put_candidate(t.n, n, n < taken ? memory.taken[n] : 0); });
      } else {
        const auto put = [&](auto& list) {
          block.sync();
          block.parallel(p.k, [&](int n) {
            if (n < wanted)
              row.put(n, list[n]);
            else
              row.put_none(n);
          });
        };
        if (!p.by_index && search.held <= few_keys) {
          block.sort(memory.taken, wanted);
          return put(memory.taken);
        }
        keep(block, search, wanted, memory);
        if (!p.by_index) block.sort(memory.best, wanted);
        put(memory.best);
      }
    }
  };
};

}  // namespace tw::kernels::topk
