// mla_append(): what it writes, where, and what it refuses.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "runtime/format.hpp"
#include "tests/bad_input.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/mla.hpp"

namespace tw::kernels::mla {
namespace {

using namespace tw::test;

struct AppendCase {
  std::vector<std::int64_t> lengths = {5, 0};
  std::int64_t seqlen_new = 1, capacity = 40, page_size = 0;
  bool rotary = true, f32_table = true, with_lengths = true, strided = false;
  RopePairing pairing = RopePairing::interleaved;
};

class MlaAppend : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(const AppendCase& c);

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

void MlaAppend::check(const AppendCase& c) {
  SCOPED_TRACE(tw::format("lengths {} new {} capacity {} page {} rotary {} f32 table {} strided {} pairing {}", tw::join(c.lengths, ","),
                          c.seqlen_new, c.capacity, c.page_size, c.rotary, c.f32_table, c.strided, static_cast<int>(c.pairing)));
  const auto batch = std::ssize(c.lengths);
  const std::int64_t pages = c.page_size > 0 ? (c.capacity + c.page_size - 1) / c.page_size : 1;
  const std::int64_t rows = c.page_size > 0 ? c.page_size : c.capacity, entries = c.page_size > 0 ? batch * pages + 2 : batch;
  const Placement gaps = c.strided ? Placement{.offset = 3, .gap = 5} : Placement{};
  const DType table_type = c.f32_table ? DType::f32 : dtype;
  PlacedTensor latent({batch, c.seqlen_new, 512}, dtype, device, gaps), rotary({batch, c.seqlen_new, 64}, dtype, device, gaps),
      cache({entries, rows, 576}, dtype, device, gaps), cos({c.capacity + 4, 32}, table_type, device, gaps),
      sin({c.capacity + 4, 32}, table_type, device, gaps), seqlens({batch}, DType::i32, device), table({batch, pages}, DType::i32, device);
  const std::vector<float> latents = latent.fill_random(random), rotaries = rotary.fill_random(random), cosines = cos.fill_random(random),
                           sines = sin.fill_random(random), before = cache.fill_random(random);
  seqlens.fill(std::vector<float>(c.lengths.begin(), c.lengths.end()));
  std::vector<float> numbers;
  for (std::int64_t n = 0; n < batch * pages; ++n) numbers.push_back(static_cast<float>(entries - 1 - n));
  table.fill(numbers);
  MlaAppendOptions options{.rotary_pairing = c.pairing, .check_contents = true};
  if (c.with_lengths) options.seqlens = &seqlens.tensor();
  if (c.page_size > 0) options.block_table = &table.tensor();
  if (c.rotary) {
    options.rotary_cos = &cos.tensor();
    options.rotary_sin = &sin.tensor();
  }
  if (!launched([&] { mla_append(latent, rotary, cache, options); })) return;

  std::vector<double> expected(before.begin(), before.end());
  std::vector<bool> rotated(expected.size());
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < c.seqlen_new; ++i) {
      const std::int64_t token = (c.with_lengths ? c.lengths[at(b)] : 0) + i, in = b * c.seqlen_new + i;
      const std::int64_t entry = c.page_size > 0 ? static_cast<std::int64_t>(numbers[at(b * pages + token / rows)]) : b;
      double* const row = expected.data() + (entry * rows + token % rows) * 576;
      for (std::int64_t col = 0; col < 512; ++col) row[col] = static_cast<double>(latents[at(in * 512 + col)]);
      for (std::int64_t k = 0; k < 32; ++k) {
        const bool interleaved = c.pairing == RopePairing::interleaved;
        const std::int64_t first = interleaved ? 2 * k : k, second = interleaved ? 2 * k + 1 : k + 32;
        const double x = rotaries[at(in * 64 + first)], y = rotaries[at(in * 64 + second)];
        const double turn = c.rotary ? cosines[at(token * 32 + k)] : 1, side = c.rotary ? sines[at(token * 32 + k)] : 0;
        row[512 + first] = x * turn - y * side;
        row[512 + second] = y * turn + x * side;
        const auto offset = static_cast<std::size_t>(row - expected.data());
        rotated[offset + at(512 + first)] = rotated[offset + at(512 + second)] = c.rotary;
      }
    }
  }
  const std::vector<double> got = cache.values();
  // One rounding of a sum of two products in f32.
  const double unit = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  for (std::size_t n = 0; n < got.size(); ++n)
    ASSERT_NEAR(got[n], expected[n], rotated[n] ? unit * std::abs(expected[n]) + 1e-5 : 0.0) << "element " << n;
  EXPECT_TRUE(cache.gaps_intact());
}

std::string append_case_name(const testing::TestParamInfo<std::tuple<Device, DType>>& info) {
  const auto& [device, dtype] = info.param;
  return tw::format("{}_{}", device.is_cuda() ? "cuda" : "cpu", name_of(dtype));
}
INSTANTIATE_TEST_SUITE_P(Ops, MlaAppend, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16)),
                         append_case_name);

TEST_P(MlaAppend, Tokens) {
  check({});
  check({.lengths = {39}});
  check({.lengths = {3, 17, 0}, .seqlen_new = 9});
  check({.seqlen_new = 4, .with_lengths = false});
  check({.seqlen_new = 0});
}

TEST_P(MlaAppend, Pages) {
  for (const std::int64_t page_size : {1, 7, 16, 64}) check({.lengths = {14, 0, 30}, .seqlen_new = 5, .page_size = page_size});
}

TEST_P(MlaAppend, Rotations) {
  check({.rotary = false});
  check({.f32_table = false});
  check({.pairing = RopePairing::half_split});
}

TEST_P(MlaAppend, Strides) {
  check({.seqlen_new = 2, .strided = true});
  check({.seqlen_new = 3, .page_size = 5, .strided = true, .pairing = RopePairing::half_split});
}

/// Codes and scales are cast_fp8()'s, and what decode reads of them is near what was appended.
TEST_P(MlaAppend, CachesOfEightBits) {
  if (dtype != DType::bf16) GTEST_SKIP() << "skipped: such a cache is for bf16";
  constexpr std::int64_t kBatch = 2, kNew = 3, kPages = 5, kPage = 16;
  PlacedTensor latent({kBatch, kNew, 512}, dtype, device), rotary({kBatch, kNew, 64}, dtype, device), cos({40, 32}, DType::f32, device),
      sin({40, 32}, DType::f32, device), seqlens({kBatch}, DType::i32, device), table({kBatch, 2}, DType::i32, device);
  std::vector<float> latents = latent.fill_random(random);
  std::fill_n(latents.begin(), 128, 0.0f);  // a group of zeros: its scale is that of 1e-4
  latent.fill(latents);
  const std::vector<float> rotaries = rotary.fill_random(random), cosines = cos.fill_random(random), sines = sin.fill_random(random);
  const std::vector<float> lengths{15, 2}, pages{3, 1, 0, 4};
  seqlens.fill(lengths);
  table.fill(pages);
  const Tensor cache = Tensor::zeros({kPages, kPage, kMlaFp8Bytes}, DType::u8, Stream::standard(device));
  if (!launched([&] {
        mla_append(
            latent, rotary, cache,
            {.seqlens = &seqlens.tensor(), .block_table = &table.tensor(), .rotary_cos = &cos.tensor(), .rotary_sin = &sin.tensor()});
      }))
    return;
  const Tensor host = cache.to(Device::cpu());
  std::int64_t written = 0;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t i = 0; i < kNew; ++i) {
      const auto token = static_cast<std::int64_t>(lengths[static_cast<std::size_t>(b)]) + i;
      const auto page = static_cast<std::int64_t>(pages[static_cast<std::size_t>(b * 2 + token / kPage)]);
      const std::uint8_t* const row = host.data<std::uint8_t>() + (page * kPage + token % kPage) * kMlaFp8Bytes;
      const float* const x = latents.data() + (b * kNew + i) * 512;
      for (std::int64_t group = 0; group < 4; ++group) {
        float largest = 1e-4f, scale = 0;
        for (std::int64_t col = 0; col < 128; ++col) largest = std::max(largest, std::abs(x[group * 128 + col]));
        std::memcpy(&scale, row + 512 + group * 4, 4);
        EXPECT_EQ(scale, largest / 448);
        for (std::int64_t col = group * 128; col < (group + 1) * 128; ++col) {
          const fp8_e4m3 code(x[col] / scale);
          EXPECT_EQ(std::memcmp(row + col, &code, 1), 0) << col;
        }
      }
      for (std::int64_t k = 0; k < 32; ++k) {
        const auto in = static_cast<std::size_t>((b * kNew + i) * 64 + 2 * k), at = static_cast<std::size_t>(token * 32 + k);
        const float expected[] = {rotaries[in] * cosines[at] - rotaries[in + 1] * sines[at],
                                  rotaries[in + 1] * cosines[at] + rotaries[in] * sines[at]};
        for (std::int64_t n = 0; n < 2; ++n) {
          bf16 got;
          std::memcpy(&got, row + 528 + (2 * k + n) * 2, 2);
          EXPECT_NEAR(static_cast<float>(got), expected[n], 0x1p-8f * std::abs(expected[n]) + 1e-5f);
        }
      }
      ++written;
    }
  }
  // Other tokens are as they were.
  std::int64_t touched = 0;
  for (std::int64_t n = 0; n < kPages * kPage; ++n) {
    const std::uint8_t* const row = host.data<std::uint8_t>() + n * kMlaFp8Bytes;
    touched += std::any_of(row, row + kMlaFp8Bytes, [](std::uint8_t byte) { return byte != 0; });
  }
  EXPECT_EQ(touched, written);
}

class MlaAppendBadInput : public BadInput {
 protected:
  void refused(const Tensor& of_latent, const Tensor& of_rotary, const PlacedTensor& of_cache,
               std::initializer_list<std::string_view> parts, MlaAppendOptions options = {}) {
    options.check_contents = true;
    expect_error<InvalidArgument>([&] { tw::mla_append(of_latent, of_rotary, of_cache, options); }, parts);
    EXPECT_TRUE(of_cache.untouched());
  }
  void refused(std::initializer_list<std::string_view> parts, const MlaAppendOptions& options) {
    refused(latent, rotary, cache, parts, options);
  }

  const PlacedTensor latent = make({2, 3, 512}), rotary = make({2, 3, 64}), cache = make({2, 16, 576});
  const PlacedTensor table = integers({0, 1, 1, 0}, {2, 2}), cos = make({20, 32}, DType::f32);
};

INSTANTIATE_TEST_SUITE_P(Ops, MlaAppendBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(MlaAppendBadInput, Tensors) {
  refused(make({2, 3, 576}), rotary, cache, {"mla_append", "latent is bf16[2, 3, 576]", "[batch, seqlen_new, 512]"});
  refused(latent, make({2, 2, 64}), cache, {"rotary is bf16[2, 2, 64]", "bf16[2, 3, 64]"});
  refused(latent, rotary, make({2, 16, 512}), {"kv_cache is bf16[2, 16, 512]", "[batch, capacity, 576]"});
  refused(latent, rotary, make({3, 16, 576}), {"kv_cache is bf16[3, 16, 576]", "[2, capacity, 576]"});
  refused(make({2, 3, 512}, DType::f16), rotary, cache, {"latent is f16[2, 3, 512]", "bf16"});
  refused(latent, rotary, make({2, 16, 576}, DType::f32), {"kv_cache is f32[2, 16, 576]", "bf16, f16"});
  refused(latent, rotary, make({2, 16, 576}, DType::fp8_e4m3), {"kv_cache is fp8_e4m3[2, 16, 576]", "[batch, capacity, 656]"});
  expect_error<InvalidArgument>([&] { tw::mla_append(cache.tensor().slice(1, 0, 3).slice(2, 0, 512), rotary, cache); },
                                {"kv_cache is", "shares memory with latent"});
}

TEST_P(MlaAppendBadInput, Options) {
  refused({"rotary_cos is given without rotary_sin"}, {.rotary_cos = &cos.tensor()});
  refused({"rotary_sin is f32[19, 32]", "rotary_cos's shape"},
          {.rotary_cos = &cos.tensor(), .rotary_sin = &make({19, 32}, DType::f32).tensor()});
  refused({"rotary_cos is f32[20, 16]", "[positions, 32]"},
          {.rotary_cos = &make({20, 16}, DType::f32).tensor(), .rotary_sin = &make({20, 16}, DType::f32).tensor()});
  refused({"rotary_cos is f16[20, 32]", "bf16, or f32"},
          {.rotary_cos = &make({20, 32}, DType::f16).tensor(), .rotary_sin = &make({20, 32}, DType::f16).tensor()});
  refused({"seqlens[1] is 14", "3 new tokens", "0 to 13"}, {.seqlens = &integers({5, 14}, {2}).tensor()});
  refused({"seqlens[0] is -1", "0 to 13"}, {.seqlens = &integers({-1, 1}, {2}).tensor()});
  refused({"block_table[1, 1] is 2", "0 to 1"},
          {.seqlens = &integers({0, 14}, {2}).tensor(), .block_table = &integers({0, 1, 1, 2}, {2, 2}).tensor()});
}

}  // namespace
}  // namespace tw::kernels::mla
