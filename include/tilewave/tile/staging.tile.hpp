#pragma once

#include "tilewave/tile/types.tile.hpp"

// How a Fragment is stored to global memory through shared memory, the same on every target: in panels of 128 bytes a row, through slots
// that are used in turn. The copy engine reads a slot after its store was issued, while the block continues, possibly with its next tile.
// So before it writes a slot again, the block waits until the engine has read it. A GPU executes this order; the other targets check it
// with UnreadStores.

namespace tw {

/// The panels of `C` columns of T, and the number of slots they are stored through.
template <class T, int C>
struct Panelled {
  static constexpr int slots = 2;
  static constexpr int panel_cols = 128 / static_cast<int>(sizeof(T));
  static constexpr int panels = (C + panel_cols - 1) / panel_cols;
};

/// For each panel p of a tile, calls wait(Constant<n>), which must return when all but the n youngest stores have been read, and then
/// panel(p, slot), which must write the slot and issue one store of it. Every tile begins with slot 0. If the number of panels is not a
/// multiple of the number of slots, a recent store of the previous tile used that slot, so all stores must have been read.
template <class P, class Wait, class Panel>
TW_INLINE void for_panels(Wait wait, Panel panel) {
  TW_UNROLL
  for (int p = 0; p < P::panels; ++p) {
    if (p == 0 && P::panels % P::slots != 0)
      wait(Constant<0>{});
    else
      wait(Constant<P::slots - 1>{});
    panel(p, p % P::slots);
  }
}

#if !TW_ON_GPU
/// The slots of the stores that a block has issued and not waited for, oldest first. It models the copy engine on targets without one.
class UnreadStores {
 public:
  /// Returns false if the slot must not be written yet, because a store of it might not have been read.
  bool issue(const void* slot) {
    if (holds(slot)) return false;
    if (count_ < kMost) slots_[count_++] = slot;
    return true;
  }
  /// Whether a store of the slot might not have been read.
  bool holds(const void* slot) const {
    for (int i = 0; i < count_; ++i)
      if (slots_[i] == slot) return true;
    return false;
  }
  /// All but the `most` youngest stores have been read.
  void wait(int most) {
    const int read = count_ > most ? count_ - most : 0;
    for (int i = read; i < count_; ++i) slots_[i - read] = slots_[i];
    count_ -= read;
  }

 private:
  static constexpr int kMost = 64;  // more than the slots of a block's stagings; no slot is listed twice
  const void* slots_[kMost] = {};
  int count_ = 0;
};

/// Returns what is wrong with a copy between shared memory and a tensor from column `col` on, or null. Such copies move whole pieces of 16
/// bytes.
template <class T>
constexpr const char* cut_piece(int col) {
  if (col * static_cast<int>(sizeof(T)) % 16 == 0) return nullptr;
  return "a copy to or from shared memory begins at a column that is no multiple of 16 bytes: on a GPU it would fault";
}
inline constexpr const char* kWrittenUnderAStore =
    "a staging slot is written while a store may still read it: on a GPU other values than the tile's would leave";
#endif

}  // namespace tw
