#pragma once

#include "tilewave/tile/buffers.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

#if !TW_ON_GPU

namespace tw {

namespace detail {
/// Bytes that a kernel's Memory takes from the target's allocator.
template <class On, class Allocator>
i64 memory_bytes_of() {
  if constexpr (requires { typename On::Memory; }) {
    Allocator allocator;
    typename On::Memory memory(allocator);
    static_cast<void>(memory);
    return allocator.used;
  } else {
    return 0;
  }
}
}  // namespace detail

/// The base of blocks on targets without threads. It holds the checks of Fragments, Buffers, staging slots and barriers that these targets
/// have in common. `kRows`: the rows of the kernel's Fragments.
template <int kRows>
class BlockModel {
 public:
  /// Barriers, fences and waits order the uses of Buffers.
  void sync() const { buffers_.sync(); }
  void sync_warpgroup() const {
    if constexpr (kRows <= kWarpgroupRows)
      buffers_.sync();
    else
      buffers_.sync_warpgroup();
  }
  void fence() const { buffers_.fence(); }

 protected:
  static constexpr int kWarpgroupRows = 64;
  mutable BufferModel buffers_;  // a kernel's block may be const

  BlockModel(UnreadStores& unread_stores, BufferUse* last_buffer) : unread_stores_(unread_stores), last_buffer_(last_buffer) {}

  /// Checks that a tile in registers belongs to this block.
  template <class F>
  static constexpr void own() {
    if constexpr (requires { F::warpgroups; }) {
      static_assert(F::warpgroups * kWarpgroupRows == kRows, TW_FRAGMENT_ROWS);
    } else if constexpr (requires { F::kind; }) {
      static_assert(F::kind == TileKind::rows || F::rows == kRows, TW_FRAGMENT_ROWS);
      static_assert(F::kind == TileKind::rows || accumulates<typename F::Element>, TW_ACCUMULATES);
    }
  }
  /// Whether the Fragment has the kernel's rows, 64 for each warpgroup.
  template <class F>
  static constexpr bool is_default = F::kind == TileKind::fragment&& F::rows == kRows;
  /// The part of a Buffer that a warpgroup accesses when the block loads or stores a Fragment.
  template <class F>
  static constexpr Reach reach = is_default<F> ? Reach::warpgroup : Reach::block;
  /// Its address identifies the type.
  template <class F>
  static constexpr char dealing = 0;
  /// The use record of the Buffer that an operand of a product is, or is a view of; null for other operands.
  static BufferUse* use_of(const auto& operand) {
    if constexpr (requires { operand.use; })
      return &operand.use;
    else if constexpr (requires { operand.source; })
      return use_of(operand.source);
    else
      return nullptr;
  }
  /// Issues the stores of a tile through `staging`, as a GPU would. Returns what is wrong with them, or null.
  template <class Staging>
  const char* issue_stores(const Staging& staging, int col) const {
    const char* problem = cut_piece<typename Staging::Element>(col);
    for_panels<Staging>([&](auto left) { unread_stores_.wait(left.value); },
                        [&](int, int slot) {
                          if (!unread_stores_.issue(staging.slot + slot)) problem = kWrittenUnderAStore;
                        });
    return problem;
  }
  /// Returns what would be wrong if the block's next tile began now, or null.
  const char* at_the_end() const { return buffers_.at_the_end(last_buffer_); }

 private:
  UnreadStores& unread_stores_;
  BufferUse* last_buffer_;
};

}  // namespace tw

#endif  // !TW_ON_GPU
