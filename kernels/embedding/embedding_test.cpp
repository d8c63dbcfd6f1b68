// embedding() against loops, on the CPU and, where there is one, on a GPU. One multiplication in f32 and one rounding: results are equal.

#include "tilewave/embedding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "kernels/embedding/reference.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::embedding {
namespace {

using namespace tw::test;

class Embedding : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::int64_t pick(std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); }

  Tensor on_device(const Tensor& t) const { return device.is_cuda() ? t.to(device) : t; }
  Tensor ids_of(const std::vector<std::int64_t>& values, Shape shape, DType dtype) const {
    const Tensor wide = Tensor::from<std::int64_t>(values, std::move(shape));
    return on_device(dtype == DType::i64 ? wide : wide.to(dtype));
  }
  static std::vector<double> values_of(const Tensor& t) {
    const Tensor wide = t.to(Device::cpu()).to(DType::f32);
    return {wide.data<float>(), wide.data<float>() + wide.numel()};
  }
  /// `expected` rounded to `out` must be what y holds.
  static void expect_equal(const std::vector<double>& got, const std::vector<double>& expected, DType out) {
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], static_cast<double>(round_to(out, static_cast<float>(expected[i])))) << "element " << i;
  }
  void check(std::int64_t vocabulary, std::int64_t dim, std::int64_t count, DType table_dtype, DType out, DType id_dtype, float scale) {
    SCOPED_TRACE(
        tw::format("[{}, {}] of {} to {}, {} ids of {}", vocabulary, dim, name_of(table_dtype), name_of(out), count, name_of(id_dtype)));
    const Tensor table = Tensor::random({vocabulary, dim}, DType::f32, random()).to(table_dtype);
    std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
    for (std::int64_t& id : ids) id = pick(vocabulary);
    if (count > 1) {
      ids[0] = vocabulary - 1;
      ids[1] = 0;
    }
    const Tensor y = Tensor::poisoned({count, dim}, out, Stream::standard(device));
    tw::embedding(on_device(table), ids_of(ids, {count}, id_dtype), y, {.scale = scale});
    expect_equal(values_of(y), reference(values_of(table), dim, ids, scale), out);
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Embedding, testing::ValuesIn(kDevices), device_name);

TEST_P(Embedding, AnyDTypeAndShape) {
  const std::pair<DType, DType> pairs[] = {{DType::f32, DType::f32},      {DType::f16, DType::f16},      {DType::f16, DType::f32},
                                           {DType::bf16, DType::bf16},    {DType::bf16, DType::f32},     {DType::fp8_e4m3, DType::bf16},
                                           {DType::fp8_e4m3, DType::f16}, {DType::fp8_e4m3, DType::f32}, {DType::fp8_e5m2, DType::bf16},
                                           {DType::fp8_e5m2, DType::f16}, {DType::fp8_e5m2, DType::f32}};
  for (const auto& [from, to] : pairs) {
    for (const std::int64_t dim : {1, 8, 129, 1024, 1025}) {
      check(17, dim, 23, from, to, DType::i32, 1);
      check(17, dim, 23, from, to, DType::i64, 0.125f);
    }
  }
  // Around a tile's columns; nothing to do.
  for (const std::int64_t dim : {2047, 2048, 2049, 5000}) check(5, dim, 3, DType::bf16, DType::bf16, DType::i64, 3);
  check(5, 16, 0, DType::bf16, DType::bf16, DType::i64, 1);
  check(5, 0, 7, DType::bf16, DType::bf16, DType::i64, 1);
}

TEST_P(Embedding, IdsOfAnyShape) {
  const Tensor table = Tensor::random({11, 40}, DType::bf16, random());
  const std::vector<std::int64_t> ids = {0, 10, 3, 3, 7, 1};
  const Tensor y = Tensor::poisoned({2, 3, 40}, DType::bf16, Stream::standard(device));
  tw::embedding(on_device(table), ids_of(ids, {2, 3}, DType::i32), y);
  expect_equal(values_of(y), reference(values_of(table), 40, ids, 1), DType::bf16);
}

TEST_P(Embedding, AnyStrides) {
  const std::vector<std::int64_t> ids = {5, 0, 12, 12, 7};
  for (const Placement& from :
       {Placement{.offset = 3}, Placement{.offset = 8, .gap = 8}, Placement{.step = 2}, Placement{.order = {1, 0}}}) {
    for (const Placement& to : {Placement{.offset = 1, .gap = 3}, Placement{.order = {1, 0}}, Placement{.gap = 1, .reversed = true}}) {
      PlacedTensor table({13, 300}, DType::f16, device, from);
      const std::vector<float> values = table.fill_random(random);
      const PlacedTensor y({5, 300}, DType::f16, device, to);
      tw::embedding(table, ids_of(ids, {5}, DType::i64), y);
      expect_equal(y.values(), reference(std::vector<double>(values.begin(), values.end()), 300, ids, 1), DType::f16);
      EXPECT_TRUE(y.gaps_intact());
    }
  }
}

TEST_P(Embedding, TablesBeyondTwoGigabytes) {
  if (device.is_cuda()) {
    constexpr std::int64_t vocabulary = 75776, dim = 16384;  // 2.3 GiB
    const Tensor table = Tensor::zeros({vocabulary, dim}, DType::bf16, Stream::standard(device));
    const Tensor last = Tensor::random({dim}, DType::bf16, random());
    table.select(0, vocabulary - 1).copy_from(last.to(device));
    const Tensor y = Tensor::poisoned({1, dim}, DType::bf16, Stream::standard(device));
    tw::embedding(table, ids_of({vocabulary - 1}, {1}, DType::i64), y);
    expect_equal(values_of(y), values_of(last), DType::bf16);
    return;
  }
  // The CPU commits pages when they are written, so rows far apart may stand for a large table.
  const std::int64_t step = (std::int64_t{1} << 29) + 8;
  const Tensor memory = Tensor::empty({2 * step + 8}, DType::bf16);
  const Tensor table = Tensor::borrow(memory.data(), {3, 8}, DType::bf16, device, {step, 1});
  const Tensor last = Tensor::random({8}, DType::bf16, random());
  table.select(0, 2).copy_from(last);
  const Tensor y = Tensor::poisoned({1, 8}, DType::bf16);
  tw::embedding(table, ids_of({2}, {1}, DType::i64), y);
  expect_equal(values_of(y), values_of(last), DType::bf16);
}

TEST_P(Embedding, IdsOutOfRange) {
  const Tensor table = Tensor::random({11, 40}, DType::bf16, random());
  const PlacedTensor y({4, 40}, DType::bf16, device);
  const auto call = [&](std::vector<std::int64_t> ids, DType dtype) { tw::embedding(on_device(table), ids_of(ids, {4}, dtype), y); };
  if (!device.is_cuda()) {
    expect_error<InvalidArgument>([&] { call({0, 10, 11, -1}, DType::i32); }, {"embedding: ids[2] is 11", "0 to 10"});
    expect_error<InvalidArgument>([&] { call({0, -1, 10, 10}, DType::i64); }, {"embedding: ids[1] is -1", "0 to 10"});
    expect_error<InvalidArgument>([&] { call({0, 1, 1, std::int64_t{1} << 32}, DType::i64); }, {"embedding: ids[3] is 4294967296"});
    EXPECT_TRUE(y.untouched());
    return;
  }
  call({-1, 11, std::int64_t{1} << 32, std::numeric_limits<std::int64_t>::min()}, DType::i64);
  expect_equal(y.values(), reference(values_of(table), 40, std::vector<std::int64_t>{0, 10, 10, 0}, 1), DType::bf16);
}

TEST_P(Embedding, BadInput) {
  const PlacedTensor table({11, 40}, DType::bf16, device), y({3, 40}, DType::bf16, device);
  const Tensor ids = ids_of({0, 1, 2}, {3}, DType::i32);
  const Stream stream = Stream::standard(device);
  const auto message = [&](auto call, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>(call, parts);
    EXPECT_TRUE(y.untouched());
  };
  message([&] { tw::embedding(table, ids, PlacedTensor({3, 41}, DType::bf16, device)); }, {"embedding: y is", "[3, 40]"});
  message([&] { tw::embedding(table, ids, PlacedTensor({3, 40}, DType::f16, device)); }, {"embedding: y is f16", "same dtype or f32"});
  message([&] { tw::embedding(table.tensor().select(0, 0), ids, y); }, {"embedding: table is", "[vocabulary, dim]"});
  message([&] { tw::embedding(Tensor::empty({4, 40}, DType::i8, stream), ids, y); }, {"embedding: table is i8", "fp8_e4m3"});
  message([&] { tw::embedding(table, Tensor::empty({3}, DType::u8, stream), y); }, {"embedding: ids is u8", "i32 and i64"});
  message([&] { tw::embedding(table, Tensor::borrow(ids.data(), {3}, DType::i32, device, {0}), y); }, {"embedding: ids is", "contiguous"});
  message([&] { tw::embedding(Tensor::empty({0, 40}, DType::bf16, stream), ids, y); }, {"embedding: table is", "no row"});
  message([&] { tw::embedding(table, ids, y, {.scale = std::numeric_limits<float>::infinity()}); }, {"embedding: scale is inf"});
}

}  // namespace
}  // namespace tw::kernels::embedding
