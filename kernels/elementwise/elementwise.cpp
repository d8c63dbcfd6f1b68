#include "tilewave/elementwise.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "kernels/check.hpp"
#include "kernels/elementwise/variants.hpp"

namespace tw {

namespace detail {

namespace {

constexpr std::size_t kMostTensors = 5;

/// A dimension of all tensors: inputs first, then y.
struct Dim {
  std::int64_t extent;
  std::array<std::int64_t, kMostTensors> strides;
};

void check_shapes(const char* op, std::span<const ElementwiseOperand> inputs, const Tensor& y, const Stream& stream) {
  const Device device = y.device();
  require(y.rank() <= 4, "{}: y is {}; at most 4 dimensions are supported", op, y);
  check_operand(op, "y", y, y.dtype(), device);
  check_output(op, "y", y);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  for (const auto& [name, x] : inputs) {
    check_operand(op, name, x, x.dtype(), device);
    bool fits = x.rank() == y.rank();
    for (int dim = 0; fits && dim < y.rank(); ++dim) fits = x.shape(dim) == y.shape(dim) || x.shape(dim) == 1;
    require(fits, "{}: {} is {}; it must have y's shape, [{}], or 1 in place of some of its extents", op, name, x,
            tw::join(y.shape(), ", "));
    check_in_place(op, {"y", &y}, {name, &x});
  }
}

/// The dimensions in the order of y's strides, without dimensions of one element. Neighbours are merged if the strides of all tensors allow
/// it.
std::vector<Dim> joined_dims(std::span<const ElementwiseOperand> inputs, const Tensor& y) {
  std::vector<Dim> dims;
  for (int d = 0; d < y.rank(); ++d) {
    if (y.shape(d) == 1) continue;
    Dim dim{y.shape(d), {}};
    for (std::size_t n = 0; n < inputs.size(); ++n) dim.strides[n] = inputs[n].tensor.shape(d) == 1 ? 0 : inputs[n].tensor.stride(d);
    dim.strides[inputs.size()] = y.stride(d);
    dims.push_back(dim);
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [&](const Dim& a, const Dim& b) { return std::abs(a.strides[inputs.size()]) > std::abs(b.strides[inputs.size()]); });
  std::vector<Dim> joined;
  for (const Dim& dim : dims) {
    bool joins = !joined.empty();
    for (std::size_t n = 0; joins && n <= inputs.size(); ++n) joins = joined.back().strides[n] == dim.strides[n] * dim.extent;
    if (joins)
      joined.back() = {joined.back().extent * dim.extent, dim.strides};
    else
      joined.push_back(dim);
  }
  if (joined.empty()) joined.push_back({1, {}});
  return joined;
}

}  // namespace

ElementwisePlan plan_elementwise(const char* op, std::span<const ElementwiseOperand> inputs, const Tensor& y,
                                 const ElementwiseOptions& options, int tile_rows, int tile_cols) {
  const Stream stream = options.stream ? *options.stream : Stream::standard(y.device());
  check_shapes(op, inputs, y, stream);
  ElementwisePlan plan{{}, 0, {0, 1, 1}, stream};
  if (y.numel() == 0) return plan;

  std::vector<Dim> dims = joined_dims(inputs, y);
  const auto views = [&](const std::vector<Dim>& of, std::int64_t first) {
    std::vector<Tensor> tensors;
    for (std::size_t n = 0; n <= inputs.size(); ++n) {
      const Tensor& tensor = n < inputs.size() ? inputs[n].tensor : y;
      Shape shape;
      std::vector<std::int64_t> strides;
      for (const Dim& dim : of) {
        shape.push_back(dim.extent);
        strides.push_back(dim.strides[n]);
      }
      char* const data =
          static_cast<char*>(tensor.data()) + first * dims.back().strides[n] * static_cast<std::int64_t>(size_of(tensor.dtype()));
      tensors.push_back(Tensor::borrow(data, std::move(shape), tensor.dtype(), tensor.device(), std::move(strides)));
    }
    return tensors;
  };
  const auto ceil = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  std::int64_t m = 0, n = 1, batch = 1;
  bool rest = false;
  if (dims.size() == 1) {
    // One dimension of any length: rows of a tile's length, and a remainder.
    const Dim dim = dims.front();
    const std::int64_t rows = dim.extent / tile_cols, left = dim.extent % tile_cols;
    Dim row = dim;
    for (std::int64_t& stride : row.strides) stride *= tile_cols;
    row.extent = rows;
    Dim col = dim;
    col.extent = tile_cols;
    if (rows > 0) plan.parts[0] = views({row, col}, 0);
    Dim last = dim;
    last.extent = left;
    if (left > 0) plan.parts[1] = views({last}, rows * tile_cols);
    m = ceil(rows, tile_rows);
    rest = left > 0;
  } else {
    plan.parts[0] = views(dims, 0);
    const std::size_t count = dims.size();
    m = ceil(dims[count - 2].extent, tile_rows);
    n = ceil(dims[count - 1].extent, tile_cols);
    for (std::size_t d = 0; d + 2 < count; ++d) batch *= dims[d].extent;
  }
  constexpr std::int64_t largest = std::numeric_limits<int>::max();
  for (const Dim& dim : dims)
    require(dims.size() == 1 || dim.extent <= largest - tile_rows - tile_cols, "{}: y is {}; with these strides an extent is limited to {}",
            op, y, largest - tile_rows - tile_cols);
  require(batch <= largest && m < largest && (m + 1) * n <= largest / batch,
          "{}: y is {}, which is {} x {} x {} tiles; they are limited to {}", op, y, m, n, batch, largest);
  plan.tiles = static_cast<int>(m);
  plan.grid = {static_cast<int>(m + (rest ? 1 : 0)), static_cast<int>(n), static_cast<int>(batch)};
  return plan;
}

void launch_parts(const ElementwisePlan& plan, int width, void (*launch)(const ElementwisePlan& part)) {
  // A remainder that does not consist of whole pieces would select the slower variant for everything, so it is launched separately.
  const bool apart = !plan.parts[0].empty() && !plan.parts[1].empty() && plan.parts[1].back().shape(0) % width != 0;
  if (!apart) return launch(plan);
  ElementwisePlan rows = plan, rest = plan;
  rows.parts[1].clear();
  rows.grid.m = plan.tiles;
  rest.parts[0].clear();
  rest.tiles = 0;
  rest.grid.m = 1;
  launch(rows);
  launch(rest);
}

void check_elementwise(const char* op, std::span<const ElementwiseOperand> inputs, const Tensor& y, int arity) {
  require(static_cast<int>(inputs.size()) == arity, "{}: {} inputs are given; the function has {}", op, inputs.size(), arity);
  require(y.dtype() == DType::f32 || y.dtype() == DType::f16 || y.dtype() == DType::bf16, "{}: y is {}; f32, f16 and bf16 are supported",
          op, y);
  for (const auto& [name, x] : inputs)
    require(x.dtype() == y.dtype(), "{}: {} is {}; it must be {} like y", op, name, x, name_of(y.dtype()));
}

}  // namespace detail

namespace {

template <class F>
void unary(const char* op, const Tensor& x, const Tensor& y, const ElementwiseOptions& options) {
  const detail::ElementwiseOperand inputs[] = {{"x", x}};
  detail::elementwise<F>(op, inputs, y, options);
}

template <class F>
void binary(const char* op, const Tensor& a, const Tensor& b, const Tensor& y, const ElementwiseOptions& options) {
  const detail::ElementwiseOperand inputs[] = {{"a", a}, {"b", b}};
  detail::elementwise<F>(op, inputs, y, options);
}

}  // namespace

void add(const Tensor& a, const Tensor& b, const Tensor& y, const ElementwiseOptions& options) { binary<Add>("add", a, b, y, options); }
void mul(const Tensor& a, const Tensor& b, const Tensor& y, const ElementwiseOptions& options) { binary<Mul>("mul", a, b, y, options); }
void silu(const Tensor& x, const Tensor& y, const ElementwiseOptions& options) { unary<Silu>("silu", x, y, options); }
void gelu_erf(const Tensor& x, const Tensor& y, const ElementwiseOptions& options) { unary<GeluErf>("gelu_erf", x, y, options); }
void gelu_tanh(const Tensor& x, const Tensor& y, const ElementwiseOptions& options) { unary<GeluTanh>("gelu_tanh", x, y, options); }

namespace kernels::elementwise {

namespace {

template <class F, class T>
Analysis analyze_shape(const ShapeValues& shape) {
  using Kernel = Elementwise<F, T>;
  const Tensor x = placeholder({shape["rows"], shape["cols"]}, dtype_of<T>);
  const std::vector<detail::ElementwiseOperand> inputs(Kernel::inputs, {"x", x});
  const Tensor y = placeholder(x.shape(), dtype_of<T>);
  const detail::ElementwisePlan plan = detail::plan_elementwise("analyze", inputs, y, {}, Kernel::tile_rows, Kernel::tile_cols);
  return analyze<Kernel>(plan.grid, [&](auto& bind, auto& p) { detail::bind_elementwise(bind, p, plan); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class F, class T>(const char* name) {
    variants.push_back({make_spec(kernel_info<Elementwise<F, T>>, true, true, name), analyze_shape<F, T>});
  };
  add.template operator()<Add, bf16>("add_bf16");
  add.template operator()<Add, float>("add_f32");
  add.template operator()<Mul, bf16>("mul_bf16");
  add.template operator()<Silu, bf16>("silu_bf16");
  add.template operator()<GeluErf, bf16>("gelu_erf_bf16");
  add.template operator()<GeluTanh, bf16>("gelu_tanh_bf16");
  add.template operator()<Chain<Silu, Mul>, bf16>("silu_mul_bf16");
  for (KernelVariant& each : registered_casts()) variants.push_back(std::move(each));
  return variants;
}

}  // namespace kernels::elementwise
}  // namespace tw
