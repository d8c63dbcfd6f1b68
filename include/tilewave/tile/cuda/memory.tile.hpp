#pragma once

#include "tilewave/tile/cuda/ptx.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

namespace tw::cuda {

inline constexpr int kWarpgroupThreads = 128;
/// Rows of accumulators that four warps hold; on Hopper the M of wgmma.
inline constexpr int kWarpgroupRows = 64;
/// The width of a panel: the widest swizzle of TMA and wgmma. A Shared tile is a sequence of panels with this many bytes in a row.
inline constexpr int kPanelBytes = 128;
/// The swizzle repeats every 8 rows of 128 bytes, so panels must start at multiples of this.
inline constexpr int kPanelAlignment = 1024;
/// Named barriers: 0 is __syncthreads; 1 is for targets whose blocks have a producer; 2 is for all threads that compute; 3 and up are for
/// one warpgroup each.
inline constexpr int kComputeBarrier = 2;
inline constexpr int kWarpgroupBarrier = 3;

/// The position of a thread among those that compute. `row` and `col` are those of its first element in a Fragment.
struct Position {
  int warpgroup;
  int warp;  ///< within the warpgroup
  int lane;
  int row;
  int col;
  TW_INLINE constexpr int block_warp() const { return warpgroup * 4 + warp; }
  /// The thread index is unsigned, so that divisions become shifts.
  TW_INLINE static Position of(u32 thread) {
    const int warp = static_cast<int>(thread / 32 % 4);
    const u32 lane = thread % 32;
    const int warpgroup = static_cast<int>(thread / kWarpgroupThreads);
    return {warpgroup, warp, static_cast<int>(lane), warpgroup * kWarpgroupRows + warp * 16 + static_cast<int>(lane / 4),
            static_cast<int>(lane % 4 * 2)};
  }
};

/// A tensor in global memory, [j, i, row, col]. The host fills it in (tilewave/launch.hpp).
struct GlobalView : BoundView {
  template <class T>
  TW_INLINE T* at(int row, int col, int i, int j) const {
    return static_cast<T*>(data) + (j * stride_j + i * stride_i + row * stride_row + col * stride_col);
  }
  /// The same for contiguous columns.
  template <class T>
  TW_INLINE T* piece_at(int row, int col, int i, int j) const {
    return static_cast<T*>(data) + (j * stride_j + i * stride_i + row * stride_row) + col;
  }
  TW_INLINE bool inside(int row, int col) const {
    return static_cast<u32>(row) < static_cast<u32>(rows) && static_cast<u32>(col) < static_cast<u32>(cols);
  }
  TW_INLINE bool inside_outer(int i, int j) const {
    return static_cast<u32>(i) < static_cast<u32>(size_i) && static_cast<u32>(j) < static_cast<u32>(size_j);
  }
  /// Whether `width` neighbours in a row can be accessed in words of up to 16 bytes. The answer is the same in every thread, so a branch on
  /// it costs nothing.
  template <class T, int width>
  TW_INLINE bool vectors() const {
    constexpr i64 bytes = width * sizeof(T) < 16 ? width * sizeof(T) : 16;
    constexpr i64 mask = bytes / static_cast<i64>(sizeof(T)) - 1;
    return stride_col == 1 && ((stride_row | stride_i | stride_j) & mask) == 0 &&
           (reinterpret_cast<u64>(data) & static_cast<u64>(bytes - 1)) == 0;
  }
  /// The same, and the number of columns is a multiple of `width`, so no piece crosses the tensor's edge.
  template <class T, int width>
  TW_INLINE bool whole_pieces() const {
    return vectors<T, width>() && cols % width == 0;
  }
};

/// The location of a tile's row in a tensor.
struct Place {
  int row, i, j;
  bool inside;  ///< whether the outer indices are inside the tensor
};

/// A tensor that TMA copies.
struct MappedView : GlobalView {
  alignas(64) u64 tensor_map[16] = {};
};
template <class Tile>
inline constexpr bool copied_by_tma = requires {
  Tile::box_rows;
};
/// Whether the tile is Rows, which are copied in pieces.
template <class Tile>
inline constexpr bool moves_in_pieces = requires {
  Tile::row_lanes;
};

/// The swizzle with which TMA writes the tile to shared memory: a panel's width, unless the tile specifies another.
template <class Tile>
constexpr int swizzle_of() {
  if constexpr (requires { Tile::swizzle_bytes; }) return Tile::swizzle_bytes;
  return kPanelBytes;
}

/// `Tile` is the Shared, Staging or Rows type copied to or from the tensor. The kernel variant without TMA for loads or stores is also the
/// one for Rows that are not copied in whole pieces. With void, only Fragments and Rows are copied, and each copy checks alignment itself.
/// Split > 1: each block of a cluster loads one part and multicasts it.
template <class T, class Tile = void, int Split = 1>
struct Global : conditional<copied_by_tma<Tile>, MappedView, GlobalView> {
  using Element = remove_const<T>;
  using TileType = Tile;
  static constexpr int split = Split;
  static constexpr bool readable = !is_same<T, Element>;

  constexpr Global() {
    if constexpr (copied_by_tma<Tile>)
      this->set_map_tile({tw::detail::map_element<Element>, Tile::box_rows / Split, Tile::box_cols, swizzle_of<Tile>()});
  }
  TW_INLINE Global part(int first, int count, int i = 0, int j = 0) const {
    static_assert(!copied_by_tma<Tile>, "part() is for tensors that compute loads and stores");
    return tw::detail::part(*this, this->template at<Element>(first, 0, i, j), count);
  }
};

/// All columns of a tile in shared memory, or some, as a different operand.
template <class T, int R, int C, Contract kContract>
struct View {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int panel_cols = kPanelBytes / static_cast<int>(sizeof(T));
  static constexpr int panel_bytes = R * kPanelBytes;
  using Element = T;
  static_assert(C % (32 / static_cast<int>(sizeof(T))) == 0, "a view's columns are whole steps of a product: 16 of 16-bit elements");
  static_assert(kContract == Contract::columns || sizeof(T) == 2,
                "wgmma transposes only 16-bit operands: contract the columns of this tile");

  const u8* bytes;

  template <class U, Contract k, int kColumn, int Count>
  TW_INLINE View<U, R, Count, k> view() const {
    return {bytes + kColumn / panel_cols * panel_bytes};
  }
};

/// R x C elements as panels of R rows of 128 bytes, with 16-byte pieces swizzled within 8 rows: the layout that TMA writes and that wgmma
/// reads without bank conflicts.
template <class T, int R, int C, Contract kContract>
struct Shared {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int panel_cols = kPanelBytes / static_cast<int>(sizeof(T));
  static constexpr int panels = (C + panel_cols - 1) / panel_cols;  ///< the last one may be partial: copies fill it with zeros
  static constexpr int panel_bytes = R * kPanelBytes;
  static constexpr int box_rows = R;
  static constexpr int box_cols = panel_cols;
  using Element = T;
  static_assert(C % (32 / static_cast<int>(sizeof(T))) == 0, "a Shared tile's columns are whole steps of a product: 16 of 16-bit elements");
  static_assert(R % 8 == 0 && R <= 256, "a Shared tile has 8 to 256 rows, a multiple of 8");
  static_assert(kContract == Contract::columns || sizeof(T) == 2,
                "wgmma transposes only 16-bit operands: contract the columns of this tile");

  alignas(kPanelAlignment) u8 bytes[panels * panel_bytes];

  /// Byte offset of element (row, col). Each element of the tile has a different one.
  TW_INLINE static constexpr int offset(int row, int col) {
    const int in_row = col % panel_cols * static_cast<int>(sizeof(T));
    return col / panel_cols * panel_bytes + row * kPanelBytes + (in_row ^ ((row & 7) << 4));
  }
  TW_INLINE T& at(int row, int col) { return *reinterpret_cast<T*>(bytes + offset(row, col)); }
  TW_INLINE T get(int row, int col) const { return *reinterpret_cast<const T*>(bytes + offset(row, col)); }
  template <class U, Contract k, int kColumn, int Count>
  TW_INLINE View<U, R, Count, k> view() const {
    return {bytes + kColumn / panel_cols * panel_bytes};
  }
};

/// R rows of 16 bytes, one after the other: a few numbers for each row of another tile.
template <class T, int R>
struct Strip {
  static constexpr int rows = R;
  static constexpr int cols = 16 / static_cast<int>(sizeof(T));
  static constexpr int panels = 1;
  static constexpr int panel_bytes = R * 16;
  static constexpr int panel_cols = cols;
  static constexpr int box_rows = R;
  static constexpr int box_cols = cols;
  static constexpr int swizzle_bytes = 0;
  using Element = T;
  u8 bytes[R * 16];

  TW_INLINE static constexpr int offset(int row, int col) { return row * 16 + col * static_cast<int>(sizeof(T)); }
  TW_INLINE T get(int row, int col) const { return *reinterpret_cast<const T*>(bytes + offset(row, col)); }
};
/// The same in memory of its own.
template <class T, int R>
struct alignas(kPanelAlignment) SharedStrip : Strip<T, R> {};
template <class S>
inline constexpr bool is_shared_strip = false;
template <class T, int R>
inline constexpr bool is_shared_strip<SharedStrip<T, R>> = true;
template <class S>
inline constexpr bool is_strip = is_shared_strip<S>;
template <class T, int R>
inline constexpr bool is_strip<Strip<T, R>> = true;
/// The codes arrive in the second half of the tile's memory, their rows' scales in the first. Where a row's codes are, the same row's f16
/// will be: so threads that share a row may widen it when all of them have read its codes.
template <class CodesType, int R, int C>
struct Widened : Shared<f16, R, C, Contract::columns> {
  using Codes = Shared<CodesType, R, C, Contract::columns>;
  static_assert(is_fp8<CodesType> && C % 128 == 0 && R % 8 == 0, TW_WIDENED);
  static constexpr u32 arriving_bytes = sizeof(Codes);  ///< without scales

  using Scales = Strip<float, R>;
  TW_INLINE Codes& codes() { return *reinterpret_cast<Codes*>(this->bytes + sizeof(Codes)); }
  TW_INLINE Scales& scales() { return *reinterpret_cast<Scales*>(this->bytes); }
};
/// The bytes that copies bring to a whole slot.
template <class Slot>
constexpr u32 arriving_bytes() {
  if constexpr (requires { Slot::arriving_bytes; }) return Slot::arriving_bytes;
  return sizeof(Slot);
}

/// A lane's word of a row of metadata: see sparse.tile.hpp.
template <class S>
TW_INLINE u32 metadata_word(const S& metadata, int row, int lane) {
  return *reinterpret_cast<const u32*>(metadata.bytes + S::offset(row, lane * 4));
}

/// Holds one row of C partial results for each warp.
template <class T, int R, int C>
struct Scratch {
  static constexpr int warps = R / 16;
  int offset;
  constexpr explicit Scratch(auto& allocator) : offset(allocator.tiles(warps * C * static_cast<int>(sizeof(T)))) {}
};

/// The alignment of vectors, which may lie closer together than tiles.
inline constexpr int kVectorAlignment = 16;
/// Reserves `bytes` of shared memory behind the first `used` bytes, and counts them as used, too. Returns where they begin.
constexpr int place(int& used, int bytes, int alignment) {
  const int at = (used + alignment - 1) / alignment * alignment;
  used = at + bytes;
  return at;
}

/// The start of the block's dynamic shared memory.
TW_INLINE u8* shared_memory() {
#if TW_ON_GPU
  extern __shared__ __align__(1024) u8 tw_shared_memory[];
  return tw_shared_memory;
#else
  return nullptr;
#endif
}

/// N counters, followed by what locate() needs: a sum for each warp, and its result.
template <int N>
struct Histogram {
  static constexpr int size = N;
  static constexpr int most_warps = 32;
  int offset;
  constexpr explicit Histogram(auto& allocator)
      : offset(allocator.tiles((N + most_warps) * static_cast<int>(sizeof(u32)) + static_cast<int>(sizeof(Located)))) {}
  TW_INLINE u32* counts() const { return reinterpret_cast<u32*>(shared_memory() + offset); }
  TW_INLINE int* warp_sums() const { return reinterpret_cast<int*>(counts() + N); }
  TW_INLINE Located* located() const { return reinterpret_cast<Located*>(warp_sums() + most_warps); }
};

/// Space for N values, followed by their number and by what append_in_order() needs: sums for each warp.
template <class T, int N>
struct List {
  static constexpr int capacity = N, most_sums = 32;
  int offset;
  constexpr explicit List(auto& allocator)
      : offset(allocator.tiles(N * static_cast<int>(sizeof(T)) + (1 + most_sums) * static_cast<int>(sizeof(u32)))) {}
  TW_INLINE T& operator[](int i) const { return reinterpret_cast<T*>(shared_memory() + offset)[i]; }
  TW_INLINE u32* size() const { return reinterpret_cast<u32*>(shared_memory() + offset + N * sizeof(T)); }
  TW_INLINE int* warp_sums() const { return reinterpret_cast<int*>(size() + 1); }
};

/// `width` neighbours in a row, moved as one word of up to 16 bytes (as two for 8 f32).
template <class T, int width>
struct alignas(width * sizeof(T) < 16 ? width * sizeof(T) : 16) Piece {
  T x[width];
};

/// A word of elements of T, in which the highest bit of each that is absent, all ones, is set; other bits may be, too.
template <class T>
TW_INLINE u32 absent_elements(u32 word) {
  if constexpr (sizeof(T) == 4) return (word & 0x7fffffffu) + 1u & word;
  return (word & 0x7fff7fffu) + 0x00010001u & word;
}
template <class T>
inline constexpr u32 absent_bits = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
/// The same word, in which NaN whose bits are all ones have become others.
template <class T>
TW_INLINE u32 present_elements(u32 word) {
  return word & ~(absent_elements<T>(word) & absent_bits<T>);
}

/// An Awaited tensor while block.await() loads from it, which learns whether elements were absent.
template <class G>
struct Polled : G {
  using Element = typename G::Element;
  static constexpr bool polled = true;
  u32* absent;  ///< its highest bit becomes 1

  TW_INLINE Polled(const G& tensor, u32& to) : G(tensor), absent(&to) {}
  template <int N>
  TW_INLINE void see(const u32 (&words)[N]) const {
    u32 any = 0;
    TW_UNROLL
    for (const u32 word : words) any |= absent_elements<Element>(word);
    *absent |= any & absent_bits<Element>;
  }
};
template <class G>
inline constexpr bool is_polled = requires {
  G::polled;
};

/// `width` neighbours with the same layout as in memory, in whole registers however narrow they are.
template <class T, int width>
struct Words {
  static constexpr int bytes = width * static_cast<int>(sizeof(T));
  static constexpr int count = (bytes + 3) / 4;
  static_assert(bytes <= 4 || bytes == 8 || bytes % 16 == 0, "words of 1, 2, 4, 8 or a multiple of 16 bytes");
  u32 w[count];

  TW_INLINE T get(int k) const {
    if constexpr (sizeof(T) == 8)
      return bit_cast<T>(static_cast<u64>(w[2 * k + 1]) << 32 | w[2 * k]);
    else if constexpr (sizeof(T) == 4)
      return bit_cast<T>(w[k]);
    else if constexpr (sizeof(T) == 2)
      return bit_cast<T>(static_cast<u16>(w[k / 2] >> k % 2 * 16));
    else
      return bit_cast<T>(static_cast<u8>(w[k / 4] >> k % 4 * 8));
  }
  /// Must be called in ascending order of k: the first element of a word overwrites the whole word.
  TW_INLINE void set(int k, T x) {
    if constexpr (sizeof(T) == 8) {
      w[2 * k] = static_cast<u32>(bit_cast<u64>(x));
      w[2 * k + 1] = static_cast<u32>(bit_cast<u64>(x) >> 32);
    } else if constexpr (sizeof(T) == 4) {
      w[k] = bit_cast<u32>(x);
    } else {
      constexpr int in_word = 4 / static_cast<int>(sizeof(T));
      const u32 bits = bit_cast<conditional<sizeof(T) == 2, u16, u8>>(x);
      w[k / in_word] = k % in_word == 0 ? bits : w[k / in_word] | bits << k % in_word * 8 * static_cast<int>(sizeof(T));
    }
  }
  /// Converts all elements. Converting two 8-bit floats costs as much as converting one.
  template <class To>
  TW_INLINE void unpack(To* x) const {
    if constexpr (is_fp8<T> && !is_same<To, T> && width % 2 == 0) {
      TW_UNROLL
      for (int k = 0; k < width; k += 2) {
        const u32 pair = ptx::widen_pair<T>(static_cast<u16>(w[k / 4] >> k % 4 * 8));
        x[k] = tw::to<To>(bit_cast<f16>(static_cast<u16>(pair)));
        x[k + 1] = tw::to<To>(bit_cast<f16>(static_cast<u16>(pair >> 16)));
      }
    } else {
      TW_UNROLL
      for (int k = 0; k < width; ++k) x[k] = tw::to<To>(get(k));
    }
  }
  /// Sets all elements, two at a time where the GPU can round two at once.
  template <class From>
  TW_INLINE void pack(const From* x) {
    if constexpr ((is_same<T, bf16> || is_same<T, f16>)&&!is_same<From, T> && width % 2 == 0) {
      TW_UNROLL
      for (int k = 0; k < width; k += 2) w[k / 2] = ptx::pack<T>(static_cast<float>(x[k]), static_cast<float>(x[k + 1]));
    } else if constexpr (is_fp8<T> && !is_same<From, T> && width % 4 == 0) {
      TW_UNROLL
      for (int k = 0; k < width; k += 4) {
        w[k / 4] = ptx::narrow_pair<T>(static_cast<float>(x[k]), static_cast<float>(x[k + 1])) |
                   ptx::narrow_pair<T>(static_cast<float>(x[k + 2]), static_cast<float>(x[k + 3])) << 16;
      }
    } else {
      TW_UNROLL
      for (int k = 0; k < width; ++k) set(k, tw::to<T>(x[k]));
    }
  }
  /// Loads a word of `S` neighbours (4, 8 or 16 bytes) from element `k` on.
  template <int S>
  TW_INLINE void load_word_if(bool inside, const T* from, int k) {
    constexpr int word_bytes = S * static_cast<int>(sizeof(T));
    u32* const to = w + k * static_cast<int>(sizeof(T)) / 4;
    if constexpr (word_bytes == 16)
      ptx::load_16_if(inside, from, to);
    else if constexpr (word_bytes == 8)
      ptx::load_8_if(inside, from, to);
    else
      ptx::load_4_if(inside, from, *to);
  }
  template <int S>
  TW_INLINE void store_word(T* to, int k) const {
    constexpr int word_bytes = S * static_cast<int>(sizeof(T));
    const u32* const from = w + k * static_cast<int>(sizeof(T)) / 4;
    if constexpr (word_bytes == 16)
      ptx::store_16(to, from);
    else if constexpr (word_bytes == 8)
      ptx::store_8(to, from);
    else
      ptx::store_4(to, from);
  }
  TW_INLINE void fill(T x) {
    TW_UNROLL
    for (int k = 0; k < width; ++k) set(k, x);
  }
  TW_INLINE void store(T* to) const {
    if constexpr (bytes < 4) {
      struct alignas(bytes) Aligned {
        T x[width];
      } piece;
      TW_UNROLL
      for (int k = 0; k < width; ++k) piece.x[k] = get(k);
      *reinterpret_cast<Aligned*>(to) = piece;
    } else {
      constexpr int at_once = count < 4 ? count : 4;
      struct alignas(at_once * 4) Raw {
        u32 w[at_once];
      };
      TW_UNROLL
      for (int n = 0; n < count; n += at_once) {
        Raw raw;
        TW_UNROLL
        for (int k = 0; k < at_once; ++k) raw.w[k] = w[n + k];
        reinterpret_cast<Raw*>(to)[n / at_once] = raw;
      }
    }
  }
  TW_INLINE void store_if(bool inside, T* to) const {
    if constexpr (bytes % 16 == 0) {
      TW_UNROLL
      for (int n = 0; n < count; n += 4) ptx::store_16_if(inside, reinterpret_cast<u32*>(to) + n, w + n);
    } else if constexpr (bytes == 8) {
      ptx::store_8_if(inside, to, w);
    } else if (inside) {
      store(to);
    }
  }
  /// To an Awaited tensor.
  TW_INLINE void store_awaited_if(bool inside, T* to) const {
    u32 present[count];
    TW_UNROLL
    for (int n = 0; n < count; ++n) present[n] = present_elements<T>(w[n]);
    if constexpr (bytes % 16 == 0) {
      TW_UNROLL
      for (int n = 0; n < count; n += 4) ptx::store_relaxed_16_if(inside, reinterpret_cast<u32*>(to) + n, present + n);
    } else if constexpr (bytes == 8) {
      ptx::store_relaxed_8_if(inside, to, present);
    } else if constexpr (bytes == 4) {
      ptx::store_relaxed_4_if(inside, to, present);
    } else {
      static_assert(bytes == 2, TW_AWAITED);
      ptx::store_relaxed_2_if(inside, to, present);
    }
  }
  /// From an Awaited tensor: elements that are absent have all ones. Zeros outside.
  TW_INLINE void load_awaited_if(bool inside, const T* from) {
    TW_UNROLL
    for (u32& word : w) word = 0;
    if constexpr (bytes % 16 == 0) {
      TW_UNROLL
      for (int n = 0; n < count; n += 4) ptx::load_relaxed_16_if(inside, reinterpret_cast<const u32*>(from) + n, w + n);
    } else if constexpr (bytes == 8) {
      ptx::load_relaxed_8_if(inside, from, w);
    } else if constexpr (bytes == 4) {
      ptx::load_relaxed_4_if(inside, from, w[0]);
    } else {
      static_assert(bytes == 2, TW_AWAITED);
      ptx::load_relaxed_2_if(inside, from, w[0]);
    }
  }
  TW_INLINE void load_if(bool inside, const T* from, T otherwise) {
    fill(otherwise);
    if constexpr (bytes % 16 == 0) {
      TW_UNROLL
      for (int n = 0; n < count; n += 4) ptx::load_16_if(inside, reinterpret_cast<const u32*>(from) + n, w + n);
    } else if constexpr (bytes == 8) {
      ptx::load_8_if(inside, from, w);
    } else if constexpr (bytes == 4) {
      ptx::load_4_if(inside, from, w[0]);
    } else if constexpr (bytes == 2) {
      ptx::load_2_if(inside, from, w[0]);
    } else {
      ptx::load_1_if(inside, from, w[0]);
    }
  }
};

}  // namespace tw::cuda
