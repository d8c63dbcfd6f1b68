#include "tilewave/cast_fp8.hpp"

#include <array>

#include "kernels/cast_fp8/cast_fp8.tile.hpp"
#include "kernels/cast_fp8/variants.hpp"
#include "kernels/rows.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels;
using kernels::cast_fp8::Grouped;
using kernels::cast_fp8::kGroup;
using kernels::cast_fp8::PerBlock;
using kernels::cast_fp8::PerToken;
using kernels::cast_fp8::RowMaxima;

constexpr int kRows = 32;  ///< of a tile: 8 for each warp, so that a thread has 8 loads in flight; a divisor of a block's 128

std::int64_t groups_of(std::int64_t cols) { return (cols + kGroup - 1) / kGroup; }

Stream check(const char* op, const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", op, x.describe());
  check_operand(op, "x", x, x.dtype(), device);
  require(y.dtype() == DType::fp8_e4m3, "{}: y is {}; it must be fp8_e4m3", op, y.describe());
  check_operand(op, "y", y, y.dtype(), device);
  check_output(op, "y", y);
  require(scales.dtype() == DType::f32, "{}: scales is {}; it must be f32", op, scales.describe());
  check_operand(op, "scales", scales, scales.dtype(), device);
  check_output(op, "scales", scales);
  check_extents(op, "x", x);
  check_extents(op, "y", y);
  require(y.numel() == 0 || y.data() != x.data(), "{}: y is x's memory; its elements are smaller", op);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  return stream;
}

void check_shape(const char* op, const char* name, const Tensor& t, const Shape& expected, const Tensor& x) {
  require(t.shape() == expected, "{}: {} is {}; for x {} it must be [{}]", op, name, t.describe(), x.describe(), fmt::join(expected, ", "));
}

bool power_of_two(const CastFp8Options& options) { return options.kind == Fp8Scales::powers_of_two; }

/// Whether every group may be a row of its own: tiles are then one piece of memory.
bool can_flatten(const Tensor& x, const Tensor& y, const Tensor& scales) {
  return x.shape(-1) % kGroup == 0 && x.is_contiguous() && y.is_contiguous() && scales.is_contiguous() &&
         x.numel() / kGroup <= kLargestExtent;
}

}  // namespace

void cast_fp8(const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  constexpr const char* op = "cast_fp8";
  const Stream stream = check(op, x, y, scales, options);
  require(x.rank() >= 1 && x.rank() <= 4, "{}: x is {}; it must have 1 to 4 dimensions", op, x.describe());
  check_shape(op, "y", y, x.shape(), x);
  Shape expected = x.shape();
  expected.back() = groups_of(x.shape(-1));
  check_shape(op, "scales", scales, expected, x);
  if (x.numel() == 0) return;
  const auto run = [&](const RowViews& views) {
    with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
      launch<PerToken<In, kRows>>(stream, row_grid(op, views, views[0].shape(3), kRows, kGroup), [&](auto& bind, auto& p) {
        bind(p.x, views[0]);
        bind(p.y, views[1]);
        bind(p.scales, views[2]);
        p.power_of_two = power_of_two(options);
      });
    });
  };
  if (can_flatten(x, y, scales)) {
    const std::int64_t groups = x.numel() / kGroup;
    const Tensor flat_x = x.reshape({groups, kGroup}), flat_y = y.reshape({groups, kGroup}), flat_scales = scales.reshape({groups, 1});
    run(RowViews(std::array{&flat_x, &flat_y, &flat_scales}));
  } else {
    run(RowViews(std::array{&x, &y, &scales}));
  }
}

void cast_fp8_blocks(const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  constexpr const char* op = "cast_fp8_blocks";
  const Stream stream = check(op, x, y, scales, options);
  require(x.rank() == 2, "{}: x is {}; it must be [N, K]", op, x.describe());
  check_shape(op, "y", y, x.shape(), x);
  const std::int64_t rows = x.shape(0), groups = groups_of(x.shape(1));
  check_shape(op, "scales", scales, {groups_of(rows), groups}, x);
  if (x.numel() == 0) return;
  const TileGrid grid = row_grid(op, RowViews(std::array{&x}), x.shape(1), kRows, kGroup);
  const Tensor amax = Tensor::empty({groups, rows}, DType::f32, stream);
  const Tensor by_warp = Tensor::borrow(amax.data(), {groups, 4, rows}, DType::f32, amax.device(), {rows, 0, 1});
  with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
    launch<RowMaxima<In, kRows>>(stream, grid, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.amax, amax);
    });
    launch<PerBlock<In, kRows>>(stream, grid, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.y, y);
      bind(p.scales, scales);
      bind(p.amax, by_warp);
      p.power_of_two = power_of_two(options);
    });
  });
}

void cast_fp8_grouped(const Tensor& x, const Tensor& sizes, const Tensor& y, const Tensor& scales, const CastFp8Options& options) {
  constexpr const char* op = "cast_fp8_grouped";
  const Stream stream = check(op, x, y, scales, options);
  require(x.rank() == 2, "{}: x is {}; it must be [rows, N]", op, x.describe());
  check_operand(op, "sizes", sizes, DType::i32, y.device());
  require(sizes.rank() == 1, "{}: sizes is {}; it must be [G]", op, sizes.describe());
  require(y.rank() == 3 && y.shape(0) == sizes.shape(0) && y.shape(2) == x.shape(1),
          "{}: y is {}; for x {} and sizes {} it must be [{}, M, {}]", op, y.describe(), x.describe(), sizes.describe(), sizes.shape(0),
          x.shape(1));
  check_shape(op, "scales", scales, {y.shape(0), y.shape(1), groups_of(x.shape(1))}, x);
  if (y.numel() == 0) return;
  const std::int64_t m = (y.shape(1) + kRows - 1) / kRows, n = groups_of(x.shape(1));
  require(m * n <= kLargestExtent && m * n * y.shape(0) <= kLargestExtent,
          "{}: y is {}, which is {} x {} x {} tiles; they are limited to {}", op, y.describe(), y.shape(0), m, n, kLargestExtent);
  const TileGrid grid{static_cast<int>(m), static_cast<int>(n), static_cast<int>(y.shape(0))};
  with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
    launch<Grouped<In, kRows>>(stream, grid, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.y, y);
      bind(p.scales, scales);
      p.power_of_two = power_of_two(options);
      p.sizes = sizes.data<std::int32_t>();
      p.size_stride = sizes.stride(0);
    });
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

std::vector<KernelSpec> registered() {
  return {make_spec(kernel_info<PerToken<bf16, kRows>>, true, true, "cast_fp8_bf16"),
          make_spec(kernel_info<PerToken<float, kRows>>, true, true, "cast_fp8_f32"),
          make_spec(kernel_info<Grouped<bf16, kRows>>, true, true, "cast_fp8_grouped_bf16"),
          make_spec(kernel_info<RowMaxima<bf16, kRows>>, true, true, "cast_fp8_row_maxima_bf16"),
          make_spec(kernel_info<PerBlock<bf16, kRows>>, true, true, "cast_fp8_blocks_bf16")};
}

}  // namespace kernels::cast_fp8
}  // namespace tw
