#pragma once

#include "tilewave/tile/sm_90a/ptx.tile.hpp"
#include "tilewave/tile/types.tile.hpp"

// wgmma: d[64 x N] = a[64 x K] b[N x K]^T (+ d), K = 32 bytes of elements, by one warpgroup. Wgmma<A, N, B> has two forms: `a` from
// shared memory or from registers. The assembler text must list a thread's N/2 accumulators; the macros generate it for each N from one
// template.

namespace tw::sm_90a {

/// Descriptor of an operand in shared memory with 128-byte swizzle (PTX manual, "matrix descriptor"): start address, leading and stride
/// byte offsets in 16-byte units at bits 0, 16 and 32, swizzle mode 1 at bit 62. Made once for a tile; at() is one addition to its lower
/// half, because any instruction between two wgmma keeps the tensor cores waiting.
struct Descriptor {
  u32 low, high;
  TW_INLINE Descriptor(u32 address, u32 leading_bytes, u32 stride_bytes)
      : low((address & 0x3ffffu) >> 4 | (leading_bytes >> 4) << 16), high(stride_bytes >> 4 | 1u << 30) {}
  /// The descriptor `bytes` further on.
  TW_INLINE u64 at(int bytes) const { return static_cast<u64>(high) << 32 | (low + static_cast<u32>(bytes >> 4)); }
};

template <class A, int N, class B = A>
struct Wgmma {
  static_assert(
      sizeof(A) == 0,
      "no product of this element type and width: bf16, f16, float, fp8 or i8, N = 8, 16, 32, 64, 80, 96, 128, 160, 176, 192 or 256");
};

/// wgmma.sp: the same where `a`, from shared memory, is 2:4 sparse: 32 bytes of its values are K / 2 elements. `metadata` is a word of each
/// lane, as sparse.tile.hpp describes.
template <class T, int N>
struct SparseWgmma {
  static_assert(sizeof(T) == 0, "no sparse product of this element type and width: bf16, f16, fp8_e4m3 or i8, N = 64, 128, 192 or 256");
};

#if TW_ON_GPU

// Accumulators in the text: "%0, %1, ...", ten at a time.
#define TW_TEXT_10(tens) \
  "%" tens "0, %" tens "1, %" tens "2, %" tens "3, %" tens "4, %" tens "5, %" tens "6, %" tens "7, %" tens "8, %" tens "9"
#define TW_TEXT_4 "%0, %1, %2, %3"
#define TW_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TW_TEXT_16 TW_TEXT_10("") ", %10, %11, %12, %13, %14, %15"
#define TW_TEXT_30 TW_TEXT_10("") ", " TW_TEXT_10("1") ", " TW_TEXT_10("2")
#define TW_TEXT_32 TW_TEXT_30 ", %30, %31"
#define TW_TEXT_40 TW_TEXT_30 ", " TW_TEXT_10("3")
#define TW_TEXT_48 TW_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TW_TEXT_60 TW_TEXT_40 ", " TW_TEXT_10("4") ", " TW_TEXT_10("5")
#define TW_TEXT_64 TW_TEXT_60 ", %60, %61, %62, %63"
#define TW_TEXT_80 TW_TEXT_60 ", " TW_TEXT_10("6") ", " TW_TEXT_10("7")
#define TW_TEXT_88 TW_TEXT_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TW_TEXT_90 TW_TEXT_80 ", " TW_TEXT_10("8")
#define TW_TEXT_96 TW_TEXT_90 ", %90, %91, %92, %93, %94, %95"
#define TW_TEXT_120 TW_TEXT_90 ", " TW_TEXT_10("9") ", " TW_TEXT_10("10") ", " TW_TEXT_10("11")
#define TW_TEXT_128 TW_TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// Accumulators as operands, with the constraint "+f" or, of integers, "+r".
#define TW_REGS_4(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define TW_REGS_8(C, i) TW_REGS_4(C, i), TW_REGS_4(C, i + 4)
#define TW_REGS_16(C, i) TW_REGS_8(C, i), TW_REGS_8(C, i + 8)
#define TW_REGS_32(C, i) TW_REGS_16(C, i), TW_REGS_16(C, i + 16)
#define TW_REGS_64(C, i) TW_REGS_32(C, i), TW_REGS_32(C, i + 32)
#define TW_REGS_40(C, i) TW_REGS_32(C, i), TW_REGS_8(C, i + 32)
#define TW_REGS_48(C, i) TW_REGS_32(C, i), TW_REGS_16(C, i + 32)
#define TW_REGS_80(C, i) TW_REGS_64(C, i), TW_REGS_16(C, i + 64)
#define TW_REGS_88(C, i) TW_REGS_80(C, i), TW_REGS_8(C, i + 80)
#define TW_REGS_96(C, i) TW_REGS_64(C, i), TW_REGS_32(C, i + 64)
#define TW_REGS_128(C, i) TW_REGS_64(C, i), TW_REGS_64(C, i + 64)

// Count = N / 2 accumulators; p0.. are the numbers of the operands after them. NEGATE: the modifiers that only floating-point products
// have. Transposes exist for 16-bit types only.
#define TW_WGMMA(A, B, D, C, SHAPE, NEGATE, TRANSPOSES_SS, TRANSPOSES_RS, N, Count, p0, p1, p2, p3, p4, p5, p6, p7)                 \
  template <>                                                                                                                       \
  struct Wgmma<A, N, B> {                                                                                                           \
    template <int TransposeA, int TransposeB>                                                                                       \
    static TW_INLINE void shared_shared(D* d, u64 a, u64 b, u32 accumulate) {                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" TW_TEXT_##Count \
                   "}, %" #p0 ", %" #p1 ", p" NEGATE TRANSPOSES_SS(p3, p4) ";\n}"                                                   \
                   : TW_REGS_##Count(C, 0)                                                                                          \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(TransposeA), "n"(TransposeB));                                            \
    }                                                                                                                               \
    template <int TransposeB>                                                                                                       \
    static TW_INLINE void registers_shared(D* d, const u32* a, u64 b, u32 accumulate) {                                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" TW_TEXT_##Count \
                   "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p" NEGATE TRANSPOSES_RS(p6) ";\n}"                       \
                   : TW_REGS_##Count(C, 0)                                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TransposeB));                         \
    }                                                                                                                               \
  };

#define TW_TRANSPOSES_BOTH(a, b) ", %" #a ", %" #b
#define TW_TRANSPOSES_ONE(b) ", %" #b
#define TW_TRANSPOSES_NONE(...) ""
#define TW_WGMMA_TYPES(...)                                                                                              \
  TW_WGMMA(bf16, bf16, float, "+f", "k16.f32.bf16.bf16", ", 1, 1", TW_TRANSPOSES_BOTH, TW_TRANSPOSES_ONE, __VA_ARGS__)   \
  TW_WGMMA(f16, f16, float, "+f", "k16.f32.f16.f16", ", 1, 1", TW_TRANSPOSES_BOTH, TW_TRANSPOSES_ONE, __VA_ARGS__)       \
  TW_WGMMA(float, float, float, "+f", "k8.f32.tf32.tf32", ", 1, 1", TW_TRANSPOSES_NONE, TW_TRANSPOSES_NONE, __VA_ARGS__) \
  TW_WGMMA_FP8(fp8_e4m3, fp8_e4m3, "e4m3.e4m3", __VA_ARGS__)                                                             \
  TW_WGMMA_FP8(fp8_e4m3, fp8_e5m2, "e4m3.e5m2", __VA_ARGS__)                                                             \
  TW_WGMMA_FP8(fp8_e5m2, fp8_e4m3, "e5m2.e4m3", __VA_ARGS__)                                                             \
  TW_WGMMA_FP8(fp8_e5m2, fp8_e5m2, "e5m2.e5m2", __VA_ARGS__)                                                             \
  TW_WGMMA(i8, i8, i32, "+r", "k32.s32.s8.s8", "", TW_TRANSPOSES_NONE, TW_TRANSPOSES_NONE, __VA_ARGS__)
#define TW_WGMMA_FP8(A, B, TYPES, ...) \
  TW_WGMMA(A, B, float, "+f", "k32.f32." TYPES, ", 1, 1", TW_TRANSPOSES_NONE, TW_TRANSPOSES_NONE, __VA_ARGS__)

TW_WGMMA_TYPES(8, 4, 4, 5, 6, 7, 8, 9, 10, 11)
TW_WGMMA_TYPES(16, 8, 8, 9, 10, 11, 12, 13, 14, 15)
TW_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20, 21, 22, 23)
TW_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36, 37, 38, 39)
TW_WGMMA_TYPES(80, 40, 40, 41, 42, 43, 44, 45, 46, 47)
TW_WGMMA_TYPES(96, 48, 48, 49, 50, 51, 52, 53, 54, 55)
TW_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68, 69, 70, 71)
TW_WGMMA_TYPES(160, 80, 80, 81, 82, 83, 84, 85, 86, 87)
TW_WGMMA_TYPES(176, 88, 88, 89, 90, 91, 92, 93, 94, 95)
TW_WGMMA_TYPES(192, 96, 96, 97, 98, 99, 100, 101, 102, 103)
TW_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132, 133, 134, 135)

// p0 to p6: the numbers of the operands after the accumulators.
#define TW_SPARSE_WGMMA(T, D, C, SHAPE, NEGATE, TRANSPOSES, N, Count, p0, p1, p2, p3, p4, p5, p6)                                      \
  template <>                                                                                                                          \
  struct SparseWgmma<T, N> {                                                                                                           \
    template <int Selector, int TransposeB>                                                                                            \
    static TW_INLINE void shared_shared(D* d, u64 a, u64 b, u32 metadata, u32 accumulate) {                                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p3 ", 0;\nwgmma.mma_async.sp.sync.aligned.m64n" #N SHAPE " {" TW_TEXT_##Count \
                   "}, %" #p0 ", %" #p1 ", %" #p2 ", %" #p4 ", p" NEGATE TRANSPOSES(p5, p6) ";\n}"                                     \
                   : TW_REGS_##Count(C, 0)                                                                                             \
                   : "l"(a), "l"(b), "r"(metadata), "r"(accumulate), "n"(Selector), "n"(0), "n"(TransposeB));                          \
    }                                                                                                                                  \
  };
#define TW_SPARSE_WGMMA_TYPES(...)                                                                       \
  TW_SPARSE_WGMMA(bf16, float, "+f", "k32.f32.bf16.bf16", ", 1, 1", TW_TRANSPOSES_BOTH, __VA_ARGS__)     \
  TW_SPARSE_WGMMA(f16, float, "+f", "k32.f32.f16.f16", ", 1, 1", TW_TRANSPOSES_BOTH, __VA_ARGS__)        \
  TW_SPARSE_WGMMA(fp8_e4m3, float, "+f", "k64.f32.e4m3.e4m3", ", 1, 1", TW_TRANSPOSES_NONE, __VA_ARGS__) \
  TW_SPARSE_WGMMA(i8, i32, "+r", "k64.s32.s8.s8", "", TW_TRANSPOSES_NONE, __VA_ARGS__)

TW_SPARSE_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36, 37, 38)
TW_SPARSE_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68, 69, 70)
TW_SPARSE_WGMMA_TYPES(192, 96, 96, 97, 98, 99, 100, 101, 102)
TW_SPARSE_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132, 133, 134)

#endif  // TW_ON_GPU

}  // namespace tw::sm_90a
