#pragma once

#include <optional>
#include <string>

#include "kernels/norm/norm.tile.hpp"
#include "kernels/rows.hpp"
#include "runtime/format.hpp"
#include "tilewave/norm.hpp"

// Shared by the family's files: a checked call and its conversion to a kernel's parameters.

namespace tw::kernels::norm {

/// A checked call.
struct Call {
  RowViews views;  ///< x, y; with a residual also the residual and the tensor for h (x if h is not stored)
  NormOptions options;
  int cols;
  Stream stream;
  std::optional<RowConfig> config = {};  ///< for tuning; GPU only

  std::int64_t rows() const { return views.rows() * views.outer(); }
  /// x's dtype if there are no weights.
  DType weights_dtype() const {
    const Tensor* const weights = options.weight ? options.weight : options.bias;
    return weights ? weights->dtype() : views[0].dtype();
  }
};

/// The call's key in the tuned choices.
template <Kind kind>
std::string problem_key(const Call& call) {
  const DType in = call.views[0].dtype(), out = call.views[1].dtype();
  const NormOptions& o = call.options;
  return tw::format("norm {} {}{} rows={},cols={}{}{}{}{}", kind == Kind::layer ? "layer" : "rms", name_of(in),
                    in == out ? "" : tw::format(" to {}", name_of(out)), call.rows(), call.cols, o.residual ? " residual" : "",
                    o.weight ? " weight" : "", o.bias ? " bias" : "", call.weights_dtype() == in ? "" : " in f32");
}

void bind_call(auto& bind, auto& p, const Call& call) {
  const NormOptions& o = call.options;
  bind(p.x, call.views[0]);
  bind(p.y, call.views[1]);
  p.has_residual = o.residual != nullptr;
  p.stores_h = o.sum != nullptr;
  bind(p.residual, o.residual ? &call.views[2] : nullptr);
  bind(p.h, o.sum ? &call.views[3] : nullptr);
  bind(p.weight, o.weight);
  bind(p.bias, o.bias);
  p.per_column = 1.0f / static_cast<float>(call.cols);
  p.epsilon = o.epsilon;
}

template <Kind kind>
constexpr const char* kOp = kind == Kind::layer ? "layer_norm" : "rms_norm";

/// Throws InvalidArgument.
template <Kind kind>
Call check(const Tensor& x, const Tensor& y, const NormOptions& options);

template <Kind kind>
void run_on_cpu(const Call& call);
template <Kind kind>
void run_on_gpu(const Call& call);

/// Calls f(std::type_identity<X>, std::type_identity<Y>) with the types of x and y.
template <class F>
void with_types(const Call& call, F f) {
  with_float_type(call.views[0].dtype(), [&]<class X>(std::type_identity<X> x) {
    with_float_type(call.views[1].dtype(), [&]<class Y>(std::type_identity<Y> y) { f(x, y); });
  });
}

}  // namespace tw::kernels::norm
