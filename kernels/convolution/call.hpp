#pragma once

#include <optional>

#include "kernels/activation.hpp"
#include "kernels/convolution/convolution.tile.hpp"
#include "kernels/convolution/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "tilewave/convolution.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::convolution {

/// A checked call: what conv1d() and conv2d() hand to the code for one device. Extents fit an int.
struct Call {
  Tensor x;  ///< [N, H, W, C]
  Tensor w;  ///< [F, KH, KW, C]
  Tensor y;  ///< [N, OH, OW, F]
  const Tensor* bias;
  Activation activation;
  Axis vertical, horizontal;
  int config;  ///< index into the device's configurations, or -1: to be chosen
  Stream stream;
  std::optional<Config> tile = {};  ///< a tuned configuration of the GPU's, which need not be one of configs()

  int in_channels() const { return static_cast<int>(w.shape(3)); }
  int out_channels() const { return static_cast<int>(w.shape(0)); }
  Problem problem(int step_channels, int units) const {
    return {y.shape(0),
            y.shape(1),
            y.shape(2),
            y.shape(3),
            w.shape(1) * w.shape(2) * ceil_div(in_channels(), step_channels),
            vertical.stride,
            horizontal.stride,
            units,
            generic_shared_bytes(stream)};
  }
};

inline TileGrid grid_of(const Tiling& tiling, const Call& call, int bn) {
  return {static_cast<int>(tiling.across * tiling.down), ceil_div(call.out_channels(), bn), static_cast<int>(tiling.deep)};
}

/// Fills in the parameters of a kernel for tiles of `bm` pixels. `w` as the kernel's contraction wants it: [KH, KW, F, C] or [KH, KW, C,
/// F].
template <class T, int step_channels, class Params>
void bind_call(auto& bind, Params& p, const Call& call, const Tensor& w, const Tiling& tiling, int bm) {
  Window input = tiling.window;
  if (input.log_width > 0) input.row_step = call.horizontal.stride;
  if (input.log_height > 0) input.i_step = call.vertical.stride;
  bind(p.x, call.x, input, CopiedRows{bm});
  bind(p.w, w);
  bind(p.epilogue.d, call.y, tiling.window);
  bind(p.epilogue.c, nullptr);
  bind(p.epilogue.residual, nullptr);
  p.epilogue.bias = call.bias ? call.bias->data<T>() : nullptr;
  p.epilogue.has_bias = call.bias != nullptr;
  p.epilogue.alpha = 1;
  p.epilogue.activation = any_activation(call.activation);
  p.vertical = call.vertical;
  p.horizontal = call.horizontal;
  p.tiles_across = static_cast<int>(tiling.across);
  p.kernel_width = static_cast<int>(call.w.shape(2));
  p.channel_steps = ceil_div(call.in_channels(), step_channels);
  // An image without pixels is all padding.
  p.steps = call.x.numel() == 0 ? 0 : static_cast<int>(call.w.shape(1)) * p.kernel_width * p.channel_steps;
}

template <class T, class Activation>
using Epilogue = Linear<T, Activation, LinearOptions{.windowed = true}>;

/// True for weights [F, KH, KW, C] that are stored [.., C, F].
inline bool stored_cf(const Tensor& w) { return w.stride(3) != 1 && w.stride(0) == 1 && w.shape(3) > 1; }

/// What conv2d() makes of its arguments. Throws InvalidArgument.
Call check_conv2d(const Tensor& x, const Tensor& w, const Tensor& y, const Conv2dOptions& options);

/// Replaces f32 operands by their parts, tf32 numbers, whose products have an error of f32 on a GPU too.
void use_parts(Call& call);

/// Runs a call whose y has elements on its device.
void run(const Call& call);
void run_on_cpu(const Call& call);
void run_on_gpu(const Call& call);

/// The index into kCpuConfigs that a call without a configuration takes.
int choose_cpu_config(const Call& call);

}  // namespace tw::kernels::convolution
