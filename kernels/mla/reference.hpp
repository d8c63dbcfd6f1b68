#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention/reference.hpp"

namespace tw::kernels::mla {

/// Attention's reference with one key head, of 576 columns, whose first 512 are the values. q: [batch, seqlen_q, heads, 576]; kv: [batch,
/// tokens, 576]; lengths: [batch].
struct PlainMla {
  attention::PlainCall call;
  std::vector<float> values;

  PlainMla(std::span<const float> q, std::span<const float> kv, std::span<const std::int64_t> lengths, std::int64_t seqlen_q,
           std::int64_t heads, double scale, bool causal) {
    constexpr std::int64_t kKeys = 576, kValues = 512;
    const auto batch = static_cast<std::int64_t>(lengths.size());
    const std::int64_t rows = static_cast<std::int64_t>(kv.size()) / kKeys;
    for (std::int64_t row = 0; row < rows; ++row) values.insert(values.end(), kv.begin() + row * kKeys, kv.begin() + row * kKeys + kValues);
    call = {.batch = batch,
            .heads = heads,
            .kv_heads = 1,
            .seqlen_q = seqlen_q,
            .seqlen_k = batch > 0 ? rows / batch : 0,
            .head_dim = kKeys,
            .value_dim = kValues,
            .q = q,
            .k = kv,
            .v = values,
            .scale = scale,
            .causal = causal,
            .lengths_k = lengths};
  }
  PlainMla(const PlainMla&) = delete;
};

}  // namespace tw::kernels::mla
