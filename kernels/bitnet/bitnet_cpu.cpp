#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kernels/bitnet/call.hpp"
#include "kernels/rows.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/tile/cpu/library.tile.hpp"

namespace tw::kernels::bitnet {

namespace {

/// Rows of x for which each row of the weight is unpacked and multiplied at once: gemm() would copy both to panels first.
constexpr std::int64_t kFewRows = 16;
/// Rows of the weight that a thread takes at a time.
constexpr std::int64_t kTogether = 32;

/// to[i] = from[i] for n elements of f32, f16 or bf16.
void widen(float* to, const void* from, DType dtype, std::int64_t n) {
  if (dtype == DType::f32)
    std::copy_n(static_cast<const float*>(from), n, to);
  else if (dtype == DType::bf16)
    cpu::library().widen_bf16(to, static_cast<const unsigned short*>(from), n);
  else
    cpu::library().widen_f16(to, static_cast<const unsigned short*>(from), n);
}
/// Row `row` as f32, in `to`.
void widen_row(std::vector<float>& to, const Tensor& t, std::int64_t row) {
  to.resize(static_cast<std::size_t>(t.shape(1)));
  widen(to.data(), static_cast<const std::byte*>(t.data()) + row * t.stride(0) * static_cast<std::int64_t>(size_of(t.dtype())), t.dtype(),
        t.shape(1));
}

/// |x| as an integer of the same order, in which infinity and NaN are the largest.
u32 magnitude(float x) { return bit_cast<u32>(x) & 0x7fffffffu; }

/// The numbers of the four codes in each byte.
constexpr auto kNumbers = [] {
  std::array<std::array<i8, 4>, 256> table{};
  for (int byte = 0; byte < 256; ++byte)
    for (int i = 0; i < 4; ++i)
      table[static_cast<std::size_t>(byte)][static_cast<std::size_t>(i)] = static_cast<i8>((byte >> 2 * i & 3) - 2);
  return table;
}();

void unpack_row(i8* to, const u8* from, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; ++i) __builtin_memcpy(to + 4 * i, kNumbers[from[i]].data(), 4);
}

i32 dot(const i8* a, const i8* b, std::int64_t n) {
  i32 sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<i32>(static_cast<short>(a[i]) * static_cast<short>(b[i]));
  return sum;
}

/// y(r, first + i) = sums[i + r * n] times both scales, plus bias and y, for i < n.
template <class T>
void finish(const Call& call, const i32* sums, std::int64_t first, std::int64_t n) {
  const float* const scales = call.weight.scales.data<float>() + first;
  const T* bias = call.options.bias == nullptr ? nullptr : call.options.bias->data<T>() + first;
  for (std::int64_t r = 0; r < call.m(); ++r) {
    const float of_row = call.x_scales.data<float>()[r];
    T* y = call.y.data<T>() + r * call.y.stride(0) + first;
    for (std::int64_t i = 0; i < n; ++i) {
      float sum = static_cast<float>(sums[r * n + i]) * of_row * scales[i];
      if (bias != nullptr) sum += static_cast<float>(bias[i]);
      if (call.options.accumulate) sum += static_cast<float>(y[i]);
      y[i] = to<T>(sum);
    }
  }
}

void finish_any(const Call& call, const i32* sums, std::int64_t first, std::int64_t n) {
  with_float_type(call.y.dtype(), [&]<class T>(std::type_identity<T>) { finish<T>(call, sums, first, n); });
}

void run_few_rows(const Call& call) {
  const std::int64_t m = call.m(), n = call.n(), k = call.k(), bytes = k / 4;
  detail::parallel_for(static_cast<long>((n + kTogether - 1) / kTogether), [&](long block) {
    const std::int64_t first = block * kTogether, count = std::min(kTogether, n - first);
    std::vector<i8> row(static_cast<std::size_t>(k));
    std::array<i32, kTogether * kFewRows> sums;
    for (std::int64_t i = 0; i < count; ++i) {
      unpack_row(row.data(), call.weight.values.data<u8>() + (first + i) * bytes, bytes);
      for (std::int64_t r = 0; r < m; ++r)
        sums[static_cast<std::size_t>(r * count + i)] = dot(row.data(), call.x.data<i8>() + r * call.x.stride(0), k);
    }
    finish_any(call, sums.data(), first, count);
  });
}

/// Panels of the weight in i8, small enough to stay in the last-level cache until they are multiplied.
void run_many_rows(const Call& call) {
  constexpr std::int64_t kPanelBytes = 4 << 20, kLeast = 256;
  const std::int64_t rows = std::min(call.n(), std::max(kLeast, kPanelBytes / std::max<std::int64_t>(1, call.k()) / kLeast * kLeast));
  const Tensor panel = Tensor::empty({rows, call.k()}, DType::i8), sums = Tensor::empty({call.m(), rows}, DType::i32);
  for (std::int64_t first = 0; first < call.n(); first += rows) {
    const std::int64_t count = std::min(rows, call.n() - first);
    const Tensor part = panel.slice(0, 0, count);
    unpack_on_cpu(call.weight.slice(first, first + count), part);
    const Tensor products = Tensor::borrow(sums.data(), {call.m(), count}, DType::i32, Device::cpu());
    tw::gemm(call.x, part.transpose(0, 1), products, {.stream = call.stream});
    finish_any(call, products.data<i32>(), first, count);
  }
}

}  // namespace

void run_on_cpu(const Call& call) { call.m() <= kFewRows ? run_few_rows(call) : run_many_rows(call); }

void unpack_on_cpu(const TernaryMatrix& weight, const Tensor& out) {
  const std::int64_t n = weight.rows(), bytes = weight.values.shape(1);
  detail::parallel_for(static_cast<long>((n + kTogether - 1) / kTogether), [&](long block) {
    for (std::int64_t i = block * kTogether; i < std::min(n, (block + 1) * kTogether); ++i)
      unpack_row(out.data<i8>() + i * 4 * bytes, weight.values.data<u8>() + i * bytes, bytes);
  });
}

void quantize_activations_on_cpu(const Tensor& x, const Tensor& values, const Tensor& scales) {
  const std::int64_t k = x.shape(1);
  detail::parallel_for(static_cast<long>(x.shape(0)), [&](long row) {
    std::vector<float> wide;
    widen_row(wide, x, row);
    u32 largest = 0;
    for (const float v : wide) largest = std::max(largest, magnitude(v));
    const bool finite = largest < 0x7f800000u;
    const float a = std::max(bit_cast<float>(largest), 1e-5f), factor = finite ? 127.0f / a : bit_cast<float>(0x7fc00000u);
    i8* const to = values.data<i8>() + row * values.stride(0);
    for (std::int64_t i = 0; i < k; ++i) to[i] = tw::to<i8>(wide[static_cast<std::size_t>(i)] * factor);
    scales.data<float>()[row] = finite ? a / 127.0f : factor;
  });
}

void quantize_ternary_on_cpu(const Tensor& weight, const TernaryMatrix& out) {
  const std::int64_t n = weight.shape(0), k = weight.shape(1);
  std::vector<double> sums(static_cast<std::size_t>(n));
  detail::parallel_for(static_cast<long>(n), [&](long row) {
    std::vector<float> wide;
    widen_row(wide, weight, row);
    double sum = 0;
    for (const float v : wide) sum += std::abs(v);
    sums[static_cast<std::size_t>(row)] = sum;
  });
  double all = 0;
  for (const double sum : sums) all += sum;
  const auto mean = k == 0 ? 0.0f : static_cast<float>(all / static_cast<double>(n * k));
  const float scale = std::max(mean, 1e-5f) + mean * 0.0f;  // NaN for what is not finite
  detail::parallel_for(static_cast<long>(n), [&](long row) {
    std::vector<float> wide;
    widen_row(wide, weight, row);
    u8* const to = out.values.data<u8>() + row * (k / 4);
    for (std::int64_t i = 0; i < k; i += 4) {
      int codes = 0;
      for (int c = 0; c < 4; ++c) codes |= (std::clamp(tw::to<i32>(wide[static_cast<std::size_t>(i + c)] / scale), -1, 1) + 2) << 2 * c;
      to[i / 4] = static_cast<u8>(codes);
    }
    out.scales.data<float>()[row] = scale;
  });
}

}  // namespace tw::kernels::bitnet
