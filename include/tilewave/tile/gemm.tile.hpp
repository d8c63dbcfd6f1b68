#pragma once

#include "tilewave/tile/epilogue.tile.hpp"

namespace tw::kernels::gemm {

/// The element type of A and B, and the dimension of each, as stored, that the product sums over: NT is (columns, columns), NN is (columns,
/// rows), TN is (rows, rows). `Interleaved`: the halves of an NT product's B are, so that columns 2 n and 2 n + 1 of the product come from
/// rows n and n + N / 2 of B. SwiGLU then takes the product with a weight that holds all gates, and after them all values. `TB`: B's
/// element type, where it is another kind of fp8.
template <class T, Contract a, Contract b, bool Interleaved = false, class TB = T>
struct Operands {
  using Element = T;
  using ElementB = TB;
  using Sum = conditional<is_same<T, i8>, i32, float>;
  static constexpr Contract a_contract = a, b_contract = b;
  static constexpr bool interleaved = Interleaved;
  static_assert(!Interleaved || b == Contract::columns, "the rows of a B [N, K] are interleaved");
};

/// The tile sizes and the schedule. A tile of D is BM x BN; operands arrive BK at a time through a ring of `Stages` slots. `Cluster`
/// blocks, neighbours along M, share every tile of B. Tiles are processed in bands of `Band` rows (of clusters). `Teams`: of warpgroups, so
/// that one multiplies while another stores.
template <int BM, int BN, int BK, int Stages, int Cluster, int Band, int Teams = 1>
struct Tiles {
  static constexpr int bm = BM, bn = BN, bk = BK, stages = Stages, cluster = Cluster, band = Band, teams = Teams;
};

/// The tiles of A and B, and their loads: the part that all kernels of the family share.
template <class Target, class Operands, class Tiles>
struct Inputs {
  using T = typename Operands::Element;
  using TB = typename Operands::ElementB;
  static constexpr int BM = Tiles::bm, BN = Tiles::bn, BK = Tiles::bk;
  using A = conditional<Operands::a_contract == Contract::columns, Shared<Target, T, BM, BK>, Shared<Target, T, BK, BM, Contract::rows>>;
  using B = conditional<Operands::b_contract == Contract::columns, Shared<Target, TB, BN, BK>, Shared<Target, TB, BK, BN, Contract::rows>>;

  struct Slot {
    A a;
    B b;
  };
  Global<Target, const T, A> a;
  /// If it is interleaved, [batch, N / 2, 2, K] in windows of pairs of rows.
  conditional<Operands::interleaved, Windowed<Target, const TB, B, Tiles::cluster>, Global<Target, const TB, B, Tiles::cluster>> b;
  int depth;                 ///< K
  int a_batches, b_batches;  ///< 0 if one operand serves all batches, otherwise 1

  /// Step `step` of the tile of D at `at`; `at.batch` counts that of both operands.
  TW_INLINE void load(auto& producer, auto& ring, const Place& at, int step) const {
    producer.put(ring, [&](auto copy, Slot& slot) {
      if constexpr (Operands::a_contract == Contract::columns)
        copy.tile(a, slot.a, at.row, step * BK, at.batch * a_batches);
      else
        copy.tile(a, slot.a, step * BK, at.row, at.batch * a_batches);
      if constexpr (Operands::interleaved)
        copy.window_for_cluster(b, slot.b, 0, step * BK, at.col / 2, at.batch * b_batches);
      else if constexpr (Operands::b_contract == Contract::columns)
        copy.tile_for_cluster(b, slot.b, at.col, step * BK, at.batch * b_batches);
      else
        copy.tile_for_cluster(b, slot.b, step * BK, at.col, at.batch * b_batches);
    });
  }
};

/// The same for a 2:4 sparse A, [M, K] as values and metadata. `b`: the dimension of B, as stored, that the product sums over.
template <class T, Contract b>
struct SparseOperands {
  using Element = T;
  using Sum = conditional<is_same<T, i8>, i32, float>;
  static constexpr Contract b_contract = b;
};
template <class Target, class T, Contract b_contract, class Tiles>
struct Inputs<Target, SparseOperands<T, b_contract>, Tiles> {
  static constexpr int BM = Tiles::bm, BN = Tiles::bn, BK = Tiles::bk;
  using A = SparseShared<Target, T, BM, BK>;
  using Values = decltype(A::values);
  using Metadata = decltype(A::metadata);
  using B = conditional<b_contract == Contract::columns, Shared<Target, T, BN, BK>, Shared<Target, T, BK, BN, Contract::rows>>;

  struct Slot {
    A a;
    B b;
  };
  Global<Target, const T, Values> a;              ///< [M, K / 2]
  Global<Target, const u8, Metadata> a_metadata;  ///< of blocks, as sparse.tile.hpp describes
  Global<Target, const T, B, Tiles::cluster> b;
  int depth;  ///< K
  int a_batches, b_batches;

  TW_INLINE void load(auto& producer, auto& ring, const Place& at, int step) const {
    producer.put(ring, [&](auto copy, Slot& slot) {
      copy.tile(a, slot.a.values, at.row, step * (BK / 2), at.batch * a_batches);
      copy.tile(a_metadata, slot.a.metadata, at.row / 16 * metadata_words<T>, 0, step);
      if constexpr (b_contract == Contract::columns)
        copy.tile_for_cluster(b, slot.b, at.col, step * BK, at.batch * b_batches);
      else
        copy.tile_for_cluster(b, slot.b, step * BK, at.col, at.batch * b_batches);
    });
  }
};

/// The rows of a tile of D that belongs to one of several groups. Groups may begin at any row.
struct RowsOfTile {
  int group;  ///< of B; negative: there is nothing to do
  int first;
  int end;  ///< the row after the last one; may be inside the tile
};

/// acc = the sum of the products of n > 0 slots with tiles a and b. If products are asynchronous, one is always in flight: a slot is
/// released once the product after the one that read it has been issued. prepare(slot, step) may change a slot before its product.
/// `kAdds`: the sum is added to what acc holds.
template <class Target, bool kAdds = false>
TW_INLINE void multiply_steps(auto& block, auto& ring, auto& acc, int n, auto prepare) {
  if constexpr (kAdds) {
    auto& slot = block.take(ring);
    prepare(slot, 0);
    block.mma(acc, slot.a, slot.b, false);
  }
  for (int step = kAdds ? 1 : 0; step < n; ++step) {
    auto& slot = block.take(ring);
    prepare(slot, step);
    block.mma(acc, slot.a, slot.b, !kAdds && step == 0);
    if (step >= in_flight<Target>) {
      block.wait(leave<in_flight<Target>>, acc);
      block.release(ring);
    }
  }
  if constexpr (in_flight < Target >> 0) {
    block.wait(leave<0>, acc);
    block.release(ring);
  }
}
template <class Target, bool kAdds = false>
TW_INLINE void multiply_steps(auto& block, auto& ring, auto& acc, int n) {
  multiply_steps<Target, kAdds>(block, ring, acc, n, [](auto&, int) {});
}

/// The product A B. An epilogue (tilewave/tile/epilogue.tile.hpp) stores its accumulators, tile by tile. With `kSplitK` the grid's batch
/// also counts splits of K, each with its own accumulators.
template <class Operands, class Epilogue, class Tiles, bool kSplitK = false>
struct Gemm {
  static constexpr const char* source = "tilewave/tile/gemm.tile.hpp";
  /// An epilogue that reads tensors needs registers, which half of the accumulators leave free.
  using WarpTile = conditional<epilogue::reads_addends<Epilogue>, tw::WarpTile<32, 2>,
                               conditional<epilogue::is_elementwise<Epilogue>(), SquareWarpTile<Tiles::bm, Tiles::bn>, RowWarpTile<16>>>;

  template <class Target>
  struct On {
    static constexpr int BM = Tiles::bm, BN = Tiles::bn;
    using In = Inputs<Target, Operands, Tiles>;
    using Slot = typename In::Slot;
    using Sum = typename Operands::Sum;
    static constexpr int teams = Tiles::teams;
    using Acc = TeamFragment<Target, Sum, BM, BN, teams>;
    using End = typename Epilogue::template On<Target, Acc>;
    using Schedule = Banded<Tiles::band>;
    static constexpr int rows = BM;
    static constexpr int cluster = Tiles::cluster;

    struct Params {
      In in;
      typename End::Params epilogue;
      int splits;  ///< number of splits of K
    };
    struct Memory {
      Ring<Target, Slot, Tiles::stages> operands;
      typename End::Memory out;
      explicit constexpr Memory(auto& block) : operands(block), out(block) {}
    };
    struct State {
      Acc acc;
    };

    TW_INLINE static int all_steps(const Params& p) { return ceil_div(p.in.depth, Tiles::bk); }
    /// Steps of one split; the last split may have fewer.
    TW_INLINE static int split_steps(const Params& p) { return ceil_div(all_steps(p), p.splits); }

    TW_INLINE static int steps(const Params& p, Tile t) {
      if constexpr (kSplitK)
        return min(split_steps(p), all_steps(p) - t.batch % p.splits * split_steps(p));
      else
        return all_steps(p);
    }

    TW_INLINE static auto& ring(Memory& memory) { return memory.operands; }

    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      const int row = t.m * BM, col = t.n * BN;
      if constexpr (kSplitK)
        p.in.load(producer, memory.operands, {row, col, t.batch / p.splits}, t.batch % p.splits * split_steps(p) + step);
      else
        p.in.load(producer, memory.operands, {row, col, t.batch}, step);
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      const int n = steps(p, t);
      constexpr bool begins = epilogue::begins<Epilogue>;
      if constexpr (begins) End::begin(block, state.acc, p.epilogue, place(t));
      // Integer products, splits and sums that begin with something have at least one step, which the host ensures. If zeros could reach
      // the store directly, the assembler would serialise the products.
      if constexpr (!is_same<Sum, i32> && !kSplitK && !begins) {
        if (n == 0) {
          block.fill(state.acc, 0.0f);
          return;
        }
      }
      multiply_steps<Target, begins>(block, memory.operands, state.acc, n);
    }

    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory& memory, State& state) {
      End::apply(block, state.acc, p.epilogue, memory.out, place(t));
    }

   private:
    TW_INLINE static Place place(Tile t) { return {t.m * BM, t.n * BN, t.batch}; }
  };
};

}  // namespace tw::kernels::gemm
