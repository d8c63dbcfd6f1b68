#pragma once

#include "tilewave/tile/language.tile.hpp"

// Shared by argmax and topk: the order of elements, and the row that a block processes.

namespace tw::kernels::topk {

template <class T>
using Bits = conditional<sizeof(T) == 4, u32, u16>;

/// Maps x to an unsigned integer of T's size with the same order: NaN is the largest, -0 equals +0.
template <class T>
TW_INLINE u32 sortable(T x) {
  constexpr u32 sign = 1u << (8 * sizeof(T) - 1);
  constexpr u32 infinity = is_same<T, f16> ? 0x7c00 : is_same<T, bf16> ? 0x7f80 : 0x7f800000;
  const u32 bits = bit_cast<Bits<T>>(x);
  const u32 magnitude = bits & (sign - 1);
  const u32 negative = 0 - bits / sign;  // all bits set, or none: without a branch, because signs are hard to predict
  const u32 ordered = sign + ((magnitude ^ negative) - negative);
  return magnitude > infinity ? sign | (sign - 1) : ordered;
}

/// The number that sortable() maps to `ordered`, or NaN if it maps none. 0 < ordered.
template <class T>
TW_INLINE T number_of(u32 ordered) {
  constexpr u32 sign = 1u << (8 * sizeof(T) - 1);
  const u32 bits = ordered >= sign ? ordered - sign : sign | (sign - ordered);
  return bit_cast<T>(static_cast<Bits<T>>(bits));
}

/// Keys: an element's value and column in one number. The larger key comes first in the result. Keys of a row are unique and larger than 0.
template <class T>
struct Order {
  int cols;         ///< of a row
  int column_bits;  ///< number of bits for 1 to `cols`
  bool smallest;    ///< the smallest comes first, NaN last
  static constexpr int value_bits = 8 * sizeof(T);
  static constexpr u32 all = 0xffffffffu >> (32 - value_bits);  ///< all bits of a value

  /// The key without the column.
  TW_INLINE u32 value(T x) const { return sortable(x) ^ (smallest ? all : 0); }
  /// reaches(limit(low), x) is value(x) >= low in one instruction instead of ten. Not if limit(low) is NaN. 0 < low.
  TW_INLINE float limit(u32 low) const { return to<float>(number_of<T>(smallest ? (all ^ low) + 1 : low)); }
  TW_INLINE bool reaches(float limit, T x) const { return (to<float>(x) < limit) == smallest; }  // NaN is not less
  TW_INLINE u64 key(T x, int col) const {
    return u64{value(x)} << column_bits | static_cast<u32>(cols - col);  // the lower column of equal values comes first
  }
  /// The value that a key was made from, but for the sign of 0 and what kind of NaN it is.
  TW_INLINE T number(u64 key) const { return number_of<T>(static_cast<u32>(key >> column_bits) ^ (smallest ? all : 0)); }
  TW_INLINE u64 column_part(u64 key) const { return key & ((u64{1} << column_bits) - 1); }
  TW_INLINE int column(u64 key) const { return cols - static_cast<int>(column_part(key)); }
  TW_INLINE int bits() const { return value_bits + column_bits; }
};

/// Either one block processes a whole row, or there are two launches: first several blocks each select the best elements of a part of the
/// row, then one block selects the best of these.
enum class Stage { whole, part, merge };

/// The row of tile t: t.m is the index of the row, t.n that of the part.
template <class Target, class T, class Index, Stage stage>
struct Row {
  using In = conditional<stage == Stage::merge, i64, T>;
  struct Params {
    Global<Target, const T> x;         ///< [.., N]
    Global<Target, const i32> starts;  ///< [.., 1], or null: rows begin at column 0
    Global<Target, const i32> ends;    ///< [.., 1], or null: at column N
    Global<Target, i64> candidates;    ///< [rows, parts * limit]: keys that the first stage passes to the second, padded with zeros
    Global<Target, T> values;          ///< [.., k]
    Global<Target, Index> indices;     ///< [.., k]
    Order<T> order;
    int k;
    int limit;      ///< maximum number of elements to sort; at least k
    int part;       ///< columns per part
    bool by_index;  ///< return the k best in the order of their columns
  };
  struct Columns {
    int begin, end;
    TW_INLINE int count() const { return end - begin; }
    TW_INLINE bool have(int col) const { return static_cast<u32>(col - begin) < static_cast<u32>(end - begin); }
  };

  const Params& p;
  int number;
  int row, i, j;  ///< the same row in a tensor with outer dimensions
  Columns own;    ///< columns of x, in the whole row or this part of it

  TW_INLINE Row(const Params& params, Tile t) : p(params), number(t.m), own{0, p.x.cols} {
    const auto n = static_cast<u32>(number), rows = static_cast<u32>(p.x.rows), size = static_cast<u32>(p.x.size_i);
    row = static_cast<int>(n % rows);
    i = static_cast<int>(n / rows % size);
    j = static_cast<int>(n / rows / size);
    if (p.starts.data) own.begin = max(own.begin, *p.starts.template at<const i32>(row, 0, i, j));
    if (p.ends.data) own.end = min(own.end, *p.ends.template at<const i32>(row, 0, i, j));
    if (stage == Stage::part) {
      own.begin = max(own.begin, t.n * p.part);
      own.end = min(own.end, (t.n + 1) * p.part);
    }
    own.end = max(own.end, own.begin);
  }

  /// Columns of the tensor that is read: x or candidates.
  TW_INLINE Columns columns() const { return stage == Stage::merge ? Columns{0, p.candidates.cols} : own; }
  template <class Tile>
  TW_INLINE void load(auto& block, Tile& x, int col) const {
    if constexpr (stage == Stage::merge)
      block.load(x, p.candidates, number, col);
    else
      block.load(x, p.x, row, col, i, j);
  }
  /// The part of key() that says most, in fewer instructions.
  TW_INLINE u32 value(In x) const {
    if constexpr (stage == Stage::merge)
      return static_cast<u32>(static_cast<u64>(x) >> p.order.column_bits);
    else
      return p.order.value(x);
  }
  /// The element in that column.
  TW_INLINE T at(int col) const { return to<T>(*p.x.template at<const T>(row, col, i, j)); }
  TW_INLINE u64 key(In x, int col) const {
    if constexpr (stage == Stage::merge)
      return static_cast<u64>(x);
    else
      return p.order.key(x, col);
  }
  /// What key() is made from, in one number.
  TW_INLINE u64 parts_of(In x, int col) const {
    if constexpr (stage == Stage::merge)
      return static_cast<u64>(x);
    else
      return u64{bit_cast<Bits<T>>(x)} << 32 | static_cast<u32>(col);
  }
  TW_INLINE u64 key_from(u64 parts) const {
    if constexpr (stage == Stage::merge)
      return parts;
    else
      return key(bit_cast<T>(static_cast<Bits<T>>(parts >> 32)), static_cast<int>(static_cast<u32>(parts)));
  }
  /// Candidate n of part `part`.
  TW_INLINE void put_candidate(int part, int n, u64 key) const {
    *p.candidates.template at<i64>(number, part * p.limit + n, 0, 0) = static_cast<i64>(key);
  }
  /// Result n: the key's element.
  TW_INLINE void put(int n, u64 key) const {
    const int col = p.order.column(key);
    *p.indices.template at<Index>(row, n, i, j) = col;
    if (!p.values.data) return;
    T value = p.order.number(key);
    if (!(to<float>(value) < 0) && !(to<float>(value) > 0)) value = at(col);  // its sign, or the NaN that it is
    *p.values.template at<T>(row, n, i, j) = value;
  }
  /// Result n if the row has no more elements.
  TW_INLINE void put_none(int n) const {
    *p.indices.template at<Index>(row, n, i, j) = -1;
    *p.values.template at<T>(row, n, i, j) = to<T>(p.order.smallest ? kInfinity : -kInfinity);
  }
};

}  // namespace tw::kernels::topk
