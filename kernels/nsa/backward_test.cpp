// nsa_selected_backward() and nsa_compressed_backward() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <random>
#include <tuple>

#include "kernels/nsa/nsa_case.hpp"

namespace tw::kernels::nsa {
namespace {

using namespace tw::test;

class NsaBackward : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "skipped: f32 is for the CPU";
    skip_unless_present(device);
  }
  void check(const NsaCase& c);

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

void NsaBackward::check(const NsaCase& c) {
  SCOPED_TRACE(c.describe());
  NsaOperands in(c, dtype, device, random);
  const Placement placement = NsaOperands::placement(c);
  PlacedTensor o({c.batch, c.tokens, c.kv_heads * c.group, c.value_dim}, dtype, device, placement),
      lse({c.batch, c.tokens, c.kv_heads * c.group}, DType::f32, device), d_o(o.tensor().shape(), dtype, device, placement),
      dq(in.q.tensor().shape(), dtype, device, placement), dk(in.k.tensor().shape(), dtype, device, placement),
      dv(in.v.tensor().shape(), dtype, device, placement);
  const std::vector<float> of_d_o = d_o.fill_random(random);
  NsaOptions forward = in.options;
  forward.lse = &lse.tensor();
  const auto run = [&] {
    if (c.compressed) {
      nsa_compressed(in.q, in.k, in.v, o, forward);
      nsa_compressed_backward(in.q, in.k, in.v, o, lse, d_o, dq, dk, dv, in.options);
    } else {
      nsa_selected(in.q, in.k, in.v, in.indices, o, forward);
      nsa_selected_backward(in.q, in.k, in.v, in.indices, o, lse, d_o, dq, dk, dv, in.options);
    }
  };
  if (!launched(run)) return;
  const std::vector<double> of_o = o.values();
  const PlainGradients expected = evaluate_gradients<double>(in.plain, of_d_o, reference(in.plain).o, [](double x) { return x; });
  const PlainGradients naive = evaluate_gradients<float>(in.plain, of_d_o, of_o, rounding_to(dtype));
  const auto expect_accurate = [&](const char* name, const PlacedTensor& got, const std::vector<double>& reference,
                                   const std::vector<double>& unfused, std::span<const double> cancelled) {
    EXPECT_TRUE(accurate({.out = got.values(),
                          .reference = reference,
                          .naive = unfused,
                          .arithmetic = arithmetic_of(dtype, device),
                          .factor = 3,
                          .cancelled = cancelled,
                          .cancelled_products = c.value_dim}))
        << name;
    EXPECT_TRUE(got.gaps_intact()) << name;
  };
  expect_accurate("dq", dq, expected.dq, naive.dq, expected.dq_size);
  expect_accurate("dk", dk, expected.dk, naive.dk, expected.dk_size);
  expect_accurate("dv", dv, expected.dv, naive.dv, {});
}

std::string case_name(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  const auto& [device, dtype] = info.param;
  return tw::format("{}_{}", device.is_cuda() ? "cuda" : "cpu", name_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Ops, NsaBackward,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16, DType::f32)), case_name);

TEST_P(NsaBackward, Sizes) {
  for (const std::int64_t tokens : {1, 7, 33, 64, 131}) check({.tokens = tokens});
  check({.batch = 3, .tokens = 37, .slots = 2});
}

TEST_P(NsaBackward, Groups) {
  for (const std::int64_t group : {1, 3, 15, 17, 33, 64}) check({.tokens = 41, .group = group});
}

TEST_P(NsaBackward, HeadDims) {
  check({.tokens = 50, .head_dim = 128, .value_dim = 128});
  check({.tokens = 50, .head_dim = 40, .value_dim = 104});
}

TEST_P(NsaBackward, BlockSizes) {
  for (const int block_size : {32, 64, 192}) check({.tokens = 401, .kv_heads = 1, .group = 4, .slots = 3, .block_size = block_size});
}

TEST_P(NsaBackward, Lists) {
  check({.slots = 0});
  check({.tokens = 70, .holes = 1});
  check({.tokens = 200, .group = 2, .slots = 37, .holes = 0.9});
  check({.batch = 2, .tokens = 77, .slots = 5, .counts = true});
}

TEST_P(NsaBackward, BlocksThatManyTokensSelect) {
  // More than a part of a list, and more tiles of tokens than are listed together.
  check({.tokens = 1100, .kv_heads = 1, .group = 2, .head_dim = 16, .value_dim = 16, .slots = 20, .holes = 0});
  check({.tokens = 4200, .kv_heads = 1, .group = 1, .head_dim = 8, .value_dim = 8, .slots = 2, .block_size = 1024, .holes = 0});
}

TEST_P(NsaBackward, PackedSequences) {
  check({.tokens = 168, .packed = {0, 33, 1, 0, 128, 6, 0}});
  check({.tokens = 150, .slots = 3, .block_size = 64, .packed = {67, 83}, .counts = true});
}

TEST_P(NsaBackward, Strides) { check({.batch = 2, .tokens = 45, .strided = true}); }

TEST_P(NsaBackward, LargeScores) { check({.tokens = 150, .slots = 6, .magnitude = 3}); }

TEST_P(NsaBackward, NoTokensOrKeys) {
  check({.tokens = 0});
  check({.batch = 0});
}

TEST_P(NsaBackward, CompressedKeys) {
  for (const std::int64_t tokens : {31, 32, 33, 500}) check({.tokens = tokens, .kv_heads = 1, .compressed = true});
  check({.batch = 2, .tokens = 2200, .kv_heads = 1, .group = 2, .compressed = true});
  check({.tokens = 300, .packed = {0, 31, 64, 205, 0}, .compressed = true});
}

}  // namespace
}  // namespace tw::kernels::nsa
