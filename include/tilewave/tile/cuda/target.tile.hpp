#pragma once

#include "tilewave/tile/cuda/buffers.tile.hpp"
#include "tilewave/tile/cuda/divided_codes.tile.hpp"
#include "tilewave/tile/cuda/divided_row.tile.hpp"
#include "tilewave/tile/cuda/fragment.tile.hpp"
#include "tilewave/tile/cuda/ring.tile.hpp"

namespace tw::cuda {

/// Any NVIDIA GPU since compute capability 8.0: cp.async of 16 bytes, ldmatrix and mma.sync. All warps of a block load and compute.
/// `kPieceLoads`, `kPieceStores`: tensors are copied in whole pieces of 16 bytes; kernels have another variant for tensors that do not
/// allow it (`whole_pieces` is false for these). Each warp holds `kWarpRows` rows of a Fragment, and `kColumnWarps` warps share the columns
/// of these rows. Larger squares read operands less often; kernels that reduce rows want kColumnWarps = 1.
template <bool kPieceLoads = true, bool kPieceStores = true, int kWarpRows = 16, int kColumnWarps = 1>
struct Target {
  static constexpr bool piece_loads = kPieceLoads;
  static constexpr bool piece_stores = kPieceStores;
  static constexpr bool whole_pieces = kPieceLoads && kPieceStores;
  static constexpr int warp_rows = kWarpRows;
  static constexpr int column_warps = kColumnWarps;
  /// A product has finished when mma() returns.
  static constexpr bool synchronous_products = true;
  template <class T, class Tile, int Split>
  using Global = cuda::Global<T, Tile, Split>;
  template <class T>
  using Pointer = T*;
  template <class T, int R, int C, Contract contract>
  using Shared = cuda::Shared<T, R, C, contract>;
  template <class Codes, int R, int C>
  using Widened = cuda::Widened<Codes, R, C>;
  template <class Slot, int Stages>
  using Ring = cuda::Ring<Slot, Stages>;
  template <class Slot, int Stages>
  using GatherRing = cuda::GatherRing<Slot, Stages>;
  template <class T, int R, int C, int Warpgroups = R / kWarpgroupRows>
  using Fragment =
      conditional<Warpgroups == R / kWarpgroupRows, cuda::Fragment<T, R, C, kWarpRows, kColumnWarps>,
                  conditional<(Warpgroups * kWarpgroupRows < R), cuda::Fragment<T, R, C, R / (Warpgroups * kWarpgroupRows) * 16, 1>,
                              cuda::Fragment<T, R, C, 16, Warpgroups * kWarpgroupRows / R>>>;
  template <class T, int R, int C, int>
  using TeamFragment = Fragment<T, R, C>;
  template <class T, int R, int C, int Warpgroups>
  using SoloFragment = Fragment<T, R, C, Warpgroups>;
  template <class T, int R, int C>
  using Operand = cuda::Operand<T, R, C, kWarpRows>;
  template <int R, int N, int Warps>
  using DividedSums = cuda::DividedSums<R, N, Warps>;
  template <int N, int Warps>
  using DividedSquares = cuda::DividedSquares<N, Warps>;
  template <class T, int N, int C, int Warps>
  using DividedOperand = cuda::DividedOperand<T, N, C, Warps>;
  template <class T, int C, int Warps>
  using DividedRow = cuda::DividedRow<T, C, Warps>;
  template <int N, int Warps>
  using DigitScales = cuda::DigitScales<N, Warps>;
  template <int R, int C, class Format, int Warps>
  using DividedScales = cuda::DividedScales<R, C, Format, Warps>;
  template <class T, int R, int C, int Warps, int Width>
  using Rows = cuda::Rows<T, R, C, Warps, Width>;
  template <class T, class Tile>
  using RowVector = cuda::RowVector<T, Tile>;
  template <class T, class Tile>
  using ColumnVector = cuda::ColumnVector<T, Tile>;
  template <class T, int R, int C>
  using Staging = cuda::Staging<T, R, C, kWarpRows, kColumnWarps>;
  template <int R, int C>
  using Outbox = cuda::Outbox<R, C>;
  template <class T, int R, int C>
  using Scratch = cuda::Scratch<T, R, C>;
  template <class T, int R, int C, Contract contract>
  using Buffer = cuda::Buffer<T, R, C, contract>;
  template <class T, int N>
  using VectorBuffer = cuda::VectorBuffer<T, N>;
  template <class T, int R>
  using SharedStrip = cuda::SharedStrip<T, R>;
  template <class T, int N>
  using SharedVector = cuda::SharedVector<T, N>;
  template <class T, class Tile>
  using RowExchange = cuda::RowExchange<T, Tile>;
  template <int N>
  using Histogram = cuda::Histogram<N>;
  template <class T, int N>
  using List = cuda::List<T, N>;
};

/// The WarpTile that a kernel template asks for.
template <class Kernel>
struct WarpTileOf {
  static auto get() {
    if constexpr (requires { typename Kernel::WarpTile; })
      return typename Kernel::WarpTile{};
    else
      return RowWarpTile<16>{};
  }
  using Type = decltype(get());
};
/// From compute capability 10.0 on, the assembler keeps more of an epilogue's loads in flight. With 64 rows a warp has no registers left
/// for them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kMostWarpRows = 32;
#else
inline constexpr int kMostWarpRows = 64;
#endif
template <class Kernel, bool kPieceLoads = true, bool kPieceStores = true>
using TargetFor =
    Target<kPieceLoads, kPieceStores, min(WarpTileOf<Kernel>::Type::rows, kMostWarpRows), WarpTileOf<Kernel>::Type::column_warps>;

/// What a launch needs to know about a kernel, derived from its types.
template <class On, class T>
struct Shape {
  static_assert(tw::Target<T>, "a target lacks one of the types that tilewave/tile/concepts.tile.hpp lists");
  static constexpr bool produces = tw::detail::has_load<On>;
  static constexpr int warps() {
    if constexpr (requires { On::warps; }) {
      return On::warps;
    } else {
      constexpr int rows = tw::detail::rows_of<On>();
      static_assert(rows % T::warp_rows == 0, "a kernel's `rows` are a multiple of the rows that the target gives each warp");
      return rows / T::warp_rows * T::column_warps;
    }
  }
  static constexpr int min_blocks = tw::detail::blocks_of<On>();
  static constexpr int cluster = 1;
  static constexpr int threads = warps() * 32;
  static constexpr Dispatch dispatch = tw::detail::ScheduleOf<On>::Type::dispatch;
  static_assert(threads <= 1024, "a block has at most 32 warps: give the kernel fewer `rows`, or a WarpTile with more");
  static constexpr int shared_bytes() {
    if constexpr (requires { typename On::Memory; }) {
      Allocator allocator = tiles();
      typename On::Memory memory(allocator);
      static_cast<void>(memory);
      return allocator.tile_bytes;
    } else {
      return 0;
    }
  }
  static constexpr Allocator tiles() { return {produces && dispatch == Dispatch::dynamic ? kTileQueueBytes : 0}; }
};

}  // namespace tw::cuda
