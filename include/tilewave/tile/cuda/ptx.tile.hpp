#pragma once

#include "tilewave/tile/types.tile.hpp"

// The PTX instructions that every NVIDIA target uses, one function each (section numbers in NVIDIA's manual change: search the name). Host
// compilers see empty bodies: they only ever read the types and constants of these targets.

#if TW_ON_GPU
#define TW_ASM(...) asm volatile(__VA_ARGS__)
#else
#define TW_ASM(...) static_cast<void>(0)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-variable"
#endif

namespace tw::cuda::ptx {

/// The 32-bit address of shared memory that the instructions below want.
TW_INLINE u32 address(const void* pointer) {
#if TW_ON_GPU
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
#else
  return 0;
#endif
}

/// The pointer that has this address().
TW_INLINE void* pointer([[maybe_unused]] u32 address) {
#if TW_ON_GPU
  return __cvta_shared_to_generic(address);
#else
  return nullptr;
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

// Synchronisation within a block

/// named_barrier() that tells each thread whether `flag` is true for any of them.
TW_INLINE bool named_barrier_any([[maybe_unused]] u32 id, [[maybe_unused]] u32 threads, bool flag) {
  u32 found = flag;
  TW_ASM("{\n.reg .pred mine, all;\nsetp.ne.b32 mine, %0, 0;\nbarrier.cta.red.or.pred all, %1, %2, mine;\nselp.b32 %0, 1, 0, all;\n}"
         : "+r"(found)
         : "r"(id), "r"(threads)
         : "memory");
  return found != 0;
}
TW_INLINE void named_barrier(u32 id, u32 threads) { TW_ASM("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
/// Counts the calling threads at the barrier without waiting there.
TW_INLINE void named_barrier_arrive(u32 id, u32 threads) { TW_ASM("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Overlapping launches (programmatic dependent launch, since compute capability 9.0; before that, a launch begins when the previous one has
// ended)
#if TW_ON_GPU && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TW_LAUNCHES_OVERLAP 1
#else
#define TW_LAUNCHES_OVERLAP 0
#endif

/// Waits until the launch before this one in the stream has finished and its results are visible.
TW_INLINE void wait_for_previous_launch() {
#if TW_LAUNCHES_OVERLAP
  TW_ASM("griddepcontrol.wait;" ::: "memory");
#endif
}
/// When every block has called it, blocks of the next launch may start where there is room.
TW_INLINE void allow_next_launch() {
#if TW_LAUNCHES_OVERLAP
  TW_ASM("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Ends the kernel with an error, where it would otherwise wait for ever.
TW_INLINE void trap() { TW_ASM("trap;"); }

// Warp

/// Waits until all lanes have arrived. They see what the others wrote.
TW_INLINE void warp_sync() {
#if TW_ON_GPU
  __syncwarp();
#endif
}
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
/// The sum of the lanes' values.
TW_INLINE int sum_of_lanes(int value) {
#if TW_ON_GPU
  return __reduce_add_sync(0xffffffffu, value);
#else
  return value;
#endif
}
/// Tells the compiler that `value` is the same in all lanes, so that it keeps what follows from it in uniform registers. Costs nothing
/// where the result is not used.
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

/// The larger of both upper and of both lower halves, as unsigned numbers.
TW_INLINE u32 max_of_pairs(u32 a, u32 b) {
#if TW_ON_GPU
  return __vmaxu2(a, b);
#else
  const u32 upper = a >> 16 > b >> 16 ? a : b, lower = (a & 0xffffu) > (b & 0xffffu) ? a : b;
  return (upper & 0xffff0000u) | (lower & 0xffffu);
#endif
}
/// Selects four of the eight bytes of `low` and `high`: the n-th four bits of `selector` are the number of the byte that becomes byte n.
TW_INLINE u32 permute_bytes(u32 low, u32 high, u32 selector) {
#if TW_ON_GPU
  return __byte_perm(low, high, selector);
#else
  const u64 bytes = u64{high} << 32 | low;
  u32 result = 0;
  for (int n = 0; n < 4; ++n) result |= static_cast<u32>(bytes >> 8 * (selector >> 4 * n & 7u) & 0xffu) << 8 * n;
  return result;
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
#if TW_CONVERTS_FP8
  u32 wide = 0;
  if constexpr (is_same<T, fp8_e4m3>)
    TW_ASM("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(pair));
  else
    TW_ASM("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(wide) : "h"(pair));
  return wide;
#else
  const u32 two = (pair & 0xffu) | (pair & 0xff00u) << 8;  // a byte in each half
  if constexpr (is_same<T, fp8_e4m3>) {
    // An f16 has 7 more mantissa bits, one more exponent bit, and a bias that is greater by 8.
    u32 wide = (two & 0x007f007fu) << 7;
    TW_ASM("mul.f16x2 %0, %0, %1;" : "+r"(wide) : "r"(0x5c005c00u));  // 2^8
    const u32 nan = ((two & 0x007f007fu) + 0x00010001u) >> 7 & 0x00010001u;
    return wide | nan * 0x7e00u | (two & 0x00800080u) << 8;
  } else {
    return two << 8;
  }
#endif
}
/// Two f32 as two 8-bit floats in the low half of the result, `low` in its lower byte.
template <class T>
TW_INLINE u32 narrow_pair(float low, float high) {
#if TW_CONVERTS_FP8
  u16 pair = 0;
  if constexpr (is_same<T, fp8_e4m3>)
    TW_ASM("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else
    TW_ASM("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return u32{T(low).bits} | u32{T(high).bits} << 8;
#endif
}

/// Four 8x8 matrices of 16-bit elements from shared memory to a warp's registers; lane i gives the address of row i % 8 of matrix i / 8.
TW_INLINE void load_matrix_x4(u32 row_address, u32* r) {
  TW_ASM("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
         : "r"(row_address)
         : "memory");
}

/// The same, each matrix transposed.
TW_INLINE void load_matrix_x4_transposed(u32 row_address, u32* r) {
  TW_ASM("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
         : "r"(row_address)
         : "memory");
}
/// Two matrices: lanes 0 to 15 give the addresses.
TW_INLINE void load_matrix_x2(u32 row_address, u32* r) {
  TW_ASM("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row_address) : "memory");
}
TW_INLINE void load_matrix_x2_transposed(u32 row_address, u32* r) {
  TW_ASM("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row_address) : "memory");
}

// Asynchronous copies from global to shared memory

/// 16 bytes, or zeros where `inside` is false; both addresses are multiples of 16.
TW_INLINE void copy_async_16(u32 to, const void* from, bool inside) {
  TW_ASM(
      "{\n.reg .pred outside;\n"
      "setp.eq.u32 outside, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, outside;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<u32>(inside))
      : "memory");
}
/// The index of the lowest bit that is 1; there is one.
TW_INLINE int lowest_one(u32 x) {
#if TW_ON_GPU
  return __ffs(static_cast<int>(x)) - 1;
#else
  return static_cast<int>(x);
#endif
}
TW_INLINE int count_ones(u32 x) {
#if TW_ON_GPU
  return __popc(x);
#else
  return static_cast<int>(x);
#endif
}

/// Orders this thread's earlier accesses before its later ones, as seen by the other threads of the block.
TW_INLINE void fence_block() { TW_ASM("fence.acq_rel.cta;" ::: "memory"); }
/// Makes the copies that this thread has issued since the last commit a group.
TW_INLINE void copy_commit() { TW_ASM("cp.async.commit_group;" ::: "memory"); }
/// Waits until all but this thread's `Pending` youngest groups have arrived.
template <int Pending>
TW_INLINE void copy_wait() {
  TW_ASM("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

TW_INLINE void store_shared_4(u32 to, u32 x) { TW_ASM("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
TW_INLINE void store_shared_16(u32 to, u32 x, u32 y, u32 z, u32 w) {
  TW_ASM("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
TW_INLINE void load_shared_2(u32 from, u32& w) {
  TW_ASM("{\n.reg .b16 h;\nld.shared.b16 h, [%1];\ncvt.u32.u16 %0, h;\n}" : "=r"(w) : "r"(from) : "memory");
}
TW_INLINE void load_shared_4(u32 from, u32& w) { TW_ASM("ld.shared.b32 %0, [%1];" : "=r"(w) : "r"(from) : "memory"); }
TW_INLINE void load_shared_8(u32 from, u32* w) {
  TW_ASM("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(from) : "memory");
}
TW_INLINE void load_shared_16(u32 from, u32* w) {
  TW_ASM("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
}

// Loads under a predicate: where `inside` is false, the words keep their values. With branches between them the loads would not overlap.
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

// The same for what another block stores meanwhile: not from the L1 cache.
TW_INLINE void load_relaxed_16_if(bool inside, const void* from, u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
         : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void load_relaxed_8_if(bool inside, const void* from, u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];\n}"
         : "+r"(w[0]), "+r"(w[1])
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void load_relaxed_4_if(bool inside, const void* from, u32& w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.relaxed.gpu.global.u32 %0, [%1];\n}"
         : "+r"(w)
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void load_relaxed_2_if(bool inside, const void* from, u32& w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.relaxed.gpu.global.u16 %0, [%1];\n}"
         : "+r"(w)
         : "l"(from), "r"(static_cast<u32>(inside))
         : "memory");
}

// One instruction each. From C++ stores on two branches, one of them less aligned, compilers make stores of the lower alignment.
TW_INLINE void store_16(void* to, const u32* w) {
  TW_ASM("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
TW_INLINE void store_8(void* to, const u32* w) { TW_ASM("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory"); }
TW_INLINE void store_4(void* to, const u32* w) { TW_ASM("st.global.u32 [%0], %1;" ::"l"(to), "r"(w[0]) : "memory"); }
// Under a predicate, so that the code around a store is not cut into parts by a branch.
TW_INLINE void store_16_if(bool inside, void* to, const u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "r"(w[0]), "r"(w[1]),
         "r"(w[2]), "r"(w[3]), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void store_8_if(bool inside, void* to, const u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p st.global.v2.u32 [%0], {%1, %2};\n}" ::"l"(to), "r"(w[0]), "r"(w[1]),
         "r"(static_cast<u32>(inside))
         : "memory");
}

// What another block loads meanwhile.
TW_INLINE void store_relaxed_16_if(bool inside, void* to, const u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "r"(w[0]),
         "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void store_relaxed_8_if(bool inside, void* to, const u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};\n}" ::"l"(to), "r"(w[0]), "r"(w[1]),
         "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void store_relaxed_4_if(bool inside, void* to, const u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.relaxed.gpu.global.u32 [%0], %1;\n}" ::"l"(to), "r"(w[0]),
         "r"(static_cast<u32>(inside))
         : "memory");
}
TW_INLINE void store_relaxed_2_if(bool inside, void* to, const u32* w) {
  TW_ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.relaxed.gpu.global.u16 [%0], %1;\n}" ::"l"(to), "h"(static_cast<u16>(w[0])),
         "r"(static_cast<u32>(inside))
         : "memory");
}

/// Waits until another block has made *counter `value`. What that block wrote before can be seen then.
TW_INLINE void await(const u32* counter, u32 value) {
  u32 now = 0;
  do {
    TW_ASM("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now != value);
}
TW_INLINE void add_release(u32* to, u32 value) { TW_ASM("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory"); }
TW_INLINE void atomic_add(float* to, float value) { TW_ASM("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory"); }
/// Adds to one 16-bit float. GPUs without this operation (before compute capability 9.0) replace the 32-bit word that holds it.
template <class T>
TW_INLINE void add_one(T* to, u16 bits) {
#if TW_ON_GPU
#if __CUDA_ARCH__ >= 900
  if constexpr (is_same<T, bf16>)
    TW_ASM("red.global.add.noftz.bf16 [%0], %1;" ::"l"(to), "h"(bits) : "memory");
  else
    TW_ASM("red.global.add.noftz.f16 [%0], %1;" ::"l"(to), "h"(bits) : "memory");
#else
  const u64 address = reinterpret_cast<u64>(to);
  u32* const word = reinterpret_cast<u32*>(address & ~u64{3});
  const u32 shift = (address & 2) * 8, mask = 0xffffu << shift;
  for (u32 before = *word, seen;; before = seen) {
    const float sum = static_cast<float>(bit_cast<T>(static_cast<u16>(before >> shift))) + static_cast<float>(bit_cast<T>(bits));
    seen = atomicCAS(word, before, (before & ~mask) | u32{tw::to<T>(sum).bits} << shift);
    if (seen == before) break;
  }
#endif
#endif
}
// Adds `count` words to global memory, aligned to their total size: each is an f32 or a pair of 16-bit floats. One operation since compute
// capability 9.0.
template <class T, int count>
TW_INLINE void add_words(T* to, const u32* w) {
#if TW_ON_GPU
#if __CUDA_ARCH__ >= 900
#define TW_ADD_WORDS(type)                                                                                                            \
  if constexpr (count == 4)                                                                                                           \
    TW_ASM("red.global.add" type(".v4") " [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory"); \
  else if constexpr (count == 2)                                                                                                      \
    TW_ASM("red.global.add" type(".v2") " [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory");                               \
  else                                                                                                                                \
    TW_ASM("red.global.add" type("") " [%0], %1;" ::"l"(to), "r"(w[0]) : "memory");
#define TW_F32(vector) vector ".f32"
#define TW_F16(vector) ".noftz" vector ".f16x2"
#define TW_BF16(vector) ".noftz" vector ".bf16x2"
  if constexpr (sizeof(T) == 4) {
    TW_ADD_WORDS(TW_F32)
  } else if constexpr (is_same<T, f16>) {
    TW_ADD_WORDS(TW_F16)
  } else {
    TW_ADD_WORDS(TW_BF16)
  }
#undef TW_ADD_WORDS
#undef TW_F32
#undef TW_F16
#undef TW_BF16
#else
  TW_UNROLL
  for (int n = 0; n < count; ++n) {
    if constexpr (sizeof(T) == 4)
      atomicAdd(to + n, bit_cast<float>(w[n]));
    else if constexpr (is_same<T, f16>)
      TW_ASM("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(to + 2 * n), "r"(w[n]) : "memory");
    else
      for (int k = 0; k < 2; ++k) add_one(to + 2 * n + k, static_cast<u16>(w[n] >> 16 * k));
  }
#endif
#endif
}

TW_INLINE u32 fetch_add(u32* to, u32 value) {
  u32 before = 0;
  TW_ASM("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}

/// The compiler's own atomic, which it can combine for the lanes of a warp that use one address.
TW_INLINE u32 fetch_add_shared(u32* to, u32 value) {
#if TW_ON_GPU
  return atomicAdd(to, value);
#else
  return 0;
#endif
}

// What the compiler must not know or move

/// The same number, hidden from the optimiser: what is computed from it is not moved or recomputed.
TW_INLINE int opaque(int x) {
  TW_ASM("" : "+r"(x));
  return x;
}
TW_INLINE u32 opaque(u32 x) {
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
/// Keeps the compiler from moving the computation of `x` past this point; costs nothing.
TW_INLINE void computed(u32 x) { TW_ASM("" ::"r"(x)); }

}  // namespace tw::cuda::ptx

#if !TW_ON_GPU
#pragma GCC diagnostic pop
#endif
