#pragma once

#include "tilewave/tile/analysis/counted.tile.hpp"
#include "tilewave/tile/buffers.tile.hpp"
#include "tilewave/tile/concepts.tile.hpp"
#include "tilewave/tile/grid.tile.hpp"
#include "tilewave/tile/math.tile.hpp"
#include "tilewave/tile/packed.tile.hpp"
#include "tilewave/tile/segments.tile.hpp"
#include "tilewave/tile/sparse.tile.hpp"
#include "tilewave/tile/staging.tile.hpp"
#include "tilewave/tile/types.tile.hpp"
#include "tilewave/tile/views.tile.hpp"

// The tile language. A kernel is a struct with a member template On<Target>. It uses these types for memory, and each target defines them;
// a kernel does not know which target it is compiled for. docs/language.md is the guide, tilewave/tile/gemm.tile.hpp the first example.
//
//   Global     a tensor in device memory: up to two outer dimensions, rows, columns; any strides
//   Pointer    an array in device memory that element functions index: a bias, a table
//   Shared     a tile in shared memory, in the layout that the target's matrix unit wants
//   SparseShared a 2:4 sparse tile in shared memory, the left operand of a product
//   Widened    a tile of f16 in shared memory that arrives as 8-bit floats
//   Ring       `Stages` slots of Shared tiles between the role that loads and the role that computes
//   GatherRing a Ring whose tiles may be gathered row by row
//   Fragment   a tile of accumulators, spread over the block's threads in the matrix unit's layout
//   SoloFragment accumulators of one of two warpgroups that take turns
//   Operand    the left operand of a product, in registers
//   DividedSums, DividedOperand  accumulators of a product whose columns the warps divide among them, and its right operand
//   DividedSquares           sums of the squares of that operand's rows
//   DividedScales            the scales of its left operand's codes of 4 or 2 bits
//   Rows       a tile for work without products: a row is in one warp if possible, its columns in 16-byte pieces
//   RowVector  one number for each row of a Fragment or Rows;  ColumnVector: one for each column
//   Buffer     a tile in shared memory that the computing role writes, reads and multiplies, in memory of its own or in that of a ring's
//              only slot;  VectorBuffer: a vector in memory of its own
//   SharedVector, SharedStrip  a vector, and a few numbers for each row of a tile, in a ring's slot
//   RowExchange   shared memory through which warpgroups that share rows of a Fragment combine their parts of a row
//   Staging    shared memory through which a Fragment is stored to global memory
//   Outbox     shared memory through which a Fragment is added to global memory; on a Hopper GPU a warp of its own does it
//   Windowed   a Global whose tiles have a window of pixels as rows: convolutions
//   Awaited    a Global whose elements other tiles of the launch store, and which is loaded when they are there
//   Histogram  counters that threads share;  List: values that threads append and sort
//
// A kernel on a target:
//
//   struct Params             what the host fills in: Globals and numbers
//   static constexpr int rows the block's rows of accumulators, a multiple of 64 (kernels with products)
//   struct Memory             rings and staging, constructed from the block: Memory(auto& block) : a(block), b(block) {}
//   steps(params, tile)       how many steps the tile takes
//   load(producer, params, tile, step, memory)    puts one step's tiles into rings: a pure function of tile and step
//   struct State              what compute leaves for finish
//   compute(block, params, tile, memory, state)   contains the main loop; takes slots from the rings
//   finish(block, params, tile, memory, state)    stores the result
//
// A kernel that reads the position of its tile from memory, such as from sequence lengths, also defines
//
//   struct Work               what its roles need to know about a tile
//   work(params, tile)        returns a Work, which steps, load, compute and finish take instead of the tile. It runs once per tile, in the
//                             role that loads. All blocks of a cluster must take the same number of steps
//
// Kernels that only use global memory need only Params and compute(block, params, tile). Optional members:
//   static constexpr int warps         the block's warps, a multiple of 4 up to 32 (default 4)
//   loads_early(params)                whether load() only reads what was complete when the previous launch began; it then need not wait
//                                      for that launch's end
//   static constexpr int min_blocks    blocks that an SM must hold at once, which limits the registers (default 1).
//                                      A kernel's variants for tensors that cannot be copied in whole pieces of 16 bytes need more
//                                      registers: `Target::whole_pieces` is false for them
//   static constexpr int teams         how many teams the warpgroups of a Hopper GPU form (default 1). A team computes whole tiles, in turn
//                                      with the others: it stores its tile while they multiply. Accumulators are then TeamFragments, and
//                                      ring(memory) returns the kernel's only ring; every step fills one of its slots
//   outbox(memory)                     returns the kernel's Outbox, if it has one
//   static constexpr bool waits        whether tiles wait for what other tiles announce: all blocks of the launch then run at once
//   static constexpr bool moves_registers  with one warpgroup that computes: the role that loads gives registers to it, as always with
//                                      more. For kernels with min_blocks whose accumulators exceed an even share
//   static constexpr int vector_bytes  the widest CPU vector (default 32). With 64 the kernel is compiled once more, which pays off where a
//                                      tile takes much arithmetic

namespace tw {

/// The kind of a tile in registers: a Fragment, which has the kernel's rows, or Rows.
enum class TileKind { fragment, rows };

/// The requirement on the rows of a Fragment, on every target.
#define TW_FRAGMENT_ROWS \
  "a Fragment has as many rows as the kernel: its `rows`, else 16 for each of its `warps`, else 64. Does the kernel lack `rows`? A \
Fragment with other rows names the kernel's warpgroups: Fragment<Target, T, R, C, Warpgroups>"
/// Whether the columns of a tile are runs of kSpan columns, which row_hadamard() transforms.
template <int kSpan, int kCols>
inline constexpr bool is_run = kSpan > 0 && (kSpan & (kSpan - 1)) == 0 && kCols % kSpan == 0;
#define TW_RUN "row_hadamard() is for runs of columns whose length is a power of two and divides the number of the tile's columns"
#define TW_SPLIT_ROW \
  "several warpgroups have a part each of this Fragment's rows: row_max(), row_sum() and complete() combine them through a RowExchange"
#define TW_HELD_FRAGMENT                                                                                                                 \
  "a Fragment over several warpgroups: 64 rows or a multiple for each, or several warpgroups for each 64, with 8 columns or a multiple " \
  "each"
#define TW_DIVIDED_SUMS "DividedSums have a multiple of 16 rows and of 8 columns"
#define TW_DIVIDED_OPERAND "a DividedOperand has 16-bit elements or i8, a multiple of 8 rows, and of 32 columns (of i8: 64) for each warp"
/// Whether a warp's codes are whole groups with a scale each, as DividedScales hold them.
template <int kCodes, int kGroup>
inline constexpr bool is_divided_group = kGroup % 32 == 0 && kCodes % kGroup == 0 && kCodes <= 8 * kGroup;
#define TW_DIVIDED_SCALES "DividedScales have a multiple of 16 rows, and up to 8 groups, of a multiple of 32 codes each, for each warp"
#define TW_DIVIDED_CODES "codes of a left operand of DividedSums are a tile of their rows and of all columns of the right operand"
#define TW_DIVIDED_TILE "the left operand of DividedSums is a tile with their rows for each warp, and its part of the columns"
#define TW_DIGITS "digits are made of 16-bit elements, of at most 1024 columns for each warp, and multiply i8"
#define TW_DIVIDED_VECTORS "vectors of a slot that hold a DividedOperand's row together have whole runs of it"
#define TW_DIVIDED_STRIPS "strips of a slot that hold DividedScales together have as many bytes of a row as there are scales"
#define TW_DIVIDED_ROW "a DividedRow has 16-bit elements, and for each warp 32 to 256 columns, a multiple of 32"
#define TW_AWAITED "elements of an Awaited tensor are f32, f16 or bf16"
#define TW_AWAITED_LOAD "elements of an Awaited tensor are loaded in await() or attempt(), which wait for them"
#define TW_WIDENED "a Widened tile has 8-bit floats, in a multiple of 128 columns, and a multiple of 8 rows"
#define TW_BUFFER_IN_SLOT "a Buffer lies in the slot of a ring of one slot, which has at least as many bytes"
#define TW_OPERAND_ROWS "a left operand in registers has the rows of the accumulators"
#define TW_SOLO "two warpgroups that share the rows of a tile take turns in solos: a kernel without teams whose `rows` are 128"
#define TW_STORED_TRANSPOSED "a Fragment is stored transposed as 16-bit elements, in panels of 64 of its columns"
/// The types of accumulators.
template <class T>
inline constexpr bool accumulates = is_same<T, float> || is_same<T, i32>;
#define TW_INTERLEAVED "interleave() is for Rows whose lanes hold 8 neighbours of a row: Rows<Target, T, R, C, Warps, 8>"
#define TW_ACCUMULATES "a Fragment holds accumulators: float, or i32 for products of i8"

/// wait(leave<N>, acc...) returns when all but the N youngest products have finished. Then the accumulators named may be read.
template <int N>
inline constexpr Constant<N> leave{};

/// The direction of a cumulative sum: element n becomes the sum up to n, or the sum from n on.
struct Forward {};
struct Backward {};

/// The value that a load gives to elements outside the tensor.
struct Fill {
  float value = 0;
};

/// The pixels that become the rows of a tile: a box of `width` rows of the tensor, `height` indices of dimension i, and as many indices of
/// dimension j as fill the tile. Neighbours in the tile are `row_step` and `i_step` apart in the tensor, like the pixels that a strided
/// convolution reads. Width and height are powers of two whose product is at most the tile's rows. By default a window is one line.
struct Window {
  int log_width = 30, log_height = 0;
  int row_step = 1, i_step = 1;

  TW_INLINE constexpr int width() const { return 1 << log_width; }
  TW_INLINE constexpr int height() const { return 1 << log_height; }
  /// The offsets of the tile's row `r` from its first row.
  TW_INLINE constexpr int row(int r) const { return (r & (width() - 1)) * row_step; }
  TW_INLINE constexpr int i(int r) const { return (r >> log_width & (height() - 1)) * i_step; }
  TW_INLINE constexpr int j(int r) const { return r >> (log_width + log_height); }
};

template <class Target, class T, class Tile = void, int Split = 1>
using Global = typename Target::template Global<T, Tile, Split>;
/// A tensor that is copied in windows, by copy.window() and block.store_window(). The host binds the window with the tensor.
template <class Target, class T, class Tile = void, int Split = 1>
struct Windowed : Global<Target, T, Tile, Split> {
  Window window;
};
/// A tensor whose elements are each stored once in a launch, and loaded by tiles that wait for them, in block.await(): an I-structure
/// (Arvind, Nikhil and Pingali, 1989). An element whose bits are all ones is not there yet: the host fills the tensor with them before the
/// launch. Elements are f32, f16 or bf16. The launch binds a contiguous tensor, of whole pieces of Tile.
template <class Target, class T, class Tile>
struct Awaited : Global<Target, T, Tile> {
  static constexpr bool awaited = true;
  using Plain = Global<Target, T, Tile>;
};
template <class G>
inline constexpr bool is_awaited = requires {
  G::awaited;
};
/// A T* on the targets that compute. The analysis target counts the accesses through it.
template <class Target, class T>
using Pointer = typename Target::template Pointer<T>;
template <class Target, class T, int R, int C, Contract contract = Contract::columns>
using Shared = typename Target::template Shared<T, R, C, contract>;
/// A tile of R x C elements. In each row, at most two of every four neighbours are nonzero. See sparse.tile.hpp.
template <class Target, class T, int R, int C>
using SparseShared = Sparse<Shared<Target, T, R, C / 2>, Shared<Target, u8, R / 16 * metadata_words<T>, kMetadataBytes>>;
/// A tile of f16 in a slot, whose R x C 8-bit floats arrive first: copies fill codes(), and block.widen() makes them f16, in place.
template <class Target, class Codes, int R, int C>
using Widened = typename Target::template Widened<Codes, R, C>;
template <class Target, class Slot, int Stages>
using Ring = typename Target::template Ring<Slot, Stages>;
/// A Ring into whose slots copy.gather() may copy. All threads of the loading role fill it.
template <class Target, class Slot, int Stages>
using GatherRing = typename Target::template GatherRing<Slot, Stages>;
/// `Warpgroups`: the kernel's warpgroups, 64 of its `rows` each. If a Fragment has fewer rows than the kernel, warpgroups share rows, and
/// each has an equal part of the columns, in order. If it has more, each warpgroup has several times 64 contiguous rows.
template <class Target, class T, int R, int C, int Warpgroups = R / 64>
using Fragment = typename Target::template Fragment<T, R, C, Warpgroups>;
/// The accumulators of a kernel with `teams`.
template <class Target, class T, int R, int C, int Teams>
using TeamFragment = typename Target::template TeamFragment<T, R, C, Teams>;
/// The accumulators of the warpgroup whose solo it is, of a kernel with `Warpgroups` warpgroups: all columns of R rows.
template <class Target, class T, int R, int C, int Warpgroups>
using SoloFragment = typename Target::template SoloFragment<T, R, C, Warpgroups>;
template <class Target, class T, int R, int C>
using Operand = typename Target::template Operand<T, R, C>;
/// `Warps`: the kernel's. `Width`: contiguous columns of a lane, for 16-byte pieces of the widest type that is loaded or stored; 0 means as
/// many as the columns allow, at most 8.
template <class Target, class T, int R, int C, int Warps = 4, int Width = 0>
using Rows = typename Target::template Rows<T, R, C, Warps, Width>;
/// `Tile`: the Fragment or Rows type whose rows or columns the vector's values belong to.
template <class Target, class T, class Tile>
using RowVector = typename Target::template RowVector<T, Tile>;
template <class Target, class T, class Tile>
using ColumnVector = typename Target::template ColumnVector<T, Tile>;
/// R x N sums over columns that the kernel's `Warps` warps divide among them: products with a few columns, of 16-bit operands, or of i8
/// and 2-bit codes. Those of integers are exact below 2^24.
template <class Target, int R, int N, int Warps>
using DividedSums = typename Target::template DividedSums<R, N, Warps>;
/// For each of the N rows of a DividedOperand, the sum of its elements' squares: the norm of a row that is multiplied.
template <class Target, int N, int Warps>
using DividedSquares = typename Target::template DividedSquares<N, Warps>;
/// The right operand of DividedSums, in registers: N rows of C columns, which the warps divide among them.
template <class Target, class T, int N, int C, int Warps>
using DividedOperand = typename Target::template DividedOperand<T, N, C, Warps>;
/// One row of C columns, as long as it is not multiplied: block.spread() makes it each row of a DividedOperand.
template <class Target, class T, int C, int Warps>
using DividedRow = typename Target::template DividedRow<T, C, Warps>;
/// The scales of a DividedOperand of N rows that block.make_digits() has rounded to fixed-point numbers of 15 bits, for products with
/// integers of 8 bits. They are relative to the largest magnitude in a warp's columns of a row: if that is infinite or NaN, so are the
/// sums.
template <class Target, int N, int Warps>
using DigitScales = typename Target::template DigitScales<N, Warps>;
/// The scales, and the zero points if there are any, of the groups of DividedSums' left operand: R rows of C codes of 4 or 2 bits. `Format`
/// says what the codes are: see packed.tile.hpp.
template <class Target, int R, int C, class Format, int Warps>
using DividedScales = typename Target::template DividedScales<R, C, Format, Warps>;
template <class Target, class T, int R, int C>
using Staging = typename Target::template Staging<T, R, C>;
/// Of a kernel that loads. Its block adds R x C Fragments of f32 to a tensor bound as Global<Target, float, Outbox<...>>: see even_first().
template <class Target, int R, int C>
using Outbox = typename Target::template Outbox<R, C>;
/// The shared memory that column reductions of R x C Fragments need.
template <class Target, class T, int R, int C>
using Scratch = typename Target::template Scratch<T, R, C>;
/// Whether a product has finished when mma() returns. Then it does not pay to start a product under other work: its operands and sums would
/// only occupy registers and slots for longer.
template <class Target>
inline constexpr bool products_are_synchronous = requires {
  Target::synchronous_products;
};
/// How many products a kernel should leave in flight: wait(leave<in_flight<Target>>, acc).
template <class Target>
inline constexpr int in_flight = products_are_synchronous<Target> ? 0 : 1;

/// How a Fragment is distributed on targets whose warps each multiply a part of it: `Rows` rows for each warp, and `ColumnWarps` warps that
/// share these rows. A kernel template may name one as its `WarpTile`; the default is RowWarpTile<16>. Squares read operands least often.
/// Kernels that reduce rows want whole rows.
template <int Rows, int ColumnWarps>
struct WarpTile {
  static constexpr int rows = Rows, column_warps = ColumnWarps;
};
/// Nearly square parts of R x C accumulators, at most 64 x 64: half of a thread's registers.
template <int R, int C>
using SquareWarpTile = WarpTile<(R % 64 == 0 && R >= 128 && C >= 64 ? 64 : 32), (C >= 192  ? 4
                                                                                 : C >= 64 ? 2
                                                                                           : 1)>;
/// Whole rows.
template <int Rows>
using RowWarpTile = WarpTile<Rows, 1>;
template <class Target, class T, int R, int C, Contract contract = Contract::columns>
using Buffer = typename Target::template Buffer<T, R, C, contract>;
template <class Target, class T, int N>
using VectorBuffer = typename Target::template VectorBuffer<T, N>;
template <class Target, class T, int N>
using SharedVector = typename Target::template SharedVector<T, N>;
/// R rows of 16 bytes in a ring's slot, one after the other: a few numbers for each row of another tile.
template <class Target, class T, int R>
using SharedStrip = typename Target::template SharedStrip<T, R>;
/// `Tile`: the Fragment type whose rows are combined.
template <class Target, class T, class Tile>
using RowExchange = typename Target::template RowExchange<T, Tile>;
/// N counters that the block's threads share.
template <class Target, int N>
using Histogram = typename Target::template Histogram<N>;
/// Up to N values of type T that the block's threads share.
template <class Target, class T, int N>
using List = typename Target::template List<T, N>;

/// Where a tensor that Fragments are added to has its column `col`: of every 8 the even ones come first, 0 2 4 6 1 3 5 7. A thread of a
/// Hopper GPU has two neighbours of a row, which it can only put 16 bytes apart without bank conflicts. interleave() restores the order.
TW_INLINE constexpr int even_first(int col) { return col / 8 * 8 + col % 2 * 4 + col % 8 / 2; }

/// The counter that holds the n-th item, counted from the last counter down. The counters after it hold `above` < n items, it holds
/// `count`, and above + count >= n.
struct Located {
  int counter;
  int above;
  int count;
};

namespace detail {
// Defaults for what a kernel leaves out.
template <class On>
constexpr int rows_of() {
  if constexpr (requires { On::rows; }) return On::rows;
  return 64;
}
template <class On>
constexpr int warps_of() {
  if constexpr (requires { On::warps; }) return On::warps;
  return rows_of<On>() / 16;
}
/// The rows of every Fragment of a kernel: those of all its warpgroups together.
template <class On>
constexpr int fragment_rows_of() {
  if constexpr (requires {
                  On::rows;
                  On::warps;
                })
    static_assert(On::warps * 16 == On::rows, "a kernel's `warps` hold 16 of its `rows` each: leave one of the two out");
  if constexpr (requires { On::rows; }) return On::rows;
  return warps_of<On>() * 16;
}
template <class On>
constexpr int blocks_of() {
  if constexpr (requires { On::min_blocks; }) return On::min_blocks;
  return 1;
}
template <class On>
constexpr int teams_of() {
  if constexpr (requires { On::teams; }) return On::teams;
  return 1;
}
template <class On>
constexpr bool waits_of() {
  if constexpr (requires { On::waits; }) return On::waits;
  return false;
}
template <class On>
constexpr int vector_bytes_of() {
  if constexpr (requires { On::vector_bytes; }) return On::vector_bytes;
  return 32;
}
template <class On>
constexpr int cluster_of() {
  if constexpr (requires { On::cluster; }) return On::cluster;
  return 1;
}
template <class On>
TW_INLINE bool loads_early(const typename On::Params& params) {
  if constexpr (requires { On::loads_early(params); }) return On::loads_early(params);
  return false;
}
/// What a kernel's roles take as their tile.
template <class On>
TW_INLINE auto work_of(const typename On::Params& params, const Tile& tile) {
  if constexpr (requires { typename On::Work; })
    return On::work(params, tile);
  else
    return tile;
}
/// Whether the kernel has members, other than `steps`, that only kernels with rings have.
template <class On>
inline constexpr bool mentions_load = requires {
  &On::template load<int>;
}
|| requires { &On::load; }
|| requires { typename On::State; }
|| requires { &On::template finish<int>; }
|| requires { &On::template finish<int, int>; };
template <class On>
constexpr bool has_load_of() {
  constexpr bool has_steps = requires { &On::steps; };
  static_assert(has_steps || !mentions_load<On>,
                "a kernel with load(), finish() or State needs steps(params, tile): is that missing or misspelled?");
  require_kernel<On>();
  return has_steps;
}
template <class On>
inline constexpr bool has_load = has_load_of<On>();
struct NoState {};
template <class On>
struct StateOf {
  static auto get() {
    if constexpr (requires { typename On::State; })
      return typename On::State{};
    else
      return NoState{};
  }
  using Type = decltype(get());
};
template <class On>
struct ScheduleOf {
  static auto get() {
    if constexpr (requires { typename On::Schedule; })
      return typename On::Schedule{};
    else
      return RowMajor{};
  }
  using Type = decltype(get());
};
}  // namespace detail

}  // namespace tw
