#pragma once

#include "tilewave/tile/types.tile.hpp"

// The PTX instructions that the sm_90a target uses, one function each (PTX ISA 8.0 and later, section numbers in NVIDIA's manual change:
// search the name). Host compilers see empty bodies: they only ever read the types and constants of this target.

#if TW_ON_GPU
#define TW_ASM(...) asm volatile(__VA_ARGS__)
#else
#define TW_ASM(...) static_cast<void>(0)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-variable"
#endif

namespace tw::sm_90a::ptx {

/// The 32-bit address of shared memory that the instructions below want.
TW_INLINE u32 address(const void* pointer) {
#if TW_ON_GPU
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
#else
  return 0;
#endif
}

TW_INLINE u32 thread_index() {
#if TW_ON_GPU
  return threadIdx.x;
#else
  return 0;
#endif
}
TW_INLINE u32 block_index() {
#if TW_ON_GPU
  return blockIdx.x;
#else
  return 0;
#endif
}
TW_INLINE u32 block_count() {
#if TW_ON_GPU
  return gridDim.x;
#else
  return 1;
#endif
}

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
TW_INLINE void store_commit() { TW_ASM("cp.async.bulk.commit_group;" ::: "memory"); }
/// All but the `Pending` youngest stores have read their shared memory.
template <int Pending>
TW_INLINE void store_wait_read() {
  TW_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Order between ordinary accesses to shared memory and those of TMA and tensor cores.
TW_INLINE void fence_proxy() { TW_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

// Synchronisation within a block and a cluster

TW_INLINE void named_barrier(u32 id, u32 threads) { TW_ASM("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
/// Not `.aligned`: the producer's warp comes with its lanes apart.
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

// Launches that overlap (programmatic dependent launch)

/// Waits until the launch before this one in the stream has finished and its results are visible.
TW_INLINE void wait_for_previous_launch() { TW_ASM("griddepcontrol.wait;" ::: "memory"); }
/// Once every block has said so, the next launch's blocks may start where there is room.
TW_INLINE void allow_next_launch() { TW_ASM("griddepcontrol.launch_dependents;" ::: "memory"); }

// Warp

template <class T>
TW_INLINE T shuffle_xor(T value, int mask) {
#if TW_ON_GPU
  return __shfl_xor_sync(0xffffffffu, value, mask);
#else
  return value;
#endif
}
/// The value that lane `lane` holds.
template <class T>
TW_INLINE T shuffle(T value, [[maybe_unused]] int lane) {
#if TW_ON_GPU
  return __shfl_sync(0xffffffffu, value, lane);
#else
  return value;
#endif
}
/// `value`, which is the same in all lanes: said so, the compiler keeps what follows from it in uniform registers. Costs nothing where the
/// result is not used.
TW_INLINE int uniform(int value) {
#if TW_ON_GPU
  asm("shfl.sync.idx.b32 %0, %0, 0, 31, 0xffffffff;" : "+r"(value));
#endif
  return value;
}
TW_INLINE bool any(bool value) {
#if TW_ON_GPU
  return __any_sync(0xffffffffu, value);
#else
  return value;
#endif
}

/// Two f32 as one register of two 16-bit floats, `low` in the lower half.
template <class T>
TW_INLINE u32 pack(float low, float high) {
  u32 pair = 0;
  if constexpr (is_same<T, bf16>)
    TW_ASM("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    TW_ASM("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Two 8-bit floats as two f16, which hold them exactly.
template <class T>
TW_INLINE u32 widen_pair(u16 pair) {
  u32 wide = 0;
  if constexpr (is_same<T, fp8_e4m3>)
    TW_ASM("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(pair));
  else
    TW_ASM("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(wide) : "h"(pair));
  return wide;
}
/// Two f32 as two 8-bit floats in the low half of the result, `low` in its lower byte.
template <class T>
TW_INLINE u32 narrow_pair(float low, float high) {
  u16 pair = 0;
  if constexpr (is_same<T, fp8_e4m3>)
    TW_ASM("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else
    TW_ASM("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Four 8x8 matrices of 16-bit elements from a warp's registers to shared memory; lane i gives the address of row i % 8 of matrix i / 8.
TW_INLINE void store_matrix_x4(u32 row_address, u32 r0, u32 r1, u32 r2, u32 r3) {
  TW_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
         : "memory");
}

/// The same the other way: four matrices from shared memory to a warp's registers.
TW_INLINE void load_matrix_x4(u32 row_address, u32* r) {
  TW_ASM("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
         : "r"(row_address)
         : "memory");
}

TW_INLINE void store_shared_16(u32 to, u32 x, u32 y, u32 z, u32 w) {
  TW_ASM("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Loads where `inside` holds, by a predicate; else the words stay as they are. Loads with branches between them would not be on their way
// together.
TW_INLINE void load_16_if(bool inside, const void* from, u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
         : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void load_8_if(bool inside, const void* from, u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.global.v2.u32 {%0, %1}, [%2];\n}"
         : "+r"(w[0]), "+r"(w[1])
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void load_4_if(bool inside, const void* from, u32& w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.u32 %0, [%1];\n}"
         : "+r"(w)
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void load_2_if(bool inside, const void* from, u32& w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.u16 %0, [%1];\n}"
         : "+r"(w)
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void load_1_if(bool inside, const void* from, u32& w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.u8 %0, [%1];\n}"
         : "+r"(w)
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}

TW_INLINE void atomic_add(float* to, float value) { TW_ASM("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory"); }
TW_INLINE u32 fetch_add(u32* to, u32 value) {
  u32 before = 0;
  TW_ASM("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}

/// The compiler's own, which it can do once for all lanes of a warp that use one address.
TW_INLINE u32 fetch_add_shared(u32* to, u32 value) {
#if TW_ON_GPU
  return atomicAdd(to, value);
#else
  return 0;
#endif
}

// Warpgroup matrix products

TW_INLINE void wgmma_fence() { TW_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
TW_INLINE void wgmma_commit() { TW_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
TW_INLINE void wgmma_wait() {
  TW_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
/// The same number, of which the compiler no longer knows where it came from: what is computed from it stays where it stands.
TW_INLINE int opaque(int x) {
  TW_ASM("" : "+r"(x));
  return x;
}
template <class T>
TW_INLINE const T* opaque(const T* x) {
  TW_ASM("" : "+l"(x));
  return x;
}
/// Keeps the compiler from moving a use of `x` across this point; costs nothing.
TW_INLINE void pin(float& x) { TW_ASM("" : "+f"(x)::"memory"); }
TW_INLINE void pin(i32& x) { TW_ASM("" : "+r"(x)::"memory"); }

}  // namespace tw::sm_90a::ptx

#if !TW_ON_GPU
#pragma GCC diagnostic pop
#endif
