#pragma once

#include "tilewave/tile/cuda/block.tile.hpp"
#include "tilewave/tile/sm_90a/memory.tile.hpp"
#include "tilewave/tile/sm_90a/wgmma.tile.hpp"

namespace tw::sm_90a {

/// The consumer role as a kernel sees it: all consumer warpgroups at once, or those of one of `Teams`.
template <int Warpgroups, bool kTmaLoad, bool kTmaStore, int Cluster, int Teams = 1>
struct Block : cuda::BlockBase<Warpgroups * 4, kTmaLoad, kTmaStore> {
  using Base = cuda::BlockBase<Warpgroups * 4, kTmaLoad, kTmaStore>;
  using Base::add_products, Base::at, Base::first_thread, Base::load, Base::store, Base::for_each, Base::sync;
  int warpgroup = Warpgroups == 1 ? 0 : ptx::uniform(at.warpgroup);  ///< at.warpgroup, for descriptors

  // Rings

  /// Waits for the next slot of the ring to be full.
  template <class RingType>
  TW_INLINE auto& take(RingType& ring) const {
    const auto cursor = ring.next;
    if constexpr (Teams > 1) {
      if (ring.awaits_turn) begin_turn();
      ring.awaits_turn = false;
    }
    ptx::wait(ring.full_barrier(cursor.index), cursor.parity);
    ring.next.advance();
    if constexpr (Teams > 1) {
      if (--ring.until_turn == 0) end_turn();
    }
    see_copies<RingType>();
    return ring.slot(cursor.index);
  }
  /// Waits until the slot is full that comes `ahead` slots after the next one to take. It is not taken.
  template <class RingType>
  TW_INLINE auto& peek(RingType& ring, int ahead) const {
    const bool wraps = ring.next.index + ahead >= RingType::stages;
    const int index = ring.next.index + ahead - (wraps ? RingType::stages : 0);
    ptx::wait(ring.full_barrier(index), ring.next.parity ^ (wraps ? 1u : 0u));
    see_copies<RingType>();
    return ring.slot(index);
  }
  /// Frees the oldest slot taken. The products that read it must have finished.
  template <class RingType>
  TW_INLINE void release(RingType& ring) const {
    u64* const empty = ring.empty_barrier(ring.released.index);
    const u32 thread = ptx::thread_index() % kWarpgroupThreads;
    if constexpr (Cluster == 1) {
      if (thread == 0) ptx::arrive(empty);
    } else {
      if (thread < Cluster) ptx::arrive_at(empty, thread);
    }
    ring.released.advance();
  }

  // Teams. A barrier's parity tells one use of a slot from the next, not from the one after that: so a team waits for its slots only when
  // the one before has taken all of its own.

  TW_INLINE void begin_turn() const {
    ptx::named_barrier(static_cast<u32>(kTeamBarrier + this->first_warpgroup / Warpgroups), 2 * Warpgroups * kWarpgroupThreads);
  }
  /// Lets the next team take slots.
  TW_INLINE void end_turn() const {
    const int team = this->first_warpgroup / Warpgroups + 1;
    ptx::named_barrier_arrive(static_cast<u32>(kTeamBarrier + (team == Teams ? 0 : team)), 2 * Warpgroups * kWarpgroupThreads);
  }

  // Solos

  /// Calls f(one) in warpgroup n % 2, where `one` is the block that this warpgroup alone is. The other one goes on.
  template <class Fn>
  TW_INLINE void solo(int n, Fn f) const {
    static_assert(Warpgroups == 2 && Teams == 1, TW_SOLO);
    if (is_soloist(n)) {
      const auto one = alone();
      f(one);
    }
  }
  /// Calls f(one) in the other warpgroup, while solo n is played, before that warpgroup joins it.
  template <class Fn>
  TW_INLINE void meanwhile(int n, Fn f) const {
    if (!is_soloist(n)) {
      const auto one = alone();
      f(one);
    }
  }
  /// Lets the other warpgroup wait until solo n has come here, and calls f(one) there. What the solo stored is there for ordinary loads.
  template <class Fn>
  TW_INLINE void join(int n, Fn f) const {
    const u32 barrier = static_cast<u32>(kSoloBarrier + (n & 1));
    if (is_soloist(n)) {
      ptx::named_barrier_arrive(barrier, Warpgroups * kWarpgroupThreads);
    } else {
      ptx::named_barrier(barrier, Warpgroups * kWarpgroupThreads);
      const auto one = alone();
      f(one);
    }
  }

  // Products

  /// acc(m, n) (+)= sum over k of a(m, k) b(n, k), both from shared memory. Asynchronous: see wait(). `overwrite` starts from zero.
  template <class Acc, class A, class B>
  TW_INLINE void mma(Acc& acc, const A& a, const B& b, bool overwrite) const {
    Base::template own<Acc>();
    multiply(acc, cuda::in_shared(a), cuda::in_shared(b), overwrite);
  }
  /// The same with the left operand in registers.
  template <class Acc, class T, int R, int C, class B>
  TW_INLINE void mma(Acc& acc, const Operand<T, R, C>& a, const B& b, bool overwrite) const {
    Base::template own<Acc>();
    static_assert(Acc::rows == R && row_blocks<Acc> == 1, TW_OPERAND_ROWS);
    multiply_registers(acc, a, cuda::in_shared(b), overwrite);
  }
  /// The same with a 2:4 sparse left operand. It begins when all products in flight have finished.
  template <class Acc, class Values, class Metadata, class B>
  TW_INLINE void mma(Acc& acc, const Sparse<Values, Metadata>& a, const B& b, bool overwrite) const {
    Base::template own<Acc>();
    multiply_sparse(acc, a, cuda::in_shared(b), overwrite);
  }
  /// All but the `Left` youngest mma() have finished; the accumulators named may be read.
  template <int Left, class... Acc>
  TW_INLINE void wait(Constant<Left>, Acc&... acc) const {
    ptx::wgmma_wait<Left>();
    (pin(acc), ...);
  }

  /// sums(r, n) += the sum over this warp's columns of a(r, c) * operand(n, c), where a is the warp's R rows of the tile, or those of its
  /// codes, times their scales. With DigitScales the operand has digits, and the tile integers. All warps of the warpgroup have read the
  /// tile when it returns, so the slot may be released.
  template <class T, int R, int N, int C, class S, class Scales = Unscaled>
  TW_INLINE void add_products(DividedSums<R, N, Warpgroups * 4>& sums, const S& tile,
                              const DividedOperand<T, N, C, Warpgroups * 4>& operand, const Scales& scales = {}) const {
    if constexpr (is_same<typename S::Element, T>)
      cuda::add_divided(at, sums, tile, operand);
    else if constexpr (is_same<Scales, cuda::DigitScales<N, Warpgroups * 4>>)
      cuda::add_divided_digits(at, sums, tile, operand, scales);
    else if constexpr (is_same<T, i8>)
      cuda::add_divided_integers(at, sums, tile, operand);
    else
      cuda::add_divided_codes(at, sums, tile, operand, scales);
    this->sync_warpgroup(at);  // end_reads() would also wait for loads from global memory that are in flight
  }
  /// The same for a tile whose rows are in groups of 8: the first group of each warp, then the second.
  template <class T, int R, int N, int C, class S, class Scales = Unscaled>
  TW_INLINE void add_products_of_groups(DividedSums<R, N, Warpgroups * 4>& sums, const S& tile,
                                        const DividedOperand<T, N, C, Warpgroups * 4>& operand, const Scales& scales = {}) const {
    if constexpr (is_same<typename S::Element, T>)
      cuda::add_divided<true>(at, sums, tile, operand);
    else if constexpr (is_same<Scales, cuda::DigitScales<N, Warpgroups * 4>>)
      cuda::add_divided_digits<true>(at, sums, tile, operand, scales);
    else
      cuda::add_divided_codes<true>(at, sums, tile, operand, scales);
    this->sync_warpgroup(at);
  }

  /// Loads a tile in shared memory as a left operand in registers. Each warpgroup loads its 64 rows; if the tile has fewer rows than the
  /// kernel, several warpgroups load the same ones. All its warps have read the tile when it returns, so the slot may be released.
  template <class T, int R, int C>
  TW_INLINE void load(Operand<T, R, C>& to, const Shared<T, R, C, Contract::columns>& from) const {
    using S = Shared<T, R, C, Contract::columns>;
    const int row =
        at.warpgroup * kWarpgroupRows % R + at.warp * 16 + at.lane % 16;  // lanes 0-15 address the left half of a step, 16-31 the right
    constexpr int k = instruction_depth<S>;
    TW_UNROLL
    for (int step = 0; step < C / k; ++step)
      ptx::load_matrix_x4(ptx::address(from.bytes) + static_cast<u32>(S::offset(row, step * k + at.lane / 16 * (k / 2))), to.x + step * 4);
    end_reads();
  }

  /// Decodes a tile of packed codes: each element is decode(number, scale). All warps of the warpgroup have read the tile when it returns.
  template <class T, int R, int C, class Codes, int Bytes, class Scales, class Decode = TimesScale>
  requires(is_decoded<Codes, T>) TW_INLINE void load(Operand<T, R, C>& to, const Shared<Codes, R, Bytes, Contract::columns>& from,
                                                     const Scales& scales, Decode decode = {}, int first = 0) const {
    load_codes(at, to, from, scales, decode, first);
    end_reads();
  }

  /// The same through shared memory, by TMA where the tensor allows it: whole lines are written whatever the fragment's layout is. Rows
  /// from `rows_end` on are left alone.
  template <class T, int R, int C, class G>
  TW_INLINE void store(const Fragment<float, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row0, int col0, int i = 0,
                       int j = 0, int rows_end = kAllRows) const {
    if constexpr (sizeof(T) != 2) {
      store_rows(from, to, row0, col0, i, j, rows_end);
    } else {
      Base::template own<Fragment<float, R, C>>();
      store_panels(from.x, staging, to, row0 + here().warpgroup * kWarpgroupRows, col0, i, j, rows_end);
    }
  }
  template <class T, int R, int C, class G>
  TW_INLINE void store(const TallFragment<float, R, C, Warpgroups>& from, const Staging<T, R, C>& staging, const G& to, int row0, int col0,
                       int i = 0, int j = 0, int rows_end = kAllRows) const {
    if constexpr (sizeof(T) != 2) {
      store_rows(from, to, row0, col0, i, j, rows_end);
    } else {
      using F = TallFragment<float, R, C, Warpgroups>;
      const int first = row0 + here().warpgroup * F::row_blocks * kWarpgroupRows;
      TW_UNROLL
      for (int block = 0; block < F::row_blocks; ++block)
        store_panels(from.x + block * F::tile_size, staging, to, first + block * kWarpgroupRows, col0, i, j, rows_end);
    }
  }
  /// to(row0 + col, col0 + row) = from(row, col), through the same memory.
  template <class T, int R, int C, class G>
  TW_INLINE void store_transposed(const Fragment<float, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row0, int col0,
                                  int i = 0, int j = 0) const {
    using S = Staging<T, R, C>;
    static_assert(sizeof(T) == 2 && C % kWarpgroupRows == 0, TW_STORED_TRANSPOSED);
    Base::template own<Fragment<float, R, C>>();
    const Position at = here();
    // stmatrix takes the rows of matrix n from lanes 8 n to 8 n + 7, and transposes each matrix: rows are columns of `from`.
    const int matrix_row = at.lane / 16 * 8 + at.lane % 8;
    const u32 piece = static_cast<u32>(at.warp * 2 + at.lane / 8 % 2) ^ (static_cast<u32>(matrix_row) & 7);
    stage_panels<S>(
        at, staging,
        [&](int panel, u8* slot) {
          TW_UNROLL
          for (int group = 0; group < kWarpgroupRows / 16; ++group) {
            const float* x = from.x + panel * (kWarpgroupRows / 2) + group * 8;
            ptx::store_matrix_x4_transposed(ptx::address(slot) + static_cast<u32>(group * 16 + matrix_row) * kPanelBytes + piece * 16,
                                            ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]),
                                            ptx::pack<T>(x[6], x[7]));
          }
        },
        [&](int panel, u8* slot) {
          const int row = row0 + panel * kWarpgroupRows, col = col0 + at.warpgroup * kWarpgroupRows;
          if constexpr (kTmaStore) {
            if (ptx::thread_index() % kWarpgroupThreads == 0) ptx::store_4d(to.tensor_map, slot, col, row, i, j);
          } else {
            this->template copy_panel<T>(slot, S::box_cols, to, row, col, i, j, kAllRows);
          }
        });
  }
  /// The same to the window of the tensor that begins at (row0, i0, j0): it may extend past any edge.
  template <class T, int R, int C, class G>
  TW_INLINE void store_window(const Fragment<float, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row0, int col0, int i0,
                              int j0) const {
    const Window& w = to.window;
    if constexpr (kTmaStore && sizeof(T) == 2) {
      static_assert(C % Staging<T, R, C>::box_cols == 0, "columns of a windowed store must fill panels of 128 bytes");
      const int first = here().warpgroup * kWarpgroupRows;
      store_panels(from.x, staging, to, row0 + w.row(first), col0, i0 + w.i(first), j0 + w.j(first));
    } else {
      Base::store_places(from, to, col0, [&](int r) {
        const int in_i = i0 + w.i(r), in_j = j0 + w.j(r);
        return cuda::Place{row0 + w.row(r), in_i, in_j, to.inside_outer(in_i, in_j)};
      });
    }
  }

  // Shared memory, element by element

  /// All warps of the warpgroup have read the tile when it returns, so the slot may be released.
  template <class F, class T, int R, int C, Contract contract>
  requires requires { F::kind; }
  TW_INLINE void load(F& to, Shared<T, R, C, contract>& from) const {
    if constexpr (is_fp8<T> && contract == Contract::columns && requires { F::warp_cols; }) {
      // Neighbouring columns are widened by one instruction.
      using S = Shared<T, R, C, contract>;
      TW_UNROLL
      for (int e = 0; e < F::size; e += 2) {
        const u16 codes = *reinterpret_cast<const u16*>(from.bytes + S::offset(F::row(at, e), F::col(at, e)));
        const u32 pair = ptx::widen_pair<T>(codes);
        to.x[e] = static_cast<float>(bit_cast<f16>(static_cast<u16>(pair)));
        to.x[e + 1] = static_cast<float>(bit_cast<f16>(static_cast<u16>(pair >> 16)));
      }
    } else {
      for_each(to, [&](int row, int col, auto& x) { x = static_cast<float>(from.at(row, col)); });
    }
    end_reads();
  }
  template <class T, class Tile, int N>
  TW_INLINE void load(RowVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    cuda::load_vector(at, to, from);
    end_reads();
  }
  template <class T, class Tile, int N>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    cuda::load_vector(at, to, from);
    end_reads();
  }
  /// When it returns, the elements are visible to all consumer threads and to the tensor cores.
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void store(F& from, Shared<T, R, C, contract>& to) const {
    for_each(from, [&](int row, int col, auto& x) { to.at(row, col) = tw::to<T>(x); });
    ptx::fence_proxy();
    sync();
  }

  // Buffers. Stores are visible to other threads after a barrier, and to tensor cores after fence() and a barrier.

  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void store(const F& from, const Buffer<T, R, C, contract>& to) const {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    Base::template own<F>();
    if constexpr (sizeof(T) == 2 && F::kind == TileKind::fragment) {
      for_matrices<false>(from, to.tile(), [](u32 address, const auto* x) {
        ptx::store_matrix_x4(address, ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]),
                             ptx::pack<T>(x[6], x[7]));
      });
    } else {
      cuda::store_pieces(at, from, to.tile());
    }
  }
  /// to(col, row) = from(row, col).
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void store_transposed(const F& from, const Buffer<T, R, C, contract>& to) const {
    static_assert(F::rows == C && F::cols == R, "a Buffer has its Fragment's shape, transposed");
    Base::template own<F>();
    if constexpr (sizeof(T) == 2) {
      for_matrices<true>(from, to.tile(), [](u32 address, const auto* x) {
        ptx::store_matrix_x4_transposed(address, ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]),
                                        ptx::pack<T>(x[6], x[7]));
      });
    } else {
      cuda::store_transposed_elements(at, from, to.tile());
    }
  }
  template <class F, class T, int R, int C, Contract contract>
  TW_INLINE void load(F& to, const Buffer<T, R, C, contract>& from) const {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    Base::template own<F>();
    if constexpr (sizeof(T) == 2 && F::kind == TileKind::fragment) {
      for_matrices<false>(to, from.tile(), [](u32 address, auto* x) {
        u32 pairs[4];
        ptx::load_matrix_x4(address, pairs);
        TW_UNROLL
        for (int n = 0; n < 8; ++n) x[n] = static_cast<float>(bit_cast<T>(static_cast<u16>(pairs[n / 2] >> n % 2 * 16)));
      });
    } else {
      cuda::load_pieces(at, to, from.tile());
    }
  }
  template <class T, int R, int C>
  TW_INLINE void load(Operand<T, R, C>& to, const Buffer<T, R, C, Contract::columns>& from) const {
    load(to, from.tile());
  }
  /// Orders this thread's stores to shared memory before what tensor cores read after the next barrier.
  TW_INLINE void fence() const { ptx::fence_proxy(); }
  /// Adds the Fragment's elements to the tensor's, from (row, col) on, where column c is the tensor's even_first(c). Elements outside the
  /// tensor are dropped. The order in which blocks add is not defined. Asynchronous: waits only until the Fragment before has left the
  /// Outbox, and not for other warpgroups.
  template <class F, int R, int C, class G>
  TW_INLINE void reduce_add(const F& from, Outbox<R, C>& box, const G& to, int row, int col, int i = 0, int j = 0) const {
    if constexpr (kTmaLoad && kTmaStore)
      send(from, box, {to.tensor_map, row, col, i, j, nullptr, 0});
    else
      Base::reduce_add(from, box, to, row, col, i, j);
  }
  /// The same when `turn` blocks have added at this counter, one of `counters` that began at 0: in the order of their turns.
  template <class F, int R, int C, class G>
  TW_INLINE void reduce_add_in_turn(const F& from, Outbox<R, C>& box, const G& to, int row, int col, int i, int j, u32* counters,
                                    i64 counter, int turn) const {
    if constexpr (kTmaLoad && kTmaStore)
      send(from, box, {to.tensor_map, row, col, i, j, counters + counter, static_cast<u32>(turn)});
    else
      Base::reduce_add_in_turn(from, box, to, row, col, i, j, counters, counter, turn);
  }
  /// Lets the warp that adds end.
  template <class Box>
  TW_INLINE void close(Box& box) const {
    ptx::wait(barrier_at(box.empty), box.parity);
    if (this->thread() == 0) box.parcel().tensor_map = nullptr;
    hand_over();
  }
  /// What that warp does until then. `leader`: the one of its threads that adds.
  template <int R, int C>
  static TW_INLINE void add_all(const Outbox<R, C>& box, bool leader) {
    using S = typename Outbox<R, C>::Layout;
    TW_NO_UNROLL
    while (true) {
      ptx::named_barrier(kOutboxBarrier, kHandOverThreads);
      const Parcel parcel = box.parcel();
      if (parcel.tensor_map == nullptr) return;
      if (leader) {
        if (parcel.counter != nullptr) {
          ptx::await(parcel.counter, parcel.turn);
          ptx::fence_proxy_global();
        }
        TW_UNROLL
        for (int panel = 0; panel < S::panels; ++panel) {
          ptx::add_4d(parcel.tensor_map, box.tile().bytes + panel * S::panel_bytes, parcel.col + panel * S::panel_cols, parcel.row,
                      parcel.i, parcel.j);
        }
        ptx::store_commit();
        ptx::store_wait_read<0>();
        ptx::arrive(barrier_at(box.empty));
        if (parcel.counter != nullptr) {
          ptx::store_wait_all();
          ptx::add_release(parcel.counter, 1);
        }
      }
      ptx::warp_sync();
    }
  }

  /// Sets the tile's rows from `first` on to zero, for this warpgroup's next products.
  template <class T, int R, int C, Contract contract>
  TW_INLINE void zero_rows(Shared<T, R, C, contract>& tile, int first) const {
    using S = Shared<T, R, C, contract>;
    constexpr int pieces = kPanelBytes / 16;
    const Position at = here();
    TW_NO_UNROLL
    for (int n = first * pieces + at.warp * 32 + at.lane; n < R * pieces; n += kWarpgroupThreads) {
      TW_UNROLL
      for (int panel = 0; panel < S::panels; ++panel)
        ptx::store_shared_16(ptx::address(tile.bytes) + static_cast<u32>(panel * S::panel_bytes + n * 16), 0, 0, 0, 0);
    }
    ptx::fence_proxy();
    this->sync_warpgroup(at);
  }

 private:
  /// The tensor cores are about to read what threads have copied. Who widens it fences what it writes.
  template <class RingType>
  static TW_INLINE void see_copies() {
    if constexpr (RingType::gathers && !requires { RingType::Slot::arriving_bytes; }) ptx::fence_proxy();
  }
  TW_INLINE bool is_soloist(int n) const { return (n & 1) == warpgroup; }
  TW_INLINE auto alone() const { return Block<1, kTmaLoad, kTmaStore, Cluster>{kWarpgroupThreads * (1 + warpgroup), warpgroup}; }
  static constexpr u32 kHandOverThreads = Warpgroups * kWarpgroupThreads + 32;  // those that compute, and the warp that adds
  TW_INLINE void hand_over() const { ptx::named_barrier_arrive(kOutboxBarrier, kHandOverThreads); }
  /// A matrix of 8 rows and 16 bytes has one number of each of a thread's pairs of neighbours, so that it goes to 32 different banks.
  template <class F, int R, int C>
  TW_INLINE void send(const F& from, Outbox<R, C>& box, const Parcel& parcel) const {
    static_assert(F::rows == R && F::cols == C, "an Outbox has its Fragment's shape");
    Base::template own<F>();
    ptx::wait(barrier_at(box.empty), box.parity);
    box.parity ^= 1;
    using S = typename Outbox<R, C>::Layout;
    static_assert(F::warp_cols % S::panel_cols == 0, "each warp has whole panels of 32 columns of a Fragment that is added");
    // One address, from which the others differ by constants: registers are short where sums are added.
    const int row = F::row(at, 0) - at.lane / 4 + at.lane / 16 * 8 + at.lane % 8;
    const u32 first = ptx::address(box.tile().bytes) + static_cast<u32>(S::offset(row, F::warp_col(at) + at.lane / 8 % 2 * 4));
    TW_UNROLL
    for (int e = 0; e < F::size; e += 4) {
      const int block = e / F::tile_size, col = e % F::tile_size * 2;
      const u32 address = (first ^ static_cast<u32>(col % S::panel_cols * 4)) +
                          static_cast<u32>(block * kWarpgroupRows * kPanelBytes + col / S::panel_cols * S::panel_bytes);
      ptx::store_matrix_x4(address, bit_cast<u32>(from.x[e]), bit_cast<u32>(from.x[e + 1]), bit_cast<u32>(from.x[e + 2]),
                           bit_cast<u32>(from.x[e + 3]));
    }
    ptx::fence_proxy();
    box.parcel() = parcel;  // all threads write the same: a branch here makes ptxas spill
    hand_over();
  }

  using Base::here, Base::kAllRows, Base::store_rows;
  template <class T, int width>
  using Piece = typename Base::template Piece<T, width>;
  /// Completes the warpgroup's reads of slots, which may then be released. The barrier alone is not enough: a read can still be in flight
  /// when its thread passes the barrier, and TMA, which fills the slot next, does not wait for it. The proxy fence does.
  TW_INLINE void end_reads() const {
    ptx::fence_proxy();
    this->sync_warpgroup(at);
  }

  /// The address of the right operand's rows or columns that belong to this warpgroup's columns of the accumulators. Those of large
  /// operands are computed where they are used: beside large accumulators, the addresses of all of a step's products would not fit the
  /// registers.
  template <class Acc, class B>
  TW_INLINE u32 own_columns(const B& b) const {
    u32 first = ptx::address(b.bytes);
    if constexpr (Acc::column_warps > 1) {
      if (B::rows * B::cols > 64 * 64) first = ptx::opaque(first);
      first += static_cast<u32>(columns_offset<B, Acc::warp_cols>(warpgroup / (Warpgroups / Acc::column_warps)));
    }
    return first;
  }
  template <class Acc, class A, class B>
  TW_INLINE void multiply(Acc& acc, const A& a, const B& b, bool overwrite) const {
    constexpr int depth = A::contract == Contract::columns ? A::cols : A::rows;
    static_assert(depth == (B::contract == Contract::columns ? B::cols : B::rows), "both operands contract over the same length");
    static_assert(Acc::rows == (A::contract == Contract::columns ? A::rows : A::cols),
                  "rows of the accumulator and of the left operand differ");
    static_assert(multiplies<typename A::Element, typename B::Element>, TW_MULTIPLIES);
    constexpr int k = instruction_depth<A>;
    constexpr bool split = Acc::column_warps > 1;
    constexpr int row_groups = Warpgroups / Acc::column_warps;  // of warpgroups
    const int row_group = (split ? warpgroup % row_groups : warpgroup) * row_blocks<Acc>;
    const Descriptor a_tile = descriptor<A>(ptx::address(a.bytes) + static_cast<u32>(row_group * warpgroup_offset<A>));
    const Descriptor b_tile = descriptor<B>(own_columns<Acc>(b));
    begin(acc);
    TW_UNROLL
    for (int block = 0; block < row_blocks<Acc>; ++block) {
      TW_UNROLL
      for (int step = 0; step < depth / k; ++step)
        Wgmma<typename A::Element, Acc::warp_cols, typename B::Element>::template shared_shared<transposed<A>, transposed<B>>(
            acc.x + block * Acc::tile_size, a_tile.at(step_offset<A>(step) + block * warpgroup_offset<A>), b_tile.at(step_offset<B>(step)),
            step > 0 || !overwrite);
    }
    ptx::wgmma_commit();
  }
  template <class Acc, class T, int R, int C, class B>
  TW_INLINE void multiply_registers(Acc& acc, const Operand<T, R, C>& a, const B& b, bool overwrite) const {
    static_assert(C == (B::contract == Contract::columns ? B::cols : B::rows), "both operands contract over the same length");
    static_assert(multiplies<T, typename B::Element>, TW_MULTIPLIES);
    const Descriptor b_tile = descriptor<B>(own_columns<Acc>(b));
    // The fence in begin() orders writes of these registers before the products that read them, so the compiler must not move those
    // writes past the fence.
    TW_UNROLL
    for (int i = 0; i < a.row_tiles * a.tile_size; ++i) ptx::computed(a.x[i]);
    begin(acc);
    TW_UNROLL
    for (int step = 0; step < C / instruction_depth<Operand<T, R, C>>; ++step)
      Wgmma<T, Acc::warp_cols, typename B::Element>::template registers_shared<transposed<B>>(
          acc.x, a.x + step * 4, b_tile.at(step_offset<B>(step)), step > 0 || !overwrite);
    ptx::wgmma_commit();
  }
  template <class Acc, class A, class B>
  TW_INLINE void multiply_sparse(Acc& acc, const A& a, const B& b, bool overwrite) const {
    using T = typename A::Element;
    static_assert(A::cols == (B::contract == Contract::columns ? B::cols : B::rows), "both operands contract over the same length");
    static_assert(is_same<T, typename B::Element>, "both operands have one element type");
    static_assert(Acc::column_warps == 1 && row_blocks<Acc> == 1 && Acc::rows == A::rows, "a sparse left operand has the kernel's rows");
    constexpr int words = metadata_words<T>;
    u32 metadata[words];
    // A product in flight reads the registers of its metadata until it has finished, which the compiler does not know.
    ptx::wgmma_wait<0>();
    TW_UNROLL
    for (int w = 0; w < words; ++w) metadata[w] = cuda::metadata_word(a.metadata, (warpgroup * 4 + at.warp) * words + w, at.lane);
    using Values = decltype(a.values);
    const Descriptor a_tile = descriptor<Values>(ptx::address(a.values.bytes) + static_cast<u32>(warpgroup * warpgroup_offset<Values>));
    const Descriptor b_tile = descriptor<B>(ptx::address(b.bytes));
    const auto issue = [&](auto selector, int step, u32 word) {
      SparseWgmma<T, Acc::cols>::template shared_shared<decltype(selector)::value, transposed<B>>(
          acc.x, a_tile.at(step * 32), b_tile.at(sparse_step_offset<B>(step)), word, step > 0 || !overwrite);
    };
    begin(acc);
    TW_UNROLL
    for (int w = 0; w < words; ++w) {  // 64 columns: two instructions of 16-bit elements or one of 8-bit ones
      if constexpr (sizeof(T) == 2) {
        issue(Constant<0>{}, 2 * w, metadata[w]);
        issue(Constant<1>{}, 2 * w + 1, metadata[w]);
      } else {
        issue(Constant<0>{}, w, metadata[w]);
      }
    }
    ptx::wgmma_commit();
  }
  /// Bytes from the right operand's first row or column to the first one of a warpgroup, where each warpgroup before it has `Count`.
  template <class S, int Count>
  static TW_INLINE int columns_offset(int warpgroups_before) {
    const int columns = warpgroups_before * Count;
    if constexpr (S::contract == Contract::columns) {
      return columns * kPanelBytes;
    } else {
      // The swizzle exchanges pieces of 16 bytes of a panel's row by the address, so that part of a panel is read from where it begins.
      static_assert(Count % S::panel_cols == 0 || S::panel_cols % Count == 0,
                    "warpgroups that share rows have whole panels, or equal parts of one");
      return columns / S::panel_cols * S::panel_bytes + columns % S::panel_cols * static_cast<int>(sizeof(typename S::Element));
    }
  }
  /// Calls f(address, x) for every block of 16 rows and 16 columns of a Fragment. x points to the thread's 8 elements; `address` is the row
  /// of an 8 x 8 matrix in `tile` that this lane passes to stmatrix or ldmatrix. The order of the matrices is that of x: upper left, lower
  /// left, upper right, lower right. `kTransposed`: each is transposed, at its place in the transposed tile.
  template <bool kTransposed, class F, class S, class Fn>
  TW_INLINE void for_matrices(F& fragment, const S& tile, Fn f) const {
    static_assert(F::warp_cols % 16 == 0, "a Fragment passes through a Buffer of 16-bit elements in steps of 16 columns");
    const int lane_row = kTransposed ? at.lane / 16 * 8 + at.lane % 8 : at.lane % 16;
    const int lane_col = kTransposed ? at.lane / 8 % 2 * 8 : at.lane / 16 * 8;
    const u32 base = ptx::address(tile.bytes);
    TW_UNROLL
    for (int block = 0; block < row_blocks<F>; ++block) {
      const int row = F::row(at, block * F::tile_size) - at.lane / 4;
      TW_UNROLL
      for (int group = 0; group < F::warp_cols / 16; ++group) {
        const int col = F::warp_col(at) + group * 16;
        const int offset = kTransposed ? S::offset(col + lane_row, row + lane_col) : S::offset(row + lane_row, col + lane_col);
        f(base + static_cast<u32>(offset), fragment.x + block * F::tile_size + group * 8);
      }
    }
  }

  template <class S>
  static constexpr int instruction_depth = 32 / static_cast<int>(sizeof(typename S::Element));
  template <class S>
  static constexpr int transposed = S::contract == Contract::rows ? 1 : 0;
  /// Bytes from one warpgroup's 64 rows of the left operand to the next warpgroup's.
  template <class S>
  static constexpr int warpgroup_offset = S::contract == Contract::columns ? kWarpgroupRows* kPanelBytes : S::panel_bytes;
  /// Where rows are contracted, the leading offset is the distance between panels; otherwise it is not used.
  template <class S>
  static TW_INLINE Descriptor descriptor(u32 address) {
    return Descriptor(address, S::contract == Contract::rows ? S::panel_bytes : 16, 8 * kPanelBytes);
  }
  /// Bytes to step `step` along the contracted dimension. Columns contracted: four steps of 32 bytes within a panel, then the next panel.
  /// Rows contracted: 16 rows.
  template <class S>
  static constexpr int step_offset(int step) {
    return S::contract == Contract::columns ? step / 4 * S::panel_bytes + step % 4 * 32 : step * 16 * kPanelBytes;
  }
  /// The same for the right operand of a sparse product, whose steps are twice as long.
  template <class S>
  static constexpr int sparse_step_offset(int step) {
    return S::contract == Contract::columns ? step / 2 * S::panel_bytes + step % 2 * 64 : step * 32 * kPanelBytes;
  }
  template <class Acc>
  static TW_INLINE void pin(Acc& acc) {
    TW_UNROLL
    for (int i = 0; i < Acc::size; ++i) ptx::pin(acc.x[i]);
  }
  template <class Acc>
  static TW_INLINE void begin(Acc& acc) {
    pin(acc);
    ptx::wgmma_fence();
  }

  /// A warpgroup's 64 rows of a Fragment, panel by panel; `row`, `i` and `j` are those of the first one.
  template <class T, int R, int C, class G>
  TW_INLINE void store_panels(const float* accumulators, const Staging<T, R, C>& staging, const G& to, int row, int col0, int i, int j,
                              int rows_end = kAllRows) const {
    using S = Staging<T, R, C>;
    static_assert(C % 16 == 0, "a Fragment leaves through Staging in steps of 16 columns");
    const Position at = here();
    const bool leader = ptx::thread_index() % kWarpgroupThreads == 0;
    const int matrix_row = at.warp * 16 + at.lane % 16;  // stmatrix: lanes 0-15 address the left 8 columns, 16-31 the right 8
    stage_panels<S>(
        at, staging,
        [&](int panel, u8* slot) {
          const int cols = min(C - panel * S::box_cols, S::box_cols);
          TW_UNROLL
          for (int group = 0; group < cols / 16; ++group) {
            const float* x = accumulators + panel * S::box_cols / 2 + group * 8;
            const u32 piece = static_cast<u32>(group * 2 + at.lane / 16) ^ (static_cast<u32>(matrix_row) & 7);
            ptx::store_matrix_x4(ptx::address(slot) + static_cast<u32>(matrix_row) * kPanelBytes + piece * 16, ptx::pack<T>(x[0], x[1]),
                                 ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]), ptx::pack<T>(x[6], x[7]));
          }
        },
        [&](int panel, u8* slot) {
          const int first = panel * S::box_cols, cols = min(C - first, S::box_cols);
          // TMA writes a whole panel.
          if (kTmaStore && cols == S::box_cols && row + kWarpgroupRows <= rows_end) {
            if (leader) ptx::store_4d(to.tensor_map, slot, col0 + first, row, i, j);
          } else {
            this->template copy_panel<T>(slot, cols, to, row, col0 + first, i, j, rows_end);
          }
        });
  }
  /// write(panel, slot) fills a slot and store(panel, slot) copies it to global memory, for every panel in turn.
  template <class S, class Write, class Store>
  TW_INLINE void stage_panels(const Position& at, const S& staging, Write write, Store store) const {
    const bool leader = ptx::thread_index() % kWarpgroupThreads == 0;
    u8* const base = shared_memory() + staging.offset + (this->first_warpgroup + at.warpgroup) * (S::slots * S::slot_bytes);
    const auto wait = [&](auto left) {
      if (leader) ptx::store_wait_read<decltype(left)::value>();
      this->sync_warpgroup(at);
    };
    for_panels<S>(wait, [&](int panel, int slot_index) {
      u8* const slot = base + slot_index * S::slot_bytes;
      write(panel, slot);
      ptx::fence_proxy();
      this->sync_warpgroup(at);
      store(panel, slot);
      if (leader) ptx::store_commit();
    });
  }
};

}  // namespace tw::sm_90a
