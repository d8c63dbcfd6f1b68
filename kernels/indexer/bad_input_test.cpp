// What indexer_scores() and indexer_scores_paged() refuse, and what they say.

#include <gtest/gtest.h>

#include <string_view>

#include "tests/bad_input.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/indexer.hpp"

namespace tw::kernels::indexer {
namespace {

using namespace tw::test;

class IndexerBadInput : public BadInput {
 protected:
  void refused(const Tensor& of_q, const Tensor& of_k, const Tensor& of_weights, const PlacedTensor& of_scores,
               std::initializer_list<std::string_view> parts, const IndexerOptions& options) {
    expect_error<InvalidArgument>([&] { indexer_scores(of_q, of_k, of_weights, of_scores, options); }, parts);
    EXPECT_TRUE(of_scores.untouched());
  }
  /// With a k_scale that would do.
  void refused(const Tensor& of_q, const Tensor& of_k, const Tensor& of_weights, const PlacedTensor& of_scores,
               std::initializer_list<std::string_view> parts) {
    refused(of_q, of_k, of_weights, of_scores, parts, {.k_scale = &k_scale.tensor()});
  }
  /// Of tensors that would do.
  void refused(std::initializer_list<std::string_view> parts, IndexerOptions options) {
    if (!options.k_scale) options.k_scale = &k_scale.tensor();
    refused(q, k, weights, scores, parts, options);
  }

  const PlacedTensor q = make({2, 16, 128}, DType::fp8_e4m3), k = make({5, 128}, DType::fp8_e4m3), k_scale = make({5}, DType::f32),
                     weights = make({2, 16}, DType::f32), scores = make({2, 5}, DType::f32);
};

INSTANTIATE_TEST_SUITE_P(Ops, IndexerBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(IndexerBadInput, Shapes) {
  refused(make({16, 128}, DType::fp8_e4m3), k, weights, scores, {"indexer_scores", "q is fp8_e4m3[16, 128]", "[queries, heads, 128]"});
  refused(make({2, 16, 64}, DType::fp8_e4m3), k, weights, scores, {"q is fp8_e4m3[2, 16, 64]", "128"});
  refused(make({2, 129, 128}, DType::fp8_e4m3), k, make({2, 129}, DType::f32), scores, {"q is fp8_e4m3[2, 129, 128]", "1 to 128 heads"});
  refused(make({2, 0, 128}, DType::fp8_e4m3), k, make({2, 0}, DType::f32), scores, {"q is fp8_e4m3[2, 0, 128]", "1 to 128 heads"});
  refused(q, make({5, 64}, DType::fp8_e4m3), weights, scores, {"k is fp8_e4m3[5, 64]", "[keys, 128]"});
  refused(q, make({5, 1, 128}, DType::fp8_e4m3), weights, scores, {"k is fp8_e4m3[5, 1, 128]", "[keys, 128]"});
  refused(q, k, make({2, 15}, DType::f32), scores, {"weights is f32[2, 15]", "f32[2, 16]"});
  refused(q, k, make({16, 2}, DType::f32), scores, {"weights is f32[16, 2]", "f32[2, 16]"});
  refused(q, k, weights, make({2, 6}, DType::f32), {"scores is f32[2, 6]", "f32[2, 5]"});
  refused(q, k, weights, make({5, 2}, DType::f32), {"scores is f32[5, 2]", "f32[2, 5]"});
}

TEST_P(IndexerBadInput, Strides) {
  const Placement step{.step = 2};
  refused(PlacedTensor({2, 16, 128}, DType::fp8_e4m3, device, step), k, weights, scores, {"q is", "stride 2", "contiguous"});
  refused(q, PlacedTensor({5, 128}, DType::fp8_e4m3, device, step), weights, scores, {"k is", "stride 2", "contiguous"});
  refused(q, k, weights, PlacedTensor({2, 5}, DType::f32, device, step), {"scores is", "stride 2", "contiguous"});
  refused({"k_scale is f32[5]", "contiguous"}, {.k_scale = &PlacedTensor({5}, DType::f32, device, step).tensor()});
  refused({"ends is i32[2]", "contiguous"}, {.ends = &PlacedTensor({2}, DType::i32, device, step).tensor()});
}

TEST_P(IndexerBadInput, Dtypes) {
  refused(make({2, 16, 128}, DType::f32), k, weights, scores, {"q is f32[2, 16, 128]", "fp8_e4m3, bf16 and f16"});
  refused(q, make({5, 128}), weights, scores, {"k is bf16[5, 128]", "fp8_e4m3"});
  refused(q, k, make({2, 16}), scores, {"weights is bf16[2, 16]", "f32"});
  refused(q, k, weights, make({2, 5}), {"scores is bf16[2, 5]", "f32"});
  refused({"k_scale is bf16[5]", "f32"}, {.k_scale = &make({5}).tensor()});
  refused({"starts is f32[2]", "i32"}, {.starts = &make({2}, DType::f32).tensor()});
  refused({"ends is f32[2]", "i32"}, {.ends = &make({2}, DType::f32).tensor()});
}

TEST_P(IndexerBadInput, Options) {
  refused(q, k, weights, scores, {"k_scale is missing"}, {});
  refused(make({2, 16, 128}), make({5, 128}), weights, scores, {"q is bf16[2, 16, 128]", "k_scale", "only keys of fp8_e4m3"});
  refused({"k_scale is f32[4]", "f32[5]"}, {.k_scale = &make({4}, DType::f32).tensor()});
  refused({"starts is i32[3]", "i32[2]"}, {.starts = &integers({1, 2, 3}, {3}).tensor()});
  refused({"ends is i32[1]", "i32[2]"}, {.ends = &integers({1}, {1}).tensor()});
  refused({"num_splits is -1", "1 to 1024"}, {.num_splits = -1});
  refused({"num_splits is 1025", "1 to 1024"}, {.num_splits = 1025});
}

TEST_P(IndexerBadInput, Memory) {
  const Tensor over_weights = Tensor::borrow(scores.tensor().data(), {2, 1}, DType::f32, device);
  refused(make({2, 1, 128}, DType::fp8_e4m3), k, over_weights, scores, {"scores is", "shares memory with weights"});
  const Tensor twice = Tensor::borrow(scores.tensor().data(), {2, 5}, DType::f32, device, {0, 1});
  expect_error<InvalidArgument>([&] { indexer_scores(q, k, weights, twice, {.k_scale = &k_scale.tensor()}); }, {"scores is"});
  EXPECT_TRUE(scores.untouched());
}

class IndexerPagedBadInput : public BadInput {
 protected:
  void refused(const Tensor& of_q, const Tensor& of_cache, const Tensor& of_weights, const Tensor& of_table, const PlacedTensor& of_scores,
               std::initializer_list<std::string_view> parts, const IndexerPagedOptions& options = {}) {
    expect_error<InvalidArgument>([&] { indexer_scores_paged(of_q, of_cache, of_weights, of_table, of_scores, options); }, parts);
    EXPECT_TRUE(of_scores.untouched());
  }
  /// Of tensors that would do.
  void refused(std::initializer_list<std::string_view> parts, const IndexerPagedOptions& options) {
    refused(q, cache, weights, table, scores, parts, options);
  }

  const PlacedTensor q = make({2, 1, 16, 128}, DType::fp8_e4m3), cache = make({3, 64, 132}, DType::fp8_e4m3),
                     weights = make({2, 1, 16}, DType::f32), scores = make({2, 1, 100}, DType::f32), table = integers({0, 1, 2, 0}, {2, 2});
};

INSTANTIATE_TEST_SUITE_P(Ops, IndexerPagedBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(IndexerPagedBadInput, Shapes) {
  refused(make({2, 16, 128}, DType::fp8_e4m3), cache, weights, table, scores,
          {"indexer_scores_paged", "q is fp8_e4m3[2, 16, 128]", "[batch, seqlen_q, heads, 128]"});
  refused(make({2, 1, 16, 64}, DType::fp8_e4m3), cache, weights, table, scores, {"q is fp8_e4m3[2, 1, 16, 64]", "128"});
  refused(q, make({3, 64, 128}, DType::fp8_e4m3), weights, table, scores, {"k_cache is fp8_e4m3[3, 64, 128]", "[pages, 64, 132]"});
  refused(q, make({3, 32, 132}, DType::fp8_e4m3), weights, table, scores, {"k_cache is fp8_e4m3[3, 32, 132]", "[pages, 64, 132]"});
  refused(q, make({3, 64, 1, 132}, DType::fp8_e4m3), weights, table, scores, {"k_cache is fp8_e4m3[3, 64, 1, 132]", "[pages, 64, 132]"});
  refused(q, cache, make({2, 16}, DType::f32), table, scores, {"weights is f32[2, 16]", "f32[2, 1, 16]"});
  refused(q, cache, weights, integers({0, 1}, {1, 2}), scores, {"block_table is i32[1, 2]", "i32[2, pages]"});
  refused(q, cache, weights, integers({0, 1}, {2}), scores, {"block_table is i32[2]", "i32[2, pages]"});
  refused(q, cache, weights, table, make({2, 100}, DType::f32), {"scores is f32[2, 100]", "f32[2, 1, columns]"});
  refused(q, cache, weights, table, make({1, 1, 100}, DType::f32), {"scores is f32[1, 1, 100]", "f32[2, 1, columns]"});
}

TEST_P(IndexerPagedBadInput, Strides) {
  const Placement step{.step = 2};
  refused(PlacedTensor({2, 1, 16, 128}, DType::fp8_e4m3, device, step), cache, weights, table, scores, {"q is", "stride 2", "contiguous"});
  refused(q, PlacedTensor({3, 64, 132}, DType::fp8_e4m3, device, step), weights, table, scores,
          {"k_cache is", "a page must be contiguous"});
  refused(q, PlacedTensor({3, 64, 132}, DType::fp8_e4m3, device, {.gap = 1}), weights, table, scores,
          {"k_cache is", "a page must be contiguous"});
  refused(q, PlacedTensor({3, 64, 132}, DType::fp8_e4m3, device, {.offset = 2}), weights, table, scores, {"k_cache is", "4 bytes"});
  refused(q, cache, weights, PlacedTensor({2, 2}, DType::i32, device, step), scores, {"block_table is", "side by side"});
  refused(q, cache, weights, table, PlacedTensor({2, 1, 100}, DType::f32, device, step), {"scores is", "stride 2", "contiguous"});
  refused(PlacedTensor({2, 3, 16, 128}, DType::fp8_e4m3, device, {.order = {1, 0, 2, 3}}), cache, make({2, 3, 16}, DType::f32), table,
          make({2, 3, 100}, DType::f32), {"q is", "equally far apart"});
}

TEST_P(IndexerPagedBadInput, Dtypes) {
  refused(make({2, 1, 16, 128}), cache, weights, table, scores, {"q is bf16[2, 1, 16, 128]", "fp8_e4m3"});
  refused(q, make({3, 64, 132}), weights, table, scores, {"k_cache is bf16[3, 64, 132]", "u8 or fp8_e4m3"});
  refused(q, cache, make({2, 1, 16}), table, scores, {"weights is bf16[2, 1, 16]", "f32"});
  refused(q, cache, weights, make({2, 2}, DType::f32), scores, {"block_table is f32[2, 2]", "i32"});
  refused(q, cache, weights, table, make({2, 1, 100}), {"scores is bf16[2, 1, 100]", "f32"});
  refused({"seqlens is f32[2]", "i32"}, {.seqlens = &make({2}, DType::f32).tensor()});
}

TEST_P(IndexerPagedBadInput, Options) {
  refused({"seqlens is i32[3]", "i32[2]"}, {.seqlens = &integers({1, 2, 3}, {3}).tensor()});
  refused({"seqlens is i32[2, 2]", "i32[2] or i32[2, 1]"}, {.seqlens = &integers({1, 2, 3, 4}, {2, 2}).tensor()});
  refused({"num_splits is 1025", "1 to 1024"}, {.num_splits = 1025});
}

}  // namespace
}  // namespace tw::kernels::indexer
