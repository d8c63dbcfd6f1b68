// The cpu target's library, every instruction set that this machine has, against loops in double.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "microkernels/isa.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/types.tile.hpp"

namespace {

using tw::cpu::kPanelRows;
using tw::cpu::Library;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// 64-byte aligned elements between two guard zones, which the destructor finds as they were.
template <class T>
class Guarded {
 public:
  explicit Guarded(long size) : size_(size), memory_(static_cast<T*>(std::aligned_alloc(64, elements() * sizeof(T))), std::free) {
    std::fill_n(memory_.get(), elements(), kGuard);
  }
  ~Guarded() {
    for (long i = 0; i < kZone; ++i) {
      EXPECT_EQ(memory_.get()[i], kGuard) << "written " << kZone - i << " before the start";
    }
    for (std::size_t i = static_cast<std::size_t>(kZone + size_); i < elements(); ++i) {
      EXPECT_EQ(memory_.get()[i], kGuard) << "written " << static_cast<long>(i) - kZone - size_ << " past the end";
    }
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return memory_.get() + kZone; }
  T& operator[](long i) { return data()[i]; }
  long size() const { return size_; }

 private:
  static constexpr long kZone = 64;
  static constexpr T kGuard = static_cast<T>(113);
  std::size_t elements() const { return static_cast<std::size_t>((size_ + 63) / 64 * 64 + 2 * kZone); }

  long size_;
  std::unique_ptr<T, void (*)(void*)> memory_;
};

// Elements that touch an unmapped page, at their start or at their end: a read outside them ends the test.
template <class T>
class Fenced {
 public:
  Fenced(long size, bool at_end) {
    const long page = ::sysconf(_SC_PAGESIZE), inside = (size * static_cast<long>(sizeof(T)) + page - 1) / page * page;
    mapped_ = static_cast<std::size_t>(inside + 2 * page);
    base_ = ::mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) std::abort();
    char* first = static_cast<char*>(base_) + page;
    if (inside > 0 && ::mprotect(first, static_cast<std::size_t>(inside), PROT_READ | PROT_WRITE) != 0) std::abort();
    data_ = reinterpret_cast<T*>(at_end ? first + inside - size * static_cast<long>(sizeof(T)) : first);
  }
  ~Fenced() { ::munmap(base_, mapped_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  T* data() { return data_; }

 private:
  void* base_ = nullptr;
  std::size_t mapped_ = 0;
  T* data_ = nullptr;
};

double f16_value(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

float bf16_value(unsigned short bits) { return std::bit_cast<float>(static_cast<unsigned>(bits) << 16); }

double fp8_value(unsigned char bits, int mantissa_bits, int bias) {
  const int exponent = (bits & 127) >> mantissa_bits, fraction = bits & ((1 << mantissa_bits) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa_bits)
                                         : std::ldexp((1 << mantissa_bits) + fraction, exponent - bias - mantissa_bits);
  return (bits & 128) != 0 ? -magnitude : magnitude;
}
double e4m3_value(unsigned char bits) { return (bits & 127) == 127 ? std::nan("") : fp8_value(bits, 3, 7); }
double e5m2_value(unsigned char bits) {
  if ((bits & 127) < 0x7c) return fp8_value(bits, 2, 15);
  return (bits & 3) != 0 ? std::nan("") : (bits & 128) != 0 ? -HUGE_VAL : HUGE_VAL;
}

// What the element types have in common to the tests. value(): what stands in a panel.
struct F32 {
  using Bits = float;
  using Packed = float;
  using Sum = float;
  static constexpr auto pack = &Library::pack_f32;
  static constexpr auto mma = &Library::mma_f32;
  static constexpr Bits garbage = kNaN;
  static Packed value(Bits bits) { return bits; }
  static Bits sample(std::mt19937_64& random) { return std::uniform_real_distribution<float>(-2, 2)(random); }
  static Packed factor(std::mt19937_64& random) { return std::uniform_real_distribution<float>(-1, 1)(random); }
  static double number(Packed packed) { return packed; }
};
struct F16 {
  using Bits = unsigned short;
  using Packed = float;
  static constexpr auto pack = &Library::pack_f16;
  static constexpr Bits garbage = 0x7e00;
  static Packed value(Bits bits) { return static_cast<float>(f16_value(bits)); }
  static Bits sample(std::mt19937_64& random) {  // any finite value or infinity
    const unsigned bits = static_cast<unsigned>(random());
    return static_cast<Bits>((bits & 0x7c00) == 0x7c00 ? bits & 0xfc00 : bits & 0xffff);
  }
};
struct E4M3 {
  using Bits = unsigned char;
  using Packed = float;
  static constexpr auto pack = &Library::pack_e4m3;
  static constexpr Bits garbage = 0x7f;
  static Packed value(Bits bits) { return static_cast<float>(e4m3_value(bits)); }
  static Bits sample(std::mt19937_64& random) { return static_cast<Bits>(random()); }
};
struct E5M2 {
  using Bits = unsigned char;
  using Packed = float;
  static constexpr auto pack = &Library::pack_e5m2;
  static constexpr Bits garbage = 0x7f;
  static Packed value(Bits bits) { return static_cast<float>(e5m2_value(bits)); }
  static Bits sample(std::mt19937_64& random) { return static_cast<Bits>(random()); }
};
struct BF16 {
  using Bits = unsigned short;
  using Packed = unsigned short;
  using Sum = float;
  static constexpr auto pack = &Library::pack_bf16;
  static constexpr auto mma = &Library::mma_bf16;
  static constexpr Bits garbage = 0x7fc0;
  static Packed value(Bits bits) { return bits; }
  static Bits sample(std::mt19937_64& random) { return static_cast<Bits>(random()); }
  static Packed factor(std::mt19937_64& random) { return tw::bf16(std::uniform_real_distribution<float>(-1, 1)(random)).bits; }
  static double number(Packed packed) { return bf16_value(packed); }
};
struct I8 {
  using Bits = signed char;
  using Packed = signed char;
  using Sum = int;
  static constexpr auto pack = &Library::pack_i8;
  static constexpr auto mma = &Library::mma_i8;
  static constexpr Bits garbage = 99;
  static Packed value(Bits bits) { return bits; }
  static Bits sample(std::mt19937_64& random) { return static_cast<Bits>(random()); }
  static Packed factor(std::mt19937_64& random) {  // extremes every other time
    static constexpr Packed kExtremes[] = {-128, -127, 127, 0};
    return random() % 2 == 0 ? kExtremes[random() % std::size(kExtremes)] : static_cast<Packed>(random());
  }
  static double number(Packed packed) { return packed; }
};

template <class Packed>
constexpr int kGroup = 4 / static_cast<int>(sizeof(Packed));

/// Where the panels of library.tile.hpp have an element.
template <class Packed>
long in_panels(int row, int k, int panel_depth) {
  constexpr int group = kGroup<Packed>;
  return static_cast<long>(row / kPanelRows) * kPanelRows * panel_depth + k / group * kPanelRows * group + row % kPanelRows * group +
         k % group;
}

void expect_same(float got, float want, const char* what, int row, int k) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << what << " (" << row << ", " << k << ")";
  } else {
    EXPECT_EQ(std::bit_cast<unsigned>(got), std::bit_cast<unsigned>(want))
        << what << " (" << row << ", " << k << "): " << got << ", " << want;
  }
}
template <class Packed>
void expect_same(Packed got, Packed want, const char* what, int row, int k) {
  EXPECT_EQ(got, want) << what << " (" << row << ", " << k << ")";
}

const std::vector<const Library*>& libraries() {
  static const std::vector<const Library*> all = [] {
    std::vector<const Library*> found{tw::cpu::baseline_library()};
    if (tw::cpu::has_avx2() && tw::cpu::avx2_library() != nullptr) found.push_back(tw::cpu::avx2_library());
    if (tw::cpu::has_avx512() && tw::cpu::avx512_library() != nullptr) {
      found.push_back(tw::cpu::avx512_library());
      if (tw::cpu::has_avx512_vnni() || tw::cpu::has_avx512_bf16()) found.push_back(tw::cpu::extended_avx512_library());
      if (tw::cpu::has_avx512_amx() && tw::cpu::amx_avx512_library() != nullptr) found.push_back(tw::cpu::amx_avx512_library());
    }
    return found;
  }();
  return all;
}

class CpuLibrary : public testing::TestWithParam<const Library*> {
 protected:
  int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  // Edges of the microkernels and panels, primes, and anything.
  int size(int largest = 300) {
    static constexpr int kEdges[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  11, 13, 14, 15,  16,  17,  22,  23,  24,  25, 31,
                                     32, 33, 41, 47, 48, 49, 63, 64, 65, 89, 95, 96, 97, 127, 128, 129, 191, 193, 241, 257};
    int sampled = 0;
    do {
      sampled = between(0, 3) == 0 ? between(0, largest) : kEdges[between(0, static_cast<int>(std::size(kEdges)) - 1)];
    } while (sampled > largest);
    return sampled;
  }

  template <class Element>
  void check_mma(int rows, int cols, int depth, int panel_depth, int acc_stride, bool overwrite);
  template <class Element>
  void check_pack(long row_stride, long depth_stride, int rows, int depth, int panel_depth);
  template <class Element>
  void check_packs();
  template <class Element>
  void check_products();

  std::mt19937_64 random_ = tw::test::random_engine();
};

template <class Element>
void CpuLibrary::check_mma(int rows, int cols, int depth, int panel_depth, int acc_stride, bool overwrite) {
  using Packed = typename Element::Packed;
  using Sum = typename Element::Sum;
  constexpr Sum kIrrelevant = std::numeric_limits<Sum>::has_quiet_NaN ? std::numeric_limits<Sum>::quiet_NaN() : Sum{-1'000'000'000};
  const int whole_depth = round_up(depth, kGroup<Packed>);
  panel_depth = round_up(panel_depth, kGroup<Packed>);
  SCOPED_TRACE("mma " + std::to_string(rows) + " x " + std::to_string(cols) + " x " + std::to_string(depth) + " of " +
               std::to_string(panel_depth) + ", stride " + std::to_string(acc_stride) + (overwrite ? ", overwriting" : ""));
  const auto panels = [&](Guarded<Packed>& to, int used, bool completes_groups) {
    for (int row = 0; row < round_up(used, kPanelRows); ++row) {
      for (int k = 0; k < panel_depth; ++k) {
        const bool present = k < depth || (k < whole_depth && completes_groups);
        to[in_panels<Packed>(row, k, panel_depth)] = present           ? Element::factor(random_)
                                                     : k < whole_depth ? Packed{0}
                                                                       : static_cast<Packed>(Element::garbage);
      }
    }
  };
  Guarded<Packed> a(static_cast<long>(round_up(rows, kPanelRows)) * panel_depth);
  Guarded<Packed> b(static_cast<long>(round_up(cols, kPanelRows)) * panel_depth);
  const bool a_completes_groups = between(0, 1) == 0;
  panels(a, rows, a_completes_groups);
  panels(b, cols, !a_completes_groups);
  const int writable_rows = round_up(rows, 8), writable_cols = round_up(cols, 16);
  Guarded<Sum> acc(static_cast<long>(writable_rows) * acc_stride);
  std::vector<Sum> before(static_cast<std::size_t>(acc.size()));
  for (long i = 0; i < acc.size(); ++i) {
    const long row = i / acc_stride, col = i % acc_stride;
    const bool read = row < rows && col < cols && !overwrite;
    before[static_cast<std::size_t>(i)] = acc[i] = read                  ? static_cast<Sum>(Element::number(Element::factor(random_)))
                                                   : col < writable_cols ? kIrrelevant
                                                                         : Sum{77};
  }

  (GetParam()->*Element::mma)(acc.data(), acc_stride, a.data(), b.data(), rows, cols, depth, panel_depth, overwrite);

  int wrong = 0;
  for (int row = 0; row < writable_rows; ++row) {
    for (int col = 0; col < acc_stride; ++col) {
      const long i = static_cast<long>(row) * acc_stride + col;
      if (col >= writable_cols) {
        ASSERT_EQ(acc[i], 77) << "written beyond the columns at (" << row << ", " << col << ")";
      } else if (row < rows && col < cols) {
        // Sums of int8 products are integers far below 2^53.
        double sum = overwrite ? 0 : before[static_cast<std::size_t>(i)], magnitude = std::abs(sum);
        for (int k = 0; k < depth; ++k) {
          const double product =
              Element::number(a[in_panels<Packed>(row, k, panel_depth)]) * Element::number(b[in_panels<Packed>(col, k, panel_depth)]);
          sum += product;
          magnitude += std::abs(product);
        }
        // The product and the sum of each k are rounded, or both at once.
        const double allowed = std::is_same_v<Sum, int> ? 0 : 2 * (depth + 1) * 0x1p-24 * magnitude;
        if (!(std::abs(acc[i] - sum) <= allowed)) {
          ASSERT_LT(++wrong, 5);
          ADD_FAILURE() << "(" << row << ", " << col << "): " << acc[i] << " instead of " << sum;
        }
      }
    }
  }
}

template <class Element>
void CpuLibrary::check_pack(long row_stride, long depth_stride, int rows, int depth, int panel_depth) {
  SCOPED_TRACE("pack " + std::to_string(rows) + " x " + std::to_string(depth) + " of " + std::to_string(panel_depth) + ", strides " +
               std::to_string(row_stride) + " and " + std::to_string(depth_stride));
  const bool empty = rows == 0 || depth == 0;
  const long row_span = empty ? 0 : row_stride * (rows - 1), depth_span = empty ? 0 : depth_stride * (depth - 1);
  const long low = std::min(row_span, 0L) + std::min(depth_span, 0L), high = std::max(row_span, 0L) + std::max(depth_span, 0L);
  Fenced<typename Element::Bits> memory(empty ? 0 : high - low + 1, between(0, 1) == 1);
  typename Element::Bits* source = memory.data() - low;
  if (!empty) std::fill(memory.data(), memory.data() + (high - low + 1), Element::garbage);
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < depth; ++k) source[row * row_stride + k * depth_stride] = Element::sample(random_);
  }
  using Packed = typename Element::Packed;
  panel_depth = round_up(panel_depth, kGroup<Packed>);
  const int padded = round_up(rows, kPanelRows);
  Guarded<Packed> panels(static_cast<long>(padded) * panel_depth);
  std::fill_n(panels.data(), panels.size(), Packed{77});

  (GetParam()->*Element::pack)(panels.data(), source, row_stride, depth_stride, rows, depth, panel_depth);

  for (int row = 0; row < padded && !HasFailure(); ++row) {
    for (int k = 0; k < panel_depth; ++k) {
      const Packed got = panels[in_panels<Packed>(row, k, panel_depth)];
      if (k >= round_up(depth, kGroup<Packed>)) {
        expect_same(got, Packed{77}, "beyond the depth", row, k);
      } else if (row < rows && k < depth) {
        expect_same(got, Element::value(source[row * row_stride + k * depth_stride]), "element", row, k);
      } else {
        expect_same(got, Packed{0}, "completing", row, k);
      }
    }
  }
}

template <class Element>
void CpuLibrary::check_packs() {
  for (int i = 0; i < 150 && !HasFailure(); ++i) {
    const int rows = size(120), depth = size(120), panel_depth = depth + (between(0, 1) == 0 ? 0 : between(1, 20));
    const long pitch = between(1, 200), sign = between(0, 1) == 0 ? 1 : -1;
    check_pack<Element>(sign * pitch, 1, rows, depth, panel_depth);  // rows may even overlap
    check_pack<Element>(1, sign * pitch, rows, depth, panel_depth);
    check_pack<Element>(0, 1, rows, depth, panel_depth);
    check_pack<Element>(1, 0, rows, depth, panel_depth);
    check_pack<Element>(between(-9, 9), between(-9, 9), rows, depth, panel_depth);
    check_pack<Element>(-1, pitch, rows, depth, panel_depth);
    check_pack<Element>(pitch, -1, rows, depth, panel_depth);
  }
}

template <class Element>
void CpuLibrary::check_products() {
  for (int i = 0; i < 300 && !HasFailure(); ++i) {
    const int rows = size(), cols = size(), depth = size();
    const int panel_depth = depth + (between(0, 1) == 0 ? 0 : between(1, 40));
    const int acc_stride = round_up(cols, 16) + (between(0, 1) == 0 ? 0 : between(1, 40));
    check_mma<Element>(rows, cols, depth, panel_depth, std::max(acc_stride, 1), between(0, 1) == 0);
  }
  // Every remainder of rows and columns.
  for (int rows = 0; rows <= 2 * kPanelRows + 1 && !HasFailure(); ++rows) {
    for (int cols = 0; cols <= 98 && !HasFailure(); cols += between(1, 5)) {
      check_mma<Element>(rows, cols, between(0, 9), 9, round_up(cols, 16) + 1, between(0, 1) == 0);
    }
  }
  // Several blocks of the depth, and of the rows.
  check_mma<Element>(17, 33, 1031, 1031, 48, false);
  check_mma<Element>(1, 33, 2769, 2800, 50, true);
  check_mma<Element>(529, 17, 67, 67, 32, false);
}

TEST_P(CpuLibrary, ProductsOfF32) { check_products<F32>(); }
TEST_P(CpuLibrary, ProductsOfBf16) { check_products<BF16>(); }
TEST_P(CpuLibrary, ProductsOfI8) { check_products<I8>(); }

// Sums of one sign, the largest that there are.
TEST_P(CpuLibrary, ProductsOfI8Extremes) {
  constexpr int kRows = 19, kCols = 50, kDepth = 20003, kPanelDepth = 20004;
  for (const auto& [x, y] : {std::pair{-128, -128}, {-128, 127}, {127, -128}, {127, 127}, {-127, 127}, {-1, -128}}) {
    Guarded<signed char> a(32L * kPanelDepth), b(64L * kPanelDepth);
    for (int k = 0; k < kPanelDepth; ++k) {
      for (int row = 0; row < 32; ++row) a[in_panels<signed char>(row, k, kPanelDepth)] = static_cast<signed char>(k < kDepth ? x : 0);
      for (int col = 0; col < 64; ++col) b[in_panels<signed char>(col, k, kPanelDepth)] = static_cast<signed char>(k < kDepth ? y : 0);
    }
    Guarded<int> acc(24 * 64);
    GetParam()->mma_i8(acc.data(), 64, a.data(), b.data(), kRows, kCols, kDepth, kPanelDepth, true);
    for (int row = 0; row < kRows; ++row)
      for (int col = 0; col < kCols; ++col) ASSERT_EQ(acc[row * 64 + col], std::int64_t{x} * y * kDepth) << row << ", " << col;
  }
}

#if defined(__SANITIZE_ADDRESS__)
// The loop over k has no checks of its own: microkernels/microkernel.hpp.
TEST_P(CpuLibrary, ProductsReportReadsOutsideOfPanels) {
  constexpr int kDepth = 40;
  const std::vector<float> whole(kPanelRows * kDepth), less(kPanelRows * kDepth - 1);
  std::vector<float> acc(kPanelRows * kPanelRows);
  const auto multiply = [&](const std::vector<float>& a, const std::vector<float>& b) {
    GetParam()->mma_f32(acc.data(), kPanelRows, a.data(), b.data(), kPanelRows, kPanelRows, kDepth, kDepth, true);
  };
  multiply(whole, whole);
  EXPECT_DEATH(multiply(less, whole), "heap-buffer-overflow");
  EXPECT_DEATH(multiply(whole, less), "heap-buffer-overflow");
}
#endif

TEST_P(CpuLibrary, ProductsOfBf16InfinityAndNan) {
  constexpr int kDepth = 40;
  constexpr unsigned short kOne = 0x3f80, kInfinity = 0x7f80, kNan = 0x7fc0;
  Guarded<unsigned short> a(16 * kDepth), b(16 * kDepth);
  std::fill_n(a.data(), a.size(), kOne);
  std::fill_n(b.data(), b.size(), kOne);
  a[in_panels<unsigned short>(1, 7, kDepth)] = kInfinity;
  b[in_panels<unsigned short>(2, 39, kDepth)] = kNan;
  Guarded<float> acc(8 * 16);
  GetParam()->mma_bf16(acc.data(), 16, a.data(), b.data(), 8, 16, kDepth, kDepth, true);
  for (int row = 0; row < 8; ++row) {
    for (int col = 0; col < 16; ++col) {
      const float want = col == 2 ? kNaN : row == 1 ? std::numeric_limits<float>::infinity() : static_cast<float>(kDepth);
      expect_same(acc[row * 16 + col], want, "product", row, col);
    }
  }
}

TEST_P(CpuLibrary, PackF32) { check_packs<F32>(); }
TEST_P(CpuLibrary, PackF16) { check_packs<F16>(); }
TEST_P(CpuLibrary, PackBf16) { check_packs<BF16>(); }
TEST_P(CpuLibrary, PackI8) { check_packs<I8>(); }
TEST_P(CpuLibrary, PackE4m3) { check_packs<E4M3>(); }
TEST_P(CpuLibrary, PackE5m2) { check_packs<E5M2>(); }

TEST_P(CpuLibrary, EveryValueIsWidened) {
  const auto check = [&]<class Element>(Element, int side) {
    std::vector<typename Element::Bits> source(static_cast<std::size_t>(side * side));
    for (int i = 0; i < side * side; ++i) source[static_cast<std::size_t>(i)] = static_cast<typename Element::Bits>(i);
    Guarded<float> panels(side * side);
    for (const bool transposed : {false, true}) {
      const long row_stride = transposed ? 1 : side, depth_stride = transposed ? side : 1;
      (GetParam()->*Element::pack)(panels.data(), source.data(), row_stride, depth_stride, side, side, side);
      for (int row = 0; row < side; ++row) {
        for (int k = 0; k < side; ++k) {
          const auto bits = source[static_cast<std::size_t>(row * row_stride + k * depth_stride)];
          expect_same(panels[in_panels<float>(row, k, side)], Element::value(bits), "element", row, k);
        }
      }
    }
  };
  check(F16{}, 256);
  check(E4M3{}, 16);
  check(E5M2{}, 16);
}

/// n floats: any bits, so NaN, infinity and subnormals too; every third lies halfway between two bf16 numbers or next to that.
std::vector<float> any_floats(int n, std::mt19937_64& random) {
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) {
    auto bits = static_cast<unsigned>(random());
    if (random() % 3 == 0) bits = (bits & 0xffff0000u) + 0x7fffu + static_cast<unsigned>(random() % 3);
    if (random() % 16 == 0) bits &= 0x807fffffu;
    if (random() % 16 == 0) bits |= 0x7f800000u;
    v = std::bit_cast<float>(bits);
  }
  return x;
}

TEST_P(CpuLibrary, WidensAndNarrowsRowsOfAnyLength) {
  const Library& library = *GetParam();
  for (const int n : {0, 1, 3, 4, 7, 8, 15, 16, 17, 100, 777}) {
    for (int shift = 0; shift < 16; ++shift) {
      std::vector<float> from = any_floats(n, random_);
      for (float& x : from)
        if (random_() % 2 == 0) x = std::ldexp(x, -130 + static_cast<int>(random_() % 130));  // where f16 has numbers, subnormals too
      std::vector<unsigned short> halves(static_cast<std::size_t>(shift + n));
      for (unsigned short& half : halves) half = static_cast<unsigned short>(random_());
      Guarded<unsigned short> narrowed(shift + n);
      Guarded<float> of_f16(n), of_bf16(n);
      library.narrow_f16(narrowed.data() + shift, from.data(), n);
      library.widen_f16(of_f16.data(), halves.data() + shift, n);
      library.widen_bf16(of_bf16.data(), halves.data() + shift, n);
      for (int k = 0; k < n; ++k) {
        const float x = from[static_cast<std::size_t>(k)];
        tw::f16 half, stored;
        tw::bf16 brain;
        stored.bits = narrowed[shift + k];
        half.bits = brain.bits = halves[static_cast<std::size_t>(shift + k)];
        if (std::isnan(x))
          ASSERT_TRUE(std::isnan(static_cast<float>(stored))) << std::hex << stored.bits;
        else
          ASSERT_EQ(stored.bits, tw::f16(x).bits) << x << " of " << n << " at " << shift;
        if (std::isnan(static_cast<float>(half)))
          ASSERT_TRUE(std::isnan(of_f16[k])) << std::hex << half.bits;
        else
          ASSERT_EQ(of_f16[k], static_cast<float>(half)) << std::hex << half.bits;
        ASSERT_EQ(std::bit_cast<unsigned>(of_bf16[k]), static_cast<unsigned>(brain.bits) << 16);
      }
    }
  }
}

/// Products of `count` rows of `cols` with a vector against double, and each row's alone: the same bits.
template <class T, class Bits>
void check_dots(tw::cpu::Dots<Bits> dots, int count, int cols, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  const long stride = cols + 5;
  std::vector<T> rows(static_cast<std::size_t>(stride * count + 1)), vector(static_cast<std::size_t>(cols + 1));
  for (T& x : rows) x = T(normal(random));
  for (T& x : vector) x = T(normal(random));
  const auto bits = [](const T* x) { return reinterpret_cast<const Bits*>(x); };
  const T *first = rows.data() + 1, *by = vector.data() + 1;  // aligned as elements are, no more
  std::vector<float> sums(static_cast<std::size_t>(count + 1), 2.0f), alone = sums;
  dots(sums.data(), bits(first), stride, bits(by), count, cols);
  for (int r = 0; r < count; ++r) dots(alone.data() + r, bits(first + r * stride), stride, bits(by), 1, cols);
  EXPECT_EQ(sums, alone);
  EXPECT_EQ(sums.back(), 2.0f) << "written past the rows";
  for (int r = 0; r < count; ++r) {
    double sum = 2, magnitude = 2;
    for (int c = 0; c < cols; ++c) {
      const double product = static_cast<double>(static_cast<float>(first[r * stride + c])) * static_cast<float>(by[c]);
      sum += product;
      magnitude += std::abs(product);
    }
    EXPECT_NEAR(sums[static_cast<std::size_t>(r)], sum, magnitude * 1e-6) << count << " rows of " << cols << ", row " << r;
  }
}

TEST_P(CpuLibrary, WeightedSumsOfRows) {
  std::normal_distribution<float> normal;
  for (const int count : {0, 1, 3, 16}) {
    for (const int cols : {0, 1, 7, 16, 31, 64, 127, 128, 129, 1000}) {
      const long stride = cols + 5;
      std::vector<float> rows(static_cast<std::size_t>(stride * count + 1)), weights(static_cast<std::size_t>(count));
      for (float& x : rows) x = normal(random_);
      for (float& x : weights) x = normal(random_);
      std::vector<float> sums(static_cast<std::size_t>(cols + 2), 2.0f);
      const float* const first = rows.data() + 1;  // aligned as elements are, no more
      GetParam()->add_rows_f32(sums.data() + 1, first, stride, weights.data(), count, cols);
      EXPECT_EQ(sums.front(), 2.0f);
      EXPECT_EQ(sums.back(), 2.0f) << "written past the columns";
      for (int c = 0; c < cols; ++c) {
        double sum = 2, magnitude = 2;
        for (int r = 0; r < count; ++r) {
          const double product = static_cast<double>(weights[static_cast<std::size_t>(r)]) * first[r * stride + c];
          sum += product;
          magnitude += std::abs(product);
        }
        EXPECT_NEAR(sums[static_cast<std::size_t>(c + 1)], sum, magnitude * 1e-6) << count << " rows of " << cols << ", column " << c;
      }
    }
  }
}

TEST_P(CpuLibrary, ProductsOfRowsWithAVector) {
  for (const int count : {0, 1, 3, 16}) {
    for (const int cols : {0, 1, 7, 31, 64, 127, 128, 129, 1000}) {
      check_dots<float, float>(GetParam()->dots_f32, count, cols, random_);
      check_dots<tw::bf16, unsigned short>(GetParam()->dots_bf16, count, cols, random_);
      check_dots<tw::f16, unsigned short>(GetParam()->dots_f16, count, cols, random_);
    }
  }
}

TEST_P(CpuLibrary, ExponentialsOfRows) {
  if (GetParam()->exponentials == nullptr) GTEST_SKIP() << "skipped: this set has none";
  for (const int n : {0, 16, 48, 64, 80, 256, 1008}) {
    std::vector<float> x(static_cast<std::size_t>(n));
    const float scale = 0.37f, base = 3.5f;
    for (float& v : x) v = std::uniform_real_distribution<float>(-400, 300)(random_);
    for (std::size_t k = 0; k < x.size(); k += 7) x[k] = std::array{-HUGE_VALF, -1e30f, 0.0f, base / scale}[random_() % 4];
    Guarded<float> y(n);
    std::copy(x.begin(), x.end(), y.data());
    const float sum = GetParam()->exponentials(y.data(), scale, base, n);
    double total = 0;
    for (int k = 0; k < n; ++k) {
      const double exponent =
          std::fma(static_cast<double>(x[static_cast<std::size_t>(k)]), static_cast<double>(scale), -static_cast<double>(base));
      const double want = exponent < -126.0 ? 0.0 : std::exp2(exponent);
      total += y[k];
      if (std::abs(exponent + 126) < 1e-4) continue;  // rounded to either side
      // The exponent itself is rounded: half a unit of a number below 256.
      ASSERT_NEAR(y[k], want, want * (std::abs(exponent) < 1 ? 0x1p-21 : 0x1p-16)) << "2^" << exponent;
    }
    EXPECT_NEAR(sum, total, total * 1e-6) << n;
  }
  Guarded<float> nan(16);
  std::fill_n(nan.data(), 16, 1.0f);
  nan[5] = kNaN;
  EXPECT_TRUE(std::isnan(GetParam()->exponentials(nan.data(), 1.0f, 2.0f, 16)));
  EXPECT_TRUE(std::isnan(nan[5]));
  EXPECT_EQ(nan[6], 0.5f);
}

TEST_P(CpuLibrary, LargestOfRows) {
  if (GetParam()->largest == nullptr) GTEST_SKIP() << "skipped: this set has none";
  for (const int n : {0, 16, 48, 64, 80, 256}) {
    for (int largest_at = -1; largest_at < n; ++largest_at) {
      Guarded<float> x(n);
      for (int k = 0; k < n; ++k)
        x[k] = random_() % 8 == 0 ? kNaN : random_() % 8 == 0 ? -HUGE_VALF : std::uniform_real_distribution<float>(-9, -1)(random_);
      if (largest_at >= 0) x[largest_at] = -0.5f;
      float want = -HUGE_VALF;
      for (int k = 0; k < n; ++k) want = x[k] > want ? x[k] : want;
      ASSERT_EQ(GetParam()->largest(x.data(), n), want) << n << ", " << largest_at;
    }
  }
  Guarded<float> none(16);
  std::fill_n(none.data(), 16, kNaN);
  EXPECT_EQ(GetParam()->largest(none.data(), 16), -HUGE_VALF);
}

TEST_P(CpuLibrary, RowsOfAnyLengthAtAnyAddress) {
  const Library& library = *GetParam();
  for (const int n : {0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 100, 777}) {
    for (int shift = 0; shift < 32; ++shift) {
      const std::vector<float> from = any_floats(n, random_);
      Guarded<float> f32(shift + n);
      Guarded<unsigned short> streamed(shift + n), narrowed(shift + n);
      const unsigned short untouched = narrowed[-1];
      library.stream_f32(f32.data() + shift, from.data(), n);
      library.stream_bf16(streamed.data() + shift, from.data(), n);
      library.narrow_bf16(narrowed.data() + shift, from.data(), n);
      for (int k = 0; k < shift + n; ++k) {
        if (k < shift) {
          ASSERT_EQ(f32[k], static_cast<float>(untouched)) << "written before the row, " << k;
          ASSERT_EQ(streamed[k], untouched) << "written before the row, " << k;
          ASSERT_EQ(narrowed[k], untouched) << "written before the row, " << k;
        } else {
          const float x = from[static_cast<std::size_t>(k - shift)];
          ASSERT_EQ(std::bit_cast<unsigned>(f32[k]), std::bit_cast<unsigned>(x)) << k - shift << " of " << n << " at " << shift;
          ASSERT_EQ(streamed[k], tw::bf16(x).bits) << std::hex << std::bit_cast<unsigned>(x) << " of " << n << " at " << shift;
          ASSERT_EQ(narrowed[k], tw::bf16(x).bits) << std::hex << std::bit_cast<unsigned>(x) << " of " << n << " at " << shift;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, CpuLibrary, testing::ValuesIn(libraries()), [](const testing::TestParamInfo<const Library*>& tested) {
  std::string name = tested.param->isa;
  std::replace(name.begin(), name.end(), '+', '_');
  return name;
});

/// Products on AMX's tiles, beyond what CpuLibrary checks of every set.
class CpuLibraryAmx : public testing::Test {
 protected:
  void SetUp() override {
    if (!tw::cpu::has_avx512_amx()) GTEST_SKIP() << "skipped: this processor has no AMX, or its operating system does not allow it";
    if (tw::cpu::amx_avx512_library() == nullptr) GTEST_SKIP() << "skipped: compiled without AMX";
    library_ = tw::cpu::amx_avx512_library();
  }

  const Library* library_ = nullptr;
  std::mt19937_64 random_ = tw::test::random_engine();
};

TEST_F(CpuLibraryAmx, SumsDependOnNeitherRowsNorColumnsNorZerosAfterTheDepth) {
  constexpr int kRows = 45, kCols = 77, kDepth = 150, kPanelDepth = 230, kStride = 80;
  Guarded<unsigned short> a(48L * kPanelDepth), b(80L * kPanelDepth);
  for (Guarded<unsigned short>* panels : {&a, &b}) {
    for (long row = 0; row < panels->size() / kPanelDepth; ++row) {
      for (int k = 0; k < kPanelDepth; ++k)
        (*panels)[in_panels<unsigned short>(static_cast<int>(row), k, kPanelDepth)] = k < kDepth ? BF16::factor(random_) : 0;
    }
  }
  const auto product = [&](Guarded<float>& acc, int rows, int cols, int depth) {
    library_->mma_bf16(acc.data(), kStride, a.data(), b.data(), rows, cols, depth, kPanelDepth, true);
  };
  Guarded<float> whole(48L * kStride);
  product(whole, kRows, kCols, kDepth);
  for (const auto& [rows, cols, depth] : {std::array{1, kCols, kDepth}, {16, 16, kDepth}, {17, 1, kDepth}, {kRows, 33, kPanelDepth}}) {
    Guarded<float> part(48L * kStride);
    product(part, rows, cols, depth);
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < cols; ++col)
        ASSERT_EQ(part[row * kStride + col], whole[row * kStride + col]) << row << ", " << col << " of " << rows << " x " << cols;
    }
  }
}

TEST_F(CpuLibraryAmx, ProductsOfRowsAreThoseOfPanels) {
  const auto between = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); };
  for (int i = 0; i < 200 && !HasFailure(); ++i) {
    const int rows = between(1, 70), cols = between(1, 100), depth = between(1, 300), panel_depth = round_up(depth + between(0, 9), 2);
    const int whole_depth = round_up(depth, 2), stride = round_up(cols, 16) + between(0, 5);
    const bool overwrite = between(0, 1) == 0;
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols) + " x " + std::to_string(depth) + " of " +
                 std::to_string(panel_depth));
    // The last row ends where its last group of k does.
    Fenced<unsigned short> by_rows(static_cast<long>(rows - 1) * panel_depth + whole_depth, true);
    Guarded<unsigned short> a(static_cast<long>(round_up(rows, kPanelRows)) * panel_depth);
    Guarded<unsigned short> b(static_cast<long>(round_up(cols, kPanelRows)) * panel_depth);
    for (int k = 0; k < panel_depth; ++k) {
      for (int row = 0; row < round_up(rows, kPanelRows); ++row) {
        const unsigned short x = k < depth ? BF16::factor(random_) : k < whole_depth ? 0 : BF16::garbage;
        a[in_panels<unsigned short>(row, k, panel_depth)] = x;
        if (row < rows && k < whole_depth) by_rows.data()[static_cast<long>(row) * panel_depth + k] = x;
      }
      for (int col = 0; col < round_up(cols, kPanelRows); ++col)
        b[in_panels<unsigned short>(col, k, panel_depth)] = k < whole_depth ? BF16::factor(random_) : BF16::garbage;
    }
    Guarded<float> want(static_cast<long>(round_up(rows, 8)) * stride), got(want.size());
    for (long n = 0; n < want.size(); ++n) want[n] = got[n] = BF16::number(BF16::factor(random_));
    library_->mma_bf16(want.data(), stride, a.data(), b.data(), rows, cols, depth, panel_depth, overwrite);
    library_->mma_bf16_by_rows(got.data(), stride, by_rows.data(), b.data(), rows, cols, depth, panel_depth, overwrite);
    for (int row = 0; row < rows; ++row)
      for (int col = 0; col < cols; ++col) ASSERT_EQ(got[row * stride + col], want[row * stride + col]) << row << ", " << col;
  }
}

#if defined(__x86_64__)
// Tiles in use make every switch of threads slower.
TEST_F(CpuLibraryAmx, ReleasesTheTiles) {
  const auto tiles_are_in_use = [] {
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));  // components of the state that are not in their initial one
    return (low >> 18 & 1u) != 0;
  };
  Guarded<unsigned short> operand(32 * 64);
  std::fill_n(operand.data(), operand.size(), static_cast<unsigned short>(0x3f80));
  Guarded<float> acc(32 * 32);
  library_->mma_bf16(acc.data(), 32, operand.data(), operand.data(), 32, 32, 64, 64, true);
  EXPECT_EQ(acc[0], 64);
  EXPECT_FALSE(tiles_are_in_use());
}
#endif

TEST(CpuLibraryChoice, IsTheBestAllowed) {
  const char* most = std::getenv("TILEWAVE_ISA");
  const Library* want = libraries().back();
  for (const Library* library : libraries()) {
    if (most != nullptr && std::string(library->isa) == most) want = library;
  }
  EXPECT_STREQ(tw::cpu::library().isa, want->isa);
}

}  // namespace
