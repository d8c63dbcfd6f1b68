#pragma once

#include "tilewave/tile/cuda/buffers.tile.hpp"
#include "tilewave/tile/cuda/divided_codes.tile.hpp"
#include "tilewave/tile/cuda/divided_row.tile.hpp"
#include "tilewave/tile/cuda/fragment.tile.hpp"
#include "tilewave/tile/sm_90a/ptx.tile.hpp"

namespace tw::sm_90a {

// Types that Hopper shares with the generic target.
using cuda::Buffer, cuda::VectorBuffer, cuda::SharedVector, cuda::RowExchange, cuda::View;
using cuda::DigitScales, cuda::DividedOperand, cuda::DividedRow, cuda::DividedScales, cuda::DividedSquares, cuda::DividedSums,
    cuda::Fragment, cuda::Operand, cuda::Rows, cuda::RowVector, cuda::ColumnVector;
using cuda::kWarpgroupThreads, cuda::kWarpgroupRows, cuda::kPanelBytes, cuda::kPanelAlignment, cuda::kComputeBarrier,
    cuda::kWarpgroupBarrier;
using cuda::Position, cuda::GlobalView, cuda::MappedView, cuda::Global, cuda::copied_by_tma, cuda::moves_in_pieces, cuda::shared_memory;
using cuda::Shared, cuda::Scratch, cuda::Histogram, cuda::List, cuda::Words;

/// Barriers come before the tiles in shared memory. Tiles need this alignment anyway.
inline constexpr int kBarrierBytes = 1024;
/// The most barriers that rings can have: the first half of the bytes, less the four of a TileQueue.
inline constexpr int kMostBarriers = kBarrierBytes / 2 / 8 - 4;
/// The producer role's named barrier.
inline constexpr int kProducerBarrier = 1;
/// The named barrier of the first team. Those of up to eight warpgroups come before.
inline constexpr int kTeamBarrier = kWarpgroupBarrier + 8;
inline constexpr int kMostTeams = 16 - kTeamBarrier;
/// The named barrier at which the warp that adds gets a Fragment. A kernel with an Outbox has no teams.
inline constexpr int kOutboxBarrier = kTeamBarrier;
/// The first of two named barriers at which solos end. A kernel with solos has no teams.
inline constexpr int kSoloBarrier = kTeamBarrier + 1;

/// R x C accumulators of fewer warpgroups than R / 64: each warpgroup holds `row_blocks` blocks of 64 rows, one after the other, and each
/// block has a Fragment's layout.
template <class T, int R, int C, int Warpgroups>
struct TallFragment {
  static_assert(R % (kWarpgroupRows * Warpgroups) == 0 && C % 8 == 0, TW_HELD_FRAGMENT);
  static constexpr TileKind kind = TileKind::fragment;
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int warps = Warpgroups * 4;
  static constexpr int column_warps = 1;
  static constexpr int warp_cols = C;
  static constexpr int row_blocks = R / kWarpgroupRows / Warpgroups;
  static constexpr int tile_size = C / 2;  ///< elements of a thread in 64 rows
  static constexpr int size = row_blocks * tile_size;
  static constexpr int width = 2;
  static constexpr int row_count = 2 * row_blocks;
  static constexpr int row_threads = 4;
  static constexpr int share = C / 4;
  static constexpr int pieces = C / 8;
  static constexpr int piece_step = 8;
  static constexpr int column_count = share;
  using Element = T;
  T x[size];

  TW_INLINE static constexpr int warp_col(const Position&) { return 0; }
  TW_INLINE static constexpr int part(const Position&) { return 0; }
  TW_INLINE static constexpr int row(const Position& p, int i) {
    return p.row + (p.warpgroup * (row_blocks - 1) + i / tile_size) * kWarpgroupRows + i / 2 % 2 * 8;
  }
  TW_INLINE static constexpr cuda::Offset col(const Position& p, int i) { return {p.col, i % tile_size / 4 * 8 + i % 2}; }
  TW_INLINE static constexpr int in_row(int r, int j) { return r / 2 * tile_size + j / 2 * 4 + r % 2 * 2 + j % 2; }
  TW_INLINE static constexpr int column_index(int i) { return i % tile_size / 4 * 2 + i % 2; }
};
/// Accumulators of one of two warpgroups that share rows, in its solo.
template <class T, int R, int C, int Warpgroups>
struct SoloFragment : Fragment<T, R, C> {
  static constexpr int soloists = Warpgroups * kWarpgroupRows / R;
  static_assert(R == kWarpgroupRows && soloists == 2, TW_SOLO);

  /// The same in both warpgroups.
  TW_INLINE static constexpr int row(const Position& p, int i) { return p.warp * 16 + p.lane / 4 + i / 2 % 2 * 8; }
};
/// How many blocks of 64 rows of accumulators a warpgroup holds.
template <class F>
constexpr int row_blocks_of() {
  if constexpr (requires { F::row_blocks; }) {
    return F::row_blocks;
  } else {
    static_assert(F::warp_rows == 16, "wgmma gives each warp 16 of 64 rows");
    return 1;
  }
}
template <class F>
inline constexpr int row_blocks = row_blocks_of<F>();

/// Slots of 64 x 128 bytes for each warpgroup: a Fragment is stored through them panel by panel, while the next panel is written.
template <class T, int R, int C>
struct Staging : Panelled<T, C> {
  using Element = T;
  static constexpr int box_rows = kWarpgroupRows;
  static constexpr int box_cols = Panelled<T, C>::panel_cols;
  static constexpr int slot_bytes = kWarpgroupRows * kPanelBytes;
  // f32 goes straight to global memory.
  static constexpr int bytes = sizeof(T) == 2 ? R / kWarpgroupRows * Panelled<T, C>::slots * slot_bytes : 0;
  int offset;
  constexpr explicit Staging(auto& allocator) : offset(allocator.tiles(bytes)) {}
};

/// Lays a kernel's Memory out. The host runs it to count bytes, one thread to initialise barriers, and every role to find its rings.
struct Allocator {
  int warpgroups;  ///< that compute
  int cluster;
  bool initialise = false;
  int tile_bytes = kBarrierBytes;
  int barriers_used = 0;
  bool gathers = false;  ///< whether there is a GatherRing
  int outboxes = 0;

  constexpr int tiles(int bytes) { return cuda::place(tile_bytes, bytes, kPanelAlignment); }
  constexpr int vectors(int bytes) { return cuda::place(tile_bytes, bytes, cuda::kVectorAlignment); }
  /// Allocates `count` barriers that complete after `arrivals`. Returns the index of the first.
  constexpr int barriers(int count, int arrivals) {
    const int at = barriers_used;
    barriers_used += count;
    if (initialise) {
      for (int i = at; i < barriers_used; ++i) ptx::barrier_init(reinterpret_cast<u64*>(shared_memory()) + i, static_cast<u32>(arrivals));
    }
    return at;
  }
  /// A full barrier takes one arrival, from the producer. An empty barrier takes one from every warpgroup of every block in the cluster.
  constexpr int empty_arrivals() const { return warpgroups * cluster; }
};

TW_INLINE u64* barrier_at(int index) { return reinterpret_cast<u64*>(shared_memory()) + index; }

/// A ring of `Stages` slots between the producer and the consumer warpgroups. Slot is a Shared tile, or a struct of tiles that arrive
/// together.
template <class SlotType, int Stages>
struct Ring {
  using Slot = SlotType;
  static constexpr int stages = Stages;
  static constexpr bool gathers = false;

  /// A position in the ring, and the parity of the next barrier phase there.
  struct Cursor {
    int index = 0;
    u32 parity = 0;
    TW_INLINE constexpr void advance() {
      if (++index == Stages) {
        index = 0;
        parity ^= 1;
      }
    }
    TW_INLINE constexpr void advance(int count) {
      index += count;
      parity ^= static_cast<u32>(index / Stages & 1);
      index %= Stages;
    }
  };

  int slots;  ///< offset in shared memory
  int full;   ///< index of the first of `Stages` barriers
  int empty;
  Cursor next;      ///< to put, or to take
  Cursor released;  ///< oldest slot taken and not released
  int until_turn;   ///< slots that a team takes before it is the next team's turn
  bool awaits_turn;

  /// `full_arrivals`: how many arrivals from the producer role make a slot full.
  constexpr explicit Ring(auto& allocator, int full_arrivals = 1)
      : slots(allocator.tiles(Stages * static_cast<int>(sizeof(Slot)))),
        full(allocator.barriers(Stages, full_arrivals)),
        empty(allocator.barriers(Stages, allocator.empty_arrivals())) {}

  /// Of the first slot in shared memory.
  constexpr int offset() const { return slots; }
  TW_INLINE Slot& slot(int index) const {
    return *reinterpret_cast<Slot*>(shared_memory() + slots + index * static_cast<int>(sizeof(Slot)));
  }
  /// Goes on behind `count` slots that another team takes and releases.
  TW_INLINE void pass_over(int count) {
    next.advance(count);
    released.advance(count);
  }
  TW_INLINE u64* full_barrier(int index) const { return barrier_at(full + index); }
  TW_INLINE u64* empty_barrier(int index) const { return barrier_at(empty + index); }
};

/// What the warp that adds needs to know about a Fragment.
struct Parcel {
  const void* tensor_map;  ///< null: there is no further one
  int row, col, i, j;
  u32* counter;  ///< null: in any order
  u32 turn;
};

/// A Fragment on its way from the warpgroups that compute to a tensor. They write it while the barrier `empty` says that its last one has
/// left, and meet the warp that adds at a named barrier, without waiting there.
template <int R, int C>
struct Outbox {
  using Layout = Shared<float, R, C, Contract::columns>;
  using Element = float;
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int box_rows = Layout::box_rows;
  static constexpr int box_cols = Layout::box_cols;
  static_assert(C % Layout::panel_cols == 0, "an Outbox has a multiple of 32 columns: whole panels");
  int tile_offset, parcel_offset;
  int empty;       ///< index of the barrier
  u32 parity = 1;  ///< of the phase in which it was empty

  constexpr explicit Outbox(auto& allocator)
      : tile_offset(allocator.tiles(static_cast<int>(sizeof(Layout)))),
        parcel_offset(allocator.tiles(static_cast<int>(sizeof(Parcel)))),
        empty(allocator.barriers(1, 1)) {
    ++allocator.outboxes;
  }
  TW_INLINE Layout& tile() const { return *reinterpret_cast<Layout*>(shared_memory() + tile_offset); }
  TW_INLINE Parcel& parcel() const { return *reinterpret_cast<Parcel*>(shared_memory() + parcel_offset); }
};

/// A slot is full when the copies of all the producer's threads are complete.
template <class SlotType, int Stages>
struct GatherRing : Ring<SlotType, Stages> {
  static constexpr bool gathers = true;
  constexpr explicit GatherRing(auto& allocator) : Ring<SlotType, Stages>(allocator, kWarpgroupThreads) { allocator.gathers = true; }
};

}  // namespace tw::sm_90a
