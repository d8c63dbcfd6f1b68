#pragma once

#include "tilewave/tile/cuda/ptx.tile.hpp"

// The PTX instructions that only Hopper has, one function each (PTX ISA 8.0 and later).

#if !TW_ON_GPU
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-variable"
#endif

namespace tw::sm_90a::ptx {

using namespace cuda::ptx;

// mbarriers

TW_INLINE void barrier_init(u64* barrier, u32 arrivals) {
  TW_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the other blocks of the cluster and to the copy engine.
TW_INLINE void fence_barrier_init() { TW_ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TW_INLINE void arrive(u64* barrier) { TW_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory"); }
TW_INLINE void arrive_expect(u64* barrier, u32 bytes) {
  TW_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}
/// Adds `bytes` to what must arrive before the barrier's phase completes.
TW_INLINE void expect(u64* barrier, u32 bytes) {
  TW_ASM("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}
/// Arrives at the barrier once all earlier copy_async_16() of this thread are complete.
TW_INLINE void arrive_copied(u64* barrier) {
  TW_ASM("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(barrier)) : "memory");
}
/// Counts `bytes` as arrived, for bytes that no copy writes.
TW_INLINE void complete_bytes(u64* barrier, u32 bytes) {
  TW_ASM("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}
/// Arrives at the same barrier of another block of the cluster. No memory scope is written: `.release.cluster` would flush the L1 cache,
/// which costs 30 % of a GEMM; the products that have read the slot are complete, so nothing needs releasing.
TW_INLINE void arrive_at(u64* barrier, u32 block) {
  TW_ASM(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(address(barrier)),
      "r"(block)
      : "memory");
}
TW_INLINE bool try_wait(u64* barrier, u32 parity) {
  u32 done = 1;
  TW_ASM(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
TW_INLINE void wait(u64* barrier, u32 parity) {
  while (!try_wait(barrier, parity)) {
  }
}

// Copies by the tensor memory accelerator (TMA). Coordinates are innermost first.

/// Fetches memory to the L2 cache. Address and size are multiples of 16.
TW_INLINE void prefetch_to_l2(const void* from, u32 bytes) {
  TW_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
TW_INLINE void prefetch_map(const void* map) { TW_ASM("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
TW_INLINE void load_4d(void* shared, const void* map, u64* barrier, int c0, int c1, int c2, int c3) {
  TW_ASM("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
             address(shared)),
         "l"(map), "r"(address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
         : "memory");
}
/// The same into every block of the cluster whose bit is set in `blocks`, at the same shared address and barrier.
TW_INLINE void load_4d_multicast(void* shared, const void* map, u64* barrier, u16 blocks, int c0, int c1, int c2, int c3) {
  TW_ASM(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], "
      "%3;" ::"r"(address(shared)),
      "l"(map), "r"(address(barrier)), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
TW_INLINE void store_4d(const void* map, const void* shared, int c0, int c1, int c2, int c3) {
  TW_ASM("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(address(shared)), "r"(c0),
         "r"(c1), "r"(c2), "r"(c3)
         : "memory");
}
/// Adds the tile's f32 elements to the tensor's.
TW_INLINE void add_4d(const void* map, const void* shared, int c0, int c1, int c2, int c3) {
  TW_ASM("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
         "r"(address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
         : "memory");
}
TW_INLINE void store_commit() { TW_ASM("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but the `Pending` youngest stores have read their shared memory.
template <int Pending>
TW_INLINE void store_wait_read() {
  TW_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

/// Waits until all stores are done, and what they wrote can be seen.
TW_INLINE void store_wait_all() { TW_ASM("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Order between ordinary accesses to shared memory and those of TMA and tensor cores.
TW_INLINE void fence_proxy() { TW_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }
/// The same for global memory.
TW_INLINE void fence_proxy_global() { TW_ASM("fence.proxy.async.global;" ::: "memory"); }

// Clusters and registers

/// Not `.aligned`, because the lanes of the producer's warp have diverged.
TW_INLINE void cluster_sync() { TW_ASM("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
TW_INLINE u32 cluster_rank() {
  u32 rank = 0;
  TW_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
template <int Registers>
TW_INLINE void take_registers() {
  TW_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
TW_INLINE void give_registers() {
  TW_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Matrices

/// Four 8x8 matrices of 16-bit elements from a warp's registers to shared memory; lane i gives the address of row i % 8 of matrix i / 8.
TW_INLINE void store_matrix_x4(u32 row_address, u32 r0, u32 r1, u32 r2, u32 r3) {
  TW_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
         : "memory");
}

/// The same of the matrices transposed: lane i gives the address of what is then row i % 8 of matrix i / 8.
TW_INLINE void store_matrix_x4_transposed(u32 row_address, u32 r0, u32 r1, u32 r2, u32 r3) {
  TW_ASM("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
         : "memory");
}

// Warpgroup matrix products

TW_INLINE void wgmma_fence() { TW_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
TW_INLINE void wgmma_commit() { TW_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
TW_INLINE void wgmma_wait() {
  TW_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

}  // namespace tw::sm_90a::ptx

#if !TW_ON_GPU
#pragma GCC diagnostic pop
#endif
