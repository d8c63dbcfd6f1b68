#pragma once

// NVIDIA's matrix products, as the peer of kernels/gemm. The library is found when the benchmark runs; building needs no toolkit. The calls
// and values in use are declared here; cublaslt_declarations_test.cpp holds them against <cublasLt.h> where that exists.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tilewave/tensor.hpp"

namespace tw::bench {

namespace cublaslt {

using Status = int;                        // cublasStatus_t
using Handle = struct HandleTag*;          // cublasLtHandle_t
using MatmulDesc = struct MatmulDescTag*;  // cublasLtMatmulDesc_t
using MatrixLayout = struct LayoutTag*;    // cublasLtMatrixLayout_t
using Preference = struct PreferenceTag*;  // cublasLtMatmulPreference_t

inline constexpr Status kSuccess = 0;  // CUBLAS_STATUS_SUCCESS
/// cudaDataType_t.
enum class DataType : int { r_32f = 0, r_16f = 2, r_16bf = 14, r_8f_e4m3 = 28 };
/// cublasComputeType_t.
enum class ComputeType : int { f32 = 68, f32_fast_tf32 = 77 };
/// cublasOperation_t.
enum class Operation : int { none = 0, transpose = 1 };
/// cublasLtMatmulDescAttributes_t.
enum class DescAttribute : int { trans_a = 3, trans_b = 4, a_scale_pointer = 17, b_scale_pointer = 18, fast_accumulation = 25 };
/// cublasLtMatmulPreferenceAttributes_t.
enum class PreferenceAttribute : int { max_workspace_bytes = 1 };
/// cublasLtMatmulAlgo_t.
struct Algorithm {
  std::uint64_t data[8];
};
/// cublasLtMatmulHeuristicResult_t.
struct HeuristicResult {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

// Each call: our name, its symbol, what it returns, parameters.
#define TILEWAVE_CUBLASLT_CALLS(X)                                                                                                        \
  X(version, cublasLtGetVersion, std::size_t, ())                                                                                         \
  X(status_text, cublasLtGetStatusString, const char*, (Status status))                                                                   \
  X(create, cublasLtCreate, Status, (Handle * handle))                                                                                    \
  X(destroy, cublasLtDestroy, Status, (Handle handle))                                                                                    \
  X(desc_create, cublasLtMatmulDescCreate, Status, (MatmulDesc * desc, ComputeType compute, DataType scale))                              \
  X(desc_destroy, cublasLtMatmulDescDestroy, Status, (MatmulDesc desc))                                                                   \
  X(desc_set, cublasLtMatmulDescSetAttribute, Status, (MatmulDesc desc, DescAttribute attribute, const void* value, std::size_t bytes))   \
  X(layout_create, cublasLtMatrixLayoutCreate, Status,                                                                                    \
    (MatrixLayout * layout, DataType type, std::uint64_t rows, std::uint64_t cols, std::int64_t leading))                                 \
  X(layout_destroy, cublasLtMatrixLayoutDestroy, Status, (MatrixLayout layout))                                                           \
  X(preference_create, cublasLtMatmulPreferenceCreate, Status, (Preference * preference))                                                 \
  X(preference_destroy, cublasLtMatmulPreferenceDestroy, Status, (Preference preference))                                                 \
  X(preference_set, cublasLtMatmulPreferenceSetAttribute, Status,                                                                         \
    (Preference preference, PreferenceAttribute attribute, const void* value, std::size_t bytes))                                         \
  X(heuristic, cublasLtMatmulAlgoGetHeuristic, Status,                                                                                    \
    (Handle handle, MatmulDesc desc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d, Preference preference, int wanted,   \
     HeuristicResult* results, int* found))                                                                                               \
  X(matmul, cublasLtMatmul, Status,                                                                                                       \
    (Handle handle, MatmulDesc desc, const void* alpha, const void* a, MatrixLayout a_layout, const void* b, MatrixLayout b_layout,       \
     const void* beta, const void* c, MatrixLayout c_layout, void* d, MatrixLayout d_layout, const Algorithm* algorithm, void* workspace, \
     std::size_t workspace_bytes, void* stream))

struct Calls {
#define TILEWAVE_CUBLASLT_MEMBER(name, symbol, result, parameters) result(*name) parameters = nullptr;
  TILEWAVE_CUBLASLT_CALLS(TILEWAVE_CUBLASLT_MEMBER)
#undef TILEWAVE_CUBLASLT_MEMBER
};

}  // namespace cublaslt

/// One product D = A B, prepared: its layouts, a 32 MB workspace and the algorithms that cuBLASLt's heuristic proposes for it (8 at most).
class CublasLtProduct {
 public:
  ~CublasLtProduct();
  CublasLtProduct(const CublasLtProduct&) = delete;
  CublasLtProduct& operator=(const CublasLtProduct&) = delete;

  int algorithms() const;
  /// Enqueues one execution with algorithm `index`. Throws Error with cuBLASLt's text.
  void launch(int index) const;

 private:
  friend class CublasLt;
  struct State;
  explicit CublasLtProduct(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// The library.
class CublasLt {
 public:
  /// Null where it is missing; then `problem` says where it was looked for. Call it with the GPU's context current: after a Stream was
  /// made.
  static std::shared_ptr<const CublasLt> find(std::string& problem);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  /// "13.1.0".
  std::string version() const;

  /// `a` [M, K], `b` [K, N], `d` [M, N] as tw::gemm takes them: row-major or transposed views. Accumulates in f32 (f32: tf32 products). The
  /// tensors and the stream must outlive the product.
  std::unique_ptr<CublasLtProduct> prepare(const Tensor& a, const Tensor& b, const Tensor& d, const Stream& stream) const;

 private:
  CublasLt() = default;
  cublaslt::Calls calls_;
  cublaslt::Handle handle_ = nullptr;
};

}  // namespace tw::bench
