#include "tile/cpu/isa.hpp"
#include "tile/cpu/pack.hpp"

namespace tw::cpu {
namespace {

// The compilers' own vectors of 16 bytes, which every architecture of interest has in some form.
struct Baseline {
  static constexpr const char* kIsa = "baseline";
  typedef float Register __attribute__((vector_size(16)));
  typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
  static constexpr int kWidth = 4;
#if defined(__aarch64__)
  static constexpr int kRows = 6, kVectors = 4;  // of 32 registers
#else
  static constexpr int kRows = 6, kVectors = 2;  // of 16 registers
#endif
  static constexpr int kDepth = 256;

  static Register zero() { return Register{0, 0, 0, 0}; }
  static Register load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
  static void store(float* to, Register x) { *reinterpret_cast<Unaligned*>(to) = x; }
  static Register broadcast(const float* from) { return Register{*from, *from, *from, *from}; }
  static Register add(Register x, Register y) { return x + y; }
  static Register multiply_add(Register x, Register y, Register z) { return x * y + z; }

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

  static Register widen(F32, const float* bits) { return load(bits); }
  template <class Element>
  static Register widen(Element element, const unsigned short* bits) {
    return Register{one(element, bits[0]), one(element, bits[1]), one(element, bits[2]), one(element, bits[3])};
  }

  static void transpose(Register (&v)[kWidth]) {
    const Register low0 = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5), high0 = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
    const Register low1 = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5), high1 = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
    v[0] = __builtin_shufflevector(low0, low1, 0, 1, 4, 5);
    v[1] = __builtin_shufflevector(low0, low1, 2, 3, 6, 7);
    v[2] = __builtin_shufflevector(high0, high1, 0, 1, 4, 5);
    v[3] = __builtin_shufflevector(high0, high1, 2, 3, 6, 7);
  }
};

}  // namespace

const Library* baseline_library() { return &kLibrary<Baseline>; }

}  // namespace tw::cpu
