#pragma once

#include <optional>

#include "kernels/activation.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/tile/gemm.tile.hpp"

namespace tw::kernels::gemm {

/// A checked call: what gemm() hands to the code for one device. Extents fit an int.
struct Call {
  Tensor a;  ///< [M, K] or [batch, M, K]
  Tensor b;  ///< [N, K] or [batch, N, K]
  Tensor d;  ///< [M, N] or [batch, M, N]; N / 2 columns for swiglu
  const Tensor* bias;
  const Tensor* residual;
  const Tensor* a_scale;  ///< of fp8 operands: [1], or block scales [M, ceil(K / 128)]
  Tensor b_scale;         ///< [1], or [ceil(N / 128), ceil(K / 128)]
  Activation activation;
  float alpha, beta;
  int m, n, k, batch;
  int config;  ///< GemmOptions::config
  int splits;  ///< GemmOptions::splits
  Stream stream;
  std::optional<Config> tile = {};  ///< a tuned configuration of the GPU's, which need not be one of configs()

  bool addends() const { return beta != 0 || residual != nullptr; }
  bool block_scaled() const { return a_scale != nullptr && a_scale->numel() != 1; }
};

/// Fills the inputs of a kernel's parameters. `a` and `b` as the kernel's contractions want them stored.
template <class In>
void bind_inputs(auto& bind, In& in, const Call& call, const Tensor& a, const Tensor& b) {
  bind(in.a, call.k > 0 ? &a : nullptr);
  bind(in.b, call.k > 0 ? &b : nullptr);
  in.depth = call.k;
  in.a_batches = call.a.rank() == 3 ? 1 : 0;
  in.b_batches = call.b.rank() == 3 ? 1 : 0;
}

/// Fills in a Linear epilogue's parameters. `d`: as the kernel stores it; `as` gives C, the residual and the bias the same view.
template <class Epilogue, class As>
void bind_epilogue(auto& bind, Epilogue& e, const Call& call, const Tensor& d, As as) {
  using T = typename decltype(e.d)::Element;
  const auto bind_view = [&](auto& global, const Tensor* tensor) { tensor ? bind(global, as(*tensor)) : bind(global, nullptr); };
  bind(e.d, d);
  bind_view(e.c, call.beta != 0 ? &call.d : nullptr);
  bind_view(e.residual, call.residual);
  if constexpr (requires { e.bias.cols; }) {
    bind_view(e.bias, call.bias);
  } else {
    e.bias = call.bias ? call.bias->data<T>() : nullptr;
  }
  e.a_scale = call.a_scale ? call.a_scale->data<float>() : nullptr;
  e.b_scale = call.a_scale ? call.b_scale.data<float>() : nullptr;
  e.alpha = call.alpha;
  e.beta = call.beta;
  e.has_bias = call.bias != nullptr;
  e.has_residual = call.residual != nullptr;
  e.activation = any_activation(call.activation);
}
inline constexpr auto kAsItIs = [](const Tensor& t) { return t; };

template <class Params>
void bind_call(auto& bind, Params& p, const Call& call, const Tensor& a, const Tensor& b) {
  bind_inputs(bind, p.in, call, a, b);
  if constexpr (requires { p.epilogue.c; })
    bind_epilogue(bind, p.epilogue, call, call.d, kAsItIs);
  else
    bind(p.epilogue.d, call.d);
  p.splits = 1;
}

/// `partial`: f32 [batch, splits, M, N]. `swapped`: a is B and b is A, and the kernel's D is transposed.
void bind_split(auto& bind, auto& p, const Call& call, const Tensor& a, const Tensor& b, const Tensor& partial, bool swapped) {
  p.splits = static_cast<int>(partial.shape(1));
  const Tensor planes = partial.reshape({call.batch * p.splits, call.m, call.n});
  bind_inputs(bind, p.in, call, a, b);
  if (swapped) std::swap(p.in.a_batches, p.in.b_batches);
  bind(p.epilogue.d, swapped ? planes.transpose(1, 2) : planes);
}

void bind_sum(auto& bind, auto& p, const Call& call, const Tensor& partial) {
  bind(p.partial, partial);
  bind_epilogue(bind, p.epilogue, call, call.d, kAsItIs);
  p.splits = static_cast<int>(partial.shape(1));
}

/// One row of A in each batch.
void bind_gemv(auto& bind, auto& p, const Call& call) {
  const auto on_end = [](const Tensor& t) { return t.rank() == 1 ? t.reshape({t.shape(0), 1}) : t.transpose(-2, -1); };
  bind(p.a, call.a);
  bind(p.b, call.b);
  bind_epilogue(bind, p.epilogue, call, on_end(call.d), on_end);
  p.depth = call.k;
  p.a_batches = call.a.rank() == 3 ? 1 : 0;
  p.b_batches = call.b.rank() == 3 ? 1 : 0;
}

template <class Params>
void bind_block_scaled(auto& bind, Params& p, const Call& call) {
  bind_inputs(bind, p.in, call, call.a, call.b);
  bind(p.a_scales, call.k > 0 ? call.a_scale : nullptr);
  bind(p.b_scales, call.k > 0 ? &call.b_scale : nullptr);
  bind(p.d, call.d);
}

/// Calls f(std::type_identity<T>{}) with the elements of A and B, and those of D: f(operand, result).
template <class F>
decltype(auto) with_types(DType dtype, F f) {
  switch (dtype) {
    case DType::f16:
      return f(std::type_identity<f16>{}, std::type_identity<f16>{});
    case DType::bf16:
      return f(std::type_identity<bf16>{}, std::type_identity<bf16>{});
    case DType::fp8_e4m3:
      return f(std::type_identity<fp8_e4m3>{}, std::type_identity<bf16>{});
    case DType::i8:
      return f(std::type_identity<i8>{}, std::type_identity<i32>{});
    default:
      return f(std::type_identity<float>{}, std::type_identity<float>{});
  }
}

/// True when a [rows, K] operand is stored as [K, rows], dense along rows.
inline bool stored_transposed(const Tensor& t) { return t.stride(-1) != 1 && t.stride(-2) == 1 && t.shape(-1) > 1; }

/// B is stored [K, N] and the GPU's tensor cores can take it so: 16-bit types alone.
inline bool stored_in_rows(const Tensor& b) { return size_of(b.dtype()) == 2 && stored_transposed(b); }
inline bool b_rows(const Call& call) { return stored_in_rows(call.b); }

/// Operands as the GPU's kernels contract them.
struct Stored {
  Tensor a, b;
  bool a_rows, b_rows;  ///< `a` is [K, M]; `b` is [K, N]
};
/// `a`: [M, K] or [batch, M, K]; `b`: [N, K] or [batch, N, K].
inline Stored as_stored(const Tensor& a, const Tensor& b) {
  const bool b_rows = stored_in_rows(b), a_rows = b_rows && stored_transposed(a);
  return {a_rows ? a.transpose(-2, -1) : a, b_rows ? b.transpose(-2, -1) : b, a_rows, b_rows};
}

/// What a choice of configuration on a GPU of so many SMs depends on.
inline Problem problem_of(const Call& call, int units) {
  return {call.m,
          call.n,
          call.k,
          call.batch,
          static_cast<int>(size_of(call.a.dtype())),
          call.addends(),
          b_rows(call),
          units,
          generic_shared_bytes(call.stream)};
}
inline Problem problem_of(const Call& call) { return problem_of(call, device_info(call.stream.device()).units); }

/// Whether the product may be done as sums over splits of K, which a second kernel adds up.
inline bool splittable(const Call& call) {
  const bool transposed_a = b_rows(call) && stored_transposed(call.a);
  return size_of(call.a.dtype()) == 2 && call.k > 0 && call.activation != Activation::swiglu && !transposed_a;
}

/// Whether a GPU swaps the operands, so that the rows of B fill the tensor cores' 64: 2 to 16 rows of A. One row has a kernel of its own.
inline bool swaps_operands(const Call& call) { return splittable(call) && !b_rows(call) && call.m > 1 && call.m <= kMostSkinnyRows; }
inline bool is_gemv(const Call& call) { return splittable(call) && !b_rows(call) && call.m == 1; }

/// Calls f(std::type_identity<T>{}) for f16 or bf16.
template <class F>
decltype(auto) with_16bit_type(DType dtype, F f) {
  return dtype == DType::f16 ? f(std::type_identity<f16>{}) : f(std::type_identity<bf16>{});
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

/// What the CPU does with one of kCpuConfigs; operands may be placeholders.
Analysis analyze_cpu_config(const Call& call, int config);

void run_on_cpu(const Call& call);
void run_on_gpu(const Call& call);

}  // namespace tw::kernels::gemm
