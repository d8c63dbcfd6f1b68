// What attention() refuses, and what it says.

#include "tilewave/attention.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

class AttentionBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  PlacedTensor make(Shape shape, DType dtype = DType::bf16) const { return PlacedTensor(std::move(shape), dtype, device, {.offset = 4}); }
  void refused(const Tensor& q, const Tensor& k, const Tensor& v, const PlacedTensor& o, std::initializer_list<std::string_view> parts,
               const AttentionOptions& options = {}) {
    expect_error<InvalidArgument>([&] { tw::attention(q, k, v, o, options); }, parts);
    EXPECT_TRUE(o.untouched());
  }

  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ops, AttentionBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(AttentionBadInput, Shapes) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64});
  refused(make({5, 4, 64}), kv, kv, o, {"attention", "q is bf16[5, 4, 64]", "[batch, seqlen, heads, head_dim]"});
  refused(q, make({7, 2, 64}), kv, o, {"k is bf16[7, 2, 64]", "[batch, seqlen, heads, head_dim]"});
  refused(q, kv, make({1, 2, 7, 2, 64}), o, {"v is bf16[1, 2, 7, 2, 64]", "[batch, seqlen, heads, head_dim]"});
  refused(q, kv, kv, make({2, 5, 256}), {"o is bf16[2, 5, 256]", "[batch, seqlen, heads, head_dim]"});
  refused(q, kv, kv, make({2, 5, 3, 64}), {"o is bf16[2, 5, 3, 64]", "q is bf16[2, 5, 4, 64]"});
  refused(q, kv, make({2, 8, 2, 64}), o, {"v is bf16[2, 8, 2, 64]", "k is bf16[2, 7, 2, 64]"});
  refused(q, make({3, 7, 2, 64}), make({3, 7, 2, 64}), o, {"k is bf16[3, 7, 2, 64]", "batch", "2"});
  refused(q, make({2, 7, 2, 128}), make({2, 7, 2, 128}), o, {"k is bf16[2, 7, 2, 128]", "head_dim", "64"});
  refused(q, make({2, 7, 3, 64}), make({2, 7, 3, 64}), o, {"q has 4 heads and k 3", "multiple of k's"});
  refused(q, make({2, 7, 8, 64}), make({2, 7, 8, 64}), o, {"q has 4 heads and k 8", "multiple"});
  refused(q, make({2, 7, 0, 64}), make({2, 7, 0, 64}), o, {"q has 4 heads and k 0", "multiple"});
  for (const std::int64_t d : {0, 1, 36, 100, 264}) {
    const PlacedTensor t = make({1, 5, 2, d});
    refused(t, t, t, make({1, 5, 2, d}), {tw::format("q is bf16[1, 5, 2, {}]", d), "multiple of 8"});
  }
  refused(q, kv, make({2, 7, 2, 32}), o, {"o is bf16[2, 5, 4, 64]", "v's, 32"});
}

TEST_P(AttentionBadInput, LastDimensionNotContiguous) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64});
  const PlacedTensor stepped({2, 7, 2, 64}, DType::bf16, device, {.step = 2});
  refused(q, stepped, kv, o, {"k is bf16[2, 7, 2, 64]", "last dimension must be contiguous"});
  refused(q, kv, stepped, o, {"v is bf16[2, 7, 2, 64]", "last dimension must be contiguous"});
}

TEST_P(AttentionBadInput, Dtypes) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64});
  refused(make({2, 5, 4, 64}, DType::f16), kv, kv, o, {"k is bf16[2, 7, 2, 64]", "f16"});
  refused(q, make({2, 7, 2, 64}, DType::f16), kv, o, {"k is f16[2, 7, 2, 64]", "bf16"});
  refused(q, kv, make({2, 7, 2, 64}, DType::f32), o, {"v is f32[2, 7, 2, 64]", "bf16"});
  refused(q, kv, kv, make({2, 5, 4, 64}, DType::f32), {"o is f32[2, 5, 4, 64]", "bf16"});
  const Tensor integers = Tensor::zeros({2, 5, 4, 64}, DType::i8, Stream::standard(device));
  refused(integers, kv, kv, o, {"q is i8[2, 5, 4, 64]", "bf16 and f16"});
}

TEST_P(AttentionBadInput, Dropout) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64});
  for (const float p : {-0.1f, 1.0f, std::numeric_limits<float>::quiet_NaN()})
    refused(q, kv, kv, o, {"attention: dropout is", "[0, 1)"}, {.dropout = p});
  const Tensor state = Tensor::zeros({2}, DType::i32, Stream::standard(device));
  refused(q, kv, kv, o, {"dropout_state is i32[2]", "i64"}, {.dropout = 0.5f, .dropout_state = &state});
  expect_error<InvalidArgument>([&] { attention_decode(q, kv, kv, o, {}, {.dropout = 0.5f}); },
                                {"attention_decode: dropout is 0.5", "not supported with a cache"});
  EXPECT_TRUE(o.untouched());
}

TEST_P(AttentionBadInput, Lse) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64});
  for (const Shape& shape : {Shape{2, 5, 4}, Shape{2, 4, 6}, Shape{8, 5}, Shape{2, 4, 5, 1}, Shape{0}}) {
    const PlacedTensor lse = make(shape, DType::f32);
    refused(q, kv, kv, o, {"lse is f32[", "f32[2, 4, 5]"}, {.lse = &lse.tensor()});
    EXPECT_TRUE(lse.untouched());
  }
  const PlacedTensor wrong = make({2, 4, 5}, DType::bf16);
  refused(q, kv, kv, o, {"lse is bf16[2, 4, 5]", "f32"}, {.lse = &wrong.tensor()});
  const PlacedTensor apart({2, 4, 5}, DType::f32, device, {.gap = 3});
  refused(q, kv, kv, o, {"lse is f32[2, 4, 5]", "contiguous"}, {.lse = &apart.tensor()});
}

TEST_P(AttentionBadInput, OutputWhoseElementsAreNotDistinct) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64});
  for (int dim = 0; dim < 4; ++dim) {
    std::vector<std::int64_t> strides = o.tensor().strides();
    strides[static_cast<std::size_t>(dim)] = 0;
    const Tensor folded = Tensor::borrow(o.tensor().data(), {2, 5, 4, 64}, DType::bf16, device, strides);
    expect_error<InvalidArgument>([&] { tw::attention(q, kv, kv, folded); },
                                  {"o is bf16[2, 5, 4, 64]", tw::format("stride 0 in dimension {}", dim), "distinct"});
  }
  EXPECT_TRUE(o.untouched());
}

TEST_P(AttentionBadInput, OutputThatIsAnOperand) {
  const PlacedTensor t = make({2, 5, 4, 64}), o = make({2, 5, 4, 64});
  refused(o, t, t, o, {"o is", "shares memory with q"});
  refused(t, o, t, o, {"o is", "shares memory with k"});
  refused(t, t, o, o, {"o is", "shares memory with v"});
}

TEST_P(AttentionBadInput, Numbers) {
  const PlacedTensor q = make({2, 5, 4, 64}), kv = make({2, 7, 2, 64}), o = make({2, 5, 4, 64});
  refused(q, kv, kv, o, {"scale is -1", "positive"}, {.scale = -1});
  refused(q, kv, kv, o, {"scale is inf", "finite"}, {.scale = std::numeric_limits<float>::infinity()});
  refused(q, kv, kv, o, {"scale is nan"}, {.scale = std::numeric_limits<float>::quiet_NaN()});
  refused(q, kv, kv, o, {"causal_offset is 2147483647", "2^29"}, {.causal = true, .causal_offset = std::numeric_limits<int>::max()});
  refused(q, kv, kv, o, {"causal_offset is -2147483648", "2^29"}, {.causal = true, .causal_offset = std::numeric_limits<int>::min()});
  refused(q, kv, kv, o, {"attention_chunk is -1", "0 for none"}, {.attention_chunk = -1});
  refused(q, kv, kv, o, {"attention_chunk is 536870913", "2^29"}, {.attention_chunk = (1 << 29) + 1});
  refused(q, kv, kv, o, {"sm_margin is -1", "0 or more"}, {.sm_margin = -1});
  if (device.is_cuda()) refused(q, kv, kv, o, {"sm_margin is 100000", "less than the", "SMs"}, {.sm_margin = 100000});
}

TEST_P(AttentionBadInput, QueryValues) {
  const PlacedTensor q = make({2, 5, 4, 64}), k = make({2, 7, 2, 64}), v = make({2, 7, 2, 128}), o = make({2, 5, 4, 128});
  for (const Shape& shape : {Shape{2, 5, 4, 64}, Shape{2, 6, 4, 128}, Shape{1, 5, 4, 128}, Shape{2, 5, 2, 128}}) {
    const PlacedTensor qv = make(shape);
    refused(q, k, v, o, {"qv is bf16[", "o's shape, [2, 5, 4, 128]"}, {.qv = &qv.tensor()});
  }
  const PlacedTensor flat = make({5, 4, 128});
  refused(q, k, v, o, {"qv is bf16[5, 4, 128]", "[batch, seqlen, heads, head_dim]"}, {.qv = &flat.tensor()});
  const PlacedTensor f16 = make({2, 5, 4, 128}, DType::f16);
  refused(q, k, v, o, {"qv is f16[2, 5, 4, 128]", "bf16"}, {.qv = &f16.tensor()});
  const PlacedTensor apart({2, 5, 4, 128}, DType::bf16, device, {.order = {0, 1, 3, 2}});
  refused(q, k, v, o, {"qv is", "last dimension must be contiguous"}, {.qv = &apart.tensor()});
  refused(q, k, v, o, {"o is", "shares memory with qv"}, {.qv = &o.tensor()});
  const PlacedTensor wide_q = make({2, 5, 4, 136}), wide_k = make({2, 7, 2, 136});
  refused(wide_q, wide_k, v, o, {"q is bf16[2, 5, 4, 136]", "limited to 128"}, {.qv = &q.tensor()});
  const PlacedTensor qv = make({2, 5, 4, 128}), mask = make({1, 1, 1, 1}, DType::boolean);
  const AttentionBlocks blocks{.mask = &mask.tensor()};
  refused(q, k, v, o, {"qv is given", "blocks"}, {.blocks = &blocks, .qv = &qv.tensor()});
}

TEST_P(AttentionBadInput, TooLarge) {
  // A row of memory stands for all: the sizes are refused before anything is read.
  const PlacedTensor row = make({128});
  const auto repeated = [&](Shape shape) {
    return Tensor::borrow(row.tensor().data<bf16>(), std::move(shape), DType::bf16, device, {0, 0, 0, 1});
  };
  const auto output = [&](Shape shape) { return Tensor::borrow(row.tensor().data<bf16>() + 64, std::move(shape), DType::bf16, device); };
  constexpr std::int64_t kHuge = std::int64_t{1} << 31;
  const Tensor k = repeated({1, 1, 1, 64});
  const Tensor q = repeated({1, kHuge, 1, 64});
  expect_error<InvalidArgument>([&] { tw::attention(q, k, k, output({1, kHuge, 1, 64})); }, {"q is bf16[1, 2147483648, 1, 64]", "limited"});
  const Tensor long_k = repeated({1, kHuge, 1, 64});
  expect_error<InvalidArgument>(
      [&] {
        tw::attention(k, long_k, long_k, output({1, 1, 1, 64}));
      },
      {"k is bf16[1, 2147483648, 1, 64]", "limited"});
  // Every extent would do, but there are more heads in all the batches, or more tiles, than can be counted.
  constexpr std::int64_t kLarge = std::int64_t{1} << 20;
  const Tensor many_k = repeated({kLarge, 1, kLarge, 64});
  expect_error<InvalidArgument>(
      [&] {
        tw::attention(repeated({kLarge, 1, kLarge, 64}), many_k, many_k, output({kLarge, 1, kLarge, 64}));
      },
      {"attention", "q is bf16[1048576, 1, 1048576, 64]", "tiles"});
  EXPECT_TRUE(row.untouched());
}

TEST(AttentionBadMemory, OperandsOnAnotherDevice) {
  // Only looked at: a tensor may say that it lies on a GPU without there being one.
  alignas(16) u16 values[64 * 8] = {};
  const PlacedTensor host({1, 4, 2, 64}, DType::bf16, Device::cpu()), o({1, 4, 2, 64}, DType::bf16, Device::cpu());
  const Tensor gpu = Tensor::borrow(values, {1, 4, 2, 64}, DType::bf16, Device::cuda());
  expect_error<InvalidArgument>([&] { tw::attention(gpu, host, host, o); }, {"q is bf16[1, 4, 2, 64] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { tw::attention(host, gpu, host, o); }, {"k is bf16[1, 4, 2, 64] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { tw::attention(host, host, gpu, o); }, {"v is bf16[1, 4, 2, 64] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { tw::attention(host, host, host, gpu); }, {"q is bf16[1, 4, 2, 64] on cpu", "cuda"});
  const Tensor lse = Tensor::borrow(values, {1, 2, 4}, DType::f32, Device::cuda());
  expect_error<InvalidArgument>([&] { tw::attention(host, host, host, o, {.lse = &lse}); }, {"lse is f32[1, 2, 4] on cuda", "cpu"});
  EXPECT_TRUE(o.untouched());
}

}  // namespace
}  // namespace tw::kernels::attention
