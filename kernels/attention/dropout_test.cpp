// Dropout of attention's weights: the random numbers, the mask, and what the options mean.

#include "tilewave/tile/dropout.tile.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

std::array<u32, 4> words(const PhiloxWords& drawn) { return {drawn.word[0], drawn.word[1], drawn.word[2], drawn.word[3]}; }

TEST(Philox, GivesThePublishedNumbers) {
  // kat_vectors of Random123, philox4x32 with 10 rounds.
  EXPECT_EQ(words(philox(0, 0, {{0, 0, 0, 0}})), (std::array<u32, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr u32 kOnes = 0xffffffff;
  EXPECT_EQ(words(philox(kOnes, kOnes, {{kOnes, kOnes, kOnes, kOnes}})),
            (std::array<u32, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words(philox(0xa4093822, 0x299f31d0, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}})),
            (std::array<u32, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, FlagsAreWhatDroppedSays) {
  for (const int kept : {1, 2, 127, 128, 129, 200, 255}) {
    const Dropout dropout{1, 2, 3, 4, kept};
    for (u32 byte = 0; byte < 256; ++byte) {
      const u32 flags = dropout.flags(byte * 0x01010101u);
      for (int n = 0; n < 4; ++n) ASSERT_EQ(flags >> (8 * n + 7) & 1, static_cast<int>(byte) >= kept ? 1u : 0u) << byte << " of " << kept;
    }
  }
}

class DropoutMaskTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::vector<u8> mask(const Shape& shape, const AttentionOptions& options) const {
    const Tensor mask = Tensor::empty(shape, DType::boolean, Stream::standard(device));
    attention_dropout_mask(mask, options);
    const Tensor host = mask.to(Device::cpu());
    const auto* const values = static_cast<const u8*>(host.data());
    return {values, values + host.numel()};
  }
  const Device device = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Devices, DropoutMaskTest, testing::ValuesIn(kDevices), device_name);

TEST_P(DropoutMaskTest, IsThatOfEachWeight) {
  const std::vector<u8> kept = mask({2, 3, 37, 300}, {.dropout = 0.3f, .dropout_seed = -5, .dropout_offset = std::int64_t{7} << 33 | 3});
  const DropoutParams<cpu::Target> params{nullptr, -5, std::int64_t{7} << 33 | 3, 179, 0};
  std::size_t n = 0;
  for (int head = 0; head < 6; ++head) {
    const Dropout dropout = Dropout::of(params, head);
    for (int i = 0; i < 37; ++i)
      for (int j = 0; j < 300; ++j, ++n) ASSERT_EQ(kept[n], dropout.dropped(i, j) ? 0 : 1) << n;
  }
}

TEST_P(DropoutMaskTest, KeepsAsManyAsAsked) {
  const Shape shape{1, 2, 512, 512};
  const double count = 2 * 512 * 512;
  for (const auto& [p, kept] :
       {std::pair{0.0f, 1.0}, {1e-6f, 255. / 256}, {0.1f, 230. / 256}, {0.5f, 0.5}, {0.9f, 26. / 256}, {0.9999f, 1. / 256}}) {
    double sum = 0;
    for (const u8 x : mask(shape, {.dropout = p, .dropout_seed = 11})) sum += x;
    // Five standard deviations of a binomial distribution.
    EXPECT_LE(std::abs(sum - count * kept), 5 * std::sqrt(count * kept * (1 - kept))) << p;
  }
}

TEST_P(DropoutMaskTest, DependsOnSeedOffsetAndHead) {
  const Shape shape{2, 2, 64, 64};
  const AttentionOptions options{.dropout = 0.5f, .dropout_seed = 1, .dropout_offset = 2};
  const std::vector<u8> first = mask(shape, options);
  EXPECT_EQ(mask(shape, options), first);
  // Half of all weights agree by chance; of 16384 that is 8192 with a standard deviation of 64.
  const auto expect_independent = [](const std::vector<u8>& a, const std::vector<u8>& b, std::size_t from) {
    int equal = 0;
    for (std::size_t i = 0; i + from < a.size(); ++i) equal += a[i] == b[i + from];
    const double count = static_cast<double>(a.size() - from);
    EXPECT_LE(std::abs(equal - count / 2), 2.5 * std::sqrt(count));
  };
  AttentionOptions other = options;
  other.dropout_seed = 2;
  expect_independent(first, mask(shape, other), 0);
  other = options;
  other.dropout_seed = 1 | std::int64_t{1} << 40;
  expect_independent(first, mask(shape, other), 0);
  other = options;
  other.dropout_offset = 3;
  expect_independent(first, mask(shape, other), 0);
  other.dropout_offset = 2 | std::int64_t{1} << 40;
  expect_independent(first, mask(shape, other), 0);
  for (const std::size_t heads : {1u, 2u, 3u}) expect_independent(first, first, heads * 64 * 64);
  for (const std::size_t keys : {1u, 2u, 8u, 16u, 64u, 512u}) expect_independent(first, first, keys);  // neighbours in a row, other rows
}

TEST_P(DropoutMaskTest, ReadsTheStateWhenItRuns) {
  const Shape shape{1, 1, 64, 64};
  const Tensor host = Tensor::empty({2}, DType::i64, Stream::standard(Device::cpu()));
  host.data<std::int64_t>()[0] = 77, host.data<std::int64_t>()[1] = 9;
  const Tensor state = host.to(device);
  EXPECT_EQ(mask(shape, {.dropout = 0.5f, .dropout_state = &state}),
            mask(shape, {.dropout = 0.5f, .dropout_seed = 77, .dropout_offset = 9}));
}

TEST_P(DropoutMaskTest, RefusesBadInput) {
  const Stream stream = Stream::standard(device);
  const Tensor good = Tensor::empty({1, 1, 4, 4}, DType::boolean, stream);
  const auto refused = [](const Tensor& mask, const AttentionOptions& options, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { attention_dropout_mask(mask, options); }, parts);
  };
  for (const float p : {-0.1f, 1.0f, 2.0f, std::nanf("")}) refused(good, {.dropout = p}, {"attention_dropout_mask: dropout is", "[0, 1)"});
  const Tensor wrong_shape = Tensor::empty({3}, DType::i64, stream), wrong_type = Tensor::empty({2}, DType::i32, stream);
  refused(good, {.dropout = 0.5f, .dropout_state = &wrong_shape}, {"dropout_state is i64[3]", "i64[2]"});
  refused(good, {.dropout = 0.5f, .dropout_state = &wrong_type}, {"dropout_state is i32[2]", "i64"});
  refused(Tensor::empty({1, 4, 4}, DType::boolean, stream), {}, {"mask is bool[1, 4, 4]", "batch, heads"});
  refused(Tensor::empty({1, 1, 4, 4}, DType::f32, stream), {}, {"mask is f32[1, 1, 4, 4]", "bool"});
  refused(good.transpose(2, 3), {}, {"mask is bool[1, 1, 4, 4]", "contiguous"});
  if (!device.is_cuda()) return;
  const Tensor elsewhere = Tensor::empty({2}, DType::i64, Stream::standard(Device::cpu()));
  refused(good, {.dropout = 0.5f, .dropout_state = &elsewhere}, {"dropout_state is i64[2]", "cpu"});
}

}  // namespace
}  // namespace tw::kernels::attention
