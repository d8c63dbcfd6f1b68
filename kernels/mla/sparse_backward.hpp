#pragma once

#include "tilewave/mla.hpp"

namespace tw::kernels::mla {

/// How gradients of lists are computed.
enum class GradientForm {
  together,  ///< by one kernel, which adds to rows of dkv in any order
  in_parts   ///< by products whose operands and results are in memory
};

/// The form that mla_sparse_backward() takes: `together` on a GPU with sm_90a kernels, unless the order of additions must be the same.
GradientForm gradient_form(const Stream& stream, bool deterministic);

/// mla_sparse_backward() in the form that is named, of checked arguments; dkv is f32 and 0.
void run_sparse_backward(GradientForm form, const Tensor& q, const Tensor& kv, const Tensor& indices, const Tensor& o, const Tensor& lse,
                         const Tensor& d_o, const Tensor& dq, const Tensor& dkv, const MlaSparseBackwardOptions& options);

}  // namespace tw::kernels::mla
