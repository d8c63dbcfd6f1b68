#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/activation_reference.hpp"
#include "tilewave/gemm.hpp"

namespace tw::kernels::gemm {

/// A product in plain numbers: every operand row-major and dense, its values those of its data type.
struct PlainCall {
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  std::span<const float> a = {};         ///< [m, k], or [batch, m, k] when a_batched
  std::span<const float> b = {};         ///< [k, n], or [batch, k, n] when b_batched
  std::span<const float> c = {};         ///< [batch, m, n]; read when beta is not 0
  std::span<const float> bias = {};      ///< [n], or empty
  std::span<const float> residual = {};  ///< [batch, m, n], or empty
  bool a_batched = false, b_batched = false;
  float alpha = 1, beta = 0;
  Activation activation = Activation::none;
};

/// The call in arithmetic of type Real: a double is exact for our purposes. `operand` is applied to each element of a and b first, `result`
/// to each of D.
template <class Real, class Operand, class Result>
std::vector<double> evaluate(const PlainCall& call, Operand operand, Result result) {
  const bool swiglu = call.activation == Activation::swiglu;
  std::vector<double> d(static_cast<std::size_t>(call.batch * call.m * (swiglu ? call.n / 2 : call.n)));
  std::vector<Real> sums(static_cast<std::size_t>(call.n));
  Real* const sum = sums.data();
  for (std::int64_t row = 0; row < call.batch * call.m; ++row) {
    const std::int64_t batch = row / call.m;
    const float* const a = call.a.data() + (call.a_batched ? row : row % call.m) * call.k;
    const float* const b = call.b.data() + (call.b_batched ? batch : 0) * call.k * call.n;
    for (std::int64_t j = 0; j < call.n; ++j) sum[j] = 0;
    for (std::int64_t k = 0; k < call.k; ++k) {
      const Real factor = operand(a[k]);
      for (std::int64_t j = 0; j < call.n; ++j) sum[j] += factor * static_cast<Real>(operand(b[k * call.n + j]));
    }
    for (std::int64_t j = 0; swiglu && j < call.n; j += 2) {
      const auto with_bias = [&](std::int64_t i) {
        const Real x = static_cast<Real>(call.alpha) * sum[i];
        return call.bias.empty() ? x : x + static_cast<Real>(call.bias[static_cast<std::size_t>(i)]);
      };
      d[static_cast<std::size_t>((row * call.n + j) / 2)] = result(activate(Activation::silu, with_bias(j)) * with_bias(j + 1));
    }
    for (std::int64_t j = 0; !swiglu && j < call.n; ++j) {
      const auto at = static_cast<std::size_t>(row * call.n + j);
      Real x = static_cast<Real>(call.alpha) * sum[j];
      if (call.beta != 0) x += static_cast<Real>(call.beta) * static_cast<Real>(call.c[at]);
      if (!call.bias.empty()) x += static_cast<Real>(call.bias[static_cast<std::size_t>(j)]);
      x = activate(call.activation, x);
      if (!call.residual.empty()) x += static_cast<Real>(call.residual[at]);
      d[at] = result(x);
    }
  }
  return d;
}

/// D = activation(alpha A B + beta C + bias) + residual, [batch, m, n], in double.
inline std::vector<double> reference(const PlainCall& call) {
  return evaluate<double>(
      call, [](float x) { return x; }, [](double x) { return x; });
}

/// The same with f32 sums and one rounding, to `dtype`, at the end. `tf32`: operands lose their low 13 bits first, as in a GPU's products
/// of f32.
inline std::vector<double> naive(const PlainCall& call, DType dtype, bool tf32) {
  const auto round = [&](float x) -> double {
    if (dtype == DType::f16) return static_cast<float>(f16(x));
    if (dtype == DType::bf16) return static_cast<float>(bf16(x));
    return x;
  };
  if (tf32)
    return evaluate<float>(
        call, [](float x) { return bit_cast<float>(bit_cast<u32>(x) & ~0x1fffu); }, round);
  return evaluate<float>(
      call, [](float x) { return x; }, round);
}

}  // namespace tw::kernels::gemm
