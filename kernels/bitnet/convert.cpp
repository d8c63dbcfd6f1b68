#include <cmath>
#include <vector>

#include "kernels/check.hpp"
#include "tilewave/bitnet.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/tile/types.tile.hpp"

namespace tw {

namespace {

/// The first of n elements for which `wrong` is true, or n.
template <class T, class F>
std::int64_t find_wrong(const T* elements, std::int64_t n, F wrong) {
  std::int64_t i = 0;
  while (i < n && !wrong(elements[i])) ++i;
  return i;
}

}  // namespace

TernaryMatrix pack_ternary(const Tensor& integers, const Tensor& scales) {
  constexpr const char* op = "pack_ternary";
  const auto dense = [&](const char* name, const Tensor& t, DType dtype, const Shape& shape) {
    require(t.dtype() == dtype && t.shape() == shape && t.is_contiguous(), "{}: {} is {}; it must be {}[{}], row-major", op, name, t,
            name_of(dtype), tw::join(shape, ", "));
    check_operand(op, name, t, dtype, Device::cpu());
  };
  require(integers.rank() == 2 && integers.shape(1) % 4 == 0,
          "{}: integers is {}; it must have 2 dimensions, and columns that are a multiple of 4", op, integers);
  const std::int64_t n = integers.shape(0), k = integers.shape(1);
  dense("integers", integers, DType::i8, integers.shape());
  dense("scales", scales, DType::f32, {n});
  const i8* const from = integers.data<i8>();
  const std::int64_t wrong = find_wrong(from, n * k, [](i8 x) { return x < -1 || x > 1; });
  require(wrong == n * k, "{}: integers[{}, {}] is {}; it must be -1, 0 or 1", op, k == 0 ? 0 : wrong / k, k == 0 ? 0 : wrong % k,
          wrong < n * k ? static_cast<int>(from[wrong]) : 0);
  const TernaryMatrix result{Tensor::empty({n, k / 4}, DType::u8), scales};
  u8* const to = result.values.data<u8>();
  detail::parallel_for(static_cast<long>(n), [&](long row) {
    for (std::int64_t i = row * k; i < (row + 1) * k; i += 4) {
      int codes = 0;
      for (int c = 0; c < 4; ++c) codes |= (from[i + c] + 2) << 2 * c;
      to[i / 4] = static_cast<u8>(codes);
    }
  });
  return result;
}

TernaryMatrix convert_bitnet(const Tensor& packed, float scale) {
  constexpr const char* op = "convert_bitnet";
  require(packed.rank() == 2 && packed.dtype() == DType::u8 && packed.is_contiguous() && packed.shape(1) % 4 == 0,
          "{}: packed is {}; it must be u8[N / 4, K], row-major, where K is a multiple of 4", op, packed);
  check_operand(op, "packed", packed, DType::u8, Device::cpu());
  require(std::isfinite(scale), "{}: scale is {}; it must be finite", op, scale);
  const std::int64_t quarter = packed.shape(0), k = packed.shape(1);
  const u8* const from = packed.data<u8>();
  const std::int64_t wrong = find_wrong(from, quarter * k, [](u8 x) { return (x & x >> 1 & 0x55) != 0; });
  require(wrong == quarter * k, "{}: packed[{}, {}] is {}, which has a code of 3; 0, 1 and 2 are allowed", op, k == 0 ? 0 : wrong / k,
          k == 0 ? 0 : wrong % k, wrong < quarter * k ? static_cast<int>(from[wrong]) : 0);
  const TernaryMatrix result = TernaryMatrix::allocate(4 * quarter, k);
  u8* const to = result.values.data<u8>();
  detail::parallel_for(static_cast<long>(quarter), [&](long r) {
    for (int i = 0; i < 4; ++i) {
      for (std::int64_t col = 0; col < k; col += 4) {
        int codes = 0;
        for (int c = 0; c < 4; ++c) codes |= ((from[r * k + col + c] >> 2 * i & 3) + 1) << 2 * c;
        to[((i * quarter + r) * k + col) / 4] = static_cast<u8>(codes);
      }
    }
  });
  for (std::int64_t n = 0; n < 4 * quarter; ++n) result.scales.data<float>()[n] = scale;
  return result;
}

}  // namespace tw
