#pragma once

#include <span>
#include <vector>

#include "kernels/attention/reference.hpp"

namespace tw::kernels::attention {

/// Row-major and dense.
struct PlainGradients {
  std::vector<double> dq;      ///< [batch, seqlen_q, heads, head_dim]
  std::vector<double> dk, dv;  ///< [batch, seqlen_k, kv_heads, head_dim or value_dim]
  std::vector<double> d_sink;  ///< [heads], if there is a sink
  std::vector<double> d_mask;  ///< of the mask's elements, if there is a mask
  /// In double, the same sums of absolute values. In place of dP - delta they have the sizes of both, the roots of their summands' sums of
  /// squares: dP and delta are equal for a query that sees one key. Those of dv and d_sink multiply weights by the size of their exponents,
  /// since the rounding error of a weight is that of its exponent.
  std::vector<double> dq_cancelled, dk_cancelled, dv_cancelled, d_sink_cancelled, d_mask_cancelled;
};

/// Gradients of the sum of d_o O in double, from the definitions and row by row. `d_o`: [batch, seqlen_q, heads, value_dim].
PlainGradients reference_gradients(const PlainCall& call, std::span<const float> d_o);

/// The unfused operations in `dtype`: products and sums in f32, what passes from one to the next rounded.
PlainGradients naive_gradients(const PlainCall& call, std::span<const float> d_o, DType dtype);

}  // namespace tw::kernels::attention
