#pragma once

#include "kernels/topk/row.tile.hpp"

namespace tw::kernels::topk {

/// The first k elements of each row by radix select. The digits of the k-th element's key are determined from the highest to the lowest,
/// each with a histogram of the elements that agree in the higher digits. When few enough elements are left, they are listed in the order
/// of their columns, and the search goes on in the list.
///
/// Of a long row a sample suggests what to list, so that the row is read once. Where it misleads, the row itself is searched.
template <class T, class Index, Stage stage, int Warps, int Capacity>
struct Topk {
  static constexpr const char* source = "kernels/topk/topk.tile.hpp";

  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    static constexpr int min_blocks = Warps < 8 ? 1 : 32 / Warps;
    static constexpr int C = Warps * 32 * 8;  ///< columns at a time: 8 of each thread
    /// Columns from which elements are listed at once: as many as registers suffice for.
    static constexpr int at_once = Warps >= 8 && stage != Stage::merge && sizeof(T) == 4 ? 4 * C : C;
    static constexpr int digit_bits = 11;
    static constexpr int long_row = 16384;  ///< from so many columns on, taking a sample is worth its time
    static constexpr int few_keys = 512;    ///< sorting these takes less time than to find out which are needed
    using ThisRow = Row<Target, T, Index, stage>;
    using In = typename ThisRow::In;
    using Params = typename ThisRow::Params;
    struct Memory {
      Histogram<Target, 1 << digit_bits> digits;
      List<Target, u64, Capacity> taken;  ///< elements in the order of their columns: what their keys need, later the keys
      explicit constexpr Memory(auto& block) : digits(block), taken(block) {}
    };

    /// What is known of the wanted element's key, or of its value.
    template <class Key>
    struct Search {
      Key low;  ///< it is in [low, low + 2^open)
      int open;
      int above;  ///< elements with larger keys than these
      int held;   ///< elements from low on, at most
    };

    /// f(x, first column, whether all columns of x are the row's) for `count` columns at a time.
    template <int count>
    TW_INLINE static void for_pieces(auto& block, const ThisRow& row, auto f) {
      const auto columns = row.columns();
      Rows<Target, In, 1, count, Warps> x;
      TW_NO_UNROLL
      for (int col = columns.begin / 8 * 8; col < columns.end; col += count) {  // pieces of 8 columns are loaded whole
        row.load(block, x, col);
        f(x, col, col >= columns.begin && col + count <= columns.end);
      }
    }

    /// Counts the highest digit of every element.
    TW_INLINE static void count_first_digits(auto& block, const ThisRow& row, Memory& memory) {
      constexpr int shift = Order<T>::value_bits - digit_bits;
      const auto columns = row.columns();
      for_pieces<C>(block, row, [&](auto& x, int col, bool whole) {
        const auto count = [&](auto& value) { block.count(memory.digits, static_cast<int>(row.value(to<In>(value)) >> shift)); };
        if (whole) {
          block.for_each(x, [&](int, int, auto& value) { count(value); });
        } else {
          block.for_each(x, [&](int, int c, auto& value) {
            if (columns.have(col + c)) count(value);
          });
        }
      });
    }

    /// Goes on with the next digit: count_all() has counted it, of every key that is still possible.
    template <class Key>
    TW_INLINE static void narrow(auto& block, Search<Key>& search, int wanted, Memory& memory, auto count_all) {
      const int shift = max(search.open - digit_bits, 0);
      const Key low = search.low, last = ~Key{0} >> (8 * static_cast<int>(sizeof(Key)) - search.open);
      count_all([&](Key key) {
        if (key - low <= last) block.count(memory.digits, static_cast<int>((key - low) >> shift));
      });
      const Located digit = block.locate(memory.digits, wanted - search.above);
      search.low += static_cast<Key>(digit.counter) << shift;
      search.above += digit.above;
      search.held = search.above + digit.count;
      search.open = shift;
    }

    /// A threshold that a sample of the row suggests, an eighth or a sixteenth of it: somewhat more than `wanted` elements should be at or
    /// above it, but no more than fit the list.
    ///
    /// If a fraction f of the elements is, and they are in no order, then 1 - (1 - f)^n of the groups of n elements have one. So it is
    /// enough to look at the best element of each group. Its elements are far from each other, because neighbours may be alike.
    TW_INLINE static u64 guess(auto& block, const Params& p, const ThisRow& row, int wanted, Memory& memory) {
      constexpr int groups = 512, at_a_time = 4, neighbours = 8;
      const auto columns = row.columns();
      const int members = max(min(columns.count() / (8 * groups), 16), columns.count() / (16 * groups)) / at_a_time * at_a_time;
      const int sample = members * groups;
      const int step = columns.count() / (sample / neighbours);
      const float sign = p.order.smallest ? -1.0f : 1.0f;
      Rows<Target, float, 1, groups, Warps, 1> best;
      block.fill(best, -kInfinity);
      TW_NO_UNROLL
      for (int first = 0; first < members; first += at_a_time) {
        TW_UNROLL
        for (int member = first; member < first + at_a_time; ++member) {
          block.for_each(best, [&](int, int group, float& b) {
            const int n = member * groups + group;
            b = max(b, sign * to<float>(row.at(columns.begin + n / neighbours * step + n % neighbours)));
          });
        }
      }
      // How many of the wanted ones are in the sample has about its square root as standard deviation.
      const float expected = static_cast<float>(wanted) * static_cast<float>(sample) / static_cast<float>(columns.count());
      const float fraction = (expected + 3.5f * sqrt(expected) + 4) / static_cast<float>(sample);
      const int rank = static_cast<int>(groups * (1 - exp2(static_cast<float>(members) * log2(1 - fraction))));
      Search<u32> search{0, Order<T>::value_bits, 0, groups};
      while (search.held > rank + rank / 16 && search.open > 0) {
        narrow(block, search, rank, memory,
               [&](auto count) { block.for_each(best, [&](int, int, float& b) { count(p.order.value(to<T>(sign * b))); }); });
      }
      return u64{search.low} << p.order.column_bits;
    }

    /// Finds a threshold: at least `wanted` and at most p.limit elements have keys at or above it.
    TW_INLINE static Search<u64> search_row(auto& block, const Params& p, const ThisRow& row, int wanted, Memory& memory) {
      const auto columns = row.columns();
      Search<u64> search{0, p.order.bits(), 0, min(columns.count(), row.own.count())};
      if (search.held > p.limit) {
        count_first_digits(block, row, memory);
        const Located digit = block.locate(memory.digits, wanted);
        search.open -= digit_bits;
        search = {static_cast<u64>(digit.counter) << search.open, search.open, digit.above, digit.above + digit.count};
      }
      while (search.held > p.limit) {
        narrow(block, search, wanted, memory, [&](auto count) {
          for_pieces<C>(block, row, [&](auto& x, int col, bool) {
            block.for_each(x, [&](int, int c, auto& value) {
              if (columns.have(col + c)) count(row.key(to<In>(value), col + c));
            });
          });
        });
      }
      return search;
    }

    /// Lists the elements from `low` on. Few threads have one at the same time, so keys are made afterwards.
    TW_INLINE static void take(auto& block, const Params& p, const ThisRow& row, u64 low, Memory& memory) {
      const auto columns = row.columns();
      low = max(low, u64{1});
      block.clear(memory.taken);
      const auto append = [&](auto& x, int col, auto chosen) {
        block.append_few(
            memory.taken, x, [&](int c, auto value) { return chosen(col + c, to<In>(value)); },
            [&](int c, auto value) { return row.parts_of(to<In>(value), col + c); });
      };
      bool by_number = false;
      if constexpr (stage != Stage::merge) {
        const float limit = p.order.limit(static_cast<u32>(low >> p.order.column_bits));
        by_number = p.order.column_part(low) == 0 && limit == limit;
        if (by_number) {
          // Only pieces at the row's ends have columns to leave out. What `smallest` decides is decided outside of the loop over elements.
          for_pieces<at_once>(block, row, [&](auto& x, int first, bool whole) {
            if (!whole)
              append(x, first, [&](int col, auto value) { return columns.have(col) && p.order.reaches(limit, value); });
            else if (p.order.smallest)
              append(x, first, [&](int, auto value) { return to<float>(value) < limit; });
            else
              append(x, first, [&](int, auto value) { return !(to<float>(value) < limit); });
          });
        }
      }
      if (!by_number) {
        for_pieces<C>(block, row, [&](auto& x, int first, bool) {
          append(x, first, [&](int col, auto value) { return columns.have(col) && row.key(value, col) >= low; });
        });
      }
    }

    /// Lists elements, the `wanted` best among them, and returns what is known of the last of these.
    TW_INLINE static Search<u64> select(auto& block, const Params& p, const ThisRow& row, int wanted, Memory& memory) {
      if constexpr (stage != Stage::merge && Capacity >= long_row / 4) {
        if (row.own.count() >= long_row) {
          take(block, p, row, guess(block, p, row, wanted, memory), memory);
          const int listed = block.size(memory.taken);
          if (listed >= wanted && listed < Capacity) return {0, p.order.bits(), 0, listed};
        }
      }
      const Search<u64> search = search_row(block, p, row, wanted, memory);
      take(block, p, row, search.low, memory);
      return search;
    }

    /// Leaves the `wanted` best in the list.
    TW_INLINE static void keep(auto& block, Search<u64> search, int wanted, Memory& memory) {
      const int n = block.size(memory.taken);
      while (search.held > wanted && search.open > 0) {
        narrow(block, search, wanted, memory, [&](auto count) { block.parallel(n, [&](int i) { count(memory.taken[i]); }); });
      }
      Rows<Target, u64, 1, C, Warps> keys;
      TW_NO_UNROLL
      for (int first = 0; first < n; first += C) {  // those kept take the places of keys that have been read
        block.for_each(keys, [&](int, int col, auto& key) { key = first + col < n ? memory.taken[first + col] : u64{0}; });
        if (first == 0) block.clear(memory.taken);
        block.append_in_order(memory.taken, keys, [&](int, u64 key) { return key > 0 && key >= search.low; });
      }
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      const ThisRow row(p, t);
      const int wanted = min(p.k, row.own.count());
      block.clear(memory.digits);
      const Search<u64> search = select(block, p, row, wanted, memory);
      block.parallel(block.size(memory.taken), [&](int i) { memory.taken[i] = row.key_from(memory.taken[i]); });
      block.sync();
      if (search.held > (stage == Stage::part ? p.limit : p.by_index ? wanted : few_keys)) keep(block, search, wanted, memory);
      if constexpr (stage == Stage::part) {
        const int listed = block.size(memory.taken);
        block.parallel(p.limit, [&](int n) { row.put_candidate(t.n, n, n < listed ? memory.taken[n] : 0); });
      } else {
        block.sync();
        if (!p.by_index) block.sort(memory.taken, wanted);
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
