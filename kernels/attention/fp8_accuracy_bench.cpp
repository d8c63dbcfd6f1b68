// `tilewave bench attention-fp8-accuracy`: what the rounding of inputs with outliers to e4m3 costs attention, with and without a rotation
// of queries and keys before the cast. Prints errors, not times.

#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "benchmarks/harness.hpp"
#include "runtime/format.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/cast_fp8.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::bench;

constexpr const char* kAccuracy = "attention-fp8-accuracy";
constexpr std::int64_t kSeqlen = 2048, kHeads = 8;

/// N(0, 1), and with a probability of 0.001 N(0, 100) more, in bf16: the test of FlashAttention 3's authors.
Tensor with_outliers(std::int64_t head_dim, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::bernoulli_distribution outlier(0.001);
  const Tensor x = Tensor::empty({1, kSeqlen, kHeads, head_dim}, DType::f32);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data<float>()[i] = normal(random);
    if (outlier(random)) x.data<float>()[i] += 10 * normal(random);
  }
  return x.to(DType::bf16);
}

Tensor random_signs(std::int64_t head_dim) {
  std::mt19937_64 random(7);
  const Tensor signs = Tensor::empty({head_dim}, DType::f32);
  for (std::int64_t i = 0; i < head_dim; ++i) signs.data<float>()[i] = random() % 2 == 0 ? 1.0f : -1.0f;
  return signs;
}

/// A tensor in e4m3, and what one stands for in each head.
struct Cast {
  Tensor y, scales;
  Cast(const Tensor& x, const CastFp8HeadsOptions& options)
      : y(Tensor::poisoned(x.shape(), DType::fp8_e4m3, *options.stream)),
        scales(Tensor::poisoned({x.shape(0), x.shape(2)}, DType::f32, *options.stream)) {
    head_scales(x, scales, options);
    cast_fp8_heads(x, y, scales, options);
  }
  /// On the CPU, in f32.
  Tensor widened() const {
    const Tensor wide = y.to(Device::cpu()).to(DType::f32), factors = scales.to(Device::cpu());
    const std::int64_t head_dim = y.shape(3);
    for (std::int64_t i = 0; i < wide.numel(); ++i) wide.data<float>()[i] *= factors.data<float>()[i / head_dim % kHeads];
    return wide;
  }
};

/// The root of the mean square of their differences.
double rms_difference(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to(Device::cpu()).to(DType::f32), y = b.to(Device::cpu()).to(DType::f32);
  double sum = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) sum += std::pow(static_cast<double>(x.data<float>()[i]) - y.data<float>()[i], 2);
  return std::sqrt(sum / static_cast<double>(x.numel()));
}

/// attention() of f32 on the CPU.
Tensor exact_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  const Tensor o = Tensor::poisoned(q.shape(), DType::f32);
  tw::attention(q, k, v, o);
  return o;
}

void print_row(Run& run, std::int64_t head_dim) {
  const Stream& stream = run.stream();
  const Tensor q = with_outliers(head_dim, 1), k = with_outliers(head_dim, 2), v = with_outliers(head_dim, 3);
  const Tensor wide_v = v.to(DType::f32), exact = exact_attention(q.to(DType::f32), k.to(DType::f32), wide_v);
  const Tensor q_here = q.to(stream.device()), k_here = k.to(stream.device()), v_here = v.to(stream.device());
  const Tensor signs = random_signs(head_dim).to(stream.device()), o = Tensor::poisoned(q.shape(), DType::bf16, stream);

  tw::attention(q_here, k_here, v_here, o, {.stream = stream});
  const double in_bf16 = rms_difference(o, exact);
  double errors[2], of_scores[2];
  for (const bool rotate : {false, true}) {
    const CastFp8HeadsOptions options{.rotate = rotate, .signs = rotate ? &signs : nullptr, .stream = stream};
    const Cast of_q(q_here, options), of_k(k_here, options), of_v(v_here, {.stream = stream});
    tw::attention(of_q.y, of_k.y, of_v.y, o,
                  {.q_descale = &of_q.scales, .k_descale = &of_k.scales, .v_descale = &of_v.scales, .stream = stream});
    errors[rotate] = rms_difference(o, exact);
    of_scores[rotate] = rms_difference(exact_attention(of_q.widened(), of_k.widened(), wide_v), exact);
  }
  run.print(tw::format("| {} | {:.2e} | {:.2e} | {:.2e} | {:.2f} | {:.2e} | {:.2e} | {:.2f} |", head_dim, in_bf16, errors[0], errors[1],
                       errors[1] / errors[0], of_scores[0], of_scores[1], of_scores[1] / of_scores[0]));
}

void run_accuracy(Run& run) {
  bool header = false;
  for (const std::int64_t head_dim : {64, 128, 256}) {
    if (!run.wants(kAccuracy, tw::format("d{}", head_dim), DType::fp8_e4m3)) continue;
    if (!std::exchange(header, true)) {
      run.print("| D | bf16 | e4m3 | e4m3, rotated | ratio | only Q and K in e4m3 | rotated | ratio |");
      run.print("|---|---|---|---|---|---|---|---|");
    }
    print_row(run, head_dim);
  }
}

const Family accuracy_family{kAccuracy, "errors of fp8 attention of inputs with outliers, without and with a rotation of Q and K",
                             run_accuracy};

}  // namespace
}  // namespace tw::kernels::attention
