// What the functions of vertical-slash sparse attention refuse, and what they say.

#include <gtest/gtest.h>

#include <initializer_list>
#include <string_view>
#include <vector>

#include "tests/bad_input.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/vertical_slash.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

class VerticalSlashBadInput : public BadInput {
 protected:
  using Parts = std::initializer_list<std::string_view>;
  void refused(const Tensor& of_q, const Tensor& of_k, const Tensor& of_v, const Tensor& columns, const Tensor& distances,
               const PlacedTensor& of_o, Parts parts, const VerticalSlashOptions& options = {}) {
    expect_error<InvalidArgument>([&] { vertical_slash_attention(of_q, of_k, of_v, columns, distances, of_o, options); }, parts);
    EXPECT_TRUE(of_o.untouched());
  }
  void refused(Parts parts, const VerticalSlashOptions& options) { refused(q, k, v, vertical, slash, o, parts, options); }
  void index_refused(const Tensor& columns, const Tensor& distances, std::int64_t seqlen, const VerticalSlashLists& lists, Parts parts,
                     const VerticalSlashOptions& options = {}) {
    expect_error<InvalidArgument>([&] { vertical_slash_index(columns, distances, seqlen, lists, options); }, parts);
    EXPECT_TRUE(block_count.untouched() && block_offset.untouched() && column_count.untouched() && column_index.untouched());
  }

  const PlacedTensor q = make({1, 100, 4, 64}), k = make({1, 100, 2, 64}), v = make({1, 100, 2, 32}), o = make({1, 100, 4, 32});
  const PlacedTensor vertical = integers(std::vector<float>(12), {1, 4, 3}), slash = integers(std::vector<float>(20), {1, 4, 5}),
                     seqlens = integers({6}, {1});
  const PlacedTensor block_count = make({1, 4, 2}, DType::i32), block_offset = make({1, 4, 2, 5}, DType::i32),
                     column_count = make({1, 4, 2}, DType::i32), column_index = make({1, 4, 2, 3}, DType::i32);
  const VerticalSlashLists lists{block_count, block_offset, column_count, column_index};
};

INSTANTIATE_TEST_SUITE_P(Ops, VerticalSlashBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(VerticalSlashBadInput, Shapes) {
  refused(make({100, 4, 64}), k, v, vertical, slash, o, {"vertical_slash_attention", "q is bf16[100, 4, 64]"});
  refused(q, make({1, 90, 2, 64}), make({1, 90, 2, 32}), vertical, slash, o, {"k is bf16[1, 90, 2, 64]", "batch and seqlen", "1 and 100"});
  refused(q, make({2, 100, 2, 64}), make({2, 100, 2, 32}), vertical, slash, o, {"k is bf16[2, 100, 2, 64]", "1 and 100"});
  refused(q, make({1, 100, 3, 64}), make({1, 100, 3, 32}), vertical, slash, o, {"q has 4 heads and k 3"});
  refused(q, k, v, vertical, slash, make({1, 100, 4, 64}), {"o is bf16[1, 100, 4, 64]", "v's, 32"});
  refused(q, k, v, make({1, 2, 3}, DType::i32), slash, o, {"vertical is i32[1, 2, 3]", "i32[1, 4, columns]"});
  refused(q, k, v, make({4, 3}, DType::i32), slash, o, {"vertical is i32[4, 3]", "i32[1, 4, columns]"});
  refused(q, k, v, vertical, make({2, 4, 5}, DType::i32), o, {"slash is i32[2, 4, 5]", "i32[1, 4, slashes]"});
  refused(q, k, v, PlacedTensor({1, 4, 3}, DType::i32, device, {.step = 2}), slash, o, {"vertical is i32[1, 4, 3]", "contiguous"});
  refused(q, k, v, make({1, 4, 65537}, DType::i32), slash, o, {"vertical is i32[1, 4, 65537]", "limited to 65536"});
}

TEST_P(VerticalSlashBadInput, DtypesAndOptions) {
  refused(q, k, v, make({1, 4, 3}, DType::i64), slash, o, {"vertical is i64[1, 4, 3]", "i32"});
  refused(q, k, v, vertical, make({1, 4, 5}, DType::f32), o, {"slash is f32[1, 4, 5]", "i32"});
  refused(q, make({1, 100, 2, 64}, DType::f16), v, vertical, slash, o, {"k is f16[1, 100, 2, 64]", "bf16"});
  if (device.is_cuda())
    refused(make({1, 100, 4, 64}, DType::f32), make({1, 100, 2, 64}, DType::f32), make({1, 100, 2, 32}, DType::f32), vertical, slash,
            make({1, 100, 4, 32}, DType::f32), {"q is f32[1, 100, 4, 64]", "f32 on the CPU"});
  refused({"query_block is 32", "64 or 128"}, {.query_block = 32});
  refused({"scale is -1"}, {.scale = -1});
  const PlacedTensor two = integers({1, 2}, {2}), lse = make({1, 4, 99}, DType::f32);
  refused({"seqlens is i32[2]", "i32[1]"}, {.seqlens = &two.tensor()});
  refused({"lse is f32[1, 4, 99]", "f32[1, 4, 100]"}, {.lse = &lse.tensor()});
}

TEST_P(VerticalSlashBadInput, Overlaps) {
  refused(q, k, v, vertical, slash, PlacedTensor({1, 100, 4, 32}, DType::bf16, device, {.step = 2}), {"o is bf16[1, 100, 4, 32]"});
  const Tensor shared = Tensor::poisoned({1, 100, 4, 32}, DType::bf16, Stream::standard(device));
  const Tensor inside = Tensor::borrow(shared.data(), {1, 4, 3}, DType::i32, device);
  expect_error<InvalidArgument>([&] { vertical_slash_attention(q, k, v, inside, slash, shared); }, {"o", "vertical"});
  expect_error<InvalidArgument>([&] { vertical_slash_attention(q, k, v, vertical, inside, shared); }, {"o", "slash"});
}

TEST_P(VerticalSlashBadInput, Lists) {
  index_refused(vertical, slash, -1, lists, {"vertical_slash_index", "seqlen is -1"});
  index_refused(make({4, 3}, DType::i32), slash, 100, lists, {"vertical is i32[4, 3]", "i32[batch, heads, columns]"});
  index_refused(vertical, make({1, 3, 5}, DType::i32), 100, lists, {"slash is i32[1, 3, 5]", "i32[1, 4, slashes]"});
  index_refused(vertical, slash, 200, lists, {"block_count is i32[1, 4, 2]", "i32[1, 4, 4]"});
  index_refused(vertical, slash, 100, lists, {"block_count is i32[1, 4, 2]", "i32[1, 4, 1]"}, {.query_block = 128});
  index_refused(vertical, slash, 100, {block_count, column_index, column_count, column_index},
                {"block_offset is i32[1, 4, 2, 3]", "i32[1, 4, 2, 5]"});
  index_refused(vertical, slash, 100, {block_count, block_offset, block_count, column_index}, {"column_count", "block_count"});
  index_refused(vertical, slash, 100, {block_count, block_offset, column_count, make({1, 4, 2, 3}, DType::i64)},
                {"column_index is i64[1, 4, 2, 3]", "i32"});
  index_refused(vertical, slash, 100, lists, {"seqlens is i64[1]", "i32"}, {.seqlens = &PlacedTensor({1}, DType::i64, device).tensor()});
}

}  // namespace
}  // namespace tw::kernels::attention
