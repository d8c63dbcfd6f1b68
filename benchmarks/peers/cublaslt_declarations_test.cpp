// Holds the benchmarks' declarations of cuBLASLt against NVIDIA's header, where it is on the include path.

#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "benchmarks/peers/cublaslt.hpp"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define TILEWAVE_HAVE_CUBLASLT_HEADER 1
#endif

namespace {

#ifndef TILEWAVE_HAVE_CUBLASLT_HEADER

TEST(CublasLtDeclarations, AgreeWithTheHeader) { GTEST_SKIP() << "skipped: no cublasLt.h"; }

#else

namespace ours = tw::bench::cublaslt;

/// Whether arguments of the two types are passed alike.
template <class A, class B>
constexpr bool same_abi() {
  if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>) return std::is_pointer_v<A> && std::is_pointer_v<B>;
  return sizeof(A) == sizeof(B) && std::is_floating_point_v<A> == std::is_floating_point_v<B>;
}

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class R, class... A, class S, class... B>
requires(sizeof...(A) == sizeof...(B)) struct SameCall<R (*)(A...), S (*)(B...)>
    : std::bool_constant<same_abi<R, S>() && (same_abi<A, B>() && ...)> {
};

TEST(CublasLtDeclarations, CallsAgreeWithTheHeader) {
#define EXPECT_SAME_CALL(name, symbol, result, parameters) \
  EXPECT_TRUE((SameCall<decltype(ours::Calls::name), decltype(&symbol)>::value)) << #symbol;
  TILEWAVE_CUBLASLT_CALLS(EXPECT_SAME_CALL)
#undef EXPECT_SAME_CALL
}

TEST(CublasLtDeclarations, StructuresAgreeWithTheHeader) {
  using Result = cublasLtMatmulHeuristicResult_t;
  EXPECT_EQ(sizeof(ours::Algorithm), sizeof(cublasLtMatmulAlgo_t));
  EXPECT_EQ(sizeof(ours::HeuristicResult), sizeof(Result));
  EXPECT_EQ(offsetof(ours::HeuristicResult, algorithm), offsetof(Result, algo));
  EXPECT_EQ(offsetof(ours::HeuristicResult, workspace_bytes), offsetof(Result, workspaceSize));
  EXPECT_EQ(offsetof(ours::HeuristicResult, state), offsetof(Result, state));
  EXPECT_EQ(offsetof(ours::HeuristicResult, waves), offsetof(Result, wavesCount));
}

TEST(CublasLtDeclarations, ValuesAgreeWithTheHeader) {
  const auto expect_same = [](auto mine, auto theirs) { EXPECT_EQ(static_cast<int>(mine), static_cast<int>(theirs)); };
  expect_same(ours::kSuccess, CUBLAS_STATUS_SUCCESS);
  expect_same(ours::DataType::r_32f, CUDA_R_32F);
  expect_same(ours::DataType::r_16f, CUDA_R_16F);
  expect_same(ours::DataType::r_16bf, CUDA_R_16BF);
  expect_same(ours::DataType::r_8f_e4m3, CUDA_R_8F_E4M3);
  expect_same(ours::ComputeType::f32, CUBLAS_COMPUTE_32F);
  expect_same(ours::ComputeType::f32_fast_tf32, CUBLAS_COMPUTE_32F_FAST_TF32);
  expect_same(ours::Operation::none, CUBLAS_OP_N);
  expect_same(ours::Operation::transpose, CUBLAS_OP_T);
  expect_same(ours::DescAttribute::trans_a, CUBLASLT_MATMUL_DESC_TRANSA);
  expect_same(ours::DescAttribute::trans_b, CUBLASLT_MATMUL_DESC_TRANSB);
  expect_same(ours::DescAttribute::a_scale_pointer, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
  expect_same(ours::DescAttribute::b_scale_pointer, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
  expect_same(ours::DescAttribute::fast_accumulation, CUBLASLT_MATMUL_DESC_FAST_ACCUM);
  expect_same(ours::PreferenceAttribute::max_workspace_bytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
}

#endif

}  // namespace
