#pragma once

#include "tilewave/tile/attention_config.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

// Dropout of attention's weights (Srivastava et al. 2014). Whether a weight is dropped depends on the seed, the offset, the batch, the
// head, the query and the key, and on nothing else: tiles of every size, transposed ones, and the CPU draw the same mask.
//
// Philox 4x32-10 (Salmon et al., SC 2011) with the seed as key gives 16 bytes for 16 weights: those of queries r, r + 8 of 16, and of keys
// 2q, 2q + 1 of each 8 of 32. This is what one thread holds in the accumulators of a product, so that it draws no number twice. A weight is
// kept if its byte is below a threshold.

#if !TW_ON_GPU
namespace tw::cpu {
[[noreturn]] void schedule_error(const char* what);
}
#endif

namespace tw {

/// The words of Philox 4x32-10 for one counter.
struct PhiloxWords {
  u32 word[4];
};
TW_INLINE constexpr PhiloxWords philox(u32 key0, u32 key1, PhiloxWords counter) {
  u32 c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  TW_UNROLL
  for (int round = 0; round < 10; ++round) {
    const u64 low = u64{0xd2511f53u} * c0, high = u64{0xcd9e8d57u} * c2;
    c0 = static_cast<u32>(high >> 32) ^ c1 ^ key0;
    c1 = static_cast<u32>(high);
    c2 = static_cast<u32>(low >> 32) ^ c3 ^ key1;
    c3 = static_cast<u32>(low);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Dropout as the host describes it.
template <class Target>
struct DropoutParams {
  Pointer<Target, const i64> state;  ///< [2]: seed and offset on the device, read when the kernel runs; null: those below
  i64 seed, offset;
  int kept;     ///< of 256 weights; 256: all, and nothing is drawn
  float scale;  ///< 256 / kept: what kept weights are multiplied by
};

/// Whether a kernel drops weights in this call; a constant unless its configuration says that Params decide.
TW_INLINE constexpr bool drops(const auto& config, const auto& p) {
  return config.dropout == Use::always || (config.dropout == Use::runtime && p.dropout.kept < 256);
}

/// The dropout of one head.
struct Dropout {
  u32 key0, key1, head, offset;
  int kept;

  /// `head`: of all batches, batch * heads + head.
  template <class Target>
  TW_INLINE static Dropout of(const DropoutParams<Target>& p, int head) {
    u64 seed = static_cast<u64>(p.seed), offset = static_cast<u64>(p.offset);
    if (p.state) seed = static_cast<u64>(p.state[0]), offset = static_cast<u64>(p.state[1]);
    // The counter has room for 32 bits of the offset.
    return {static_cast<u32>(seed), static_cast<u32>(seed >> 32) ^ static_cast<u32>(offset >> 32), static_cast<u32>(head),
            static_cast<u32>(offset), p.kept};
  }
  /// The bytes of queries 8 * (row_group / 8) * 2 + row_group % 8 and + 8, and of keys 32 * (key_group / 4) + 2 * (key_group % 4) + 8 j and
  /// + 1: byte 2 * (key % 2) + (query / 8) % 2 of word j.
  TW_INLINE PhiloxWords bytes(int row_group, int key_group) const {
    return philox(key0, key1, {{static_cast<u32>(key_group), static_cast<u32>(row_group), head, offset}});
  }
  /// Whether the weight of one query and key is dropped.
  TW_INLINE bool dropped(int query, int key) const {
    const PhiloxWords drawn = bytes(query / 16 * 8 + query % 8, key / 32 * 4 + key % 8 / 2);
    return static_cast<int>(drawn.word[key % 32 / 8] >> (16 * (key % 2) + 8 * (query % 16 / 8)) & 0xff) >= kept;
  }
  /// Sets bit 7 of each byte whose weight is dropped; other bits are undefined.
  TW_INLINE u32 flags(u32 word) const {
    const u32 threshold = static_cast<u32>(kept), sums = (word & 0x7f7f7f7fu) + (0x80u - (threshold & 0x7fu)) * 0x01010101u;
    return (word & sums) | ((word | sums) & (threshold < 0x80u ? ~0u : 0u));
  }
};

namespace detail {

#if TW_ON_GPU
constexpr u32 kSign = 1u << 31;

TW_INLINE void mark(float& x, u32 flags, int bit) { x = bit_cast<float>(bit_cast<u32>(x) | (flags << (31 - bit) & kSign)); }

/// Transposes the 8 x 8 halfwords of a warp: lane l has two neighbours of row l / 4.
TW_INLINE u32 transpose_halfwords(u32 pair) {
  u32 result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}
/// Two weights, rounded; negative ones become 0.
template <class T>
TW_INLINE u32 kept_pair(float first, float second) {
  u32 pair;
  if constexpr (is_same<T, bf16>)
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  else
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
template <class T>
TW_INLINE u32 kept_pair(u32 pair) {
  u32 result;
  if constexpr (is_same<T, bf16>)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0));
  else
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0));
  return result;
}
#else
/// Marks a tile whose element of a query and a key, both counted from the tile's first, is at(query, key).
[[gnu::noinline]] void mark_groups(auto& block, const Dropout& dropout, int queries, int keys, int query0, int key0, auto& weights,
                                   auto at) {
  if (query0 % 16 != 0 || key0 % 32 != 0 || queries % 16 != 0 || keys % 32 != 0)
    cpu::schedule_error("on the CPU dropout takes tiles of whole groups, 16 queries and 32 keys");
  block.for_each(weights, [](int, int, auto&) {});  // which reports accumulators that a product still writes
  for (int query = 0; query < queries; query += query % 8 == 7 ? 9 : 1) {
    for (int key = 0; key < keys; key += key % 8 == 6 ? 26 : 2) {
      const PhiloxWords drawn = dropout.bytes((query0 + query) / 16 * 8 + query % 8, (key0 + key) / 32 * 4 + key % 8 / 2);
      for (int i = 0; i < 16; ++i) {
        if (static_cast<int>(drawn.word[i / 4] >> 8 * (i % 4) & 0xff) < dropout.kept) continue;
        auto& x = at(query + i % 2 * 8, key + i / 4 * 8 + i / 2 % 2);
        x = -x;
      }
    }
  }
}
#endif

}  // namespace detail

/// Gives dropped weights a minus sign: element (r, c) is that of query query0 + r and key key0 + c, a multiple of 16 each.
template <class Block, class F>
TW_INLINE void mark_dropped(Block& block, const Dropout& dropout, F& weights, int query0, int key0) {
#if TW_ON_GPU
  static_assert(F::column_warps == 1 && F::cols % 16 == 0, "a warp has the scores of all keys");
  const int row_group = (query0 + F::warp_row(block.at)) / 2 + block.at.lane / 4, key_group = key0 / 32 * 4 + block.at.lane % 4;
  const int odd = key0 / 16 % 2;  // the first 16 keys may be the second half of 32
  TW_UNROLL
  for (int tile = 0; tile < F::row_tiles; ++tile) {
    PhiloxWords drawn;
    TW_UNROLL
    for (int n = 0; n < F::cols / 16; ++n) {
      const int chunk = F::cols % 32 == 0 ? n : n + odd;
      if (F::cols % 32 != 0 || n % 2 == 0) drawn = dropout.bytes(row_group + tile * 8, key_group + chunk / 2 * 4);
      TW_UNROLL
      for (int octet = 0; octet < 2; ++octet) {
        const u32 word = F::cols % 32 == 0 ? drawn.word[n % 2 * 2 + octet] : chunk % 2 == 0 ? drawn.word[octet] : drawn.word[2 + octet];
        const u32 flags = dropout.flags(word);
        TW_UNROLL
        for (int i = 0; i < 4; ++i)  // row r: keys 2q, 2q + 1; row r + 8: the same
          detail::mark(weights.x[tile * F::tile_size + n * 8 + octet * 4 + i], flags, i % 2 * 16 + i / 2 * 8 + 7);
      }
    }
  }
#else
  detail::mark_groups(
      block, dropout, F::rows, F::cols, query0, key0, weights, [&](int query, int key) -> auto& { return weights.at(query, key); });
#endif
}

/// The same for transposed weights: element (r, c) is that of key key0 + r and query query0 + c.
template <class Block, class F>
TW_INLINE void mark_dropped_transposed(Block& block, const Dropout& dropout, F& weights, int query0, int key0) {
#if TW_ON_GPU
  static_assert(F::column_warps == 1 && F::cols % 16 == 0, "a warp has the scores of all queries");
  const int chunk = (key0 + F::warp_row(block.at)) / 16, lane = block.at.lane;
  TW_UNROLL
  for (int tile = 0; tile < F::row_tiles; ++tile) {
    const bool odd = (chunk + tile) % 2 != 0;
    const int key_group = (chunk + tile) / 2 * 4 + lane % 4;
    TW_UNROLL
    for (int first = 0; first < F::cols; first += 64) {  // 64 queries and 16 keys have two bits in each of a warp's 8 x 8 halfwords
      u32 halfwords = 0;
      TW_UNROLL
      for (int n = 0; n < min(F::cols - first, 64) / 16; ++n) {
        const PhiloxWords drawn = dropout.bytes((query0 + first) / 2 + n * 8 + lane / 4, key_group);
        TW_UNROLL
        for (int octet = 0; octet < 2; ++octet)
          halfwords |= (dropout.flags(odd ? drawn.word[2 + octet] : drawn.word[octet]) & 0x80808080u) >> (2 * n + octet);
      }
      halfwords = detail::transpose_halfwords(halfwords);
      TW_UNROLL
      for (int n = 0; n < min(F::cols - first, 64) / 16; ++n) {
        TW_UNROLL
        for (int i = 0; i < 8; ++i) {  // queries 2q, 2q + 1 of key r, then of key r + 8; then 8 queries on
          float& x = weights.x[tile * F::tile_size + (first / 16 + n) * 8 + i];
          detail::mark(x, halfwords, i % 2 * 16 + i / 4 * 8 + 7 - (2 * n + i / 2 % 2));
        }
      }
    }
  }
#else
  detail::mark_groups(
      block, dropout, F::cols, F::rows, query0, key0, weights, [&](int query, int key) -> auto& { return weights.at(key, query); });
#endif
}

/// The derivative by a score of a marked weight whose derivative before dropout is `d_weight`: P (scale d_weight - delta), P (0 - delta) if
/// it was dropped.
TW_INLINE auto score_derivative(auto weight, auto d_weight, auto delta, float scale) {
  return abs(weight) * ((weight < 0.0f ? 0.0f : d_weight * scale) - delta);
}

/// Rounds weights to an operand's type; those with a minus sign become 0.
template <class Block, class T, class F>
TW_INLINE void convert_kept(Block& block, T& to, F& weights) {
#if TW_ON_GPU
  using E = typename T::Element;
  TW_UNROLL
  for (int i = 0; i < F::size / 2; ++i) to.x[i] = detail::kept_pair<E>(weights.x[2 * i], weights.x[2 * i + 1]);
#else
  block.for_each(weights, [](int, int, auto& x) { x = max(x, 0.0f); });
  block.convert(to, weights);
#endif
}

/// Sets weights with a minus sign to 0. `rounded`: the same weights, in accumulators.
template <class Block, class T, class F>
TW_INLINE void drop_marked(Block& block, T& weights, [[maybe_unused]] F& rounded) {
#if TW_ON_GPU
  TW_UNROLL
  for (int i = 0; i < T::size / 2; ++i) weights.x[i] = detail::kept_pair<typename T::Element>(weights.x[i]);
#else
  convert_kept(block, weights, rounded);
#endif
}

}  // namespace tw
