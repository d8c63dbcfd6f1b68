#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/reference.hpp"
#include "runtime/format.hpp"
#include "tilewave/attention.hpp"

// The blocks of keys that tests of attention attend to, and what they mean for the reference: a mask of single keys.

namespace tw::kernels::attention {

/// Which blocks a call attends to.
struct Blocks {
  int query_block = 128, key_block = 128;
  bool indices = false;  ///< a list, else a mask
  bool one_sequence = false;
  int heads_per_list = 1;  ///< 1, heads / kv_heads or heads
  double density = 0.5;
  bool counted = true;  ///< lists have counts; else unused entries are out of range

  std::string describe() const {
    return tw::format("blocks of {} x {}, {}, one sequence {}, heads per list {}, density {}, counted {}", query_block, key_block,
                      indices ? "indices" : "mask", one_sequence, heads_per_list, density, counted);
  }
};

inline std::int64_t blocks_in(std::int64_t rows, int size) { return (rows + size - 1) / size; }

/// bool [batch, heads, blocks of queries, blocks of keys] of batch and heads with blocks of their own.
struct Selection {
  std::int64_t batch, heads, queries, keys;
  std::vector<bool> selected = {};

  std::size_t index(std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t k) const {
    return static_cast<std::size_t>(((std::min(b, batch - 1) * heads + h) * queries + q) * keys + k);
  }
  bool at(std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t k) const { return selected[index(b, h, q, k)]; }
};

inline Selection select_blocks(std::int64_t batch, std::int64_t heads, std::int64_t queries, std::int64_t keys, double density,
                               std::mt19937_64& random) {
  Selection s{batch, heads, queries, keys};
  std::bernoulli_distribution taken(density);
  s.selected.resize(static_cast<std::size_t>(batch * heads * queries * keys));
  for (auto&& bit : s.selected) bit = taken(random);
  return s;
}

inline Tensor mask_tensor(const Selection& s, Device device) {
  const std::vector<u8> bytes(s.selected.begin(), s.selected.end());
  const Tensor host = Tensor::empty({s.batch, s.heads, s.queries, s.keys}, DType::boolean);
  std::copy(bytes.begin(), bytes.end(), static_cast<u8*>(host.data()));
  return host.to(device);
}

/// Lists in random order, with entries twice and entries that are out of range. Unused entries, after the counts, are any blocks, or if not
/// `counted` out of range.
struct ListTensors {
  Tensor indices, counts;

  ListTensors() = default;
  ListTensors(const Selection& s, bool counted, std::mt19937_64& random, Device device) {
    const auto pick = [&](std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); };
    std::vector<std::vector<std::int32_t>> lists;
    std::vector<std::int32_t> sizes, entries;
    std::size_t longest = 1;
    for (std::int64_t row = 0; row < s.batch * s.heads * s.queries; ++row) {
      std::vector<std::int32_t> list;
      for (std::int64_t k = 0; k < s.keys; ++k) {
        if (!s.selected[static_cast<std::size_t>(row * s.keys + k)]) continue;
        list.insert(list.end(), pick(4) == 0 ? 3 : 1, static_cast<std::int32_t>(k));
      }
      using Limits = std::numeric_limits<std::int32_t>;
      for (const std::int32_t bad : {-1, static_cast<std::int32_t>(s.keys), Limits::min(), Limits::max()})
        if (pick(3) == 0) list.push_back(bad);
      std::shuffle(list.begin(), list.end(), random);
      sizes.push_back(static_cast<std::int32_t>(list.size()));
      longest = std::max(longest, list.size() + 1);
      lists.push_back(std::move(list));
    }
    for (std::vector<std::int32_t>& list : lists) {
      list.resize(longest, counted ? static_cast<std::int32_t>(pick(s.keys + 1)) : -7);
      entries.insert(entries.end(), list.begin(), list.end());
    }
    const auto tensor = [&](const std::vector<std::int32_t>& values, Shape shape) {
      const Tensor host = Tensor::empty(std::move(shape), DType::i32);
      std::copy(values.begin(), values.end(), host.data<std::int32_t>());
      return host.to(device);
    };
    indices = tensor(entries, {s.batch, s.heads, s.queries, static_cast<std::int64_t>(longest)});
    counts = tensor(sizes, {s.batch, s.heads, s.queries});
  }
};

/// A selection as a call takes it.
struct BlockTensors {
  Tensor mask;
  ListTensors lists;
  AttentionBlocks blocks = {};

  BlockTensors(const Blocks& x, const Selection& s, std::mt19937_64& random, Device device) {
    blocks.query_block = x.query_block, blocks.key_block = x.key_block;
    if (x.indices) {
      lists = ListTensors(s, x.counted, random, device);
      blocks.indices = &lists.indices;
      if (x.counted) blocks.counts = &lists.counts;
    } else {
      mask = mask_tensor(s, device);
      blocks.mask = &mask;
    }
  }
  BlockTensors(const BlockTensors&) = delete;
  BlockTensors& operator=(const BlockTensors&) = delete;
};

/// Makes the plain call's mask what the blocks and its own mask hide; `memory` holds it.
inline void hide_blocks(PlainCall& plain, const Blocks& x, const Selection& s, std::vector<float>& memory) {
  memory.clear();
  for (std::int64_t b = 0; b < plain.batch; ++b) {
    for (std::int64_t h = 0; h < plain.heads; ++h) {
      for (std::int64_t i = 0; i < plain.seqlen_q; ++i) {
        for (std::int64_t j = 0; j < plain.seqlen_k; ++j) {
          const std::int64_t at[] = {b, h, i, j};
          std::int64_t index = 0;
          for (std::size_t dim = 0; dim < 4; ++dim) index += at[dim] * plain.mask_strides[dim];
          const float own = plain.mask.empty() ? 0.0f : plain.mask[static_cast<std::size_t>(index)];
          memory.push_back(s.at(b, h / x.heads_per_list, i / x.query_block, j / x.key_block) ? own
                                                                                             : -std::numeric_limits<float>::infinity());
        }
      }
    }
  }
  plain.mask = memory;
  plain.mask_strides = {plain.heads * plain.seqlen_q * plain.seqlen_k, plain.seqlen_q * plain.seqlen_k, plain.seqlen_k, 1};
}

}  // namespace tw::kernels::attention
