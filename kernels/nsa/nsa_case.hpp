#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/nsa/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/nsa.hpp"

// A random call of the family for its tests.

namespace tw::kernels::nsa {

/// What a random call looks like. Sequences have random lists of blocks, with some entries that select nothing and some duplicates.
struct NsaCase {
  std::int64_t batch = 1, tokens = 20, kv_heads = 2, group = 16, head_dim = 64, value_dim = 64;
  std::int64_t slots = 4;
  int block_size = 32;
  std::vector<std::int64_t> packed = {};   ///< lengths of packed sequences; batch is 1 and tokens their sum
  std::int64_t capacity = 0;               ///< k and v are caches of so many keys; 0: as many keys as tokens
  std::vector<std::int64_t> lengths = {};  ///< of the sequences in these caches, queries included
  bool counts = false;                     ///< block_counts
  double holes = 0.2;                      ///< share of entries that select nothing
  bool compressed = false;                 ///< compressed keys, without lists
  float scale = 0, magnitude = 1;
  bool strided = false;  ///< tensors that are not aligned and have gaps
  bool lse = true;

  std::string describe() const {
    return tw::format(
        "batch {} tokens {} kv_heads {} group {} dims {}/{} slots {} block_size {} packed {} capacity {} lengths {} counts {} holes {} "
        "compressed {} scale {} magnitude {} strided {} lse {}",
        batch, tokens, kv_heads, group, head_dim, value_dim, slots, block_size, tw::join(packed, ","), capacity, tw::join(lengths, ","),
        counts, holes, compressed, scale, magnitude, strided, lse);
  }
};

/// The tensors of a case, filled, and the same in plain numbers.
struct NsaOperands {
  using Placed = test::PlacedTensor;
  NsaCase c;
  DType dtype;
  Device device;
  std::int64_t keys;  ///< of a sequence; of all if packed
  Placed q, k, v, indices, counts, cu, cu_k, seqlens;
  std::vector<float> of_q, of_k, of_v;
  PlainCall plain;
  NsaOptions options;

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  static std::int64_t keys_of(const NsaCase& c) {
    if (!c.packed.empty() && c.compressed) {
      std::int64_t all = 0;
      for (const std::int64_t length : c.packed) all += length / c.block_size;
      return all;
    }
    const std::int64_t tokens = c.capacity > 0 ? c.capacity : c.tokens;
    return c.compressed ? tokens / c.block_size : tokens;
  }
  static test::Placement placement(const NsaCase& c) {
    return c.strided ? test::Placement{.order = {0, 2, 1, 3}, .offset = 3, .gap = 5} : test::Placement{};
  }

  NsaOperands(NsaCase of, DType type, Device on, std::mt19937_64& random)
      : c(std::move(of)),
        dtype(type),
        device(on),
        keys(keys_of(c)),
        q({c.batch, c.tokens, c.kv_heads * c.group, c.head_dim}, dtype, device, placement(c)),
        k({c.batch, keys, c.kv_heads, c.head_dim}, dtype, device, placement(c)),
        v({c.batch, keys, c.kv_heads, c.value_dim}, dtype, device, placement(c)),
        indices({c.batch, c.tokens, c.kv_heads, c.slots}, DType::i32, device),
        counts({c.batch, c.tokens, c.kv_heads}, DType::i32, device),
        cu({std::ssize(c.packed) + 1}, DType::i32, device),
        cu_k({std::ssize(c.packed) + 1}, DType::i32, device),
        seqlens({c.batch}, DType::i32, device) {
    of_q = q.fill_random(random, c.magnitude);
    of_k = k.fill_random(random, c.magnitude);
    of_v = v.fill_random(random);
    plain = {.tokens = c.batch * c.tokens,
             .kv_heads = c.kv_heads,
             .group = c.group,
             .head_dim = c.head_dim,
             .value_dim = c.value_dim,
             .keys = c.batch * keys,
             .scale = c.scale > 0 ? static_cast<double>(c.scale) : 1 / std::sqrt(static_cast<double>(c.head_dim))};
    options = {.block_size = c.block_size, .scale = c.scale};
    std::vector<std::int64_t> all_indices, all_counts, used(at(plain.keys));
    std::uniform_real_distribution<double> uniform;
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(uniform(random) * static_cast<double>(n)); };
    const auto add_token = [&](std::int64_t position, std::int64_t begin, std::int64_t keys_of_sequence) {
      for (std::int64_t head = 0; head < c.kv_heads; ++head) {
        const std::int64_t span = c.compressed ? c.block_size : 1;
        const std::int64_t visible = std::clamp<std::int64_t>((position + 1) / span, 0, keys_of_sequence);
        if (c.compressed) {
          std::vector<std::int64_t> rows(at(visible));
          std::iota(rows.begin(), rows.end(), begin);
          plain.seen.push_back(rows);
          continue;
        }
        const std::int64_t blocks = (keys_of_sequence + c.block_size - 1) / c.block_size;
        const std::int64_t missing[] = {-1, blocks, -(std::int64_t{1} << 31), std::int64_t{1} << 30, keys};
        std::vector<std::int64_t> list;
        for (std::int64_t n = 0; n < c.slots; ++n)
          list.push_back(uniform(random) < c.holes ? missing[random() % 5] : below(std::max<std::int64_t>(position / c.block_size + 2, 1)));
        const std::int64_t count = c.counts ? below(c.slots + 3) - 1 : c.slots;
        all_indices.insert(all_indices.end(), list.begin(), list.end());
        all_counts.push_back(count);
        list.resize(at(std::clamp<std::int64_t>(count, 0, c.slots)));
        plain.seen.push_back(rows_of_blocks(list, c.block_size, begin, visible));
      }
    };
    if (!c.packed.empty()) {
      std::vector<float> offsets{0}, offsets_k{0};
      for (const std::int64_t length : c.packed) {
        const std::int64_t its_keys = c.compressed ? length / c.block_size : length;
        for (std::int64_t i = 0; i < length; ++i) add_token(i, static_cast<std::int64_t>(offsets_k.back()), its_keys);
        offsets.push_back(offsets.back() + static_cast<float>(length));
        offsets_k.push_back(offsets_k.back() + static_cast<float>(its_keys));
      }
      cu.fill(offsets);
      cu_k.fill(offsets_k);
      options.cu_seqlens = &cu.tensor();
      if (c.compressed) options.cu_seqlens_k = &cu_k.tensor();
    } else {
      for (std::int64_t b = 0; b < c.batch; ++b) {
        const std::int64_t length = !c.lengths.empty() ? c.lengths[at(b)] : c.compressed ? c.tokens : keys;
        const std::int64_t its_keys = std::clamp<std::int64_t>(c.compressed ? length / c.block_size : length, 0, keys);
        for (std::int64_t i = 0; i < c.tokens; ++i) add_token(length - c.tokens + i, b * keys, its_keys);
      }
      if (!c.lengths.empty()) {
        seqlens.fill(std::vector<float>(c.lengths.begin(), c.lengths.end()));
        options.seqlens = &seqlens.tensor();
      }
    }
    if (!c.compressed) indices.fill(std::vector<float>(all_indices.begin(), all_indices.end()));
    if (c.counts) {
      counts.fill(std::vector<float>(all_counts.begin(), all_counts.end()));
      options.block_counts = &counts.tensor();
    }
    poison_after_lengths();
    plain.q = of_q;
    plain.k = of_k;
    plain.v = of_v;
  }
  NsaOperands(const NsaOperands&) = delete;

 private:
  /// Keys and values after a sequence's end are NaN.
  void poison_after_lengths() {
    if (c.lengths.empty()) return;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      const std::int64_t first = std::clamp<std::int64_t>(c.compressed ? c.lengths[at(b)] / c.block_size : c.lengths[at(b)], 0, keys);
      for (auto* const x : {&of_k, &of_v}) {
        const std::int64_t row = std::ssize(*x) / std::max<std::int64_t>(plain.keys, 1);
        std::fill(x->begin() + (b * keys + first) * row, x->begin() + (b + 1) * keys * row, test::kNaN);
      }
    }
    k.fill(of_k);
    v.fill(of_v);
  }
};

/// Expects results with infinities at the same places, and otherwise within 1e-3.
inline void expect_close(const std::vector<double>& got, const std::vector<double>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t n = 0; n < got.size(); ++n) {
    if (std::isinf(wanted[n]))
      EXPECT_EQ(got[n], wanted[n]) << n;
    else
      EXPECT_NEAR(got[n], wanted[n], 1e-3) << n;
  }
}

}  // namespace tw::kernels::nsa
