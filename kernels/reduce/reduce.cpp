#include "tilewave/reduce.hpp"

#include <algorithm>
#include <compare>
#include <cstdlib>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/check.hpp"
#include "kernels/named.hpp"
#include "kernels/reduce/reduce.tile.hpp"
#include "kernels/reduce/variants.hpp"
#include "kernels/rows.hpp"
#include "runtime/format.hpp"
#include "runtime/stream.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels::reduce;
using kernels::RowTile;

constexpr const char* kOp = "reduce";
/// The largest extent and number of tiles: indices stay ints, even at the end of a last, incomplete tile.
constexpr std::int64_t kLargest = std::int64_t{1} << 30;

/// A kept dimension of x, with the strides of x and y.
struct Dim {
  std::int64_t extent = 1, x_stride = 0, y_stride = 0;
};

/// A checked call. Kept dimensions are merged if x's strides allow it.
struct Call {
  Tensor x, y;
  Dim kept[3];  ///< j, i and the innermost in y
  std::int64_t extent, stride;
  float divisor;
  Stream stream;

  Tensor view(const Tensor& t, Shape shape, std::vector<std::int64_t> strides) const {
    return Tensor::borrow(t.data(), std::move(shape), t.dtype(), t.device(), std::move(strides));
  }
};

Call check(Reduction reduction, const Tensor& x, const Tensor& y, const ReduceOptions& options) {
  const Device device = y.device();
  require(x.dtype() == DType::f32 || x.dtype() == DType::f16 || x.dtype() == DType::bf16, "{}: x is {}; f32, f16 and bf16 are supported",
          kOp, x);
  require(x.rank() >= 1 && x.rank() <= 4, "{}: x is {}; it must have 1 to 4 dimensions", kOp, x);
  check_operand(kOp, "x", x, x.dtype(), device);
  require(y.dtype() == x.dtype() || y.dtype() == DType::f32, "{}: y is {}; it must be {} like x, or f32", kOp, y, name_of(x.dtype()));
  check_operand(kOp, "y", y, y.dtype(), device);
  require(options.dim >= -x.rank() && options.dim < x.rank(), "{}: dim is {}; for x {} it must be {} to {}", kOp, options.dim, x, -x.rank(),
          x.rank() - 1);
  const int dim = options.dim < 0 ? options.dim + x.rank() : options.dim;
  Shape left_out = x.shape(), one = x.shape();
  left_out.erase(left_out.begin() + dim);
  one[static_cast<std::size_t>(dim)] = 1;
  require((y.shape() == left_out || y.shape() == one) && y.is_contiguous(),
          "{}: y is {}; for x {} and dim {} it must be contiguous, [{}] or [{}]", kOp, y, x, options.dim, tw::join(left_out, ", "),
          tw::join(one, ", "));
  for (const std::int64_t extent : x.shape()) require(extent <= kLargest, "{}: x is {}; extents are limited to {}", kOp, x, kLargest);
  require(reduction == Reduction::sum || reduction == Reduction::mean || x.shape(dim) > 0 || y.numel() == 0,
          "{}: x is {}; along a dimension without elements there is no largest or smallest one", kOp, x);
  check_disjoint(kOp, {"y", &y}, {{"x", &x}});
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());

  Call call{x, y, {}, x.shape(dim), x.stride(dim), reduction == Reduction::mean ? static_cast<float>(x.shape(dim)) : 1, stream};
  // From the innermost dimension on. y is dense, so only x decides which dimensions can be merged.
  int place = 2;
  std::int64_t y_stride = 1;
  for (int d = x.rank() - 1; d >= 0; --d) {
    if (d == dim || x.shape(d) == 1) continue;
    Dim& inner = call.kept[place];
    if (inner.extent == 1) {
      inner = {x.shape(d), x.stride(d), y_stride};
    } else if (x.stride(d) == inner.x_stride * inner.extent && inner.extent * x.shape(d) <= kLargest) {
      inner.extent *= x.shape(d);
    } else {
      call.kept[--place] = {x.shape(d), x.stride(d), y_stride};
    }
    y_stride *= x.shape(d);
  }
  return call;
}

/// f32 memory for the results of splits. It lives until the work enqueued on the stream is done.
Tensor partial_results(Shape shape, const Stream& stream) {
  std::size_t bytes = sizeof(float);
  for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
  const std::shared_ptr<void> memory = allocate_workspace(bytes, stream);
  return Tensor::borrow(memory.get(), std::move(shape), DType::f32, stream.device(), {}, memory);
}

std::int64_t ceil(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

TileGrid grid_of(std::int64_t m, std::int64_t n, std::int64_t batch) {
  require(m <= kLargest && n <= kLargest && batch <= kLargest && m * n <= 2 * kLargest - 1 && m * n * batch <= 2 * kLargest - 1,
          "{}: the call is {} x {} x {} tiles; they are limited to {}", kOp, m, n, batch, 2 * kLargest - 1);
  return {static_cast<int>(m), static_cast<int>(n), static_cast<int>(batch)};
}

/// The number of blocks that keeps the device busy. On the CPU it does not depend on the number of threads, so that results do not either.
int wanted_blocks(Device device) { return device.is_cuda() ? 4 * device_info(device).units : 32; }

/// ReduceRows on a GPU; without rows ReduceColumns.
struct ReduceKernel {
  Reduction reduction;
  DType x, y;
  int rows = 0, cols = 0;
  auto operator<=>(const ReduceKernel&) const = default;
};

const char* name_of_operator(Reduction reduction) {
  switch (reduction) {
    case Reduction::max:
      return "Max";
    case Reduction::min:
      return "Min";
    case Reduction::abs_max:
      return "AbsMax";
    default:
      return "Sum";
  }
}

std::string type_of(const ReduceKernel& k) {
  const std::string types =
      tw::format("tw::kernels::reduce::{}, {}, {}", name_of_operator(k.reduction), kernels::element_name(k.x), kernels::element_name(k.y));
  return k.rows > 0 ? tw::format("tw::kernels::reduce::ReduceRows<{}, {}, {}>", types, k.rows, k.cols)
                    : tw::format("tw::kernels::reduce::ReduceColumns<{}>", types);
}

kernels::KernelTable<ReduceKernel>& kernel_table() {
  static kernels::KernelTable<ReduceKernel> table(type_of, ReduceColumns<Sum, float, float>::source);
  return table;
}

/// Calls f<Op>() with the reduction's operator.
template <class F>
void with_op(Reduction reduction, F f) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::mean:
      return f.template operator()<Sum>();
    case Reduction::max:
      return f.template operator()<Max>();
    case Reduction::min:
      return f.template operator()<Min>();
    case Reduction::abs_max:
      return f.template operator()<AbsMax>();
  }
}

/// The arguments of one launch. Results are divided by `divisor`.
struct Launch {
  Reduction reduction;
  Tensor x, y;
  Splits splits;
  float divisor;
  const Stream& stream;
};

/// Tiles of ReduceRows: many rows for short ones, a block for a long one. On a GPU a lane has 16 pieces of 16 bytes, four of them in
/// flight.
enum class RowTiles { short_rows, rows, long_rows };
constexpr RowTile gpu_tile(RowTiles tiles, std::size_t element_bytes) {
  const int piece = 32 * (16 / static_cast<int>(element_bytes));  // of a warp
  const int rows = tiles == RowTiles::short_rows ? 16 : tiles == RowTiles::rows ? 4 : 1;
  return {rows, piece * 16 / rows, 4};
}
constexpr RowTile kCpuShort{16, 256, 4}, kCpuLong{1, 1024, 4};

TileGrid grid_of_rows(const Tensor& x, Splits splits, int tile_rows) {
  return grid_of(ceil(x.shape(2), tile_rows), splits.count, x.shape(0) * x.shape(1));
}

template <class Out>
void bind_rows(auto& bind, auto& p, const Tensor& x, const Tensor& y, Splits splits, float divisor) {
  bind(p.x, x);
  p.y = y.data<Out>();
  p.splits = splits.count;
  p.length = splits.length;
  p.divisor = divisor;
}

/// Calls f<T, Out>() with the types of x and y. Partial results are f32: outputs of any x, and inputs for any y.
template <class F>
void with_types(const Launch& launch, F f) {
  kernels::with_float_type(launch.x.dtype(), [&]<class T>(std::type_identity<T>) {
    kernels::with_float_type(launch.y.dtype(), [&]<class Out>(std::type_identity<Out>) { f.template operator()<T, Out>(); });
  });
}

/// Reduces x, [j, i, rows, extent], to dense y, [j, i, rows, splits].
void launch_rows_on_gpu(const Launch& launch, const RowTile& tile) {
  const detail::NamedKernel& kernel = kernel_table()[{launch.reduction, launch.x.dtype(), launch.y.dtype(), tile.rows, tile.cols}];
  const TileGrid grid = grid_of_rows(launch.x, launch.splits, tile.rows);
  with_types(launch, [&]<class T, class Out>() {
    constexpr RowTile any = gpu_tile(RowTiles::rows, sizeof(T));
    using Params = typename ReduceRows<Sum, T, Out, any.rows, any.cols>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(kernel, launch.stream, grid,
                                 [&](auto& bind, auto& p) { bind_rows<Out>(bind, p, launch.x, launch.y, launch.splits, launch.divisor); });
  });
}

template <class Out, RowTile tile>
void launch_rows_on_cpu(const Launch& launch) {
  with_op(launch.reduction, [&]<class Op>() {
    launch_cpu<ReduceRows<Op, cpu::AnyFloat, Out, tile.rows, tile.cols>>(
        grid_of_rows(launch.x, launch.splits, tile.rows),
        [&](auto& bind, auto& p) { bind_rows<Out>(bind, p, launch.x, launch.y, launch.splits, launch.divisor); });
  });
}

void launch_rows(const Launch& launch, RowTiles tiles) {
  if (launch.stream.device().is_cuda()) return launch_rows_on_gpu(launch, gpu_tile(tiles, size_of(launch.x.dtype())));
  const bool is_short = tiles == RowTiles::short_rows;
  kernels::with_float_type(launch.y.dtype(), [&]<class Out>(std::type_identity<Out>) {
    is_short ? launch_rows_on_cpu<Out, kCpuShort>(launch) : launch_rows_on_cpu<Out, kCpuLong>(launch);
  });
}

void reduce_rows(Reduction reduction, const Tensor& x, const Tensor& y, float divisor, const Stream& stream) {
  const bool gpu = stream.device().is_cuda();
  const std::int64_t extent = x.shape(3), rows = x.shape(0) * x.shape(1) * x.shape(2);
  const auto tile = [&](RowTiles tiles) {
    return gpu ? gpu_tile(tiles, size_of(x.dtype())) : tiles == RowTiles::short_rows ? kCpuShort : kCpuLong;
  };
  const RowTile short_tile = tile(RowTiles::short_rows), middle = tile(RowTiles::rows), long_tile = tile(RowTiles::long_rows);
  if (extent <= short_tile.cols) return launch_rows({reduction, x, y, {1, short_tile.cols}, divisor, stream}, RowTiles::short_rows);
  // Many rows keep the device busy with one warp each, for any length.
  const bool many = gpu && rows >= std::int64_t{4 * middle.rows} * wanted_blocks(stream.device());
  if (gpu && (extent <= middle.cols || many)) {
    const int length = static_cast<int>(ceil(extent, middle.cols)) * middle.cols;
    return launch_rows({reduction, x, y, {1, length}, divisor, stream}, RowTiles::rows);
  }
  const Splits splits = choose_splits(extent, rows, long_tile.cols, wanted_blocks(stream.device()));
  if (splits.count == 1) return launch_rows({reduction, x, y, splits, divisor, stream}, RowTiles::long_rows);
  const Tensor partial = partial_results({1, 1, rows, splits.count}, stream);
  launch_rows({reduction, x, partial, splits, 1, stream}, RowTiles::long_rows);
  reduce_rows(reduction, partial, y, divisor, stream);
}

template <class T>
using AnyColumns = ReduceColumns<Sum, T, T>;

TileGrid grid_of_columns(const Tensor& x, Splits splits, int tile_cols) {
  return grid_of(ceil(x.shape(3), tile_cols), splits.count, x.shape(0) * x.shape(1));
}

void bind_columns(auto& bind, auto& p, const Tensor& x, const Tensor& y, Splits splits, float divisor) {
  bind(p.x, x);
  bind(p.y, y);
  p.splits = splits.count;
  p.length = splits.length;
  p.divisor = divisor;
}

/// Tile sizes of ReduceColumns.
int tile_cols(const Tensor& x) {
  if (!x.device().is_cuda()) return AnyColumns<cpu::AnyFloat>::tile_cols;
  return size_of(x.dtype()) == 2 ? AnyColumns<bf16>::tile_cols : AnyColumns<float>::tile_cols;
}

/// Reduces x, [j, i, extent, cols], to y, [j, i, 1, cols], or with splits [(j, i), splits, 1, cols].
void launch_columns(const Launch& launch) {
  const auto bind_all = [&](auto& bind, auto& p) { bind_columns(bind, p, launch.x, launch.y, launch.splits, launch.divisor); };
  const TileGrid grid = grid_of_columns(launch.x, launch.splits, tile_cols(launch.x));
  if (!launch.stream.device().is_cuda()) {
    return with_op(launch.reduction, [&]<class Op>() { launch_cpu<ReduceColumns<Op, cpu::AnyFloat, cpu::AnyFloat>>(grid, bind_all); });
  }
  const detail::NamedKernel& kernel = kernel_table()[{launch.reduction, launch.x.dtype(), launch.y.dtype()}];
  with_types(launch, [&]<class T, class Out>() {
    detail::launch_named<typename ReduceColumns<Sum, T, Out>::template On<sm_90a::Target<>>::Params>(kernel, launch.stream, grid, bind_all);
  });
}

void reduce_columns(Reduction reduction, const Tensor& x, const Tensor& y, float divisor, const Stream& stream) {
  const std::int64_t batch = x.shape(0) * x.shape(1), cols = x.shape(3), tiles = ceil(cols, tile_cols(x));
  const Splits splits = choose_splits(x.shape(2), tiles * batch, AnyColumns<float>::tile_rows, wanted_blocks(stream.device()));
  if (splits.count == 1) return launch_columns({reduction, x, y, splits, divisor, stream});
  const Tensor partial = partial_results({batch, splits.count, 1, cols}, stream);
  launch_columns({reduction, x, partial, splits, 1, stream});
  const std::int64_t plane = splits.count * cols;
  const Tensor again = Tensor::borrow(partial.data(), {x.shape(0), x.shape(1), splits.count, cols}, DType::f32, partial.device(),
                                      {x.shape(1) * plane, plane, cols, 1});
  reduce_columns(reduction, again, y, divisor, stream);
}

/// Shorter rows are reduced as columns of the transposed view: each thread has a row.
constexpr std::int64_t kShortest = 32;

void run(Reduction reduction, const Call& call) {
  const Dim &j = call.kept[0], &i = call.kept[1], &inner = call.kept[2];
  const auto distance = [](const Dim& dim) { return dim.extent == 1 ? std::numeric_limits<std::int64_t>::max() : std::abs(dim.x_stride); };
  const bool along_rows = call.extent == 1 || std::abs(call.stride) <= std::min({distance(j), distance(i), distance(inner)});
  if (along_rows && call.extent > kShortest) {
    const Tensor x =
        call.view(call.x, {j.extent, i.extent, inner.extent, call.extent}, {j.x_stride, i.x_stride, inner.x_stride, call.stride});
    return reduce_rows(reduction, x, call.y, call.divisor, call.stream);
  }
  // The columns are the kept dimension with x's smallest stride.
  Dim dims[3] = {j, i, inner};
  std::stable_sort(dims, dims + 3, [&](const Dim& a, const Dim& b) { return distance(a) > distance(b); });
  const Tensor x = call.view(call.x, {dims[0].extent, dims[1].extent, call.extent, dims[2].extent},
                             {dims[0].x_stride, dims[1].x_stride, call.stride, dims[2].x_stride});
  const Tensor y =
      call.view(call.y, {dims[0].extent, dims[1].extent, 1, dims[2].extent}, {dims[0].y_stride, dims[1].y_stride, 0, dims[2].y_stride});
  reduce_columns(reduction, x, y, call.divisor, call.stream);
}

}  // namespace

void reduce(Reduction reduction, const Tensor& x, const Tensor& y, const ReduceOptions& options) {
  const Call call = check(reduction, x, y, options);
  if (y.numel() > 0) run(reduction, call);
}

namespace kernels::reduce {

Splits choose_splits(std::int64_t extent, std::int64_t blocks, int tile, int wanted) {
  constexpr std::int64_t kFewestTiles = 4;  // per split: with fewer the second pass costs more than it saves
  const std::int64_t most = std::max<std::int64_t>(extent / (kFewestTiles * tile), 1);
  const std::int64_t count = blocks >= wanted ? 1 : std::min(most, (wanted + blocks - 1) / std::max<std::int64_t>(blocks, 1));
  const std::int64_t tiles = (extent + tile - 1) / tile;
  const std::int64_t length = std::max<std::int64_t>((tiles + count - 1) / count, 1) * tile;
  return {static_cast<int>(std::max<std::int64_t>((extent + length - 1) / length, 1)), static_cast<int>(length)};
}

namespace {

template <class Op, class T, class Out, RowTile tile>
Analysis analyze_rows(const ShapeValues& shape) {
  const Tensor x = placeholder({1, shape["batch"], shape["rows"], shape["cols"]}, dtype_of<T>);
  const Splits splits = choose_splits(shape["cols"], 1, tile.cols, std::max(shape.integer("splits"), 1));
  const Tensor y = placeholder({1, shape["batch"], shape["rows"], splits.count}, dtype_of<Out>);
  return analyze<ReduceRows<Op, T, Out, tile.rows, tile.cols>>(grid_of_rows(x, splits, tile.rows),
                                                               [&](auto& bind, auto& p) { bind_rows<Out>(bind, p, x, y, splits, 1); });
}

template <class Op, class T, class Out>
Analysis analyze_columns(const ShapeValues& shape) {
  using Kernel = ReduceColumns<Op, T, Out>;
  const std::int64_t batch = shape["batch"], cols = shape["cols"];
  const Tensor x = placeholder({1, batch, shape["rows"], cols}, dtype_of<T>);
  const Splits splits = choose_splits(shape["rows"], 1, Kernel::tile_rows, std::max(shape.integer("splits"), 1));
  const Tensor y = placeholder(splits.count > 1 ? Shape{batch, splits.count, 1, cols} : Shape{1, batch, 1, cols}, dtype_of<Out>);
  return analyze<Kernel>(grid_of_columns(x, splits, Kernel::tile_cols),
                         [&](auto& bind, auto& p) { bind_columns(bind, p, x, y, splits, 1); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&](const ReduceKernel& kernel, const char* name, Analysis (*analyze)(const ShapeValues&)) {
    const std::string type = type_of(kernel);
    variants.push_back({make_spec({type, ReduceColumns<Sum, float, float>::source, nullptr}, true, true, name), analyze});
  };
  const auto rows = [&]<class Op, class T, class Out, RowTiles tiles>(const char* name, Reduction reduction = Reduction::sum) {
    constexpr RowTile tile = gpu_tile(tiles, sizeof(T));
    add({reduction, dtype_of<T>, dtype_of<Out>, tile.rows, tile.cols}, name, analyze_rows<Op, T, Out, tile>);
  };
  const auto columns = [&]<class Op, class T, class Out>(const char* name) {
    add({Reduction::sum, dtype_of<T>, dtype_of<Out>}, name, analyze_columns<Op, T, Out>);
  };
  rows.template operator()<Sum, bf16, bf16, RowTiles::short_rows>("sum_short_rows_bf16");
  rows.template operator()<Sum, bf16, bf16, RowTiles::rows>("sum_rows_bf16");
  rows.template operator()<Sum, bf16, bf16, RowTiles::long_rows>("sum_long_rows_bf16");
  rows.template operator()<Sum, bf16, float, RowTiles::long_rows>("sum_long_rows_bf16_f32");
  rows.template operator()<Sum, float, float, RowTiles::long_rows>("sum_long_rows_f32");
  rows.template operator()<AbsMax, bf16, float, RowTiles::rows>("abs_max_rows_bf16_f32", Reduction::abs_max);
  columns.template operator()<Sum, bf16, bf16>("sum_columns_bf16");
  columns.template operator()<Sum, float, float>("sum_columns_f32");
  return variants;
}

}  // namespace kernels::reduce
}  // namespace tw
