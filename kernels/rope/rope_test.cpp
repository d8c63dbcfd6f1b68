// rope_table() and rope() against loops in double, on the CPU and, where there is one, on a GPU; their bad inputs.

#include "tilewave/rope.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/rope/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::rope {
namespace {

using namespace tw::test;

Tensor on(Device device, std::vector<std::int32_t> values, Shape shape) {
  return Tensor::from(std::span<const std::int32_t>(values), std::move(shape)).to(device);
}

struct Case {
  std::int64_t batch = 2, seqlen = 3, heads = 4, dim = 64, half = 32;
  bool interleaved = false, batched = true, in_place = false;
  std::int64_t table = 40, offset = 0;
  DType table_type = DType::f32;
  std::vector<std::int32_t> offsets = {}, positions = {};  ///< [batch]; [batch, seqlen] or [seqlen]
  Placement x_place = {}, y_place = {}, table_place = {};
};

class Rope : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void check(Case c) {
    if (!c.batched) c.batch = 1;
    SCOPED_TRACE(tw::format("[{}, {}, {}, {}] half {} interleaved {} in place {} table {} {} offset {}", c.batch, c.seqlen, c.heads, c.dim,
                            c.half, c.interleaved, c.in_place, c.table, name_of(c.table_type), c.offset));
    const Shape shape = c.batched ? Shape{c.batch, c.seqlen, c.heads, c.dim} : Shape{c.seqlen, c.heads, c.dim};
    PlacedTensor x(shape, dtype, device, c.x_place), own_y(shape, dtype, device, c.y_place);
    PlacedTensor cos({c.table, c.half}, c.table_type, device, c.table_place), sin({c.table, c.half}, c.table_type, device, c.table_place);
    const std::vector<float> values = x.fill_random(random);
    std::vector<float> cosines, sines;
    for (std::int64_t n = 0; n < c.table; ++n) {
      for (std::int64_t k = 0; k < c.half; ++k) {
        const auto a = angle(n, k, c.half, 10000);
        cosines.push_back(round_to(c.table_type, static_cast<float>(std::cos(a))));
        sines.push_back(round_to(c.table_type, static_cast<float>(std::sin(a))));
      }
    }
    cos.fill(cosines);
    sin.fill(sines);
    std::optional<Tensor> offsets, positions;
    if (!c.offsets.empty()) offsets = on(device, c.offsets, {c.batch});
    const bool per_batch = static_cast<std::int64_t>(c.positions.size()) == c.batch * c.seqlen;
    if (!c.positions.empty()) positions = on(device, c.positions, per_batch ? Shape{c.batch, c.seqlen} : Shape{c.seqlen});
    std::vector<std::int64_t> rows;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t s = 0; s < c.seqlen; ++s) {
        std::int64_t position = c.offset + s;
        if (offsets) position = c.offsets[static_cast<std::size_t>(b)] + s;
        if (positions) position = c.positions[static_cast<std::size_t>(per_batch ? b * c.seqlen + s : s)];
        rows.push_back(std::clamp<std::int64_t>(position, 0, c.table - 1));
      }
    }
    PlacedTensor& y = c.in_place ? x : own_y;
    tw::rope(x, cos, sin, y,
             {.pairing = c.interleaved ? RopePairing::interleaved : RopePairing::half_split,
              .offset = c.offset,
              .offsets = offsets ? &*offsets : nullptr,
              .positions = positions ? &*positions : nullptr});
    const PlainCall call{values, rows, cosines, sines, c.heads, c.dim, c.half, c.interleaved};
    std::vector<double> naive;
    for (const float v : plain<float>(call)) naive.push_back(round_to(dtype, v));
    EXPECT_TRUE(accurate({y.values(), plain<double>(call), naive, arithmetic_of(dtype, Device::cpu())}));
    EXPECT_TRUE(y.gaps_intact());
  }
  void check_both(Case c) {
    check(c);
    c.interleaved = true;
    check(c);
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Rope, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(Rope, AnyShape) {
  for (const std::int64_t heads : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 28, 33}) check_both({.heads = heads});
  for (const std::int64_t half : {1, 2, 7, 16, 31, 32, 33, 63, 64, 65, 128, 129, 200})
    for (const std::int64_t rest : {0, 1, 32, 65}) check_both({.heads = 3, .dim = 2 * half + rest, .half = half});
  for (const std::int64_t seqlen : {0, 1, 17}) check_both({.seqlen = seqlen});
  for (const std::int64_t batch : {0, 1, 5}) check_both({.batch = batch});
  check_both({.heads = 0});
  check_both({.batched = false});
}

TEST_P(Rope, AnyStridesAndInPlace) {
  check_both({.x_place = {.offset = 1, .gap = 3}, .y_place = {.offset = 5, .gap = 1}, .table_place = {.offset = 3, .gap = 1}});
  check_both({.x_place = {.offset = 8, .gap = 8, .align = 8}, .y_place = {.order = {0, 2, 1, 3}}});  // heads before rows
  check_both({.x_place = {.order = {3, 1, 0, 2}}, .y_place = {.step = 2}, .table_place = {.order = {1, 0}}});
  check_both({.x_place = {.gap = 2, .reversed = true}, .table_place = {.step = 2, .gap = 5}});
  check_both({.in_place = true});
  check_both({.dim = 100, .in_place = true, .x_place = {.offset = 1, .gap = 3}});
}

TEST_P(Rope, TableOfTheModelsType) { check_both({.table_type = dtype}); }

TEST_P(Rope, Positions) {
  check_both({.offset = 37});
  check_both({.offsets = {5, 37}});
  check_both({.positions = {9, 8, 7, 1, 1, 39}});
  check_both({.positions = {30, 2, 30}});
  // What is beyond the table is clamped.
  check_both({.offsets = {39, -2}});
  check_both({.positions = {-1, 40, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min(), 0, 39}});
}

TEST_P(Rope, TableHoldsTheAnglesAtAnyPosition) {
  for (const double theta : {10000.0, 500000.0}) {
    for (const std::int64_t half : {1, 16, 64, 65}) {
      const std::vector<std::int32_t> positions{0, 1, 1499, 8191, 999'983, 1'000'000, 2'147'483'647, -5, 77};
      const auto rows = static_cast<std::int64_t>(positions.size());
      PlacedTensor cos({rows, half}, dtype, device, {.gap = 1}), sin({rows, half}, dtype, device, {.order = {1, 0}});
      const Tensor given = on(device, positions, {rows});
      const auto expect = [&](const PlacedTensor& t, long double (*f)(long double), std::int64_t offset, bool explicit_positions) {
        const std::vector<double> values = t.values();
        for (std::int64_t n = 0; n < rows; ++n) {
          for (std::int64_t k = 0; k < half; ++k) {
            const std::int64_t position = explicit_positions ? positions[static_cast<std::size_t>(n)] : offset + n;
            const double exact = static_cast<double>(f(angle(position, k, half, theta)));
            const bool far = std::abs(position) > 1'000'100;
            const double unit = dtype == DType::f32 ? (far ? 1e-6 : 3e-7) : dtype == DType::f16 ? 5e-4 : 4e-3;
            ASSERT_NEAR(values[static_cast<std::size_t>(n * half + k)], exact, unit) << "position " << position << " frequency " << k;
          }
        }
        EXPECT_TRUE(t.gaps_intact());
      };
      const auto cosine = [](long double a) { return std::cos(a); };
      const auto sine = [](long double a) { return std::sin(a); };
      tw::rope_table(cos, sin, {.theta = theta, .positions = &given});
      expect(cos, cosine, 0, true);
      expect(sin, sine, 0, true);
      for (const std::int64_t offset : {0, 1'000'000}) {
        tw::rope_table(cos, sin, {.theta = theta, .offset = offset});
        expect(cos, cosine, offset, false);
        expect(sin, sine, offset, false);
      }
    }
  }
  tw::rope_table(Tensor::empty({0, 4}, dtype, Stream::standard(device)), Tensor::empty({0, 4}, dtype, Stream::standard(device)));
}

class RopeArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::bf16) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, RopeArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(RopeArguments, AreRefusedByName) {
  const Tensor x = tensor({2, 3, 4, 8}), y = tensor({2, 3, 4, 8}), cos = tensor({10, 4}), sin = tensor({10, 4});
  const auto refused = [&](const Tensor& from, const Tensor& c, const Tensor& s, const Tensor& to,
                           std::initializer_list<std::string_view> parts,
                           RopeOptions options = {}) { expect_error<InvalidArgument>([&] { tw::rope(from, c, s, to, options); }, parts); };
  refused(tensor({2, 3, 4, 8}, DType::i8), cos, sin, y, {"rope: x is i8"});
  refused(tensor({3, 8}), cos, sin, tensor({3, 8}), {"[batch, seqlen, heads, dim]"});
  refused(x, cos, sin, tensor({2, 3, 8, 4}), {"y is bf16[2, 3, 8, 4]", "x's shape"});
  refused(x, cos, sin, tensor({2, 3, 4, 8}, DType::f16), {"y is f16"});
  refused(x, tensor({10, 4}, DType::f16), sin, y, {"cos is f16[10, 4]", "bf16, or f32"});
  refused(x, cos, tensor({10, 4}, DType::f32), y, {"sin is f32"});
  refused(x, cos, tensor({10, 3}), y, {"sin is bf16[10, 3]", "cos's shape"});
  refused(x, tensor({40}), tensor({40}), y, {"cos is bf16[40]", "[positions, rotary_dim / 2]"});
  refused(x, tensor({10, 5}), tensor({10, 5}), y, {"cos is bf16[10, 5]", "10 rotary dimensions"});
  refused(x, tensor({10, 0}), tensor({10, 0}), y, {"0 rotary dimensions"});
  refused(x, tensor({0, 4}), tensor({0, 4}), y, {"without positions"});
  refused(x, cos, sin, y, {"offset is 8", "positions 8 to 10", "has 10"}, {.offset = 8});
  refused(x, cos, sin, y, {"offset is -1"}, {.offset = -1});
  refused(x, cos, sin, Tensor::borrow(x.data(), x.shape(), DType::bf16, x.device(), {96, 8, 24, 1}), {"shares memory with x"});
  const Tensor two = tensor({2}, DType::i32), three = tensor({3}, DType::i32), floats = tensor({2}, DType::f32);
  refused(x, cos, sin, y, {"offsets is i32[3]", "[2]"}, {.offsets = &three});
  refused(x, cos, sin, y, {"offsets is f32[2]", "i32"}, {.offsets = &floats});
  refused(x, cos, sin, y, {"positions is i32[2]", "[2, 3] or [3]"}, {.positions = &two});
  refused(x, cos, sin, y, {"both offsets and positions"}, {.offsets = &two, .positions = &three});
  const auto table_refused = [&](const Tensor& c, const Tensor& s, std::initializer_list<std::string_view> parts,
                                 RopeTableOptions options = {}) {
    expect_error<InvalidArgument>([&] { tw::rope_table(c, s, options); }, parts);
  };
  table_refused(tensor({3, 4}, DType::i32), sin, {"rope_table: cos is i32"});
  table_refused(tensor({3}), tensor({3}), {"[rows, rotary_dim / 2]"});
  table_refused(cos, tensor({10, 5}), {"sin is bf16[10, 5]"});
  table_refused(cos, cos, {"sin is", "shares memory with cos"});
  for (const double theta : {0.0, -1.0, std::numeric_limits<double>::infinity()}) table_refused(cos, sin, {"theta is"}, {.theta = theta});
  table_refused(cos, sin, {"offset is"}, {.offset = std::int64_t{1} << 31});
  table_refused(cos, sin, {"positions is i32[3]", "[10]"}, {.positions = &three});
}

}  // namespace
}  // namespace tw::kernels::rope
