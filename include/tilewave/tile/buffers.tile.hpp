#pragma once

#include "tilewave/tile/staging.tile.hpp"

// A Buffer is shared memory that the computing threads write. Threads read it, and so do tensor cores, asynchronously. On a GPU only the
// kernel orders these accesses: fence() makes a thread's stores visible to tensor cores, barriers let threads wait for each other, wait()
// waits for asynchronous reads. Targets without threads check that the kernel does enough of this: they keep a BufferModel, in which every
// event has a time.

#if !TW_ON_GPU
namespace tw {

inline constexpr const char* kBufferUnwritten = "a Buffer is read before anything was stored to it";
inline constexpr const char* kBufferLoadedTooEarly =
    "a Buffer is loaded before a barrier: sync() between store and load, so that the other threads' elements are there";
inline constexpr const char* kBufferWithoutFence =
    "tensor cores read a Buffer that was stored to after the last fence(): on a GPU they could read what was there before";
inline constexpr const char* kBufferWithoutBarrier =
    "tensor cores read a Buffer before a barrier: sync() between fence() and the product, so that all threads have stored";
inline constexpr const char* kBufferUnderAProduct = "a Buffer is written while a product reads it: wait for it first";
inline constexpr const char* kBufferStillRead =
    "a Buffer is written while other threads or their products may still read it: sync() between their last use and the store";
inline constexpr const char* kBufferWrittenTwice =
    "a Buffer is stored to by other threads than before, without a barrier between: sync() between the stores";
inline constexpr const char* kSoloOpen = "a solo begins before the last one was joined: join() between them";
inline constexpr const char* kSoloTwice =
    "the same warpgroup plays two solos one after the other: their numbers are alternately even and odd";
inline constexpr const char* kSoloMissing = "join() of a solo that has not been played";
inline constexpr const char* kBufferLeftInUse =
    "the tile ends while a Buffer may still be read: wait for its readers and sync(), since the block's next tile writes it";

/// The part of a Buffer that one access can touch: the 64 rows of the thread's warpgroup, or all of it.
enum class Reach { warpgroup, block };

/// The last accesses to a Buffer, as times; 0 means never.
struct BufferUse {
  int written = 0;
  Reach written_reach = Reach::block;
  const void* written_as = nullptr;  ///< identifies the type that distributed its elements over threads
  int read_by_warpgroup = 0;         ///< time of the last read with that reach
  int read_by_block = 0;
  int products = 0;  ///< products in flight that read it
  BufferUse* previous = nullptr;
};

/// Events happen in the order of the kernel's text, which is also the order in each thread. Members return what is wrong with the kernel,
/// or null.
class BufferModel {
 public:
  void fence() { fence_ = ++now_; }
  void sync() {
    block_.barrier = warpgroup_.barrier = ++now_;
    block_.fenced = warpgroup_.fenced = fence_;
  }
  void sync_warpgroup() {
    warpgroup_.barrier = ++now_;
    warpgroup_.fenced = fence_;
  }

  /// A warpgroup begins its solo, or goes on with it. What it alone has read, when it joined the last one, it may overwrite.
  const char* solo(int n) {
    if (playing_ && n != solo_) return kSoloOpen;
    if (!playing_ && solo_ >= 0 && (n - solo_) % 2 == 0) return kSoloTwice;
    playing_ = true;
    solo_ = n;
    return nullptr;
  }
  /// The other warpgroup waits for the solo. Then it reads, until end_join().
  const char* join(int n) {
    if (!playing_ || n != solo_) return kSoloMissing;
    playing_ = false;
    joining_ = true;
    sync();
    return nullptr;
  }
  void end_join() { joining_ = false; }

  const char* store(BufferUse& use, Reach reach, const void* as) {
    if (const char* problem = still_read(use, reach)) return problem;
    if (use.written > seen(reach, use.written_reach).barrier && use.written_as != as) return kBufferWrittenTwice;
    written(use, reach, as);
    return nullptr;
  }
  const char* load(BufferUse& use, Reach reach) {
    if (use.written == 0) return kBufferUnwritten;
    if (use.written > seen(reach, use.written_reach).barrier) return kBufferLoadedTooEarly;
    has_read(use, reach);
    return nullptr;
  }
  /// Threads read and write elements of one or more Buffers in any order between two barriers.
  template <class... Use>
  const char* update(Use&... uses) {
    for (BufferUse* use : {&uses...}) {
      if (const char* problem = still_read(*use, Reach::block)) return problem;
      if (use->written > block_.barrier) return kBufferLoadedTooEarly;
    }
    (written(uses, Reach::block, nullptr), ...);
    sync();
    return nullptr;
  }
  /// A product that reads up to two Buffers was issued. Null stands for an operand that is not a Buffer.
  const char* product(BufferUse* a, Reach a_reach, BufferUse* b) {
    Product& product = products_[in_flight_ < kMost ? in_flight_++ : kMost - 1];
    product = {{a, b}, {a_reach, Reach::block}};
    for (int i = 0; i < 2; ++i) {
      if (product.use[i] == nullptr) continue;
      if (const char* problem = asynchronous(*product.use[i], product.reach[i])) return problem;
      ++product.use[i]->products;
    }
    return nullptr;
  }
  /// All but the `left` youngest products have finished.
  void wait(int left) {
    const int done = in_flight_ > left ? in_flight_ - left : 0;
    for (int n = 0; n < done; ++n) {
      for (int i = 0; i < 2; ++i) {
        if (BufferUse* const use = products_[n].use[i]) {
          --use->products;
          has_read(*use, products_[n].reach[i]);
        }
      }
    }
    in_flight_ -= done;
    for (int n = 0; n < in_flight_ && n + done < kMost; ++n) products_[n] = products_[n + done];
  }
  /// Whether a Buffer would still be in use if the block's next tile wrote the same memory. `last` is the last of the block's Buffers,
  /// which are linked.
  const char* at_the_end(const BufferUse* last) const {
    for (const BufferUse* use = last; use != nullptr; use = use->previous) {
      if (use->products > 0 || use->read_by_block > block_.barrier || use->read_by_warpgroup > warpgroup_.barrier) return kBufferLeftInUse;
    }
    return nullptr;
  }

 private:
  struct Seen {
    int barrier = 0;  ///< time of the last barrier
    int fenced = 0;   ///< time of the last fence before that barrier
  };
  struct Product {
    BufferUse* use[2];
    Reach reach[2];
  };
  static constexpr int kMost = 16;
  int now_ = 0, fence_ = 0;
  Seen block_, warpgroup_;
  Product products_[kMost];  // the first `in_flight_` are valid
  int in_flight_ = 0;
  int solo_ = -1;  ///< the last one's number
  bool playing_ = false, joining_ = false;

  /// The barrier that orders two accesses: a barrier of the warpgroup is enough if both concern that warpgroup only.
  const Seen& seen(Reach a, Reach b) const { return a == Reach::warpgroup && b == Reach::warpgroup ? warpgroup_ : block_; }
  void written(BufferUse& use, Reach reach, const void* as) {
    use.written = ++now_;
    use.written_reach = reach;
    use.written_as = as;
  }
  void has_read(BufferUse& use, Reach reach) {
    if (!joining_) (reach == Reach::block ? use.read_by_block : use.read_by_warpgroup) = ++now_;
  }
  const char* still_read(const BufferUse& use, Reach reach) const {
    if (use.products > 0) return kBufferUnderAProduct;
    if (use.read_by_block > block_.barrier || use.read_by_warpgroup > seen(reach, Reach::warpgroup).barrier) return kBufferStillRead;
    return nullptr;
  }
  const char* asynchronous(const BufferUse& use, Reach reach) const {
    if (use.written == 0) return kBufferUnwritten;
    if (use.written > fence_) return kBufferWithoutFence;
    if (use.written > seen(reach, use.written_reach).fenced) return kBufferWithoutBarrier;
    return nullptr;
  }
};

}  // namespace tw
#endif
