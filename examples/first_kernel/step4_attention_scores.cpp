#include "step4_attention_scores.tile.hpp"

#include <cmath>
#include <vector>

#include "every_device.hpp"

int main() {
  const int queries = 150, keys = 119, D = 64;
  const float scale = 0.125f;  // 1 / sqrt(D)
  const tw::Tensor q = random_tensor({queries, D}, tw::DType::bf16, 1), k = random_tensor({keys, D}, tw::DType::bf16, 2);

  return on_every_device(1e-4, [&](tw::Device device) {
    const tw::Stream stream = tw::Stream::standard(device);
    const tw::Tensor on_q = q.to(device), on_k = k.to(device), s = tw::Tensor::poisoned({queries, keys}, tw::DType::f32, stream);
    tw::launch<AttentionScores<tw::bf16, D, 64, 128>>(stream, {.m = tw::ceil_div(queries, 64)}, [&](auto& bind, auto& params) {
      bind(params.q, on_q);
      bind(params.k, on_k);
      bind(params.s, s);
      params.scale = scale;
    });

    const tw::Tensor result = s.to(tw::Device::cpu());
    double error = 0;
    for (int row = 0; row < queries; ++row) {
      std::vector<double> weights(keys);
      double sum = 0;
      for (int key = 0; key < keys; ++key) {
        double product = 0;
        for (int d = 0; d < D; ++d) product += q.at({row, d}) * k.at({key, d});
        sum += weights[key] = std::exp(scale * product);
      }
      for (int key = 0; key < keys; ++key) error = worse(error, std::abs(result.at({row, key}) - weights[key] / sum));
    }
    return error;
  });
}
