#pragma once

#include "kernels/activation.hpp"
#include "kernels/gemm/gemm.tile.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gemm {

/// A checked call: what gemm() hands to the code for one device. Extents fit an int.
struct Call {
  Tensor a;  ///< [M, K] or [batch, M, K]
  Tensor b;  ///< [N, K] or [batch, N, K]
  Tensor d;  ///< [M, N] or [batch, M, N]
  const Tensor* bias;
  const Tensor* residual;
  Activation activation;
  float alpha, beta;
  int m, n, k, batch;
  int config;  ///< GemmOptions::config
  Stream stream;

  bool addends() const { return beta != 0 || residual != nullptr; }
};

/// Fills a kernel's parameters. `a` and `b` as the kernel's contractions want them stored.
template <class T, class Params>
void bind_call(auto& bind, Params& p, const Call& call, const Tensor& a, const Tensor& b) {
  if (call.k > 0) {
    bind(p.a, a);
    bind(p.b, b);
  }
  bind(p.d, call.d);
  if (call.beta != 0) bind(p.c, call.d);
  if (call.residual) bind(p.residual, *call.residual);
  p.has_residual = call.residual != nullptr;
  p.bias = call.bias ? call.bias->data<T>() : nullptr;
  p.alpha = call.alpha;
  p.beta = call.beta;
  p.depth = call.k;
  p.a_batches = call.a.rank() == 3 ? 1 : 0;
  p.b_batches = call.b.rank() == 3 ? 1 : 0;
}

void run_on_cpu(const Call& call);
void run_on_gpu(const Call& call);

}  // namespace tw::kernels::gemm
