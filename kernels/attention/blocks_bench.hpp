#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "tilewave/tensor.hpp"

// What benchmarks of block-sparse attention attend to.

namespace tw::kernels::attention {

struct RandomBlocks {
  Tensor mask;      ///< bool [batch, heads, query_blocks, key_blocks]
  double selected;  ///< blocks, where those on a causal mask's diagonal count half
};

/// In each row the same share of the blocks, at random. Under a causal mask the block on the diagonal is always among them.
inline RandomBlocks random_blocks(std::int64_t batch, std::int64_t heads, std::int64_t queries, std::int64_t keys, double density,
                                  bool causal, Device device, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Tensor host = Tensor::empty({batch, heads, queries, keys}, DType::boolean);
  auto* const bytes = static_cast<unsigned char*>(host.data());
  std::fill_n(bytes, host.numel(), static_cast<unsigned char>(0));
  double selected = 0;
  std::vector<std::int64_t> order;
  for (std::int64_t row = 0; row < batch * heads * queries; ++row) {
    const std::int64_t visible = causal ? std::min(keys, row % queries + 1 + keys - queries) : keys;
    const std::int64_t count = std::max<std::int64_t>(1, std::llround(density * static_cast<double>(visible)));
    order.resize(static_cast<std::size_t>(visible));
    std::iota(order.begin(), order.end(), 0);
    if (causal) std::swap(order.front(), order.back());
    std::shuffle(order.begin() + (causal ? 1 : 0), order.end(), random);
    for (std::int64_t i = 0; i < count; ++i) bytes[row * keys + order[static_cast<std::size_t>(i)]] = 1;
    selected += static_cast<double>(count) - (causal ? 0.5 : 0.0);
  }
  return {host.to(device), selected};
}

/// The same as indices, i32 [batch, heads, query_blocks, entries], where all rows have the same number of blocks.
inline Tensor indices_of(const Tensor& mask) {
  const Tensor host = mask.to(Device::cpu());
  const auto* const bytes = static_cast<const unsigned char*>(host.data());
  std::vector<std::int32_t> entries;
  for (std::int64_t i = 0; i < host.numel(); ++i)
    if (bytes[i] != 0) entries.push_back(static_cast<std::int32_t>(i % host.shape(3)));
  const std::int64_t rows = host.numel() / host.shape(3);
  const Tensor indices = Tensor::empty({host.shape(0), host.shape(1), host.shape(2), std::ssize(entries) / rows}, DType::i32);
  std::copy_n(entries.begin(), indices.numel(), indices.data<std::int32_t>());
  return indices;
}

}  // namespace tw::kernels::attention
