#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tilewave/attention.hpp"

// The calls that attention_test.cpp makes, and how their results are held against the reference.

namespace tw::kernels::attention {

using namespace tw::test;

inline constexpr double kInf = std::numeric_limits<double>::infinity();

/// Where q, k, v and o lie. A GPU copies the first three by TMA, the others by ordinary loads.
enum class Place { dense, by_head, aligned, unaligned };

inline Placement placement(Place place) {
  switch (place) {
    case Place::dense:
      break;
    case Place::by_head:
      return {.order = {0, 2, 1, 3}};  // BHSD memory, seen as BSHD
    case Place::aligned:
      return {.offset = 16, .gap = 8, .align = 8};
    case Place::unaligned:
      return {.offset = 3, .gap = 5};
  }
  return {};
}

/// A call of attention() and where its tensors lie.
struct Case {
  std::int64_t seqlen_q, seqlen_k;
  std::int64_t batch = 1, heads = 1, kv_heads = 1;
  std::int64_t head_dim = 64;
  bool causal = false;
  std::optional<int> causal_offset = {};
  float scale = 0;
  float magnitude = 1;  ///< standard deviation of q and k
  bool with_lse = true;
  Place q = Place::dense, kv = Place::dense, o = Place::dense;
  std::int64_t value_dim = 0;  ///< 0: head_dim
  int window_left = -1, window_right = -1;
  float softcap = 0;
  int alibi = 0;  ///< dimensions of the slopes; 0: none
  bool sink = false;
  std::optional<DType> mask = {};
  unsigned mask_dims = 15;  ///< bits: the dimensions of which the mask has all, batch first

  std::int64_t values() const { return value_dim > 0 ? value_dim : head_dim; }

  std::string describe() const {
    return tw::format(
        "Sq {} Sk {} batch {} heads {}/{} D {}/{} causal {} offset {} window {}/{} softcap {} alibi {} sink {} mask {} {} scale {} "
        "magnitude {} "
        "lse {} q {} kv {} o {}",
        seqlen_q, seqlen_k, batch, heads, kv_heads, head_dim, values(), causal, causal_offset ? std::to_string(*causal_offset) : "default",
        window_left, window_right, softcap, alibi, sink, mask ? name_of(*mask) : "none", mask_dims, scale, magnitude, with_lse,
        static_cast<int>(q), static_cast<int>(kv), static_cast<int>(o));
  }
};

inline PlainCall plain_call(const Case& c) {
  PlainCall plain{
      .batch = c.batch, .heads = c.heads, .kv_heads = c.kv_heads, .seqlen_q = c.seqlen_q, .seqlen_k = c.seqlen_k, .head_dim = c.head_dim};
  plain.scale = c.scale > 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.head_dim));
  plain.causal = c.causal;
  plain.causal_offset = c.causal_offset ? *c.causal_offset : c.seqlen_k - c.seqlen_q;
  plain.value_dim = c.value_dim;
  plain.window_left = c.window_left, plain.window_right = c.window_right;
  plain.softcap = c.softcap;
  return plain;
}

/// -infinity exactly where expected, else within 1e-3.
inline testing::AssertionResult lse_accurate(const std::vector<double>& lse, const std::vector<double>& expected) {
  if (lse.size() != expected.size()) return testing::AssertionFailure() << lse.size() << " values instead of " << expected.size();
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (expected[i] == -kInf ? lse[i] != -kInf : !(std::abs(lse[i] - expected[i]) <= 1e-3))
      return testing::AssertionFailure() << "lse " << i << " is " << lse[i] << " instead of " << expected[i];
  }
  return testing::AssertionSuccess();
}

inline void expect_results(const PlainCall& plain, DType dtype, Device device, const PlacedTensor& o, const PlacedTensor* lse) {
  const PlainResult expected = reference(plain);
  EXPECT_TRUE(accurate({o.values(), expected.o, naive(plain, dtype).o, arithmetic_of(dtype, device)}));
  EXPECT_TRUE(o.gaps_intact());
  if (lse != nullptr) {
    EXPECT_TRUE(lse_accurate(lse->values(), expected.lse));
    EXPECT_TRUE(lse->gaps_intact());
  }
}

}  // namespace tw::kernels::attention
