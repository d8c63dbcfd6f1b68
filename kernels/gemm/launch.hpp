#pragma once

#include <bit>

#include "kernels/activation.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/kernels.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gemm {

/// One launch of a call: a kernel, and the tensors that it is given.
struct Launch {
  Kernel kernel;
  TileGrid grid;
  Tensor a, b;  ///< as the kernel contracts them; in a sum `a` is the partial results, f32 [batch, splits, M, N]
  Tensor d;     ///< as the kernel stores it
  int splits = 1;
  // Of a kernel for shares of K:
  Tensor sums = {};
  u32* complete = nullptr;
  Shares shares = {};
  TileGrid tiles = {};  ///< of D
};

/// Two rows of a B whose halves are interleaved, and as many such pairs as fill the tile.
inline constexpr Window kPairs{.log_width = 1, .log_height = 29};

/// The launch of a kernel for a call. `partial`: the results of its splits of K, if it has them.
Launch make_launch(const Call& call, const Kernel& kernel, const Tensor& partial = {});

/// The launch of a kernel for shares of K. `sums`: f32 [blocks at once, BM, BN]; `complete`: a zero for each tile that is shared, which are
/// fewer than blocks.
Launch make_stream_k_launch(const Call& call, const Kernel& kernel, const Tensor& sums, u32* complete);

/// Fills in a Linear epilogue's parameters. `on_end`: D and all that is added to it stand beside the rows of B.
template <class Epilogue>
void bind_linear(auto& bind, Epilogue& e, const Call& call, const Tensor& d, bool on_end) {
  using T = typename decltype(e.d)::Element;
  const auto bind_view = [&](auto& global, const Tensor* t) {
    if (t == nullptr || !on_end) return bind(global, t);
    bind(global, t->rank() == 1 ? t->reshape({t->shape(0), 1}) : t->transpose(-2, -1));
  };
  bind(e.d, d);
  bind_view(e.c, call.beta != 0 ? &call.d : nullptr);
  // Sums can begin with either.
  bind_view(e.residual, call.residual == nullptr && call.beta != 0 ? &call.d : call.residual);
  if constexpr (requires { e.bias.cols; }) {
    bind_view(e.bias, call.bias);
  } else {
    e.bias = call.bias ? call.bias->data<T>() : nullptr;
  }
  e.a_scale = call.a_scale ? call.a_scale->data<float>() : nullptr;
  e.b_scale = call.a_scale ? call.b_scale.data<float>() : nullptr;
  const auto step_of = [](const Tensor* scale) { return scale && scale->rank() == 2 ? scale->stride(0) : 0; };
  e.a_scale_step = step_of(call.a_scale);
  e.b_scale_step = step_of(call.a_scale ? &call.b_scale : nullptr);
  e.alpha = call.alpha;
  e.beta = call.beta;
  e.has_bias = call.bias != nullptr;
  e.has_residual = call.residual != nullptr;
  e.activation = any_activation(call.activation);
}

/// Fills in the parameters of a product with block scales. `a_scale`: [M, ceil(K / 128)]; `b`: [N, K] or [groups, N, K], as `b_scale` [..,
/// ceil(N / 128), ceil(K / 128)].
template <class Params>
void bind_block_scaled(auto& bind, Params& p, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                       const Tensor& d) {
  p.depth = static_cast<int>(a.shape(-1));
  const auto operand = [&](const Tensor& t) { return p.depth > 0 ? &t : nullptr; };
  const Tensor a_scales = a_scale.transpose(0, 1);
  bind(p.a, operand(a));
  bind(p.b, operand(b));
  bind(p.a_scales, operand(a_scales));
  bind(p.b_scales, operand(b_scale));
  bind(p.d, d);
}

/// Fills in the parameters of any of the family's kernels.
template <class Params>
void bind_launch(auto& bind, Params& p, const Call& call, const Launch& x) {
  if constexpr (requires { p.in; }) {
    bind(p.in.a, call.k > 0 ? &x.a : nullptr);
    if constexpr (requires { p.in.b.window; })
      bind(p.in.b, x.b,
           x.kernel.interleaved
               ? kPairs
               : Window{std::countr_zero(static_cast<unsigned>(x.kernel.tile.bm)), std::countr_zero(unsigned{kSkinnyWarps})});
    else
      bind(p.in.b, call.k > 0 ? &x.b : nullptr);
    p.in.depth = call.k;
    p.in.a_batches = call.a.rank() == 3 ? 1 : 0;
    p.in.b_batches = call.b.rank() == 3 ? 1 : 0;
  } else if constexpr (requires { p.partial; }) {
    bind(p.partial, x.a);
  }
  if constexpr (requires { p.splits; }) p.splits = x.splits;
  if constexpr (requires { p.shares; }) {
    p.shares = x.shares;
    p.grid = x.tiles;
    bind(p.sums, x.sums);
    p.complete = x.complete;
  }
  if constexpr (requires { p.constant_b; }) p.constant_b = call.constant_b;
  if constexpr (requires { p.a_scales; }) {
    bind_block_scaled(bind, p, x.a, x.b, *call.a_scale, call.b_scale, x.d);
  } else if constexpr (requires { p.epilogue.c; }) {
    bind_linear(bind, p.epilogue, call, x.d, x.kernel.form == Kernel::gemv);
  } else {
    bind(p.epilogue.d, x.d);
  }
}

}  // namespace tw::kernels::gemm
