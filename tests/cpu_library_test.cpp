// The cpu target's library, every instruction set that this machine has, against loops in double.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/support.hpp"
#include "tile/cpu/isa.hpp"

namespace {

using tw::cpu::kPanelRows;
using tw::cpu::Library;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// 64-byte aligned floats between two guard zones, which the destructor finds as they were.
class Guarded {
 public:
  explicit Guarded(long size) : size_(size), memory_(static_cast<float*>(std::aligned_alloc(64, bytes())), std::free) {
    std::fill_n(memory_.get(), bytes() / sizeof(float), kGuard);
  }
  ~Guarded() {
    for (long i = 0; i < kZone; ++i) {
      EXPECT_EQ(memory_.get()[i], kGuard) << "written " << kZone - i << " before the start";
    }
    for (std::size_t i = kZone + size_; i < bytes() / sizeof(float); ++i) {
      EXPECT_EQ(memory_.get()[i], kGuard) << "written " << i - kZone - size_ << " past the end";
    }
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  float* data() { return memory_.get() + kZone; }
  float& operator[](long i) { return data()[i]; }
  long size() const { return size_; }

 private:
  static constexpr long kZone = 64;
  static constexpr float kGuard = -12345.0f;
  std::size_t bytes() const { return static_cast<std::size_t>(round_up(static_cast<int>(size_), 16) + 2 * kZone) * sizeof(float); }

  long size_;
  std::unique_ptr<float, void (*)(void*)> memory_;
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

// What the three packings have in common to the test.
struct F32 {
  using Bits = float;
  static constexpr auto pack = &Library::pack_f32;
  static constexpr Bits garbage = kNaN;
  static float value(Bits bits) { return bits; }
  static Bits sample(std::mt19937_64& random) { return std::uniform_real_distribution<float>(-2, 2)(random); }
};
struct F16 {
  using Bits = unsigned short;
  static constexpr auto pack = &Library::pack_f16;
  static constexpr Bits garbage = 0x7e00;
  static float value(Bits bits) { return static_cast<float>(f16_value(bits)); }
  static Bits sample(std::mt19937_64& random) {  // any finite value or infinity
    const unsigned bits = static_cast<unsigned>(random());
    return static_cast<Bits>((bits & 0x7c00) == 0x7c00 ? bits & 0xfc00 : bits & 0xffff);
  }
};
struct BF16 {
  using Bits = unsigned short;
  static constexpr auto pack = &Library::pack_bf16;
  static constexpr Bits garbage = 0x7fc0;
  static float value(Bits bits) { return bf16_value(bits); }
  static Bits sample(std::mt19937_64& random) {
    const unsigned bits = static_cast<unsigned>(random());
    return static_cast<Bits>((bits & 0x7f80) == 0x7f80 ? bits & 0xff80 : bits & 0xffff);
  }
};

void expect_same(float got, float want, const char* what, int row, int k) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << what << " (" << row << ", " << k << ")";
  } else {
    EXPECT_EQ(std::bit_cast<unsigned>(got), std::bit_cast<unsigned>(want))
        << what << " (" << row << ", " << k << "): " << got << ", " << want;
  }
}

const std::vector<const Library*>& libraries() {
  static const std::vector<const Library*> all = [] {
    std::vector<const Library*> found{tw::cpu::baseline_library()};
    if (tw::cpu::has_avx2() && tw::cpu::avx2_library() != nullptr) found.push_back(tw::cpu::avx2_library());
    if (tw::cpu::has_avx512() && tw::cpu::avx512_library() != nullptr) found.push_back(tw::cpu::avx512_library());
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

  void check_mma(int rows, int cols, int depth, int panel_depth, int acc_stride, bool overwrite);
  template <class Element>
  void check_pack(long row_stride, long depth_stride, int rows, int depth, int panel_depth);
  template <class Element>
  void check_packs();

  std::mt19937_64 random_ = tw::test::random_engine();
};

void CpuLibrary::check_mma(int rows, int cols, int depth, int panel_depth, int acc_stride, bool overwrite) {
  SCOPED_TRACE("mma " + std::to_string(rows) + " x " + std::to_string(cols) + " x " + std::to_string(depth) + " of " +
               std::to_string(panel_depth) + ", stride " + std::to_string(acc_stride) + (overwrite ? ", overwriting" : ""));
  std::uniform_real_distribution<float> sample(-1, 1);
  const auto panels = [&](Guarded& to, int used) {
    for (int row = 0; row < round_up(used, kPanelRows); ++row) {
      for (int k = 0; k < panel_depth; ++k) {
        to[static_cast<long>(row / kPanelRows) * kPanelRows * panel_depth + k * kPanelRows + row % kPanelRows] =
            k < depth ? sample(random_) : kNaN;
      }
    }
  };
  Guarded a(static_cast<long>(round_up(rows, kPanelRows)) * panel_depth), b(static_cast<long>(round_up(cols, kPanelRows)) * panel_depth);
  panels(a, rows);
  panels(b, cols);
  const int writable_rows = round_up(rows, 8), writable_cols = round_up(cols, 16);
  Guarded acc(static_cast<long>(writable_rows) * acc_stride);
  std::vector<float> before(static_cast<std::size_t>(acc.size()));
  for (long i = 0; i < acc.size(); ++i) {
    const long row = i / acc_stride, col = i % acc_stride;
    const bool read = row < rows && col < cols && !overwrite;
    before[static_cast<std::size_t>(i)] = acc[i] = read ? sample(random_) : col < writable_cols ? kNaN : 77.0f;
  }

  GetParam()->mma(acc.data(), acc_stride, a.data(), b.data(), rows, cols, depth, panel_depth, overwrite);

  const auto at = [&](Guarded& from, int row, int k) {
    return static_cast<double>(from[static_cast<long>(row / kPanelRows) * kPanelRows * panel_depth + k * kPanelRows + row % kPanelRows]);
  };
  int wrong = 0;
  for (int row = 0; row < writable_rows; ++row) {
    for (int col = 0; col < acc_stride; ++col) {
      const long i = static_cast<long>(row) * acc_stride + col;
      if (col >= writable_cols) {
        ASSERT_EQ(acc[i], 77.0f) << "written beyond the columns at (" << row << ", " << col << ")";
      } else if (row < rows && col < cols) {
        double sum = overwrite ? 0 : before[static_cast<std::size_t>(i)], magnitude = std::abs(sum);
        for (int k = 0; k < depth; ++k) {
          const double product = at(a, row, k) * at(b, col, k);
          sum += product;
          magnitude += std::abs(product);
        }
        if (!(std::abs(acc[i] - sum) <= (depth + 2) * 0x1p-24 * magnitude)) {
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
  const int padded = round_up(rows, kPanelRows);
  Guarded panels(static_cast<long>(padded) * panel_depth);
  std::fill_n(panels.data(), panels.size(), 77.0f);

  (GetParam()->*Element::pack)(panels.data(), source, row_stride, depth_stride, rows, depth, panel_depth);

  for (int row = 0; row < padded && !HasFailure(); ++row) {
    for (int k = 0; k < panel_depth; ++k) {
      const float got = panels[static_cast<long>(row / kPanelRows) * kPanelRows * panel_depth + k * kPanelRows + row % kPanelRows];
      if (k >= depth) {
        expect_same(got, 77.0f, "beyond the depth", row, k);
      } else {
        expect_same(got, row < rows ? Element::value(source[row * row_stride + k * depth_stride]) : 0.0f, "element", row, k);
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

TEST_P(CpuLibrary, MmaIsTheSumOfProducts) {
  for (int i = 0; i < 400 && !HasFailure(); ++i) {
    const int rows = size(), cols = size(), depth = size();
    const int panel_depth = depth + (between(0, 1) == 0 ? 0 : between(1, 40));
    const int acc_stride = round_up(cols, 16) + (between(0, 1) == 0 ? 0 : between(1, 40));
    check_mma(rows, cols, depth, panel_depth, std::max(acc_stride, 1), between(0, 1) == 0);
  }
}

TEST_P(CpuLibrary, MmaOfEveryRemainder) {
  for (int rows = 0; rows <= 2 * kPanelRows + 1 && !HasFailure(); ++rows) {
    for (int cols = 0; cols <= 98 && !HasFailure(); cols += between(1, 5)) {
      check_mma(rows, cols, between(0, 9), 9, round_up(cols, 16) + 1, between(0, 1) == 0);
    }
  }
}

TEST_P(CpuLibrary, MmaOfGreatDepth) {
  check_mma(17, 33, 1031, 1031, 48, false);
  check_mma(1, 33, 769, 800, 50, true);
}

TEST_P(CpuLibrary, PackF32) { check_packs<F32>(); }
TEST_P(CpuLibrary, PackF16) { check_packs<F16>(); }
TEST_P(CpuLibrary, PackBf16) { check_packs<BF16>(); }

TEST_P(CpuLibrary, EveryValueOf16BitsIsWidened) {
  constexpr int kSide = 256;
  std::vector<unsigned short> source(kSide * kSide);
  for (int i = 0; i < kSide * kSide; ++i) source[static_cast<std::size_t>(i)] = static_cast<unsigned short>(i);
  Guarded f16(kSide * kSide), bf16(kSide * kSide);
  for (const bool transposed : {false, true}) {
    const long row_stride = transposed ? 1 : kSide, depth_stride = transposed ? kSide : 1;
    GetParam()->pack_f16(f16.data(), source.data(), row_stride, depth_stride, kSide, kSide, kSide);
    GetParam()->pack_bf16(bf16.data(), source.data(), row_stride, depth_stride, kSide, kSide, kSide);
    for (int row = 0; row < kSide; ++row) {
      for (int k = 0; k < kSide; ++k) {
        const unsigned short bits = source[static_cast<std::size_t>(row * row_stride + k * depth_stride)];
        const long at = row / kPanelRows * kPanelRows * kSide + k * kPanelRows + row % kPanelRows;
        expect_same(f16[at], static_cast<float>(f16_value(bits)), "f16", row, k);
        expect_same(bf16[at], bf16_value(bits), "bf16", row, k);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, CpuLibrary, testing::ValuesIn(libraries()),
                         [](const testing::TestParamInfo<const Library*>& tested) { return std::string(tested.param->isa); });

TEST(CpuLibraryChoice, IsTheBestAllowed) {
  const char* most = std::getenv("TILEWAVE_ISA");
  const Library* want = libraries().back();
  for (const Library* library : libraries()) {
    if (most != nullptr && std::string(library->isa) == most) want = library;
  }
  EXPECT_STREQ(tw::cpu::library().isa, want->isa);
}

}  // namespace
