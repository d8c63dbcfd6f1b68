#pragma once

#include "tilewave/tile/cuda/memory.tile.hpp"

// Shared memory of a block whose warps all load and compute: the classic multistage pipeline. Asynchronous copies fill the slots; the
// copies of each put() form a group. take() waits for the group, then for all threads of the block (a meeting), so that every thread sees
// what all have copied. A released slot may be filled again after the next meeting, because then no warp reads it any more.

namespace tw::cuda {

/// Bytes before the tiles, through which a dynamic schedule passes tiles to the block's threads.
inline constexpr int kTileQueueBytes = kPanelAlignment;

/// Lays a kernel's Memory out: the host runs it to count bytes, every thread to find its rings.
struct Allocator {
  int tile_bytes;

  constexpr int tiles(int bytes) { return place(tile_bytes, bytes, kPanelAlignment); }
  constexpr int vectors(int bytes) { return place(tile_bytes, bytes, kVectorAlignment); }
};

/// A ring of `Stages` slots. Slot is a Shared tile, or a struct of tiles that arrive together.
template <class SlotType, int Stages>
struct Ring {
  using Slot = SlotType;
  static constexpr int stages = Stages;
  static constexpr bool gathers = false;
  static_assert(Stages <= 8, "a ring has at most 8 slots");

  u32 slots;         ///< address in shared memory
  u32 put = 0;       ///< slots filled so far
  u32 taken = 0;     ///< slots taken
  u32 released = 0;  ///< slots released
  u32 reusable = 0;  ///< slots released before meeting number `meeting`: until the next one, only those may be filled again
  u32 meeting = 0;
  using Bytes = conditional<Stages <= 4, u32, u64>;
  Bytes groups = 0;  ///< for each slot the lowest byte of its group's number

  /// The address is opaque, because otherwise the compiler computes it anew in every step, which takes longer than a product.
  constexpr explicit Ring(auto& allocator) : slots(static_cast<u32>(allocator.tiles(Stages * static_cast<int>(sizeof(Slot))))) {
    if (!__builtin_is_constant_evaluated()) slots = ptx::opaque(slots + ptx::address(shared_memory()));
  }

  /// Of the first slot in shared memory.
  constexpr int offset() const {
    if (__builtin_is_constant_evaluated()) return static_cast<int>(slots);
    return static_cast<int>(slots - ptx::address(shared_memory()));
  }
  TW_INLINE Slot& slot(u32 n) const { return *static_cast<Slot*>(ptx::pointer(slots + n % Stages * static_cast<u32>(sizeof(Slot)))); }
  /// Whether a slot may be filled after `meetings` meetings.
  TW_INLINE bool has_room(u32 meetings) const { return put - (meeting == meetings ? reusable : released) < Stages; }
  TW_INLINE void release(u32 meetings) {
    if (meeting != meetings) {
      meeting = meetings;
      reusable = released;
    }
    ++released;
  }
  /// Notes that group number `group` fills the next slot.
  TW_INLINE void fill(u32 group) {
    const u32 shift = put % Stages * 8;
    groups = (groups & ~(Bytes{0xff} << shift)) | Bytes{group & 0xff} << shift;
    ++put;
  }
  /// The group of the slot that is taken next.
  TW_INLINE u32 group() const { return static_cast<u32>(groups >> taken % Stages * 8) & 0xff; }
};

/// All threads copy into every ring, so only the copies differ.
template <class SlotType, int Stages>
struct GatherRing : Ring<SlotType, Stages> {
  static constexpr bool gathers = true;
  using Ring<SlotType, Stages>::Ring;
};

/// 16 rows of 128 bytes for each warp, through which it stores its part of a Fragment, so that lines are written whole.
template <class T, int R, int C, int WarpRows, int ColumnWarps>
struct Staging {
  using Element = T;
  static constexpr int box_rows = kWarpgroupRows;  // the same as on sm_90a, where TMA copies boxes, so that Params have one layout
  static constexpr int box_cols = kPanelBytes / static_cast<int>(sizeof(T));
  static constexpr int slot_rows = 16;
  static constexpr int slot_bytes = slot_rows * kPanelBytes;
  // f32 goes straight to global memory.
  static constexpr int bytes = sizeof(T) == 2 ? R / WarpRows * ColumnWarps * slot_bytes : 0;
  int offset;
  constexpr explicit Staging(auto& allocator) : offset(allocator.tiles(bytes)) {}
};

}  // namespace tw::cuda
