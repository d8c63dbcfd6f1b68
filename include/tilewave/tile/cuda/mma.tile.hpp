#pragma once

#include "tilewave/tile/cuda/ptx.tile.hpp"

// mma.sync: d[16 x 8] += a[16 x K] b[8 x K]^T by one warp, where K is 32 bytes of elements. A register of `a` or `b` is four bytes of a
// row, as ldmatrix loads one 8 x 16-byte matrix.

namespace tw::cuda {

template <class A, class B = A>
struct Mma {
  static_assert(sizeof(A) == 0, "no product of these element types: bf16, f16, float, fp8 or i8");
};

/// mma.sp: the same where `a` is 2:4 sparse. Its 32 bytes are values, K / 2 elements, and `b` has 64 bytes in four registers. `metadata`: a
/// word of each lane, as sparse.tile.hpp describes.
template <class T>
struct SparseMma {
  static_assert(sizeof(T) == 0, "no sparse product of this element type: bf16, f16, i8 or, from compute capability 8.9 on, fp8_e4m3");
};

#if TW_ON_GPU

#define TW_MMA(A, B, D, C, INSTRUCTION)                                                                      \
  template <>                                                                                                \
  struct Mma<A, B> {                                                                                         \
    static TW_INLINE void add(D* d, const u32* a, const u32* b) {                                            \
      asm("mma.sync.aligned." INSTRUCTION " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
          : C(d[0]), C(d[1]), C(d[2]), C(d[3])                                                               \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                               \
    }                                                                                                        \
  };
TW_MMA(bf16, bf16, float, "+f", "m16n8k16.row.col.f32.bf16.bf16.f32")
TW_MMA(f16, f16, float, "+f", "m16n8k16.row.col.f32.f16.f16.f32")
TW_MMA(float, float, float, "+f", "m16n8k8.row.col.f32.tf32.tf32.f32")
TW_MMA(i8, i8, i32, "+r", "m16n8k32.row.col.s32.s8.s8.s32")
#if TW_CONVERTS_FP8
TW_MMA(fp8_e4m3, fp8_e4m3, float, "+f", "m16n8k32.row.col.f32.e4m3.e4m3.f32")
TW_MMA(fp8_e4m3, fp8_e5m2, float, "+f", "m16n8k32.row.col.f32.e4m3.e5m2.f32")
TW_MMA(fp8_e5m2, fp8_e4m3, float, "+f", "m16n8k32.row.col.f32.e5m2.e4m3.f32")
TW_MMA(fp8_e5m2, fp8_e5m2, float, "+f", "m16n8k32.row.col.f32.e5m2.e5m2.f32")
#else
/// GPUs without products of 8-bit floats multiply them as f16, which hold them exactly. A register's lower pair goes into one half of a
/// product over 16 and its upper pair into the other, for both operands alike: the order of summation does not matter.
template <class A, class B>
requires(is_fp8<A>&& is_fp8<B>) struct Mma<A, B> {
  template <class T>
  static TW_INLINE u32 low(u32 four) {
    return ptx::widen_pair<T>(static_cast<u16>(four));
  }
  template <class T>
  static TW_INLINE u32 high(u32 four) {
    return ptx::widen_pair<T>(static_cast<u16>(four >> 16));
  }
  static TW_INLINE void add(float* d, const u32* a, const u32* b) {
    TW_UNROLL
    for (int half = 0; half < 2; ++half) {
      const u32 wide_a[4] = {low<A>(a[2 * half]), low<A>(a[2 * half + 1]), high<A>(a[2 * half]), high<A>(a[2 * half + 1])};
      const u32 wide_b[2] = {low<B>(b[half]), high<B>(b[half])};
      Mma<f16>::add(d, wide_a, wide_b);
    }
  }
};
#endif

// Ordered metadata name the lower column of a group first, as ours do. Without this qualifier, which PTX ISA 8.5 (CUDA 12.5) added, some
// GPUs are slower.
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 5)
#define TW_MMA_SP "mma.sp::ordered_metadata.sync.aligned."
#else
#define TW_MMA_SP "mma.sp.sync.aligned."
#endif
#define TW_SPARSE_MMA(T, D, C, INSTRUCTION)                                                                                        \
  template <>                                                                                                                      \
  struct SparseMma<T> {                                                                                                            \
    template <int Selector>                                                                                                        \
    static TW_INLINE void add(D* d, const u32* a, const u32* b, u32 metadata) {                                                    \
      asm(TW_MMA_SP INSTRUCTION " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"             \
          : C(d[0]), C(d[1]), C(d[2]), C(d[3])                                                                                     \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata), "n"(Selector)); \
    }                                                                                                                              \
  };
TW_SPARSE_MMA(bf16, float, "+f", "m16n8k32.row.col.f32.bf16.bf16.f32")
TW_SPARSE_MMA(f16, float, "+f", "m16n8k32.row.col.f32.f16.f16.f32")
TW_SPARSE_MMA(i8, i32, "+r", "m16n8k64.row.col.s32.s8.s8.s32")
#if TW_CONVERTS_FP8
TW_SPARSE_MMA(fp8_e4m3, float, "+f", "m16n8k64.row.col.f32.e4m3.e4m3.f32")
#endif

#endif  // TW_ON_GPU

}  // namespace tw::cuda
