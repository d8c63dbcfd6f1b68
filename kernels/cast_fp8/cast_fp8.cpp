#include "tilewave/cast_fp8.hpp"

#include <array>

#include "kernels/cast_fp8/cast_fp8.tile.hpp"
#include "kernels/cast_fp8/variants.hpp"
#include "kernels/rows.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels;
using kernels::cast_fp8::GatedPerToken;
using kernels::cast_fp8::Grouped;
using kernels::cast_fp8::kGroup;
using kernels::cast_fp8::PerBlock;
using kernels::cast_fp8::PerToken;
using kernels::cast_fp8::RowMaxima;

constexpr int kRows = 32;  ///< per tile: 8 per warp, so that a thread has 8 loads in flight; a divisor of a block's 128

std::int64_t groups_of(std::int64_t cols) { return (cols + kGroup - 1) / kGroup; }

/// Checks what all casts have in common. `name`: that of x.
Stream check(const char* op, const char* name, const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: {} is {}; f32, f16 and bf16 are supported", op, name, x);
  check_operand(op, name, x, x.dtype(), device);
  require(y.dtype() == DType::fp8_e4m3, "{}: y is {}; it must be fp8_e4m3", op, y);
  check_operand(op, "y", y, y.dtype(), device);
  check_output(op, "y", y);
  require(scales.dtype() == DType::f32, "{}: scales is {}; it must be f32", op, scales);
  check_operand(op, "scales", scales, scales.dtype(), device);
  check_output(op, "scales", scales);
  check_extents(op, name, x);
  check_extents(op, "y", y);
  check_disjoint(op, {"y", &y}, {{name, &x}, {"scales", &scales}});
  check_disjoint(op, {"scales", &scales}, {{name, &x}});
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  return stream;
}

void check_shape(const char* op, const char* name, const Tensor& t, const Shape& expected, const Tensor& x, const char* x_name = "x") {
  require(t.shape() == expected, "{}: {} is {}; for {} {} it must be [{}]", op, name, t, x_name, x, tw::join(expected, ", "));
}

bool power_of_two(const CastFp8Options& options) { return options.kind == Fp8Scales::powers_of_two; }

/// Whether every group can be viewed as a row, which makes tiles contiguous in memory.
bool can_flatten(const Tensor& x, const Tensor& y, const Tensor& scales) {
  return x.shape(-1) % kGroup == 0 && x.is_contiguous() && y.is_contiguous() && scales.is_contiguous() &&
         x.numel() / kGroup <= kLargestExtent;
}

/// x, y and scales for PerToken.
RowViews views_of(const Tensor& x, const Tensor& y, const Tensor& scales) {
  if (!can_flatten(x, y, scales)) return RowViews(std::array{&x, &y, &scales});
  const std::int64_t groups = x.numel() / kGroup;
  const Tensor flat_x = x.reshape({groups, kGroup}), flat_y = y.reshape({groups, kGroup}), flat_scales = scales.reshape({groups, 1});
  return RowViews(std::array{&flat_x, &flat_y, &flat_scales});
}

TileGrid grid_of(const char* op, const RowViews& views) { return row_grid(op, views, views[0].shape(3), kRows, kGroup); }

TileGrid grid_of_groups(const Tensor& y) {
  const std::int64_t m = (y.shape(1) + kRows - 1) / kRows, n = groups_of(y.shape(2));
  require(m * n <= kLargestExtent && m * n * y.shape(0) <= kLargestExtent,
          "cast_fp8_grouped: y is {}, which is {} x {} x {} tiles; they are limited to {}", y, y.shape(0), m, n, kLargestExtent);
  return {static_cast<int>(m), static_cast<int>(n), static_cast<int>(y.shape(0))};
}

void bind_views(auto& bind, auto& p, const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  bind(p.x, x);
  bind(p.y, y);
  bind(p.scales, scales);
  p.power_of_two = power_of_two(options);
}

void bind_gated(auto& bind, auto& p, const Tensor& gate, const Tensor& up, const Tensor& y, const Tensor& scales,
                const CastFp8Options& options) {
  bind(p.gate, gate);
  bind(p.up, up);
  bind(p.y, y);
  bind(p.scales, scales);
  p.power_of_two = power_of_two(options);
}

void bind_groups(auto& bind, auto& p, const Tensor& x, const Tensor& sizes, const Tensor& y, const Tensor& scales,
                 const CastFp8Options& options) {
  bind_views(bind, p, x, y, scales, options);
  p.sizes = sizes.data<std::int32_t>();
  p.size_stride = sizes.stride(0);
}

/// The shapes of a cast by rows.
void check_rows(const char* op, const char* name, const Tensor& x, const Tensor& y, const Tensor& scales) {
  require(x.rank() >= 1 && x.rank() <= 4, "{}: {} is {}; it must have 1 to 4 dimensions", op, name, x);
  check_shape(op, "y", y, x.shape(), x, name);
  Shape expected = x.shape();
  expected.back() = groups_of(x.shape(-1));
  check_shape(op, "scales", scales, expected, x, name);
}

/// amax [groups, rows] for PerBlock.
Tensor by_warp(const Tensor& amax) {
  const std::int64_t groups = amax.shape(0), rows = amax.shape(1);
  return Tensor::borrow(amax.data(), {groups, 4, rows}, DType::f32, amax.device(), {rows, 0, 1});
}

}  // namespace

void cast_fp8(const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  constexpr const char* op = "cast_fp8";
  const Stream stream = check(op, "x", x, y, scales, options);
  check_rows(op, "x", x, y, scales);
  if (x.numel() == 0) return;
  const RowViews views = views_of(x, y, scales);
  with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
    launch<PerToken<In, kRows>>(stream, grid_of(op, views),
                                [&](auto& bind, auto& p) { bind_views(bind, p, views[0], views[1], views[2], options); });
  });
}

void cast_fp8_swiglu(const Tensor& gate, const Tensor& up, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  constexpr const char* op = "cast_fp8_swiglu";
  const Stream stream = check(op, "gate", gate, y, scales, options);
  check_rows(op, "gate", gate, y, scales);
  check_operand(op, "up", up, gate.dtype(), y.device());
  require(up.shape() == gate.shape(), "{}: up is {}; it must have gate's shape, {}", op, up, gate);
  check_disjoint(op, {"y", &y}, {{"up", &up}});
  check_disjoint(op, {"scales", &scales}, {{"up", &up}});
  if (gate.numel() == 0) return;
  const RowViews views(std::array{&gate, &up, &y, &scales});
  with_float_type(gate.dtype(), [&]<class In>(std::type_identity<In>) {
    launch<GatedPerToken<In, kRows>>(stream, grid_of(op, views),
                                     [&](auto& bind, auto& p) { bind_gated(bind, p, views[0], views[1], views[2], views[3], options); });
  });
}

void cast_fp8_blocks(const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  constexpr const char* op = "cast_fp8_blocks";
  const Stream stream = check(op, "x", x, y, scales, options);
  require(x.rank() == 2, "{}: x is {}; it must be [N, K]", op, x);
  check_shape(op, "y", y, x.shape(), x);
  const std::int64_t rows = x.shape(0), groups = groups_of(x.shape(1));
  check_shape(op, "scales", scales, {groups_of(rows), groups}, x);
  if (x.numel() == 0) return;
  const TileGrid grid = grid_of(op, RowViews(std::array{&x}));
  const Tensor amax = Tensor::empty({groups, rows}, DType::f32, stream);
  with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
    launch<RowMaxima<In, kRows>>(stream, grid, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.amax, amax);
    });
    launch<PerBlock<In, kRows>>(stream, grid, [&](auto& bind, auto& p) {
      bind_views(bind, p, x, y, scales, options);
      bind(p.amax, by_warp(amax));
    });
  });
}

void cast_fp8_grouped(const Tensor& x, const Tensor& sizes, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  constexpr const char* op = "cast_fp8_grouped";
  const Stream stream = check(op, "x", x, y, scales, options);
  require(x.rank() == 2, "{}: x is {}; it must be [rows, N]", op, x);
  check_operand(op, "sizes", sizes, DType::i32, y.device());
  require(sizes.rank() == 1, "{}: sizes is {}; it must be [G]", op, sizes);
  check_disjoint(op, {"y", &y}, {{"sizes", &sizes}});
  check_disjoint(op, {"scales", &scales}, {{"sizes", &sizes}});
  require(y.rank() == 3 && y.shape(0) == sizes.shape(0) && y.shape(2) == x.shape(1),
          "{}: y is {}; for x {} and sizes {} it must be [{}, M, {}]", op, y, x, sizes, sizes.shape(0), x.shape(1));
  check_shape(op, "scales", scales, {y.shape(0), y.shape(1), groups_of(x.shape(1))}, x);
  if (y.numel() == 0) return;
  const TileGrid grid = grid_of_groups(y);
  with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
    launch<Grouped<In, kRows>>(stream, grid, [&](auto& bind, auto& p) { bind_groups(bind, p, x, sizes, y, scales, options); });
  });
}

Tensor column_major_scales(std::int64_t rows, std::int64_t groups, std::int64_t batch, const Stream& stream) {
  require(rows >= 0 && groups >= 0 && batch >= 0, "column_major_scales: rows is {}, groups {} and batch {}; none may be negative", rows,
          groups, batch);
  const std::int64_t padded = (rows + 3) / 4 * 4;
  if (batch == 0) return Tensor::empty({groups, padded}, DType::f32, stream).slice(1, 0, rows).transpose(0, 1);
  return Tensor::empty({batch, groups, padded}, DType::f32, stream).slice(2, 0, rows).transpose(1, 2);
}

namespace kernels::cast_fp8 {

namespace {

/// x and y [rows, cols], contiguous.
struct Placeholders {
  Tensor x, y;
  Placeholders(const ShapeValues& shape, DType dtype)
      : x(placeholder({shape["rows"], shape["cols"]}, dtype)), y(placeholder(x.shape(), DType::fp8_e4m3)) {}
};

template <class In>
Analysis analyze_tokens(const ShapeValues& shape) {
  const Placeholders of(shape, dtype_of<In>);
  const Tensor scales = placeholder({of.x.shape(0), groups_of(of.x.shape(1))}, DType::f32);
  const RowViews views = views_of(of.x, of.y, scales);
  return analyze<PerToken<In, kRows>>(grid_of("cast_fp8", views),
                                      [&](auto& bind, auto& p) { bind_views(bind, p, views[0], views[1], views[2], {}); });
}

template <class In>
Analysis analyze_gated(const ShapeValues& shape) {
  const Placeholders of(shape, dtype_of<In>);
  const Tensor scales = placeholder({of.x.shape(0), groups_of(of.x.shape(1))}, DType::f32), up = placeholder(of.x.shape(), dtype_of<In>);
  const RowViews views(std::array{&of.x, &up, &of.y, &scales});
  return analyze<GatedPerToken<In, kRows>>(grid_of("cast_fp8_swiglu", views),
                                           [&](auto& bind, auto& p) { bind_gated(bind, p, views[0], views[1], views[2], views[3], {}); });
}

template <class In>
Analysis analyze_grouped(const ShapeValues& shape) {
  const Placeholders of(shape, dtype_of<In>);
  const std::int64_t groups = shape["groups"], rows = of.x.shape(0), cols = of.x.shape(1);
  require(groups > 0 && rows % groups == 0, "shape: rows is {}; it must be a multiple of groups, {}", rows, groups);
  const Tensor y = placeholder({groups, rows / groups, cols}, DType::fp8_e4m3);
  const Tensor scales = placeholder({groups, rows / groups, groups_of(cols)}, DType::f32);
  const std::vector<std::int32_t> equal(static_cast<std::size_t>(groups), static_cast<std::int32_t>(rows / groups));
  const Tensor sizes = Tensor::from<std::int32_t>(equal, {groups});
  return analyze<Grouped<In, kRows>>(grid_of_groups(y), [&](auto& bind, auto& p) { bind_groups(bind, p, of.x, sizes, y, scales, {}); });
}

template <class In>
Analysis analyze_maxima(const ShapeValues& shape) {
  const Placeholders of(shape, dtype_of<In>);
  const Tensor amax = placeholder({groups_of(of.x.shape(1)), of.x.shape(0)}, DType::f32);
  return analyze<RowMaxima<In, kRows>>(grid_of("cast_fp8_blocks", RowViews(std::array{&of.x})), [&](auto& bind, auto& p) {
    bind(p.x, of.x);
    bind(p.amax, amax);
  });
}

template <class In>
Analysis analyze_blocks(const ShapeValues& shape) {
  const Placeholders of(shape, dtype_of<In>);
  const std::int64_t rows = of.x.shape(0), groups = groups_of(of.x.shape(1));
  const Tensor scales = placeholder({groups_of(rows), groups}, DType::f32), amax = placeholder({groups, rows}, DType::f32);
  return analyze<PerBlock<In, kRows>>(grid_of("cast_fp8_blocks", RowViews(std::array{&of.x})), [&](auto& bind, auto& p) {
    bind_views(bind, p, of.x, of.y, scales, {});
    bind(p.amax, by_warp(amax));
  });
}

}  // namespace

std::vector<KernelVariant> registered() {
  return {{make_spec(kernel_info<PerToken<bf16, kRows>>, true, true, "cast_fp8_bf16"), analyze_tokens<bf16>},
          {make_spec(kernel_info<GatedPerToken<bf16, kRows>>, true, true, "cast_fp8_swiglu_bf16"), analyze_gated<bf16>},
          {make_spec(kernel_info<Grouped<bf16, kRows>>, true, true, "cast_fp8_grouped_bf16"), analyze_grouped<bf16>},
          {make_spec(kernel_info<RowMaxima<bf16, kRows>>, true, true, "cast_fp8_row_maxima_bf16"), analyze_maxima<bf16>},
          {make_spec(kernel_info<PerBlock<bf16, kRows>>, true, true, "cast_fp8_blocks_bf16"), analyze_blocks<bf16>},
          rotated_heads_variant()};
}

}  // namespace kernels::cast_fp8
}  // namespace tw
