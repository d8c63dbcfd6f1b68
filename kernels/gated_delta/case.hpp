#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/gated_delta/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

// Shared by the family's tests: random inputs on a device and as plain numbers.

namespace tw::kernels::gated_delta {

using namespace tw::test;

/// Sequences of these lengths; without `packed` all are equally long, and a batch.
struct Case {
  std::vector<std::int64_t> lengths = {70};
  bool packed = false;
  std::int64_t heads_of_keys = 1, group = 1, dim = 64, values = 64;
  float lowest_gate = -1;  ///< gates are uniform between it and 0; 0: none are given
  bool channels = false;   ///< each channel of a key has a gate of its own
  bool resets = false;     ///< some are -infinity
  float key_norm = 1, largest_beta = 1;
  bool normalise = false, initial = false, final = true, f32_beta = false;
  std::optional<float> scale = {};
  Placement place = {}, token_place = {};
};

class CaseTest : public testing::TestWithParam<std::tuple<Device, DType>> {
 public:
  static std::string name(const testing::TestParamInfo<std::tuple<Device, DType>>& instance) {
    return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu", name_of(std::get<1>(instance.param)));
  }

 protected:
  void SetUp() override { skip_unless_present(device); }

  struct Inputs {
    PlacedTensor q, k, v, beta, g, state;
    std::optional<Tensor> offsets;
    PlainCall plain;
  };
  static Shape tokens_of(const Case& c) {
    if (c.packed) return {1, std::accumulate(c.lengths.begin(), c.lengths.end(), std::int64_t{0})};
    return {static_cast<std::int64_t>(c.lengths.size()), c.lengths.at(0)};
  }
  static Shape with(Shape shape, std::initializer_list<std::int64_t> more) {
    shape.insert(shape.end(), more);
    return shape;
  }
  Inputs inputs(const Case& c) {
    const Shape tokens = tokens_of(c);
    const auto n = static_cast<std::int64_t>(c.lengths.size()), heads = c.heads_of_keys * c.group;
    Inputs in{{with(tokens, {c.heads_of_keys, c.dim}), dtype, device, c.place},
              {with(tokens, {c.heads_of_keys, c.dim}), dtype, device, c.place},
              {with(tokens, {heads, c.values}), dtype, device, c.place},
              {with(tokens, {heads}), c.f32_beta ? DType::f32 : dtype, device, c.token_place},
              {c.channels ? with(tokens, {heads, c.dim}) : with(tokens, {heads}), DType::f32, device, c.token_place},
              {{n, heads, c.dim, c.values}, DType::f32, device, c.token_place},
              {},
              {.heads_of_keys = c.heads_of_keys,
               .heads = heads,
               .dim = c.dim,
               .values = c.values,
               .normalise = c.normalise,
               .channels = c.channels}};
    in.plain.scale = c.scale ? *c.scale : 1 / std::sqrt(static_cast<double>(c.dim));
    in.plain.q = in.q.fill_random(random);
    in.plain.v = in.v.fill_random(random);
    in.plain.k = of_norm(in.k.fill_random(random), c.dim, c.key_norm);
    in.k.fill(in.plain.k);
    in.plain.beta = uniform(in.beta, 0, c.largest_beta);
    std::vector<float> gates = uniform(in.g, c.lowest_gate, 0);
    for (std::size_t i = 5; c.resets && i < gates.size(); i += 29) gates[i] = -kInf;
    in.g.fill(gates);
    const std::vector<float> state = in.state.fill_random(random);
    if (c.lowest_gate < 0) in.plain.g = gates;
    if (c.initial) in.plain.initial_state = state;
    std::vector<std::int32_t> offsets{0};
    for (const std::int64_t length : c.lengths) offsets.push_back(offsets.back() + static_cast<std::int32_t>(length));
    in.plain.offsets.assign(offsets.begin(), offsets.end());
    if (c.packed) in.offsets = Tensor::from(std::span<const std::int32_t>(offsets), {n + 1}).to(device);
    return in;
  }
  /// Rows of this norm, rounded.
  std::vector<float> of_norm(std::vector<float> x, std::int64_t dim, float norm) {
    for (std::size_t first = 0; first < x.size(); first += static_cast<std::size_t>(dim)) {
      const std::span<float> row(x.data() + first, static_cast<std::size_t>(dim));
      const float squares = std::inner_product(row.begin(), row.end(), row.begin(), 0.0f);
      for (float& v : row) v = round_to(dtype, v * norm / std::sqrt(squares));
    }
    return x;
  }
  std::vector<float> uniform(PlacedTensor& tensor, float from, float to) {
    std::vector<float> values(static_cast<std::size_t>(tensor.tensor().numel()));
    std::uniform_real_distribution<float> distribution(from, to);
    for (float& x : values) x = round_to(tensor.tensor().dtype(), distribution(random));
    tensor.fill(values);
    return values;
  }
  static std::string text(const Case& c) {
    std::string lengths;
    for (const std::int64_t length : c.lengths) lengths += tw::format(" {}", length);
    return tw::format(
        "lengths{} packed {} heads {} x {} dim {} values {} gates {} of channels {} resets {} key norm {} beta {} normalise {} initial {}",
        lengths, c.packed, c.heads_of_keys, c.group, c.dim, c.values, c.lowest_gate, c.channels, c.resets, c.key_norm, c.largest_beta,
        c.normalise, c.initial);
  }
  int pick(int n) { return std::uniform_int_distribution(0, n - 1)(random); }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

}  // namespace tw::kernels::gated_delta
