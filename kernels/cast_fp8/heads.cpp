#include <array>
#include <cmath>
#include <string>
#include <type_traits>

#include "kernels/cast_fp8/heads.tile.hpp"
#include "kernels/cast_fp8/variants.hpp"
#include "kernels/hadamard/plan.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/hadamard.hpp"
#include "tilewave/launch.hpp"

// cast_fp8_heads() and head_scales().

namespace tw {

namespace {

using namespace kernels;
using kernels::cast_fp8::HeadMaxima;
using kernels::cast_fp8::HeadScales;
using kernels::cast_fp8::PerHead;

constexpr std::int64_t kLongestRow = 2048;

/// A checked call. x and y are [batch, head, row, dim].
struct Call {
  Tensor x, y;
  Tensor scales;
  const Tensor* signs;
  bool rotate;
  Stream stream;

  int columns() const { return static_cast<int>(x.shape(3)); }
  int heads_per_scale() const { return static_cast<int>(x.shape(1) / scales.shape(1)); }
};

Call check(const char* op, const Tensor& x, const Tensor& scales, const CastFp8HeadsOptions& options) {
  const Device device = scales.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", op, x);
  check_operand(op, "x", x, x.dtype(), device);
  require(x.rank() == 4, "{}: x is {}; it must be [batch, seqlen, heads, head_dim]", op, x);
  check_extents(op, "x", x);
  const std::int64_t n = x.shape(3);
  require(n > 0 && n <= kLongestRow, "{}: x is {}; its head_dim must be 1 to {}", op, x, kLongestRow);
  check_operand(op, "scales", scales, DType::f32, device);
  require(scales.rank() == 2 && scales.shape(0) == x.shape(0), "{}: scales is {}; for x {} it must be f32[{}, kv_heads]", op, scales, x,
          x.shape(0));
  const std::int64_t heads = x.shape(2), of_scales = scales.shape(1);
  require(heads == 0 ? of_scales == 0 : of_scales > 0 && heads % of_scales == 0,
          "{}: x has {} heads and scales {}; the former must be a multiple of the latter", op, heads, of_scales);
  if (options.rotate) {
    require(kernels::hadamard::is_held(static_cast<int>(n)), "{}: x is {}; with rotate its head_dim must be a power of two from 2 to {}",
            op, x, kLongestRow);
  }
  if (options.signs != nullptr) {
    require(options.rotate, "{}: signs is given, but rotate is false", op);
    check_operand(op, "signs", *options.signs, DType::f32, device);
    require(options.signs->shape() == Shape{n}, "{}: signs is {}; it must be f32[{}], one for each element of x's last dimension", op,
            *options.signs, n);
  }
  return {.x = x.transpose(1, 2),
          .y = {},
          .scales = scales,
          .signs = options.signs,
          .rotate = options.rotate,
          .stream = checked_stream(op, options.stream, device)};
}

/// Heads vary fastest: in [batch, seqlen, heads, dim] the rows of neighbouring tiles are neighbours in memory.
TileGrid grid_of(const char* op, const Call& call, int tile_rows) {
  const std::int64_t m = (call.x.shape(2) + tile_rows - 1) / tile_rows, n = call.x.shape(1), batch = call.x.shape(0);
  require(m * n <= kLargestExtent && m * n * batch <= kLargestExtent, "{}: x is {}, which is {} x {} x {} tiles; they are limited to {}",
          op, call.x.transpose(1, 2), batch, n, m, kLargestExtent);
  return {static_cast<int>(m), static_cast<int>(n), static_cast<int>(batch)};
}

template <class P>
void fill_rotation(auto& bind, P& rotation, const Call& call) {
  if constexpr (requires { rotation.norm; }) {
    bind(rotation.signs, call.signs);
    rotation.used = call.rotate;
    rotation.norm = 1 / std::sqrt(static_cast<float>(call.columns()));
  }
}
void bind_cast(auto& bind, auto& p, const Call& call) {
  bind(p.x, call.x);
  bind(p.y, call.y);
  bind(p.scales, call.scales);
  p.heads_per_scale = call.heads_per_scale();
  fill_rotation(bind, p.rotation, call);
}
void bind_maxima(auto& bind, auto& p, const Call& call, const Tensor& maxima) {
  bind(p.x, call.x);
  bind(p.maxima, maxima);
  fill_rotation(bind, p.rotation, call);
}

/// The tile of a GPU for rows of n elements.
constexpr RowTile tile_for(int n, int width) {
  int cols = 1;
  while (cols < n) cols *= 2;
  return kernels::hadamard::held_tile(cols, width);
}

struct HeadsKernel {
  DType in;
  bool maxima, rotates;
  int n;
  auto operator<=>(const HeadsKernel&) const = default;
};
std::string type_of(const HeadsKernel& k) {
  const int width = piece_columns({k.in});
  const RowTile tile = tile_for(k.n, width);
  return tw::format("tw::kernels::cast_fp8::{}<{}, {}, {}, {}, {}, {}>", k.maxima ? "HeadMaxima" : "PerHead", element_name(k.in),
                    bool_name(k.rotates), tile.rows, tile.cols, tile.warps, width);
}
constexpr const char* kSource = PerHead<float, false, 4, 128, 4, 4>::source;

template <template <class, bool, int, int, int, int> class Kernel>
void launch_on_gpu(const Call& call, const TileGrid& grid, auto bind_all) {
  static KernelTable<HeadsKernel> table(type_of, kSource);
  const int columns = tile_for(call.columns(), piece_columns({call.x.dtype()})).cols;
  constexpr bool kMaxima = std::is_same_v<Kernel<float, false, 4, 128, 4, 4>, HeadMaxima<float, false, 4, 128, 4, 4>>;
  const auto launch = [&]<class In, bool kRotates>() {
    // The tile changes neither the layout of Params nor the way tensors are bound.
    using AnyTile = Kernel<In, kRotates, tile_for(128, kPieceColumns<In>).rows, 128, 4, kPieceColumns<In>>;
    detail::launch_named<typename AnyTile::template On<sm_90a::Target<>>::Params>(table[{call.x.dtype(), kMaxima, kRotates, columns}],
                                                                                  call.stream, grid, bind_all);
  };
  with_float_type(call.x.dtype(), [&]<class In>(std::type_identity<In>) {
    call.rotate ? launch.template operator()<In, true>() : launch.template operator()<In, false>();
  });
}

/// Calls f(Constant<C>{}) for the CPU's tiles, whose C columns hold a row.
template <class F>
void with_columns(int n, F f) {
  if (n <= 64) return f(Constant<64>{});
  if (n <= 128) return f(Constant<128>{});
  if (n <= 256) return f(Constant<256>{});
  f(Constant<2048>{});
}
/// A tile of 16 KB stays in the L1 cache.
constexpr int cpu_rows(int cols) { return cols < 4096 ? 4096 / cols : 1; }

}  // namespace

void cast_fp8_heads(const Tensor& x, const Tensor& y, const Tensor& scales, const CastFp8HeadsOptions& options) {
  constexpr const char* op = "cast_fp8_heads";
  Call call = check(op, x, scales, options);
  require(y.dtype() == DType::fp8_e4m3, "{}: y is {}; it must be fp8_e4m3", op, y);
  check_operand(op, "y", y, y.dtype(), scales.device());
  check_output(op, "y", y);
  require(y.shape() == x.shape(), "{}: y is {}; it must have x's shape, {}", op, y, x);
  check_disjoint(op, {"y", &y}, {{"x", &x}, {"scales", &scales}, {"signs", options.signs}});
  if (x.numel() == 0) return;
  call.y = y.transpose(1, 2);
  if (call.stream.device().is_cuda()) {
    const TileGrid grid = grid_of(op, call, tile_for(call.columns(), piece_columns({x.dtype()})).rows);
    return launch_on_gpu<PerHead>(call, grid, [&](auto& bind, auto& p) { bind_cast(bind, p, call); });
  }
  with_columns(call.columns(), [&]<int kCols>(Constant<kCols>) {
    constexpr int kRows = cpu_rows(kCols);
    launch_cpu<PerHead<cpu::AnyFloat, true, kRows, kCols, 4, 0>>(grid_of(op, call, kRows),
                                                                 [&](auto& bind, auto& p) { bind_cast(bind, p, call); });
  });
}

void head_scales(const Tensor& x, const Tensor& scales, const CastFp8HeadsOptions& options) {
  constexpr const char* op = "head_scales";
  const Call call = check(op, x, scales, options);
  check_output(op, "scales", scales);
  check_disjoint(op, {"scales", &scales}, {{"x", &x}, {"signs", options.signs}});
  if (scales.numel() == 0) return;
  const std::int64_t batch = scales.shape(0), heads = x.shape(2), of_scales = scales.shape(1);
  const bool cuda = call.stream.device().is_cuda();
  const auto rows_of = [&]() -> int {
    if (cuda) return tile_for(call.columns(), piece_columns({x.dtype()})).rows;
    int rows = 0;
    with_columns(call.columns(), [&]<int kCols>(Constant<kCols>) { rows = cpu_rows(kCols); });
    return rows;
  };
  const int rows = rows_of();
  const TileGrid grid = grid_of(op, call, rows * HeadMaxima<float, false, 4, 128, 4, 4>::kPasses);
  const std::int64_t count = std::int64_t{grid.m} * rows;  // of each head
  const Tensor maxima = workspace({batch, heads, count}, DType::f32, call.stream);
  if (x.numel() > 0) {
    const auto bind_all = [&](auto& bind, auto& p) { bind_maxima(bind, p, call, maxima); };
    if (cuda) {
      launch_on_gpu<HeadMaxima>(call, grid, bind_all);
    } else {
      with_columns(call.columns(), [&]<int kCols>(Constant<kCols>) {
        launch_cpu<HeadMaxima<cpu::AnyFloat, true, cpu_rows(kCols), kCols, 4, 0>>(grid, bind_all);
      });
    }
  }
  constexpr int kMaximaAtOnce = 1024;
  launch<HeadScales<kMaximaAtOnce>>(call.stream, {static_cast<int>(of_scales), static_cast<int>(batch)}, [&](auto& bind, auto& p) {
    bind(p.maxima, maxima.reshape({batch, of_scales, heads / of_scales * count}));
    bind(p.scales, scales);
  });
}

namespace kernels::cast_fp8 {

namespace {

KernelSpec spec_of(const HeadsKernel& kernel, const std::string& name) {
  return make_spec({type_of(kernel), kSource, nullptr}, true, true, name);
}

}  // namespace

KernelVariant rotated_heads_variant() {
  static constexpr int kDim = 128, kWidth = kPieceColumns<bf16>;
  using Instantiated = PerHead<bf16, true, tile_for(kDim, kWidth).rows, kDim, tile_for(kDim, kWidth).warps, kWidth>;
  return {spec_of({DType::bf16, false, true, kDim}, "cast_fp8_heads_rotated_bf16_128"), [](const ShapeValues& shape) {
            const std::int64_t rows = shape["rows"], cols = shape["cols"];
            require(cols <= kDim, "shape: cols is {}; the kernel supports up to {}", cols, kDim);
            const Tensor x = placeholder({1, rows, 1, cols}, DType::bf16), signs = placeholder({cols}, DType::f32);
            Call call = check("cast_fp8_heads", x, placeholder({1, 1}, DType::f32), {.rotate = true, .signs = &signs});
            call.y = placeholder(x.shape(), DType::fp8_e4m3).transpose(1, 2);
            return analyze<Instantiated>(grid_of("cast_fp8_heads", call, tile_for(kDim, kWidth).rows),
                                         [&](auto& bind, auto& p) { bind_cast(bind, p, call); });
          }};
}

std::vector<KernelSpec> all_head_specs() {
  std::vector<KernelSpec> specs;
  for (const DType in : {DType::bf16, DType::f16, DType::f32})
    for (const bool maxima : {false, true})
      for (const bool rotates : {false, true})
        for (int n = 8; n <= kLongestRow; n *= 2)
          specs.push_back(
              spec_of({in, maxima, rotates, n}, tw::format("{} {} rotates {} n {}", name_of(in), maxima ? "maxima" : "cast", rotates, n)));
  return specs;
}

}  // namespace kernels::cast_fp8
}  // namespace tw
