#pragma once

#include <array>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "tilewave/launch.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tile/elementwise.tile.hpp"

namespace tw {

// Functions of tensors element by element. Common to all of them:
//
// Tensors have 0 to 4 dimensions and any strides; y is the output. The inputs have y's shape, or extents of 1, which are broadcast. An
// input may share y's memory if it has y's shape, strides and element size (in place). Any number of elements runs at full speed if all
// tensors are contiguous, or dense in the same order of dimensions. Extents that cannot be merged with their neighbours are limited to 2^31
// - 1.
//
// They enqueue on the stream and return (on the CPU: done when they return). Each throws InvalidArgument for shapes, dtypes, strides or
// devices that do not fit, with nothing written; CompileError, DeviceError.

struct ElementwiseOptions {
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

// f32, f16 or bf16, the same for all tensors; computed in f32 and rounded once.

void add(const Tensor& a, const Tensor& b, const Tensor& y, const ElementwiseOptions& options = {});  ///< a + b
void mul(const Tensor& a, const Tensor& b, const Tensor& y, const ElementwiseOptions& options = {});  ///< a b
void silu(const Tensor& x, const Tensor& y, const ElementwiseOptions& options = {});                  ///< x / (1 + exp(-x))
void gelu_erf(const Tensor& x, const Tensor& y, const ElementwiseOptions& options = {});              ///< x Phi(x)
/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
void gelu_tanh(const Tensor& x, const Tensor& y, const ElementwiseOptions& options = {});

/// y = x, converted between any two dtypes as in Tensor::to(DType), to the nearest, ties to even. To an integer type: out-of-range values
/// become the nearest integer in range, NaN becomes 0. To bool: true if not 0. To fp8: saturates.
void cast(const Tensor& x, const Tensor& y, const ElementwiseOptions& options = {});

using Inputs = std::initializer_list<std::reference_wrapper<const Tensor>>;

/// y = F::apply(inputs[0], inputs[1], ...) for a function type F with one to four arguments: `static float apply(float a, float b)`.
/// Chain<F, G...> fuses several into one kernel: elementwise<Chain<Silu, Mul>>({gate, up}, y). f32, f16 or bf16, the same for all tensors.
///
/// On a GPU F must come from an embedded file (tilewave_embed) that includes "tilewave/tile/elementwise.tile.hpp":
///
///   struct Softcap {
///     static constexpr const char* source = "softcap.tile.hpp";  // the file
///     static float apply(float x) { return 30 * tw::tanh(x / 30); }
///   };
template <class F>
void elementwise(Inputs inputs, const Tensor& y, const ElementwiseOptions& options = {});

namespace detail {

struct ElementwiseOperand {
  const char* name;
  const Tensor& tensor;
};

/// A checked call as tiles: the tensors of the two parts of Elementwise's parameters, inputs first, then y. An empty part has none.
struct ElementwisePlan {
  std::array<std::vector<Tensor>, 2> parts;
  int tiles = 0;
  TileGrid grid;
  Stream stream;
};
/// `inputs` have y's shape or are broadcast to it. Throws InvalidArgument. No dtype is checked.
ElementwisePlan plan_elementwise(const char* op, std::span<const ElementwiseOperand> inputs, const Tensor& y,
                                 const ElementwiseOptions& options, int tile_rows, int tile_cols);
/// Throws InvalidArgument unless all have the same dtype (f32, f16 or bf16) and there are as many inputs as F has arguments.
void check_elementwise(const char* op, std::span<const ElementwiseOperand> inputs, const Tensor& y, int arity);

/// Fills the parameters of Elementwise, or of a kernel that has the same.
inline void bind_elementwise(auto& bind, auto& p, const ElementwisePlan& plan) {
  for (std::size_t k = 0; k < 2; ++k) {
    const std::vector<Tensor>& tensors = plan.parts[k];
    std::size_t n = 0;
    for (auto& in : p.parts[k].in) bind(in, tensors.empty() ? nullptr : &tensors[n++]);
    bind(p.parts[k].out, tensors.empty() ? nullptr : &tensors.back());
  }
  p.tiles = plan.tiles;
}

/// Calls launch(plan) for the plan, or separately for its two parts. `width`: of the kernel's pieces.
void launch_parts(const ElementwisePlan& plan, int width, void (*launch)(const ElementwisePlan& part));

template <class Kernel>
void launch_elementwise(const ElementwisePlan& plan) {
  launch_parts(plan, Kernel::width, [](const ElementwisePlan& part) {
    launch<Kernel>(part.stream, part.grid, [&](auto& bind, auto& p) { bind_elementwise(bind, p, part); });
  });
}

template <class F>
void elementwise(const char* op, std::span<const ElementwiseOperand> inputs, const Tensor& y, const ElementwiseOptions& options) {
  check_elementwise(op, inputs, y, Elementwise<F, float>::inputs);
  const auto run = [&]<class Kernel>(void (*launch)(const ElementwisePlan&)) {
    launch_parts(plan_elementwise(op, inputs, y, options, Kernel::tile_rows, Kernel::tile_cols), Kernel::width, launch);
  };
  if (!y.device().is_cuda()) {
    using Kernel = Elementwise<F, cpu::AnyFloat>;
    return run.template operator()<Kernel>([](const ElementwisePlan& part) {
      if (part.grid.count() > 0) launch_cpu<Kernel>(part.grid, [&](auto& bind, auto& p) { bind_elementwise(bind, p, part); });
    });
  }
  const auto run_on_gpu = [&]<class Kernel>() {
    run.template operator()<Kernel>([](const ElementwisePlan& part) {
      if (part.grid.count() > 0) launch_gpu<Kernel>(part.stream, part.grid, [&](auto& bind, auto& p) { bind_elementwise(bind, p, part); });
    });
  };
  switch (y.dtype()) {
    case DType::f16:
      return run_on_gpu.template operator()<Elementwise<F, f16>>();
    case DType::bf16:
      return run_on_gpu.template operator()<Elementwise<F, bf16>>();
    default:
      return run_on_gpu.template operator()<Elementwise<F, float>>();
  }
}

}  // namespace detail

template <class F>
void elementwise(Inputs inputs, const Tensor& y, const ElementwiseOptions& options) {
  static constexpr const char* names[] = {"inputs[0]", "inputs[1]", "inputs[2]", "inputs[3]", "inputs[4]"};
  std::vector<detail::ElementwiseOperand> operands;
  for (const Tensor& input : inputs) operands.push_back({names[operands.size() < 4 ? operands.size() : 4], input});
  detail::elementwise<F>("elementwise", operands, y, options);
}

}  // namespace tw
