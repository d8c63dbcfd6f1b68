#pragma once

#include <optional>

#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "tilewave/gemm.hpp"

namespace tw::kernels::gemm {

/// Whether A and B are stored so, dense along M and N. `a`: [M, K] or [batch, M, K]; `b`: [N, K] or [batch, N, K].
Layout stored_layout(const Tensor& a, const Tensor& b);

/// What the GPU's tensor cores take as it is stored: 16-bit types alone, and A only with such a B. Copies transpose the rest.
Layout kernel_layout(DType dtype, const Layout& stored);

/// A checked call: what gemm() hands to the code for one device. Extents fit an int.
struct Call {
  Tensor a;  ///< [M, K] or [batch, M, K]
  Tensor b;  ///< [N, K] or [batch, N, K]
  Tensor d;  ///< [M, N] or [batch, M, N]; N / 2 columns for swiglu
  const Tensor* bias;
  const Tensor* residual;
  const Tensor* a_scale;  ///< of fp8 operands: [1], [M, 1], or block scales [M, ceil(K / 128)]
  Tensor b_scale;         ///< [1], [N, 1], or [ceil(N / 128), ceil(K / 128)]
  Activation activation;
  float alpha, beta;
  int m, n, k, batch;
  int config;  ///< GemmOptions::config
  int splits;  ///< GemmOptions::splits
  bool constant_b;
  Stream stream;
  Layout stored, layout;            ///< of A and B: as they are, and as the GPU's kernels take them
  std::optional<Config> tile = {};  ///< a tuned configuration of the GPU's, which need not be one of configs()
  bool interleaved = false;         ///< B's halves are interleaved: see Operands
  bool row_scales = false;          ///< a_scale, b_scale or both have a factor for each row of A or column of B

  bool addends() const { return beta != 0 || residual != nullptr; }
  /// Whether the sums can begin with what is added to them, on sm_90a.
  bool begins() const {
    const bool one = alpha == 1 && (residual != nullptr ? beta == 0 : beta == 1);
    const bool hopper = stream.device().is_cuda() && generic_shared_bytes(stream) == 0;
    return hopper && addends() && one && size_of(a.dtype()) == 2 && k > 0 && activation == Activation::none;
  }
  bool block_scaled() const { return a_scale != nullptr && a_scale->rank() == 2 && !row_scales; }
  /// Whether the product may be done as sums over splits of K, which a second kernel adds up.
  bool splittable() const { return size_of(a.dtype()) == 2 && k > 0 && activation != Activation::swiglu && !layout.a_rows; }
  /// Whether a GPU has a kernel for this one row of A.
  bool is_gemv() const { return splittable() && !layout.b_rows && m == 1; }
  /// Whether a GPU has a kernel for these few rows of A. It takes whole panels of K.
  bool is_skinny() const { return splittable() && !layout.b_rows && m > 1 && m <= kMostSkinnyRows && k % kSkinnyPanel == 0; }
};

/// Problem::end: GELU takes some 3 us for a tile.
constexpr double end_of(Activation activation) { return activation == Activation::gelu_erf || activation == Activation::gelu_tanh ? 5 : 0; }

/// What a choice of configuration depends on, on a GPU of so many SMs.
inline Problem problem_of(const Call& call, int units) {
  const auto bytes = static_cast<int>(size_of(call.a.dtype()));
  return {.m = call.m,
          .n = call.n,
          .k = call.k,
          .batch = call.batch,
          .element_bytes = bytes,
          .addends = call.addends(),
          .b_rows = call.layout.b_rows,
          .units = units,
          .generic_shared = generic_shared_bytes(call.stream),
          .begins = call.begins(),
          .pairs = call.activation == Activation::swiglu,
          .end = end_of(call.activation)};
}

/// Extents of A B. Each is less than 2^31 by more than a tile.
struct Extents {
  int m, n, k, batch;
};
/// `a`: [M, K] or [batch, M, K]; `b`: [K, N] or [batch, K, N]. Throws InvalidArgument.
Extents check_extents(const char* op, const Tensor& a, const Tensor& b);

/// Checks the arguments of gemm() and sorts the shapes out. Throws InvalidArgument.
Call make_call(const Tensor& a, const Tensor& b, const Tensor& d, const GemmOptions& options);

/// The index into kCpuConfigs that a call without a configuration takes, few rows aside.
int choose_cpu_config(const Call& call);

/// The same product from parts of f32 operands that are tf32 numbers, with an error of f32 on a GPU too. Works on any device.
void run_in_parts(Call call);

/// `t`, or a copy of it whose rows TMA can take: contiguous, with aligned strides. f32, [rows, cols] or [batch, rows, cols], on a GPU.
Tensor tma_rows(const Tensor& t, const Stream& stream);

void run_on_cpu(const Call& call);
void run_on_gpu(const Call& call);

}  // namespace tw::kernels::gemm
