#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw {

/// Members of a block that only combine its other members, written once for all targets. `Block` is the derived class (CRTP). It provides
/// map_with(), rows(), load(), store(), scatter_add(), column_reduce() and combine_rows().
template <class Block>
struct BlockOperations {
  /// x = f(x, y...) for every element. A y is a RowVector (the value of the element's row), a ColumnVector (of its column), another tile
  /// with the same layout, or a number.
  template <class F, class Fn>
  TW_INLINE void map(F& tile, Fn f) const {
    self().map_with(tile, f);
  }
  template <class F, class A, class Fn>
  TW_INLINE void map(F& tile, const A& a, Fn f) const {
    self().map_with(tile, f, a);
  }
  template <class F, class A, class B, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, Fn f) const {
    self().map_with(tile, f, a, b);
  }
  template <class F, class A, class B, class C, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, const C& c, Fn f) const {
    self().map_with(tile, f, a, b, c);
  }
  template <class F, class A, class B, class C, class D, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, const C& c, const D& d, Fn f) const {
    self().map_with(tile, f, a, b, c, d);
  }
  /// map(tile, operands..., f), then store(tile, to, row, col, i, j). The CPU does both in one pass.
  template <class F, class G, class Fn, class... Operands>
  TW_INLINE void map_store(F& tile, const G& to, int row, int col, int i, int j, Fn f, const Operands&... operands) const {
    self().map_with(tile, f, operands...);
    self().store(tile, to, row, col, i, j);
  }

  /// vector[col] = the sum, or the largest element, of the column over all of the block's rows.
  template <class F, class V, class S>
  TW_INLINE void column_sum(const F& fragment, V& vector, const S& scratch) const {
    self().column_reduce(fragment, vector, scratch, [](auto a, auto b) { return a + b; });
  }
  template <class F, class V, class S>
  TW_INLINE void column_max(const F& fragment, V& vector, const S& scratch) const {
    self().column_reduce(fragment, vector, scratch, [](auto a, auto b) { return max(a, b); });
  }
  /// vector[i] = the largest element of row i, or the sum of its elements, where several warpgroups share the row.
  template <class F, class V, class Exchange>
  TW_INLINE void row_max(F& fragment, V& vector, const Exchange& exchange) const {
    self().rows(fragment, [&](int i, auto row) { vector[i] = row.partial_max(); });
    self().combine_rows(vector, exchange, [](auto a, auto b) { return max(a, b); });
  }
  template <class F, class V, class Exchange>
  TW_INLINE void row_sum(F& fragment, V& vector, const Exchange& exchange) const {
    self().rows(fragment, [&](int i, auto row) { vector[i] = row.map_partial_sum([](auto x) { return x; }); });
    complete(vector, exchange);
  }
  /// Adds up the partial sums of map_partial_sum() where several warpgroups share a row.
  template <class V, class Exchange>
  TW_INLINE void complete(V& sums, const Exchange& exchange) const {
    self().combine_rows(sums, exchange, [](auto a, auto b) { return a + b; });
  }
  /// Loads a tile or a vector, with `fill` outside the tensor.
  template <class F, class G>
  TW_INLINE void load(F& to, const G& from, int row, int col, Fill fill) const {
    self().load(to, from, row, col, 0, 0, fill);
  }
  /// Adds each element to the tensor's, atomically. Elements outside the tensor are dropped.
  template <class F, class G>
  TW_INLINE void atomic_add(const F& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    self().scatter_add(
        from, to, [row0](int row) { return row0 + row; }, col0, i, j);
  }

 private:
  TW_INLINE const Block& self() const { return static_cast<const Block&>(*this); }
};

}  // namespace tw
