#include "microkernels/isa.hpp"
#include "microkernels/table.hpp"
#include "tilewave/tile/types.tile.hpp"

namespace tw::cpu {
namespace {

// The compilers' own vectors of 16 bytes, which every architecture of interest has in some form.
struct Baseline {
  static constexpr const char* kIsa = "baseline";
  static constexpr Exponentials exponentials = nullptr;
  static constexpr LargestOf largest = nullptr;
  using Element = float;
  using Sum = float;
  typedef float Register __attribute__((vector_size(16)));
  typedef float Unaligned __attribute__((vector_size(16), aligned(1), may_alias));
  typedef int Integers __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
#if defined(__aarch64__)
  static constexpr int kRows = 6, kVectors = 4;  // of 32 registers
#else
  static constexpr int kRows = 6, kVectors = 2;  // of 16 registers
#endif
  static constexpr int kDepth = 256;
  static constexpr bool kStarts = false;

  [[gnu::always_inline]] static Register zero() { return Register{0, 0, 0, 0}; }
  [[gnu::always_inline]] static Register load(const void* from) { return *static_cast<const Unaligned*>(from); }
  static void store(float* to, Register x) { *reinterpret_cast<Unaligned*>(to) = x; }
  [[gnu::always_inline]] static Register columns(const float* from) { return load(from); }
  [[gnu::always_inline]] static Register row(const float* from) { return Register{*from, *from, *from, *from}; }
  [[gnu::always_inline]] static Register multiply_add(Register x, Register y, Register z) { return x * y + z; }
  static void accumulate(float* to, Register sum, bool overwrite) { store(to, overwrite ? sum : load(to) + sum); }

  static float from_bits(unsigned bits) { return __builtin_bit_cast(float, bits); }
  static float one(BF16, unsigned short bits) { return from_bits(static_cast<unsigned>(bits) << 16); }
  static float one(F16, unsigned short bits) {
    const unsigned sign = static_cast<unsigned>(bits & 0x8000) << 16;
    const unsigned exponent = bits & 0x7c00u, rest = static_cast<unsigned>(bits & 0x7fff) << 13;
    unsigned magnitude = rest + (112u << 23);                // the exponent's bias is 127 instead of 15
    if (exponent == 0x7c00) magnitude = rest | 0x7f800000u;  // infinity, NaN
    if (exponent == 0) {
      // A subnormal is (2^-14 + fraction) - 2^-14: normal numbers all, so right even where f32's own subnormals are flushed to 0.
      const float value = from_bits(rest + (113u << 23)) - from_bits(113u << 23);
      magnitude = __builtin_bit_cast(unsigned, value);
    }
    return from_bits(sign | magnitude);
  }

  static float one(E5M2, unsigned char bits) { return one(F16{}, static_cast<unsigned short>(bits << 8)); }
  static float one(E4M3, unsigned char bits) {
    if ((bits & 0x7f) == 0x7f) return from_bits(0x7fc00000u);
    // As f16 bits its exponent has a bias of 15 instead of 7.
    return one(F16{}, static_cast<unsigned short>((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256.0f;
  }

  static Register widen(F32, const float* bits) { return load(bits); }
  static Register widen(BF16, const unsigned short* groups) { return load(groups); }
  static Register widen(I8, const signed char* groups) { return load(groups); }
  template <class Element, class Bits>
  static Register widen(Element element, const Bits* bits) {
    return Register{one(element, bits[0]), one(element, bits[1]), one(element, bits[2]), one(element, bits[3])};
  }

  template <class Element>
  static Register interleave(Element element, const typename Element::Bits* const* k, int first) {
    if constexpr (kGroupOf<Element> == 1) {
      return widen(element, k[0] + first);
    } else {
      typename Element::Bits groups[kWidth][kGroupOf<Element>];
      for (int i = 0; i < kWidth; ++i)
        for (int j = 0; j < kGroupOf<Element>; ++j) groups[i][j] = k[j][first + i];
      return load(groups);
    }
  }

  static Integers integers(const void* groups) { return __builtin_bit_cast(Integers, load(groups)); }
  static void split(BF16, const unsigned short* groups, Register (&out)[2]) {
    const Integers both = integers(groups);
    out[0] = __builtin_bit_cast(Register, both << 16);
    out[1] = __builtin_bit_cast(Register, both & ~0xffff);
  }
  static void split(I8, const signed char* groups, Register (&out)[4]) {
    const Integers all = integers(groups);
    TILEWAVE_UNROLL(4)
    for (int j = 0; j < 4; ++j) out[j] = __builtin_convertvector(all << (24 - 8 * j) >> 24, Register);
  }

  static void stream_line(float* to, const float* from) {
    for (int k = 0; k < 16; k += kWidth) store(to + k, load(from + k));
  }
  static void store_narrowed(unsigned short* to, const float* from) {
    for (int k = 0; k < 32; ++k) narrow_one(to[k], from[k]);
  }
  static void stream_narrowed(unsigned short* to, const float* from) { store_narrowed(to, from); }
  static void store_f16(unsigned short* to, const float* from) {
    for (int k = 0; k < kWidth; ++k) to[k] = f16(from[k]).bits;
  }
  static void store_widened(float* to, const unsigned short* from) {
    for (int k = 0; k < kWidth; ++k) to[k] = one(BF16{}, from[k]);
  }

  static void transpose(Register (&v)[kWidth]) {
    const Register low0 = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5), high0 = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
    const Register low1 = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5), high1 = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
    v[0] = __builtin_shufflevector(low0, low1, 0, 1, 4, 5);
    v[1] = __builtin_shufflevector(low0, low1, 2, 3, 6, 7);
    v[2] = __builtin_shufflevector(high0, high1, 0, 1, 4, 5);
    v[3] = __builtin_shufflevector(high0, high1, 2, 3, 6, 7);
  }

  struct Exact;
};

struct Baseline::Exact : Baseline {
  using Sum = int;
  static void accumulate(int* to, Register sum, bool overwrite) {
    const Integers exact = __builtin_convertvector(sum, Integers);
    Baseline::store(reinterpret_cast<float*>(to), __builtin_bit_cast(Register, overwrite ? exact : exact + integers(to)));
  }
};

}  // namespace

const Library* baseline_library() { return &kLibrary<Baseline>; }
const QuantizedLibrary* baseline_quantized_library() { return &kQuantizedLibrary<Baseline>; }

}  // namespace tw::cpu
