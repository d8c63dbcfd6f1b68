#pragma once

#include "tilewave/tile/sm_90a/memory.tile.hpp"

namespace tw::sm_90a {

/// Hopper. The default variant copies by TMA. Others are compiled for tensors whose base or strides rule TMA out, for loads or for stores.
template <bool kTmaLoad = true, bool kTmaStore = true>
struct Target {
  static constexpr bool tma_load = kTmaLoad;
  static constexpr bool tma_store = kTmaStore;
  static constexpr bool whole_pieces = kTmaLoad && kTmaStore;
  template <class T, class Tile, int Split>
  using Global = sm_90a::Global<T, Tile, Split>;
  template <class T>
  using Pointer = T*;
  template <class T, int R, int C, Contract contract>
  using Shared = sm_90a::Shared<T, R, C, contract>;
  template <class Codes, int R, int C>
  using Widened = cuda::Widened<Codes, R, C>;
  template <class Slot, int Stages>
  using Ring = sm_90a::Ring<Slot, Stages>;
  template <class Slot, int Stages>
  using GatherRing = sm_90a::GatherRing<Slot, Stages>;
  template <class T, int R, int C, int Warpgroups = R / kWarpgroupRows>
  using Fragment = conditional<(Warpgroups * kWarpgroupRows < R), sm_90a::TallFragment<T, R, C, Warpgroups>,
                               sm_90a::Fragment<T, R, C, 16, Warpgroups * kWarpgroupRows / R>>;
  template <class T, int R, int C, int Teams>
  using TeamFragment = Fragment<T, R, C, R / kWarpgroupRows / Teams>;
  template <class T, int R, int C, int Warpgroups>
  using SoloFragment = sm_90a::SoloFragment<T, R, C, Warpgroups>;
  template <class T, int R, int C>
  using Operand = sm_90a::Operand<T, R, C>;
  template <int R, int N, int Warps>
  using DividedSums = sm_90a::DividedSums<R, N, Warps>;
  template <int N, int Warps>
  using DividedSquares = sm_90a::DividedSquares<N, Warps>;
  template <class T, int N, int C, int Warps>
  using DividedOperand = sm_90a::DividedOperand<T, N, C, Warps>;
  template <class T, int C, int Warps>
  using DividedRow = sm_90a::DividedRow<T, C, Warps>;
  template <int N, int Warps>
  using DigitScales = sm_90a::DigitScales<N, Warps>;
  template <int R, int C, class Format, int Warps>
  using DividedScales = sm_90a::DividedScales<R, C, Format, Warps>;
  template <class T, int R, int C, int Warps, int Width>
  using Rows = sm_90a::Rows<T, R, C, Warps, Width>;
  template <class T, class Tile>
  using RowVector = sm_90a::RowVector<T, Tile>;
  template <class T, class Tile>
  using ColumnVector = sm_90a::ColumnVector<T, Tile>;
  template <class T, int R, int C>
  using Staging = sm_90a::Staging<T, R, C>;
  template <int R, int C>
  using Outbox = sm_90a::Outbox<R, C>;
  template <class T, int R, int C>
  using Scratch = sm_90a::Scratch<T, R, C>;
  template <class T, int R, int C, Contract contract>
  using Buffer = sm_90a::Buffer<T, R, C, contract>;
  template <class T, int N>
  using VectorBuffer = sm_90a::VectorBuffer<T, N>;
  template <class T, int R>
  using SharedStrip = cuda::SharedStrip<T, R>;
  template <class T, int N>
  using SharedVector = sm_90a::SharedVector<T, N>;
  template <class T, class Tile>
  using RowExchange = sm_90a::RowExchange<T, Tile>;
  template <int N>
  using Histogram = sm_90a::Histogram<N>;
  template <class T, int N>
  using List = sm_90a::List<T, N>;
};

/// Only TMA can share tiles between the blocks of a cluster: without it each block loads its own.
template <class On, class T>
inline constexpr int cluster_size = T::tma_load ? tw::detail::cluster_of<On>() : 1;

/// What a launch needs to know about a kernel, derived from its types.
template <class On, class T>
struct Shape {
  static_assert(tw::Target<T>, "a target lacks one of the types that tilewave/tile/concepts.tile.hpp lists");
  static constexpr bool produces = tw::detail::has_load<On>;
  static constexpr int warpgroups = tw::detail::warps_of<On>() / 4;
  /// The warpgroups of a team, which compute a tile together.
  static constexpr int teams = tw::detail::teams_of<On>(), team_warpgroups = warpgroups / teams;
  static_assert(teams == 1 || warpgroups == teams, "a team is one warpgroup: a kernel has as many `teams` as 64 rows");
  static_assert(teams <= kMostTeams, "too many teams");
  static_assert(tw::detail::warps_of<On>() % 4 == 0, "a block has whole warpgroups: a multiple of 4 warps, of 64 rows of accumulators");
  static constexpr int min_blocks = tw::detail::blocks_of<On>();
  /// Whether the role that loads gives registers to the one that computes. One warpgroup alone on an SM has as many as a thread can have.
  static constexpr bool moves_registers = warpgroups > 1 || (min_blocks > 1 && requires { On::moves_registers; });
  static constexpr int cluster = cluster_size<On, T>;
  static constexpr int threads = (warpgroups + (produces ? 1 : 0)) * kWarpgroupThreads;
  static_assert(threads <= 1024, "a block has at most 1024 threads: 32 for each 16 of the kernel's `rows`, and 128 that load");
  static_assert(cluster >= 1 && cluster <= 8, "a cluster has 1 to 8 blocks");
  static constexpr Dispatch dispatch = tw::detail::ScheduleOf<On>::Type::dispatch;
  static constexpr Allocator memory() {
    Allocator allocator{team_warpgroups, cluster};
    if constexpr (requires { typename On::Memory; }) {
      typename On::Memory tiles(allocator);
      static_cast<void>(tiles);
    } else {
      allocator.tile_bytes = 0;
    }
    return allocator;
  }
  static constexpr int shared_bytes() { return memory().tile_bytes; }
  /// Whether all producer threads run load(). TMA needs only one.
  static constexpr bool all_load() { return !T::tma_load || memory().gathers; }
  /// Whether a warp of its own adds what is in the kernel's Outbox.
  static constexpr bool adds = T::tma_load && T::tma_store && tw::detail::HasOutbox<On>;
  static_assert(memory().outboxes == (tw::detail::HasOutbox<On> ? 1 : 0),
                "a kernel with an Outbox has one, which its outbox(memory) returns");
  static_assert(!tw::detail::HasOutbox<On> || (produces && teams == 1 && !memory().gathers),
                "a kernel with an Outbox has rings, which one thread fills, and no teams");
  static_assert(memory().barriers_used <= kMostBarriers, "the rings have too many stages: two barriers each, 60 together");
};

}  // namespace tw::sm_90a
