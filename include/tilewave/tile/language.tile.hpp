#pragma once

#include "tilewave/tile/analysis/counted.tile.hpp"
#include "tilewave/tile/buffers.tile.hpp"
#include "tilewave/tile/concepts.tile.hpp"
#include "tilewave/tile/grid.tile.hpp"
#include "tilewave/tile/math.tile.hpp"
#include "tilewave/tile/packed.tile.hpp"
#include "tilewave/tile/segments.tile.hpp"
#include "tilewave/tile/staging.tile.hpp"
#include "tilewave/tile/types.tile.hpp"
#include "tilewave/tile/views.tile.hpp"

// The tile language. A kernel is a struct with a member template On<Target>; these names are how it speaks of memory. Each target defines
// what they are; a kernel never says which target it is on. docs/language.md is the guide, tilewave/tile/gemm.tile.hpp the first example.
//
//   Global     a tensor in device memory: up to two outer dimensions, rows, columns; any strides
//   Pointer    an array in device memory that element functions index: a bias, a table
//   Shared     a tile that blocks keep close to the arithmetic, in the layout that the target's matrix unit wants
//   Ring       `Stages` slots of Shared tiles between the role that loads and the role that computes
//   GatherRing a Ring whose tiles may be gathered row by row
//   Fragment   a tile of accumulators, spread over the block's threads in the matrix unit's layout
//   Operand    a Fragment converted to be the left operand of a product
//   Rows       a tile for work without products: whole rows stay within a warp, columns in 16-byte pieces
//   RowVector  one number for each row of a Fragment or Rows;  ColumnVector: one for each column
//   Buffer     a tile in shared memory that the role that computes writes, reads and multiplies;  VectorBuffer: a vector of that kind
//   SharedVector  a vector in a ring's slot
//   RowExchange   shared memory through which warpgroups that share rows of a Fragment combine what each has of a row
//   Staging    shared memory through which a Fragment leaves for global memory
//   Windowed   a Global of which a tile's rows are a window of pixels: convolutions
//   Histogram  counters that threads share;  List: values that threads append, and sort
//
// A kernel on a target:
//
//   struct Params             what the host fills in: Globals and numbers
//   static constexpr int rows the block's rows of accumulators, a multiple of 64 (kernels with products)
//   struct Memory             rings and staging, constructed from the block: Memory(auto& block) : a(block), b(block) {}
//   steps(params, tile)       how many steps the tile takes
//   load(producer, params, tile, step, memory)    puts one step's tiles into rings: a pure function of tile and step
//   struct State              what compute leaves for finish
//   compute(block, params, tile, memory, state)   takes from the rings; owns its loop
//   finish(block, params, tile, memory, state)    stores the result
//
// A kernel that must find out where a tile lies, from lengths in memory, say, defines besides
//
//   struct Work               what its roles want to know of a tile
//   work(params, tile)        a Work, which steps, load, compute and finish then take instead of the tile. It is made once, by the role
//                             that loads. All blocks of a cluster must take the same number of steps
//
// Kernels that only touch global memory need Params and compute(block, params, tile) alone. Theirs is
//   static constexpr int warps   of a block, a multiple of 4 up to 32; 4 when left out
//   static constexpr int min_blocks  that a GPU's unit shall hold at once: the compiler keeps to the registers that this leaves; 1 when
//   left out
//   static constexpr int vector_bytes  that a CPU's vectors have at most: 32 when left out; 64 where a tile takes arithmetic, since the
//   kernel is then compiled once more

namespace tw {

/// What a tile in registers is: a Fragment, whose rows are the kernel's, or Rows.
enum class TileKind { fragment, rows };

/// What the rows of a Fragment must be, on every target.
#define TW_FRAGMENT_ROWS \
  "a Fragment has as many rows as the kernel: its `rows`, else 16 for each of its `warps`, else 64. Does the kernel lack `rows`? A \
Fragment with other rows names the kernel's warpgroups: Fragment<Target, T, R, C, Warpgroups>"
#define TW_SPLIT_ROW \
  "several warpgroups have a part each of this Fragment's rows: row_max(), row_sum() and complete() combine them through a RowExchange"
#define TW_HELD_FRAGMENT                                                                                                                 \
  "a Fragment over several warpgroups: 64 rows or a multiple for each, or several warpgroups for each 64, with 8 columns or a multiple " \
  "each"
/// The types of accumulators.
template <class T>
inline constexpr bool accumulates = is_same<T, float> || is_same<T, i32>;
#define TW_ACCUMULATES "a Fragment holds accumulators: float, or i32 for products of i8"

/// wait(leave<N>, acc...): all but the N youngest products have finished, and the accumulators named may be read.
template <int N>
inline constexpr Constant<N> leave{};

/// The direction of a cumulative sum: element n is the sum of those up to n, or of those from n on.
struct Forward {};
struct Backward {};

/// What a load gives for elements outside the tensor.
struct Fill {
  float value = 0;
};

/// Which of a tensor's outer dimensions and rows become the rows of a tile: a box of `width` rows, `height` of dimension i, and as many of
/// dimension j as the tile has rows left for. Neighbours in the tile lie `row_step` and `i_step` apart in the tensor, as the pixels that a
/// strided convolution reads. Width and height are powers of two, together at most the tile's rows; by default a window is one line.
struct Window {
  int log_width = 30, log_height = 0;
  int row_step = 1, i_step = 1;

  TW_INLINE constexpr int width() const { return 1 << log_width; }
  TW_INLINE constexpr int height() const { return 1 << log_height; }
  /// Where the tile's row `r` lies, counted from its first one.
  TW_INLINE constexpr int row(int r) const { return (r & (width() - 1)) * row_step; }
  TW_INLINE constexpr int i(int r) const { return (r >> log_width & (height() - 1)) * i_step; }
  TW_INLINE constexpr int j(int r) const { return r >> (log_width + log_height); }
};

template <class Target, class T, class Tile = void, int Split = 1>
using Global = typename Target::template Global<T, Tile, Split>;
/// A tensor that is copied in windows: copy.window() and block.store_window(). The window is part of what the host binds.
template <class Target, class T, class Tile = void>
struct Windowed : Global<Target, T, Tile> {
  Window window;
};
/// A T* on the targets that compute; the analysis target counts what is read and written through it.
template <class Target, class T>
using Pointer = typename Target::template Pointer<T>;
template <class Target, class T, int R, int C, Contract contract = Contract::columns>
using Shared = typename Target::template Shared<T, R, C, contract>;
template <class Target, class Slot, int Stages>
using Ring = typename Target::template Ring<Slot, Stages>;
/// A Ring into whose slots copy.gather() may copy: all threads of the role that loads fill it.
template <class Target, class Slot, int Stages>
using GatherRing = typename Target::template GatherRing<Slot, Stages>;
/// `Warpgroups`: the kernel's, each 64 of its `rows`. Where a Fragment has fewer rows than the kernel, warpgroups share them and have equal
/// parts of the columns, in order; where it has more, each has several times 64 that follow each other.
template <class Target, class T, int R, int C, int Warpgroups = R / 64>
using Fragment = typename Target::template Fragment<T, R, C, Warpgroups>;
template <class Target, class T, int R, int C>
using Operand = typename Target::template Operand<T, R, C>;
/// `Warps`: the kernel's. `Width`: columns side by side in a lane, for 16-byte pieces of the widest type that is loaded or stored; 0: as
/// many as the columns allow, at most 8.
template <class Target, class T, int R, int C, int Warps = 4, int Width = 0>
using Rows = typename Target::template Rows<T, R, C, Warps, Width>;
/// `Tile`: the Fragment or Rows whose rows or columns it goes with.
template <class Target, class T, class Tile>
using RowVector = typename Target::template RowVector<T, Tile>;
template <class Target, class T, class Tile>
using ColumnVector = typename Target::template ColumnVector<T, Tile>;
template <class Target, class T, int R, int C>
using Staging = typename Target::template Staging<T, R, C>;
/// Shared memory that column reductions of Fragments of R rows and C columns need.
template <class Target, class T, int R, int C>
using Scratch = typename Target::template Scratch<T, R, C>;
/// A product is done when mma() returns: then nothing is gained where a kernel starts one to run under other work, and its operands and
/// sums only need registers and slots for longer.
template <class Target>
inline constexpr bool products_are_synchronous = requires {
  Target::synchronous_products;
};
/// How many products a kernel leaves in flight while it goes on: wait(leave<in_flight<Target>>, acc).
template <class Target>
inline constexpr int in_flight = products_are_synchronous<Target> ? 0 : 1;

/// How targets whose warps each multiply a part of a Fragment deal it out: `Rows` rows to each warp, `ColumnWarps` warps side by side. A
/// kernel template may name one as its `WarpTile`. Squares read operands least often; one that reduces rows wants whole rows, and 16 of
/// them in each warp is what a kernel has that names none.
template <int Rows, int ColumnWarps>
struct WarpTile {
  static constexpr int rows = Rows, column_warps = ColumnWarps;
};
/// Nearly square parts of R x C accumulators, of at most 64 x 64: half of a thread's registers.
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
/// `Tile`: the Fragment whose rows are combined.
template <class Target, class T, class Tile>
using RowExchange = typename Target::template RowExchange<T, Tile>;
/// N counters that the block's threads share.
template <class Target, int N>
using Histogram = typename Target::template Histogram<N>;
/// Up to N values of type T that the block's threads share.
template <class Target, class T, int N>
using List = typename Target::template List<T, N>;

/// The counter that the n-th of all things counted is in, from the last counter downwards: those behind it hold `above` < n of them, it
/// holds `count`, and above + count >= n.
struct Located {
  int counter;
  int above;
  int count;
};

namespace detail {
// What a kernel leaves out has these defaults.
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
/// Rows of every Fragment of a kernel: what its warpgroups hold together.
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
constexpr int vector_bytes_of() {
  if constexpr (requires { On::vector_bytes; }) return On::vector_bytes;
  return 32;
}
template <class On>
constexpr int cluster_of() {
  if constexpr (requires { On::cluster; }) return On::cluster;
  return 1;
}
/// What a kernel's roles take for a tile.
template <class On>
TW_INLINE auto work_of(const typename On::Params& params, const Tile& tile) {
  if constexpr (requires { typename On::Work; })
    return On::work(params, tile);
  else
    return tile;
}
/// The kernel has the members of one that loads tiles into rings, all but `steps`, which say that it is one.
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
