#pragma once

#include "tilewave/tile/cuda/copy.tile.hpp"
#include "tilewave/tile/cuda/products.tile.hpp"
#include "tilewave/tile/cuda/ring.tile.hpp"
#include "tilewave/tile/cuda/target.tile.hpp"

namespace tw::cuda {

/// How many groups of copies the threads have issued, and how many are known to have arrived. Every thread has the same numbers.
struct Copies {
  u32 issued = 0;
  u32 unseen = 0;    ///< how many of the youngest may not be visible to all threads yet
  u32 meetings = 0;  ///< how often the threads have met; slots released before may be filled again
};

/// Finds out whether the slots of a step are free: load() runs on a copy of the rings' state and copies nothing.
struct Probe {
  u32 meetings;
  bool& room;
  template <class G>
  TW_INLINE void prefetch(const G&, int, int, int, int) const {}
  TW_INLINE void wait_for_previous_launch() const {}
  template <int N, class RingType>
  TW_INLINE void limit(const RingType&) const {}
  template <class RingType, class Fill>
  TW_INLINE void put(RingType& ring, Fill) const {
    room = room && ring.has_room(meetings);
    ++ring.put;
  }
};

/// Starts copies into slots that are free.
template <bool kPieces, int Threads>
struct Producer {
  int thread;
  Copies& copies;
  template <class G>
  TW_INLINE void prefetch(const G&, int, int, int, int) const {}
  TW_INLINE void wait_for_previous_launch() const {}
  template <int N, class RingType>
  TW_INLINE void limit(const RingType&) const {}
  template <class RingType, class Fill>
  TW_INLINE void put(RingType& ring, Fill fill) const {
    auto& slot = ring.slot(ring.put);
    using Copy = conditional<kPieces, AsyncCopy<Threads>, StridedCopy<Threads>>;
    fill(conditional<RingType::gathers, Gathering<Copy>, Copy>(thread), slot);
    if constexpr (kPieces) ptx::copy_commit();
    ring.fill(copies.issued++);
    ++copies.unseen;
  }
};

/// A block as a kernel with rings sees it. It runs the kernel's load() ahead of compute(), as long as slots are free. `Work`: what load()
/// takes for a tile, or a pointer to it.
template <class On, class T, class Work>
struct MultistageBlock : ProductBlock<Shape<On, T>::warps(), T::piece_loads, T::piece_stores> {
  using Base = ProductBlock<Shape<On, T>::warps(), T::piece_loads, T::piece_stores>;
  using Base::at, Base::sync;
  using Params = typename On::Params;
  using Memory = typename On::Memory;

  const Params& params;
  Memory& memory;
  Work loading;             ///< the tile whose steps are being loaded
  int step = 0, steps = 0;  ///< the next step to load, and the number of steps
  Copies copies;
  bool late = false;  ///< whether this warp still has loads to issue after its next product

  TW_INLINE MultistageBlock(const Params& p, Memory& m) : Base{0}, params(p), memory(m) {}

  // Rings

  /// Starts to load a tile. All steps of the previous tile have been taken and released.
  TW_INLINE void begin(const Work& work) {
    loading = work;
    step = 0;
    steps = On::steps(params, tile());
    late = false;  // a warp may have left out the last product
  }
  /// The same, and already loads as many steps as there are free slots for.
  TW_INLINE void load_early(const Work& work) {
    begin(work);
    meet();
    load_ahead();
  }

  /// Waits for the next slot of the ring to be full.
  template <class RingType>
  TW_INLINE auto& take(RingType& ring) {
    load_late();
    if (ring.put == ring.taken) {
      meet();
      load_ahead();
      if (ring.put == ring.taken) ptx::trap();  // the kernel never releases the slots that the next step needs
    }
    const u32 younger = (copies.issued - 1 - ring.group()) & 0xff;
    if (younger < copies.unseen) {
      wait_for_copies(younger);
      copies.unseen = younger;
      meet();
      if (kLate && late_warp())
        late = true;
      else
        load_ahead();
    }
    return ring.slot(ring.taken++);
  }
  /// Frees the oldest slot taken.
  template <class RingType>
  TW_INLINE void release(RingType& ring) const {
    ring.release(copies.meetings);
  }

  // Solos: all warps load, so they also compute together.

  template <class Fn>
  TW_INLINE void solo(int, Fn f) {
    f(*this);
  }
  template <class Fn>
  TW_INLINE void join(int, Fn) const {
    sync();
  }

  // Products. Loads that a warp has put off begin after them.

  template <class... A>
  TW_INLINE void mma(A&&... a) {
    Base::mma(a...);
    load_late();
  }
  template <class... A>
  TW_INLINE void add_products(A&&... a) {
    Base::add_products(a...);
    load_late();
  }
  template <class... A>
  TW_INLINE void add_products_of_groups(A&&... a) {
    Base::add_products_of_groups(a...);
    load_late();
  }

 private:
  static constexpr int threads = Shape<On, T>::threads;

  TW_INLINE const auto& tile() const {
    if constexpr (requires { *loading; })
      return *loading;
    else
      return loading;
  }
  /// Waits until all threads have arrived. They then see the copies that the others have waited for, and slots released before may be
  /// filled.
  TW_INLINE void meet() {
    sync();
    ++copies.meetings;
  }
  /// Loads as many steps as there are free slots for.
  TW_INLINE void load_ahead() {
    TW_NO_UNROLL
    while (step < steps) {
      bool room = true;
      Memory as_if = memory;
      const Probe probe{copies.meetings, room};
      On::load(probe, params, tile(), step, as_if);
      if (!room) break;
      const Producer<T::piece_loads, threads> producer{static_cast<int>(ptx::thread_index()), copies};
      On::load(producer, params, tile(), step, memory);
      ++step;
    }
  }
  /// Where each of an SM's four schedulers has two warps, one of them loads before its product and the other after it, so that one keeps
  /// the tensor cores busy while the other computes addresses.
  static constexpr bool kLate = threads == 256 && T::piece_loads;
  TW_INLINE bool late_warp() const { return at.block_warp() >= threads / 64; }
  TW_INLINE void load_late() {
    if constexpr (kLate) {
      if (late) load_ahead();
      late = false;
    }
  }
  /// Waits until all but this thread's `most` youngest groups have arrived.
  static TW_INLINE void wait_for_copies(u32 most) {
    if constexpr (T::piece_loads) {
      if (most >= 4)
        ptx::copy_wait<4>();
      else if (most == 3)
        ptx::copy_wait<3>();
      else if (most == 2)
        ptx::copy_wait<2>();
      else if (most == 1)
        ptx::copy_wait<1>();
      else
        ptx::copy_wait<0>();
    }
  }
};

}  // namespace tw::cuda
