#include <algorithm>
#include <span>
#include <vector>

#include "kernels/activation.hpp"
#include "kernels/dequant_gemm/call.hpp"
#include "kernels/rows.hpp"
#include "microkernels/quantized_library.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/tile/cpu/library.tile.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

/// Rows of x for which the weight is read as it lies in memory: widening it takes longer than a few products.
constexpr std::int64_t kFewRows = 16;
/// Rows of the weight that a thread takes at a time: enough for one stream of memory, few enough to share a small matrix.
constexpr std::int64_t kTogether = 32, kMostTogether = 128;

/// The same for few rows of x: up to 128 KiB, because a stream starts slowly, as long as each thread has four turns. Even: SwiGLU takes
/// pairs of rows.
std::int64_t rows_together(const QuantizedMatrix& weight) {
  constexpr std::int64_t kBytes = 128 << 10, kTurns = 4;
  const std::int64_t row_bytes = std::max<std::int64_t>(1, weight.values.shape(1));
  return std::clamp(std::min(kBytes / row_bytes, weight.rows() / (kTurns * cpu_threads())), kTogether, kMostTogether) / 2 * 2;
}

/// The library's functions for a format.
struct Functions {
  cpu::Dequantize dequantize;
  cpu::QuantizedDots dots;
  cpu::RoundRow round;  ///< or null
  cpu::RoundedDots rounded_dots;
  int block;  ///< elements of a block of RoundedRows
};
Functions functions_of(WeightFormat format) {
  const cpu::QuantizedLibrary& l = cpu::quantized_library();
  if (format == WeightFormat::int8) return {l.dequantize_i8, l.dots_i8, l.round_for_i8, l.rounded_dots_i8, cpu::kInt8Block};
  if (format == WeightFormat::int4) return {l.dequantize_u4, l.dots_u4, l.round_for_u4, l.rounded_dots_u4, cpu::kInt4Block};
  if (format == WeightFormat::fp8) return {l.dequantize_e4m3, l.dots_e4m3, nullptr, nullptr, 0};
  return {l.dequantize_numbers, l.dots_numbers, nullptr, nullptr, 0};
}

/// f32 to a row of a tensor.
void narrow(void* to, const float* from, DType dtype, std::int64_t n) {
  if (dtype == DType::f32)
    std::copy_n(from, n, static_cast<float*>(to));
  else if (dtype == DType::bf16)
    cpu::library().narrow_bf16(static_cast<unsigned short*>(to), from, n);
  else
    cpu::library().narrow_f16(static_cast<unsigned short*>(to), from, n);
}

/// Rows of x as f32, or rounded to integers where the library has products of these.
class Activations {
 public:
  Activations(const Call& call, const Functions& functions) : wide_(static_cast<std::size_t>(call.m() * call.k())), k_(call.k()) {
    const auto* from = static_cast<const std::byte*>(call.x.data());
    const auto stride = static_cast<std::size_t>(call.x.stride(0)) * size_of(call.x.dtype());
    const auto m = static_cast<std::size_t>(call.m());
    for (std::size_t r = 0; r < m; ++r) {
      float* to = wide_.data() + r * static_cast<std::size_t>(k_);
      if (!call.has_integers()) {
        widen(to, from + r * stride, call.x.dtype(), k_);
        continue;
      }
      const auto* integers = reinterpret_cast<const signed char*>(from + r * stride);
      const float scale = call.options.x_scales->data<float>()[r];
      for (std::int64_t i = 0; i < k_; ++i) to[i] = scale * static_cast<float>(integers[i]);
    }
    if (functions.round == nullptr) return;
    rounded_.blocks = static_cast<int>((k_ + functions.block - 1) / functions.block);
    const std::size_t blocks = m * static_cast<std::size_t>(rounded_.blocks);
    codes_.resize(blocks * static_cast<std::size_t>(functions.block));
    scales_.resize(blocks * 4);             // int8 has one for each block
    sums_.resize(std::max(m, blocks * 4));  // int8 has one for each row, also without columns
    rounded_.codes = codes_.data(), rounded_.scales = scales_.data(), rounded_.sums = sums_.data();
    for (std::size_t r = 0; r < m; ++r) {
      if (call.has_integers())
        arrange(r, reinterpret_cast<const signed char*>(from + r * stride), call.options.x_scales->data<float>()[r]);
      else
        functions.round(rounded_, static_cast<int>(r), wide_.data() + r * static_cast<std::size_t>(k_), static_cast<int>(k_));
    }
  }
  const float* wide() const { return wide_.data(); }
  const cpu::RoundedRows& rounded() const { return rounded_; }

 private:
  /// A row that is integers already, in the order of int4's codes.
  void arrange(std::size_t row, const signed char* integers, float scale) {
    constexpr std::size_t block = cpu::kInt4Block, group = 32, groups = block / group;
    const std::size_t first = row * static_cast<std::size_t>(rounded_.blocks);
    std::fill_n(scales_.data() + first * groups, static_cast<std::size_t>(rounded_.blocks) * groups, scale);
    for (std::size_t k = 0; k < static_cast<std::size_t>(k_); ++k) {
      const std::size_t at = first + k / block, in_block = k % block;
      codes_[at * block + in_block % 2 * (block / 2) + in_block / 2] = integers[k];
      sums_[at * groups + in_block / group] += static_cast<float>(integers[k]);
    }
    const std::size_t count = static_cast<std::size_t>(rounded_.blocks) * groups;
    for (float& sum : std::span(sums_).subspan(first * groups, count)) sum *= scale;
  }

  std::vector<float> wide_;
  std::int64_t k_;
  std::vector<signed char> codes_;
  std::vector<float> scales_, sums_;
  cpu::RoundedRows rounded_{};
};

/// y(r, first + i) = activation(sums[i, r] + bias), or y + sums + bias, for i < n.
template <class T, class Act>
void finish(const Call& call, const float* sums, std::int64_t first, std::int64_t n) {
  const T* bias = call.options.bias == nullptr ? nullptr : call.options.bias->data<T>() + first;
  const std::int64_t m = call.m();
  for (std::int64_t r = 0; r < m; ++r) {
    T* y = call.y.data<T>() + r * call.y.stride(0) + first;
    for (std::int64_t i = 0; i < n; ++i) {
      float sum = sums[i * m + r];
      if (bias != nullptr) sum += static_cast<float>(bias[i]);
      sum = call.options.accumulate ? static_cast<float>(y[i]) + sum : Act::apply(sum);
      y[i] = to<T>(sum);
    }
  }
}

/// y(r, (first + i) / 2) = silu(gate) up, where gate is sums[i, r] + bias and up the next row's, for even i < n.
template <class T>
void finish_pairs(const Call& call, const float* sums, std::int64_t first, std::int64_t n) {
  const T* bias = call.options.bias == nullptr ? nullptr : call.options.bias->data<T>() + first;
  const std::int64_t m = call.m();
  const auto sum = [&](std::int64_t i, std::int64_t r) { return sums[i * m + r] + (bias == nullptr ? 0.0f : static_cast<float>(bias[i])); };
  for (std::int64_t r = 0; r < m; ++r) {
    T* y = call.y.data<T>() + r * call.y.stride(0) + first / 2;
    for (std::int64_t i = 0; i < n; i += 2) y[i / 2] = to<T>(SwiGlu::apply(sum(i, r), sum(i + 1, r)));
  }
}

void run_few_rows(const Call& call) {
  const Functions functions = functions_of(call.weight.format);
  const Activations x(call, functions);
  const QuantizedRows rows(call.weight);
  const auto m = static_cast<int>(call.m()), k = static_cast<int>(call.k());
  const std::int64_t n = call.n(), together = rows_together(call.weight);
  detail::parallel_for(static_cast<long>((n + together - 1) / together), [&](long block) {
    const std::int64_t first = block * together, end = std::min(n, first + together);
    float sums[kMostTogether * kFewRows];
    for (std::int64_t i = first; i < end; ++i) {
      const cpu::QuantizedRow row = rows[i];
      float* of_row = sums + (i - first) * m;
      if (functions.round != nullptr)
        functions.rounded_dots(of_row, row, x.rounded(), m, k);
      else
        functions.dots(of_row, row, x.wide(), k, m, k);
    }
    with_float_type(call.y.dtype(), [&]<class T>(std::type_identity<T>) {
      if (call.pairs()) return finish_pairs<T>(call, sums, first, end - first);
      with_activation(call.options.activation, [&]<class Act>(std::type_identity<Act>) { finish<T, Act>(call, sums, first, end - first); });
    });
  });
}

/// Panels of the weight, in x's dtype, small enough to stay in the last-level cache until they are multiplied.
void run_many_rows(const Call& call) {
  constexpr std::int64_t kPanelBytes = 8 << 20, kLeast = 256;
  const DType dtype = call.x.dtype();
  const std::int64_t row_bytes = std::max<std::int64_t>(1, call.k()) * static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t rows = std::min(call.n(), std::max(kLeast, kPanelBytes / row_bytes / kLeast * kLeast));
  const Tensor panel = Tensor::empty({rows, call.k()}, dtype);
  for (std::int64_t first = 0; first < call.n(); first += rows) {
    const std::int64_t end = std::min(call.n(), first + rows);
    const Tensor part = panel.slice(0, 0, end - first);
    dequantize_on_cpu(call.weight.slice(first, end), part);
    Tensor bias;
    if (call.options.bias != nullptr) bias = call.options.bias->slice(0, first, end);
    const Tensor y = call.pairs() ? call.y.slice(1, first / 2, end / 2) : call.y.slice(1, first, end);
    gemm(call.x, part.transpose(0, 1), y,
         {.beta = call.options.accumulate ? 1.0f : 0.0f,
          .bias = call.options.bias == nullptr ? nullptr : &bias,
          .activation = call.options.activation,
          .stream = call.stream});
  }
}

}  // namespace

QuantizedRows::QuantizedRows(const QuantizedMatrix& w) : bytes_(w.values.stride(0)) {
  // 16 of each, because registers are loaded whole.
  static constexpr float kIntegers[16] = {0, 1, 2, 3};
  static constexpr float kFloats[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  first_.values = static_cast<const unsigned char*>(w.values.data());
  if (w.group == 0) {
    row_scales_ = w.scales.data<float>();
    return;
  }
  groups_ = w.scales.shape(1);
  if (w.format == WeightFormat::nf4)
    first_.f32_scales = w.scales.data<float>();
  else if (w.format == WeightFormat::mxfp4)
    first_.e8m0_scales = w.scales.data<u8>();
  else
    first_.scales = static_cast<const unsigned short*>(w.scales.data());
  if (w.zeros.numel() > 0) first_.zeros = w.zeros.data<u8>();
  first_.group = w.group;
  first_.code_bits = 8 / codes_in_byte(w.format);
  first_.numbers = w.format == WeightFormat::int2 ? kIntegers : w.format == WeightFormat::nf4 ? kNormalFloats : kFloats;
}

void dequantize_on_cpu(const QuantizedMatrix& weight, const Tensor& out) {
  const cpu::Dequantize dequantize = functions_of(weight.format).dequantize;
  const std::int64_t n = weight.rows(), k = weight.columns();
  const std::size_t element = size_of(out.dtype());
  const QuantizedRows rows(weight);
  detail::parallel_for(static_cast<long>((n + kTogether - 1) / kTogether), [&](long block) {
    constexpr int kPiece = 2048;
    float wide[kPiece];
    for (std::int64_t i = block * kTogether; i < std::min(n, (block + 1) * kTogether); ++i) {
      const cpu::QuantizedRow row = rows[i];
      auto* to = static_cast<std::byte*>(out.data()) + static_cast<std::size_t>(i * k) * element;
      for (std::int64_t first = 0; first < k; first += kPiece) {
        const auto count = static_cast<int>(std::min<std::int64_t>(kPiece, k - first));
        dequantize(wide, row, static_cast<int>(first), count);
        narrow(to + static_cast<std::size_t>(first) * element, wide, out.dtype(), count);
      }
    }
  });
}

void run_on_cpu(const Call& call) {
  if (call.m() <= kFewRows) return run_few_rows(call);
  if (call.has_integers()) {
    const Tensor x = Tensor::empty({call.m(), call.k()}, call.y.dtype());
    dequantize_on_cpu({.format = WeightFormat::int8, .values = call.x, .scales = *call.options.x_scales}, x);
    return run_widened(call, x, run_on_cpu);
  }
  multiplies_rounded(call) ? run_rounded(call) : run_many_rows(call);
}

}  // namespace tw::kernels::dequant_gemm
