#include <algorithm>
#include <cmath>

#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/quantized_layouts.hpp"

namespace tw {

namespace {

constexpr int kInWord = 8;                                     ///< codes
constexpr int kAwqPlaces[kInWord] = {0, 4, 1, 5, 2, 6, 3, 7};  ///< where a word has column i

/// A published weight: its extents, and its parts by position.
struct Published {
  const char* op;
  std::int64_t n, k, groups;
};

void check_words(const char* op, const char* name, const Tensor& t, const Shape& shape) {
  require(t.dtype() == DType::i32 && t.shape() == shape && t.is_contiguous(), "{}: {} is {}; it must be i32[{}], row-major", op, name, t,
          tw::join(shape, ", "));
  check_operand(op, name, t, DType::i32, Device::cpu());
}

void check_scales(const char* op, const Tensor& t, const Shape& shape) {
  require(kernels::is_float(t.dtype()) && t.shape() == shape && t.is_contiguous(),
          "{}: scales are {}; they must be f16, bf16 or f32 [{}], row-major", op, t, tw::join(shape, ", "));
  check_operand(op, "scales", t, t.dtype(), Device::cpu());
}

/// The group of the result. Throws if the weight's groups cannot be cut into such.
int group_of(const Published& w) {
  require(w.groups > 0 && w.k % w.groups == 0, "{}: there are {} groups for {} inputs; the inputs must be a multiple of the groups", w.op,
          w.groups, w.k);
  const std::int64_t inputs = w.k / w.groups;
  require(inputs % 32 == 0 && inputs > 0, "{}: a group has {} inputs; it must have a multiple of 32", w.op, inputs);
  return inputs % 128 == 0 ? 128 : 32;
}

f16 scale_of(const Published& w, const Tensor& scales, std::int64_t row, std::int64_t col) {
  const double exact = scales.at({row, col});
  const f16 scale(static_cast<float>(exact));
  require(std::isfinite(static_cast<float>(scale)), "{}: scale [{}, {}] is {}; it must be in the range of f16", w.op, row, col, exact);
  return scale;
}

/// `code(n, k)` and `zero(n, g)` are numbers, `scale(n, g)` is an f16.
template <class Code, class Scale, class Zero>
QuantizedMatrix assemble(const Published& w, Code code, Scale scale, Zero zero) {
  const int group = group_of(w);
  QuantizedMatrix result = QuantizedMatrix::allocate(w.n, w.k, {WeightFormat::int4, group, true});
  const std::int64_t groups = w.k / group, repeated = groups / w.groups;
  bool symmetric = true;
  for (std::int64_t n = 0; n < w.n; ++n) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const int z = zero(n, g / repeated);
      require(z >= 0 && z <= 15, "{}: the zero point of row {}, group {} is {}; it must be from 0 to 15", w.op, n, g / repeated, z);
      symmetric = symmetric && z == static_cast<int>(kSymmetricZero);
      result.zeros.data<u8>()[n * groups + g] = static_cast<u8>(z);
      result.scales.data<f16>()[n * groups + g] = scale(n, g / repeated);
    }
  }
  detail::parallel_for(static_cast<long>(w.n), [&](long n) {
    auto* const values = reinterpret_cast<u4x2*>(result.values.data<u8>()) + n * w.k / 2;
    for (std::int64_t k = 0; k < w.k; ++k) values[k / 2].set(static_cast<int>(k % 2), code(n, k));
  });
  if (symmetric) result.zeros = {};
  return result;
}

int code_in(const Tensor& words, std::int64_t row, std::int64_t col, int place) {
  return static_cast<int>(static_cast<u32>(words.data<i32>()[row * words.shape(1) + col]) >> 4 * place & 15u);
}

void check_ranks(const char* op, std::initializer_list<std::pair<const char*, const Tensor*>> tensors) {
  for (const auto& [name, t] : tensors) require(t->rank() == 2, "{}: {} is {}; it must have 2 dimensions", op, name, *t);
}

}  // namespace

QuantizedMatrix convert_awq(const Tensor& qweight, const Tensor& qzeros, const Tensor& scales) {
  constexpr const char* op = "convert_awq";
  check_ranks(op, {{"qweight", &qweight}, {"qzeros", &qzeros}, {"scales", &scales}});
  const Published w{op, qweight.shape(1) * kInWord, qweight.shape(0), scales.shape(0)};
  check_words(op, "qweight", qweight, qweight.shape());
  check_words(op, "qzeros", qzeros, {w.groups, w.n / kInWord});
  check_scales(op, scales, {w.groups, w.n});
  const auto at = [](const Tensor& words, std::int64_t row, std::int64_t n) {
    return code_in(words, row, n / kInWord, kAwqPlaces[n % kInWord]);
  };
  return assemble(
      w, [&](std::int64_t n, std::int64_t k) { return at(qweight, k, n); },
      [&](std::int64_t n, std::int64_t g) { return scale_of(w, scales, g, n); },
      [&](std::int64_t n, std::int64_t g) { return at(qzeros, g, n); });
}

QuantizedMatrix convert_gptq(const Tensor& qweight, const Tensor& qzeros, const Tensor& scales, const GptqOptions& options) {
  constexpr const char* op = "convert_gptq";
  check_ranks(op, {{"qweight", &qweight}, {"qzeros", &qzeros}, {"scales", &scales}});
  const Published w{op, qweight.shape(1), qweight.shape(0) * kInWord, scales.shape(0)};
  check_words(op, "qweight", qweight, qweight.shape());
  check_words(op, "qzeros", qzeros, {w.groups, w.n / kInWord});
  require(w.n % kInWord == 0, "{}: there are {} outputs; they must be a multiple of {}", op, w.n, kInWord);
  check_scales(op, scales, {w.groups, w.n});
  group_of(w);
  if (const Tensor* g_idx = options.g_idx) {
    check_operand(op, "g_idx", *g_idx, DType::i32, Device::cpu());
    require(g_idx->shape() == Shape{w.k} && g_idx->is_contiguous(), "{}: g_idx is {}; it must be i32[{}]", op, *g_idx, w.k);
    for (std::int64_t k = 0; k < w.k; ++k)
      require(g_idx->data<i32>()[k] == k / (w.k / w.groups), "{}: g_idx[{}] is {}; it must be {}: inputs in the order of their groups", op,
              k, g_idx->data<i32>()[k], k / (w.k / w.groups));
  }
  return assemble(
      w, [&](std::int64_t n, std::int64_t k) { return code_in(qweight, k / kInWord, n, static_cast<int>(k % kInWord)); },
      [&](std::int64_t n, std::int64_t g) { return scale_of(w, scales, g, n); },
      [&](std::int64_t n, std::int64_t g) {
        return code_in(qzeros, g, n / kInWord, static_cast<int>(n % kInWord)) + (options.zeros_minus_one ? 1 : 0);
      });
}

QuantizedMatrix convert_compressed_tensors(const Tensor& weight_packed, const Tensor& weight_scale, const Tensor* weight_zero_point) {
  constexpr const char* op = "convert_compressed_tensors";
  check_ranks(op, {{"weight_packed", &weight_packed}, {"weight_scale", &weight_scale}});
  const Published w{op, weight_packed.shape(0), weight_packed.shape(1) * kInWord, weight_scale.shape(1)};
  check_words(op, "weight_packed", weight_packed, weight_packed.shape());
  check_scales(op, weight_scale, {w.n, w.groups});
  if (weight_zero_point != nullptr) check_words(op, "weight_zero_point", *weight_zero_point, {(w.n + kInWord - 1) / kInWord, w.groups});
  return assemble(
      w, [&](std::int64_t n, std::int64_t k) { return code_in(weight_packed, n, k / kInWord, static_cast<int>(k % kInWord)); },
      [&](std::int64_t n, std::int64_t g) { return scale_of(w, weight_scale, n, g); },
      [&](std::int64_t n, std::int64_t g) {
        return weight_zero_point == nullptr ? static_cast<int>(kSymmetricZero)
                                            : code_in(*weight_zero_point, n / kInWord, g, static_cast<int>(n % kInWord));
      });
}

}  // namespace tw
