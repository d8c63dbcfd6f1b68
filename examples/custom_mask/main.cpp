// Attention with a user-defined mask, document_mask.tile.hpp, and the library's causal mask, on the CPU and on a GPU if there is one,
// compared with plain loops. Exit code 0 if they agree.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <tilewave/attention_with.hpp>
#include <vector>

#include "document_mask.tile.hpp"

namespace {

constexpr int kTokens = 300, kHeads = 4, kKvHeads = 2, kHeadDim = 64;

/// The largest difference between `o` and softmax(Q K^T / sqrt(head_dim)) V. A token sees itself and the earlier tokens of its document.
double largest_error(const tw::Tensor& q, const tw::Tensor& k, const tw::Tensor& v, const tw::Tensor& document, const tw::Tensor& o) {
  double largest = 0;
  for (int head = 0; head < kHeads; ++head) {
    const int kv_head = head / (kHeads / kKvHeads);
    for (int query = 0; query < kTokens; ++query) {
      std::vector<double> out(kHeadDim);
      double sum = 0;
      for (int key = 0; key <= query; ++key) {
        if (document.at({key}) != document.at({query})) continue;
        double score = 0;
        for (int d = 0; d < kHeadDim; ++d) score += q.at({0, query, head, d}) * k.at({0, key, kv_head, d});
        const double weight = std::exp(score / std::sqrt(kHeadDim));
        sum += weight;
        for (int d = 0; d < kHeadDim; ++d) out[static_cast<std::size_t>(d)] += weight * v.at({0, key, kv_head, d});
      }
      for (int d = 0; d < kHeadDim; ++d) {
        const double error = std::abs(o.at({0, query, head, d}) - out[static_cast<std::size_t>(d)] / sum);
        if (!(error <= largest)) largest = error;  // also for NaN
      }
    }
  }
  return largest;
}

}  // namespace

int main() {
  const tw::Tensor q = tw::Tensor::random({1, kTokens, kHeads, kHeadDim}, tw::DType::bf16, 1);
  const tw::Tensor k = tw::Tensor::random({1, kTokens, kKvHeads, kHeadDim}, tw::DType::bf16, 2),
                   v = tw::Tensor::random(k.shape(), k.dtype(), 3);
  const tw::Tensor document = tw::Tensor::empty({kTokens}, tw::DType::i32);
  for (int token = 0; token < kTokens; ++token) document.data<int>()[token] = token < 50 ? 0 : token < 180 ? 1 : 2;

  const tw::DeviceReport found = tw::find_devices();
  std::printf("%s", found.problems().c_str());
  for (const tw::Device device : found.usable()) {
    const tw::Tensor on_q = q.to(device), on_k = k.to(device), on_v = v.to(device), documents = document.to(device);
    const tw::Tensor o = tw::Tensor::poisoned(q.shape(), q.dtype(), tw::Stream::standard(device));
    tw::attention_with<SameDocument, tw::bf16, kHeadDim>(on_q, on_k, on_v, o, [&](auto& rule) { rule.document = documents.data<int>(); },
                                                         {.causal = true});

    const double error = largest_error(q, k, v, document, o.to(tw::Device::cpu()));
    std::printf("%s: largest error %.2g\n", device.name().c_str(), error);
    if (!(error <= 0.02)) return 1;  // bf16: outputs up to 4 are rounded by up to 1/128
  }
}
