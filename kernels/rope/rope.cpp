#include "tilewave/rope.hpp"

#include <algorithm>
#include <cmath>
#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/named.hpp"
#include "kernels/rope/rope.tile.hpp"
#include "kernels/rope/variants.hpp"
#include "kernels/rows.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels;
using kernels::rope::Pairs;
using kernels::rope::Table;
using kernels::rope::TwoParts;

constexpr const char* kOp = "rope";

/// A checked call. Tensors are [batch, seqlen, heads, ...], or with `one_token` false [batch, 1, seqlen * heads, ...]; `rest` has no
/// columns if nothing passes through.
struct Call {
  Tensor x, y, cos, sin, rest_in, rest_out;
  std::int64_t half, heads;
  bool one_token;  ///< whether a tile's rows are heads of one token
  const RopeOptions& options;
  Stream stream;
};

/// Views pairs of elements of `t` as words.
Tensor words(const Tensor& t, std::int64_t half) {
  Shape shape = t.shape();
  std::vector<std::int64_t> strides = t.strides();
  shape.back() = half;
  for (std::size_t dim = 0; dim < 3; ++dim) strides[dim] /= 2;
  return Tensor::borrow(t.data(), std::move(shape), size_of(t.dtype()) == 2 ? DType::i32 : DType::i64, t.device(), std::move(strides));
}
bool pairs_are_words(const Tensor& t) {
  if (t.stride(-1) != 1 || reinterpret_cast<std::uintptr_t>(t.data()) % (2 * size_of(t.dtype())) != 0) return false;
  for (int dim = 0; dim < 3; ++dim)
    if (t.shape(dim) > 1 && t.stride(dim) % 2 != 0) return false;
  return true;
}

void bind_common(auto& bind, auto& p, const Call& call) {
  bind(p.cos, call.cos);
  bind(p.sin, call.sin);
  bind(p.rest_in, call.rest_in);
  bind(p.rest_out, call.rest_out);
  const RopeOptions& o = call.options;
  p.offset = o.offset;
  p.seqlen = static_cast<int>(call.x.shape(1));
  p.heads = static_cast<u32>(call.heads);
  p.rows = static_cast<int>(call.x.shape(2));
  p.offsets = o.offsets ? o.offsets->data<std::int32_t>() : nullptr;
  p.offset_stride = o.offsets ? o.offsets->stride(0) : 0;
  p.positions = o.positions ? o.positions->data<std::int32_t>() : nullptr;
  p.position_stride_i = o.positions ? o.positions->stride(-1) : 0;
  p.position_stride_j = o.positions && o.positions->rank() == 2 ? o.positions->stride(0) : 0;
}

void bind_pairs(auto& bind, auto& p, const Call& call) {
  bind_common(bind, p, call);
  bind(p.in, words(call.x, call.half));
  bind(p.out, words(call.y, call.half));
}

void bind_parts(auto& bind, auto& p, const Call& call) {
  const bool interleaved = call.options.pairing == RopePairing::interleaved;
  const std::int64_t step = interleaved ? 2 : 1, second = interleaved ? 1 : call.half;
  bind_common(bind, p, call);
  bind(p.first_in, columns_of(call.x, 0, call.half, step));
  bind(p.second_in, columns_of(call.x, second, call.half, step));
  bind(p.first_out, columns_of(call.y, 0, call.half, step));
  bind(p.second_out, columns_of(call.y, second, call.half, step));
}

TileGrid grid_of(const Call& call, int rows, int cols) {
  const std::int64_t outer = call.x.shape(0) * call.x.shape(1);
  const std::int64_t m = (call.x.shape(2) + rows - 1) / rows, n = (call.half + cols - 1) / cols;
  require(outer * m <= kLargestExtent && outer * m * n <= kLargestExtent,
          "{}: x is {}, which is {} x {} x {} tiles; they are limited to {}", kOp, call.x, outer, m, n, kLargestExtent);
  return {static_cast<int>(m), static_cast<int>(n), static_cast<int>(outer)};
}

/// Pairs; TwoParts if the pairs are not aligned words.
struct TileKernel {
  bool pairs;
  DType x, table;
  int rows, cols;
  bool one_token;
  auto operator<=>(const TileKernel&) const = default;
  /// Columns of a piece: 16 bytes, if the tile then has one for each thread.
  int width() const { return std::min(16 / static_cast<int>(size_of(x)), rows * cols / 128); }
};

std::string type_of(const TileKernel& k) {
  return tw::format("tw::kernels::rope::{}<{}, {}, {}, {}, {}, {}>", k.pairs ? "Pairs" : "TwoParts", element_name(k.x),
                    element_name(k.table), k.rows, k.cols, k.width(), bool_name(k.one_token));
}

/// For the GPU: two pieces per thread if that leaves enough blocks; rows without a head and columns without a pair waste lanes.
TileKernel choose_kernel(const Call& call, bool pairs) {
  const std::int64_t rows = call.x.shape(2), outer = call.x.shape(0) * call.x.shape(1);
  const bool many = rows * outer >= 32 * 8 * std::int64_t{device_info(call.stream.device()).units};
  TileKernel kernel{.pairs = pairs,
                    .x = call.x.dtype(),
                    .table = call.cos.dtype(),
                    .rows = rows <= 4           ? 4
                            : rows <= 8         ? 8
                            : rows > 16 && many ? 32
                                                : 16,
                    .cols = call.half <= 32   ? 32
                            : call.half <= 64 ? 64
                                              : 128,
                    .one_token = call.one_token};
  if (call.half <= 16) {
    kernel.cols = 16;
    kernel.rows = std::max(8, kernel.rows == 32 && rows > 32 ? 64 : kernel.rows);
  }
  return kernel;
}

/// Only the width of pieces affects the layout of Params, not the rest of the tile size.
template <template <class, class, int, int, int, bool> class Kernel, class X, class T, class Bind>
void launch_on_gpu(const Call& call, const TileKernel& kernel, Bind bind_call) {
  static KernelTable<TileKernel> table(type_of, Kernel<X, T, 16, 64, 1, true>::source);
  const TileGrid grid = grid_of(call, kernel.rows, kernel.cols);
  const auto with_width = [&]<int kWidth>() {
    detail::launch_named<typename Kernel<X, T, 16, 64, kWidth, true>::template On<sm_90a::Target<>>::Params>(table[kernel], call.stream,
                                                                                                             grid, bind_call);
  };
  switch (kernel.width()) {
    case 1:
      return with_width.template operator()<1>();
    case 2:
      return with_width.template operator()<2>();
    case 4:
      return with_width.template operator()<4>();
    default:
      if constexpr (sizeof(X) == 2) with_width.template operator()<8>();
  }
}

template <template <class, class, int, int, int, bool> class Kernel, class X, class T, class Bind>
void launch_tiles(const Call& call, bool pairs, Bind bind_call) {
  if (call.stream.device().is_cuda()) return launch_on_gpu<Kernel, X, T>(call, choose_kernel(call, pairs), bind_call);
  constexpr int kRows = 8, kCols = 64;
  launch_cpu<Kernel<X, T, kRows, kCols, kRows * kCols / 128, true>>(grid_of(call, kRows, kCols), bind_call);
}

template <class X, class T>
void run(const Call& call) {
  const bool interleaved = call.options.pairing == RopePairing::interleaved;
  if (interleaved && pairs_are_words(call.x) && pairs_are_words(call.y)) {
    launch_tiles<Pairs, X, T>(call, true, [&](auto& bind, auto& p) { bind_pairs(bind, p, call); });
  } else {
    launch_tiles<TwoParts, X, T>(call, false, [&](auto& bind, auto& p) { bind_parts(bind, p, call); });
  }
}

/// Heads of all tokens as rows, [batch, 1, seqlen * heads, ...].
bool tokens_merge(const Tensor& t) { return t.stride(1) == t.shape(2) * t.stride(2); }
Tensor merge_tokens(const Tensor& t) {
  Shape shape = t.shape();
  std::vector<std::int64_t> strides = t.strides();
  shape[2] *= shape[1];
  shape[1] = 1;
  return Tensor::borrow(t.data(), std::move(shape), t.dtype(), t.device(), std::move(strides));
}

/// A tensor [seqlen, heads, dim] as [1, seqlen, heads, dim].
Tensor with_batch(const Tensor& t) {
  if (t.rank() == 4) return t;
  Shape shape = t.shape();
  std::vector<std::int64_t> strides = t.strides();
  shape.insert(shape.begin(), 1);
  strides.insert(strides.begin(), 0);
  return Tensor::borrow(t.data(), std::move(shape), t.dtype(), t.device(), std::move(strides));
}

Call check(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& y, const RopeOptions& options) {
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", kOp, x);
  check_operand(kOp, "x", x, x.dtype(), device);
  check_operand(kOp, "y", y, x.dtype(), device);
  check_output(kOp, "y", y);
  require(x.rank() == 3 || x.rank() == 4, "{}: x is {}; it must be [batch, seqlen, heads, dim] or [seqlen, heads, dim]", kOp, x);
  require(y.shape() == x.shape(), "{}: y is {}; it must have x's shape, {}", kOp, y, x);
  check_extents(kOp, "x", x);
  check_in_place(kOp, {"y", &y}, {"x", &x});
  require(cos.dtype() == x.dtype() || cos.dtype() == DType::f32, "{}: cos is {}; it must be of x's dtype, {}, or f32", kOp, cos,
          name_of(x.dtype()));
  check_operand(kOp, "cos", cos, cos.dtype(), device);
  check_operand(kOp, "sin", sin, cos.dtype(), device);
  require(cos.rank() == 2, "{}: cos is {}; it must be [positions, rotary_dim / 2]", kOp, cos);
  require(sin.shape() == cos.shape(), "{}: sin is {}; it must have cos's shape, {}", kOp, sin, cos);
  check_extents(kOp, "cos", cos);
  const std::int64_t half = cos.shape(1), dim = x.shape(-1), seqlen = x.shape(-3), batch = x.rank() == 4 ? x.shape(0) : 1;
  require(x.numel() == 0 || (half > 0 && 2 * half <= dim),
          "{}: cos is {}, for {} rotary dimensions, but x is {}; they must be at least 2 and at most its last dimension", kOp, cos,
          2 * half, x);
  check_disjoint(kOp, {"y", &y}, {{"cos", &cos}, {"sin", &sin}, {"offsets", options.offsets}, {"positions", options.positions}});
  require(!options.offsets || !options.positions, "{}: both offsets and positions are given; at most one may be", kOp);
  if (options.offsets) {
    check_operand(kOp, "offsets", *options.offsets, DType::i32, device);
    require(options.offsets->shape() == Shape{batch}, "{}: offsets is {}; it must be [{}]", kOp, *options.offsets, batch);
  }
  if (options.positions) {
    const Tensor& positions = *options.positions;
    check_operand(kOp, "positions", positions, DType::i32, device);
    require(positions.shape() == Shape{seqlen} || positions.shape() == (Shape{batch, seqlen}),
            "{}: positions is {}; it must be [{}, {}] or [{}]", kOp, positions, batch, seqlen, seqlen);
  }
  if (x.numel() > 0) {
    require(cos.shape(0) > 0, "{}: cos is {}; a table without positions serves no rows", kOp, cos);
    if (!options.offsets && !options.positions)
      require(options.offset >= 0 && options.offset <= cos.shape(0) - seqlen,
              "{}: offset is {} and x is {}; positions {} to {} are not all in the table, which has {}", kOp, options.offset, x,
              options.offset, options.offset + seqlen - 1, cos.shape(0));
  }
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  Tensor x4 = with_batch(x), y4 = with_batch(y);
  const std::int64_t heads = x4.shape(2);
  // Tiles have up to 16 or 32 rows, so 8 and 16 heads fill them.
  const bool one_token = !device.is_cuda() || seqlen == 1 || (heads % 8 == 0 && (heads <= 16 || heads % 16 == 0)) || !tokens_merge(x4) ||
                         !tokens_merge(y4) || seqlen * heads > kLargestExtent;
  if (!one_token) {
    x4 = merge_tokens(x4);
    y4 = merge_tokens(y4);
  }
  const std::int64_t rest = y.data() == x.data() ? 0 : dim - 2 * half;
  return {x4, y4, cos, sin, columns_of(x4, 2 * half, rest), columns_of(y4, 2 * half, rest), half, heads, one_token, options, stream};
}

constexpr int kTableRows = 8, kTableCols = 64;

TileGrid grid_of_table(const Tensor& cos) {
  const std::int64_t m = (cos.shape(0) + kTableRows - 1) / kTableRows, n = (cos.shape(1) + kTableCols - 1) / kTableCols;
  require(m * n <= kLargestExtent, "rope_table: cos is {}, which is {} tiles; they are limited to {}", cos, m * n, kLargestExtent);
  return {static_cast<int>(m), static_cast<int>(n), 1};
}

void bind_table(auto& bind, auto& p, const Tensor& cos, const Tensor& sin, const RopeTableOptions& options) {
  bind(p.cos, cos);
  bind(p.sin, sin);
  p.positions = options.positions ? options.positions->data<std::int32_t>() : nullptr;
  p.position_stride = options.positions ? options.positions->stride(0) : 0;
  p.offset = options.offset;
  p.step = std::log2(options.theta) / static_cast<double>(cos.shape(1));
}

}  // namespace

void rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& y, const RopeOptions& options) {
  const Call call = check(x, cos, sin, y, options);
  if (x.numel() == 0) return;
  with_float_type(x.dtype(), [&]<class X>(std::type_identity<X>) { cos.dtype() == x.dtype() ? run<X, X>(call) : run<X, float>(call); });
}

void rope_table(const Tensor& cos, const Tensor& sin, const RopeTableOptions& options) {
  constexpr const char* op = "rope_table";
  const Device device = cos.device();
  require(is_float(cos.dtype()), "{}: cos is {}; f32, f16 and bf16 are supported", op, cos);
  check_operand(op, "cos", cos, cos.dtype(), device);
  check_operand(op, "sin", sin, cos.dtype(), device);
  check_output(op, "cos", cos);
  check_output(op, "sin", sin);
  require(cos.rank() == 2, "{}: cos is {}; it must be [rows, rotary_dim / 2]", op, cos);
  require(sin.shape() == cos.shape(), "{}: sin is {}; it must have cos's shape, {}", op, sin, cos);
  check_extents(op, "cos", cos);
  check_disjoint(op, {"sin", &sin}, {{"cos", &cos}, {"positions", options.positions}});
  check_disjoint(op, {"cos", &cos}, {{"positions", options.positions}});
  require(std::isfinite(options.theta) && options.theta > 0, "{}: theta is {}; it must be positive and finite", op, options.theta);
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  require(std::abs(options.offset) <= most && std::abs(options.offset + cos.shape(0)) <= most,
          "{}: offset is {} for {} rows; positions are limited to +-{}", op, options.offset, cos.shape(0), most);
  if (options.positions) {
    check_operand(op, "positions", *options.positions, DType::i32, device);
    require(options.positions->shape() == Shape{cos.shape(0)}, "{}: positions is {}; it must be [{}]", op, *options.positions,
            cos.shape(0));
  }
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  if (cos.numel() == 0) return;
  const TileGrid grid = grid_of_table(cos);
  with_float_type(cos.dtype(), [&]<class T>(std::type_identity<T>) {
    launch<Table<T, kTableRows, kTableCols>>(stream, grid, [&](auto& bind, auto& p) { bind_table(bind, p, cos, sin, options); });
  });
}

namespace kernels::rope {

namespace {

/// Tensors for a shape: x and y [batch, seqlen, heads, dim], and tables of `Element`.
struct Placeholders {
  Tensor x, y, cos, sin;
  Placeholders(const ShapeValues& shape, DType dtype, DType table) {
    const std::int64_t dim = shape["dim"];
    require(dim > 0 && dim % 2 == 0, "shape: dim is {}; it must be positive and even", dim);
    x = placeholder({shape["batch"], shape["seqlen"], shape["heads"], dim}, dtype);
    y = placeholder(x.shape(), dtype);
    cos = placeholder({shape["seqlen"], dim / 2}, table);
    sin = placeholder(cos.shape(), table);
  }
};

template <class X, class T, int kRows, int kCols, int kWidth>
Analysis analyze_parts(const ShapeValues& shape) {
  const Placeholders of(shape, dtype_of<X>, dtype_of<T>);
  const RopeOptions options;
  const Call call = check(of.x, of.cos, of.sin, of.y, options);
  return analyze<TwoParts<X, T, kRows, kCols, kWidth, true>>(grid_of(call, kRows, kCols),
                                                             [&](auto& bind, auto& p) { bind_parts(bind, p, call); });
}

template <class X, class T, int kRows, int kCols, int kWidth>
Analysis analyze_pairs(const ShapeValues& shape) {
  const Placeholders of(shape, dtype_of<X>, dtype_of<T>);
  const RopeOptions options{.pairing = RopePairing::interleaved};
  const Call call = check(of.x, of.cos, of.sin, of.y, options);
  return analyze<Pairs<X, T, kRows, kCols, kWidth, true>>(grid_of(call, kRows, kCols),
                                                          [&](auto& bind, auto& p) { bind_pairs(bind, p, call); });
}

template <class T>
Analysis analyze_table(const ShapeValues& shape) {
  const Placeholders of(shape, dtype_of<T>, dtype_of<T>);
  return analyze<Table<T, kTableRows, kTableCols>>(grid_of_table(of.cos),
                                                   [&](auto& bind, auto& p) { bind_table(bind, p, of.cos, of.sin, {}); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto table = [&]<class T>(const char* name) {
    variants.push_back({make_spec(kernel_info<Table<T, kTableRows, kTableCols>>, true, true, name), analyze_table<T>});
  };
  const auto add = [&]<class X, class T, int kRows, int kCols>(bool pairs, const char* name, Analysis (*analyze)(const ShapeValues&)) {
    const std::string type = type_of(TileKernel{pairs, dtype_of<X>, dtype_of<T>, kRows, kCols, true});
    variants.push_back({make_spec({type, TwoParts<X, T, kRows, kCols, 1, true>::source, nullptr}, true, true, name), analyze});
  };
  const auto parts = [&]<class X, class T, int kRows, int kCols, int kWidth>(const char* name) {
    add.template operator()<X, T, kRows, kCols>(false, name, analyze_parts<X, T, kRows, kCols, kWidth>);
  };
  const auto pairs = [&]<class X, class T, int kRows, int kCols, int kWidth>(const char* name) {
    add.template operator()<X, T, kRows, kCols>(true, name, analyze_pairs<X, T, kRows, kCols, kWidth>);
  };
  table.template operator()<float>("rope_table_f32");
  table.template operator()<bf16>("rope_table_bf16");
  parts.template operator()<bf16, bf16, 16, 64, 8>("rope_bf16_16x64");
  parts.template operator()<bf16, float, 16, 64, 8>("rope_bf16_f32_16x64");
  parts.template operator()<bf16, bf16, 8, 32, 2>("rope_bf16_8x32");
  parts.template operator()<float, float, 16, 64, 4>("rope_f32_16x64");
  pairs.template operator()<bf16, bf16, 16, 64, 8>("rope_interleaved_bf16_16x64");
  return variants;
}

}  // namespace kernels::rope
}  // namespace tw
