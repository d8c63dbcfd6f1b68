#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/attention/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/tile/dropout.tile.hpp"

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
  int chunk = 0;
  float softcap = 0;
  int alibi = 0;  ///< dimensions of the slopes; 0: none
  bool sink = false;
  std::optional<DType> mask = {};
  unsigned mask_dims = 15;  ///< bits: the dimensions of which the mask has all, batch first
  bool mask_hides = false;  ///< whether a mask that is added has elements of -infinity
  float dropout = 0;
  bool qv = false;

  std::int64_t values() const { return value_dim > 0 ? value_dim : head_dim; }

  std::string describe() const {
    return tw::format(
        "Sq {} Sk {} batch {} heads {}/{} D {}/{} causal {} offset {} window {}/{} chunk {} softcap {} alibi {} sink {} mask {} {} {} "
        "dropout "
        "{} qv {} scale {} magnitude {} lse {} q {} kv {} o {}",
        seqlen_q, seqlen_k, batch, heads, kv_heads, head_dim, values(), causal, causal_offset ? std::to_string(*causal_offset) : "default",
        window_left, window_right, chunk, softcap, alibi, sink, mask ? name_of(*mask) : "none", mask_dims,
        mask_hides ? "with -inf" : "finite", dropout, qv, scale, magnitude, with_lse, static_cast<int>(q), static_cast<int>(kv),
        static_cast<int>(o));
  }
};

inline PlainCall plain_call(const Case& c) {
  PlainCall plain{
      .batch = c.batch, .heads = c.heads, .kv_heads = c.kv_heads, .seqlen_q = c.seqlen_q, .seqlen_k = c.seqlen_k, .head_dim = c.head_dim};
  plain.scale = c.scale > 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.head_dim + (c.qv ? c.values() : 0)));
  plain.causal = c.causal;
  plain.causal_offset = c.causal_offset ? *c.causal_offset : c.seqlen_k - c.seqlen_q;
  plain.value_dim = c.value_dim;
  plain.window_left = c.window_left, plain.window_right = c.window_right;
  plain.chunk = c.chunk;
  plain.softcap = c.softcap;
  return plain;
}

/// What a test of attention has in common: a device, a data type, and what a Case asks for besides q, k and v.
class AttentionTest : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  struct Mask {
    Tensor tensor;
    std::vector<float> values;
    std::array<std::int64_t, 4> strides = {};
  };
  struct Features {
    std::vector<float> slopes, sinks, dropout;
    Tensor slopes_tensor, sink_tensor, dropout_state;
    Mask mask;
  };

  /// Sets the options of a call and of its reference; both point into `features`.
  void add_features(const Case& c, Features& features, AttentionOptions& options, PlainCall& plain) {
    options.scale = c.scale;
    options.causal = c.causal, options.causal_offset = c.causal_offset;
    options.window_left = c.window_left, options.window_right = c.window_right;
    options.attention_chunk = c.chunk;
    options.softcap = c.softcap;
    if (c.alibi > 0) {
      features.slopes = uniform(c.alibi == 2 ? c.batch * c.heads : c.heads, 0.01f, 0.5f);
      features.slopes_tensor = to_device(features.slopes, c.alibi == 2 ? Shape{c.batch, c.heads} : Shape{c.heads});
      options.alibi_slopes = &features.slopes_tensor;
      plain.alibi_slopes = features.slopes;
    }
    if (c.sink) {
      features.sinks = uniform(c.heads, -2, 2);
      features.sink_tensor = to_device(features.sinks, {c.heads});
      options.sink = &features.sink_tensor;
      plain.sink = features.sinks;
    }
    if (c.mask) {
      features.mask = make_mask(c);
      options.mask = &features.mask.tensor;
      plain.mask = features.mask.values, plain.mask_strides = features.mask.strides;
    }
    if (c.dropout > 0) {
      options.dropout = c.dropout;
      options.dropout_seed = static_cast<std::int64_t>(random()), options.dropout_offset = pick(1000);
      features.dropout = dropout_factors(c, options);
      plain.dropout = features.dropout;
      if (pick(2) == 0) {  // the same, from the device
        features.dropout_state = to_device(std::vector{options.dropout_seed, options.dropout_offset}, {2});
        options.dropout_state = &features.dropout_state;
        options.dropout_seed = 0;
      }
    }
  }
  /// What weights are multiplied by, one weight at a time: [batch, heads, seqlen_q, seqlen_k].
  static std::vector<float> dropout_factors(const Case& c, const AttentionOptions& options) {
    const int kept = std::clamp(static_cast<int>(std::lround((1 - c.dropout) * 256)), 1, 255);
    const DropoutParams<cpu::Target> params{nullptr, options.dropout_seed, options.dropout_offset, kept, 0};
    std::vector<float> factors;
    for (int head = 0; head < c.batch * c.heads; ++head) {
      const Dropout dropout = Dropout::of(params, head);
      for (int i = 0; i < c.seqlen_q; ++i)
        for (int j = 0; j < c.seqlen_k; ++j) factors.push_back(dropout.dropped(i, j) ? 0.0f : 256.0f / static_cast<float>(kept));
    }
    return factors;
  }
  std::vector<float> uniform(std::int64_t count, float from, float to) {
    std::uniform_real_distribution<float> distribution(from, to);
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& x : values) x = distribution(random);
    return values;
  }
  template <class X>
  Tensor to_device(const std::vector<X>& values, Shape shape) const {
    const Tensor host = Tensor::empty(std::move(shape), dtype_of<X>, Stream::standard(Device::cpu()));
    std::copy(values.begin(), values.end(), host.data<X>());
    return host.to(device);
  }
  /// A mask whose dimensions in `mask_dims` are whole. Of the others those in front are left out, and the rest have one element.
  Mask make_mask(const Case& c) {
    Mask mask;
    const std::int64_t extents[] = {c.batch, c.heads, c.seqlen_q, c.seqlen_k};
    Shape shape;
    for (unsigned dim = 0; dim < 4; ++dim) {
      const bool all = (c.mask_dims >> dim & 1) != 0;
      if (all || !shape.empty() || dim == 3) shape.push_back(all ? extents[dim] : 1);
    }
    std::int64_t size = 1;
    for (unsigned dim = 4; dim-- > 0;) {
      mask.strides[dim] = (c.mask_dims >> dim & 1) != 0 ? size : 0;
      if ((c.mask_dims >> dim & 1) != 0) size *= extents[dim];
    }
    const bool boolean = *c.mask == DType::boolean;
    const Tensor host = Tensor::empty(shape, *c.mask, Stream::standard(Device::cpu()));
    for (std::int64_t i = 0; i < size; ++i) {
      float x = boolean ? (pick(4) == 0 ? -static_cast<float>(kInf) : 0.0f) : static_cast<float>(pick(33) - 16) / 8;
      if (c.mask_hides && pick(5) == 0) x = -static_cast<float>(kInf);
      if (boolean)
        static_cast<u8*>(host.data())[i] = x == 0;
      else if (*c.mask == DType::f32)
        host.data<float>()[i] = x;
      else if (*c.mask == DType::f16)
        host.data<f16>()[i] = f16(x);
      else
        host.data<bf16>()[i] = bf16(x);
      mask.values.push_back(x);
    }
    mask.tensor = host.to(device);
    return mask;
  }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

inline const std::vector<DType> kDTypes = {DType::f32, DType::f16, DType::bf16};

/// Every device with these types, except f16 on the CPU, which runs the code of bf16. The suites Attention and AttentionBackward test it
/// there.
inline const std::vector<std::tuple<Device, DType>> kDevicesAndDTypes = {{Device::cpu(), DType::f32},
                                                                         {Device::cpu(), DType::bf16},
                                                                         {Device::cuda(), DType::f32},
                                                                         {Device::cuda(), DType::f16},
                                                                         {Device::cuda(), DType::bf16}};
inline std::string device_and_dtype(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  return tw::format("{}_{}", std::get<0>(info.param).is_cuda() ? "cuda" : "cpu", name_of(std::get<1>(info.param)));
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
