#include <vector>

#include "kernels/bitnet/kernels.hpp"
#include "kernels/bitnet/variants.hpp"
#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/reduce.hpp"

namespace tw::kernels::bitnet {

namespace {

constexpr const char* kQuantizeSource = "kernels/bitnet/quantize.tile.hpp";
constexpr const char* kProductSource = "kernels/bitnet/products.tile.hpp";

constexpr int kMostRows = 16;          ///< of x, in the kernel for few rows
constexpr int kRingBytes = 192 << 10;  ///< of W in flight on an SM, in the rings of all its blocks
constexpr int kMostStages = 12, kMostGenericStages = 8;
constexpr int kSlotBytes = 128;  ///< of each row of W, in the kernel for many rows of x

bool starts_at_16_bytes(const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data()) % 16 == 0; }
bool has_whole_pieces(const TernaryMatrix& w) { return w.values.shape(1) % 16 == 0 && starts_at_16_bytes(w.values); }

/// The tile with as many slots as the rings of an SM's blocks have room for. A single block gets no more than one of two does.
SkinnyTile with_slots(SkinnyTile tile, std::int64_t generic_shared) {
  const int slot = tile.rows * 64 * tile.warps;  // SkinnyTernaryGemm::depth codes of each row
  tile.stages = std::min(kMostStages, kRingBytes / std::max(2, tile.blocks) / slot);
  if (generic_shared > 0)
    tile.stages = generic_stages(generic_shared, slot, tile.warps * tile.rows * tile.x_rows * 4, std::min(kMostGenericStages, tile.stages));
  return tile;
}

// The kernels of the other operations.

constexpr int kRows = 8, kColumns = 256;  ///< of a tile of the kernels that need no rows in full

/// Rows that are too long for a block's registers.
constexpr RowTile kChunk{1, 8192, 16};

struct ActivationKernel {
  DType dtype = DType::bf16;
  int rows = kChunk.rows, cols = kChunk.cols, warps = kChunk.warps;
  auto operator<=>(const ActivationKernel&) const = default;
};
std::string type_of_activations(const ActivationKernel& k) {
  return tw::format("tw::kernels::bitnet::QuantizeActivations<{}, {}, {}, {}, {}>", element_name(k.dtype), k.rows, k.cols, k.warps,
                    piece_columns({k.dtype}));
}
template <class In>
using HostActivations = QuantizeActivations<In, kChunk.rows, kChunk.cols, kChunk.warps, kPieceColumns<In>>;
template <class In>
using SumsKernel = AbsoluteSums<In, kRows, kColumns, kPieceColumns<In>>;
template <class In>
using TernaryKernel = QuantizeTernary<In, kRows, kColumns>;
using UnpackKernel = UnpackTernary<kRows, kColumns>;
template <class Sum, class T>
using ScaleKernel = ScaleSums<Sum, T, kRows, kColumns, 4>;

TileGrid grid_of(std::int64_t rows, std::int64_t columns) { return {.m = tiles_of(rows, kRows), .n = tiles_of(columns, kColumns)}; }

void bind_activations(auto& bind, auto& p, const Tensor& x, const Tensor& values, const Tensor& scales) {
  const Tensor column = scales.reshape({x.shape(0), 1});
  bind(p.x, x);
  bind(p.values, values);
  bind(p.scales, column);
}
void bind_ternary(auto& bind, auto& p, const Tensor& weight, const Tensor& sum, const TernaryMatrix& out) {
  const Tensor scales = out.scales.reshape({weight.shape(0), 1});
  bind(p.w, weight);
  bind(p.sum, sum);
  bind(p.values, out.values);
  bind(p.scales, scales);
  p.per_element = weight.shape(1) == 0 ? 0.0f : static_cast<float>(1.0 / static_cast<double>(weight.numel()));
}

/// y = sums, times the scales if `scaled`, plus bias and y as the call says.
template <class Sum>
void scale_sums(const Call& call, const Tensor& sums, bool scaled) {
  const Tensor x_scales = call.x_scales.reshape({call.m(), 1}), scales = call.weight.scales.reshape({1, call.n()});
  Tensor bias;
  if (call.options.bias != nullptr) bias = call.options.bias->reshape({1, call.n()});
  with_float_type(call.y.dtype(), [&]<class T>(std::type_identity<T>) {
    launch_gpu<ScaleKernel<Sum, T>>(call.stream, grid_of(call.m(), call.n()), [&](auto& bind, auto& p) {
      bind(p.sums, sums);
      bind(p.x_scales, scaled ? &x_scales : nullptr);
      bind(p.scales, scaled ? &scales : nullptr);
      bind(p.bias, call.options.bias == nullptr ? nullptr : &bias);
      bind(p.added, call.options.accumulate ? &call.y : nullptr);
      bind(p.y, call.y);
    });
  });
}

void launch_wide(const Call& call, const WideTile& tile, const Tensor& y, bool with_bias) {
  static KernelTable<WideKernel> table(type_of, kProductSource);
  const WideKernel kernel{y.dtype(), tile};
  const bool transposed = tile.x_rows >= 128 && size_of(y.dtype()) == 2;
  const auto launch_as = [&]<DType dtype>() {
    if (dtype != kernel.dtype) return;
    using Params = typename WideHostKernel<WideKernel{.dtype = dtype}>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(table[kernel], call.stream, wide_grid(call, tile),
                                 [&](auto& bind, auto& p) { bind_wide(bind, p, call, y, with_bias, transposed); });
  };
  launch_as.template operator()<DType::bf16>();
  launch_as.template operator()<DType::f16>();
  launch_as.template operator()<DType::f32>();
}

/// W in i8 for gemm(), and its sums, in memory of the call.
void run_unpacked(const Call& call) {
  const Tensor sums = workspace({call.m(), call.n()}, DType::i32, call.stream);
  const Tensor weight = workspace({call.n(), call.k()}, DType::i8, call.stream);
  if (weight.numel() > 0) unpack_on_gpu(call.weight, weight, call.stream);
  tw::gemm(call.x, weight.transpose(0, 1), sums, {.stream = call.stream});
  scale_sums<i32>(call, sums, true);
}

}  // namespace

bool is_skinny(const Call& call) { return call.m() <= kMostRows && call.k() > 0 && has_whole_pieces(call.weight); }

bool is_wide(const Call& call) {
  if (call.k() == 0 || generic_shared_bytes(call.stream) > 0) return false;
  return has_whole_pieces(call.weight) && call.x.stride(0) % 16 == 0 && starts_at_16_bytes(call.x);
}

SkinnyKernel skinny_kernel(const Call& call, int units, std::int64_t generic_shared) {
  SkinnyTile tile;
  if (call.m() > tile.x_rows) tile.x_rows = kMostRows, tile.blocks = 1;
  if (generic_shared > 0) tile.blocks = 1;
  // 32 rows of W halve the loads of x, if there are enough tiles for all SMs.
  if (call.n() > std::int64_t{16} * units * tile.blocks) tile.rows = 32;
  return {call.y.dtype(), call.options.accumulate, with_slots(tile, generic_shared)};
}

double predicted_cycles(const Call& call, const WideTile& t, int units) {
  constexpr int codes = 4 * kSlotBytes;
  const TileGrid grid = wide_grid(call, t);
  const std::int64_t tiles = std::int64_t{grid.m} * grid.n;
  const auto slots = static_cast<double>((call.weight.values.shape(1) + kSlotBytes - 1) / kSlotBytes);
  // For a slot: products of 64 rows take half a cycle for each 32 codes and row of x; a scheduler issues one of 32 lanes' instructions in a
  // cycle, two of three slots at best, and half of them with one warp on each scheduler; an SM's share of the memory's read rate, and what
  // it reads from the L2 cache.
  const double products = t.w_rows / 64.0 * t.x_rows / 2.0 * codes / 32.0;
  const double decoding = t.w_rows * static_cast<double>(codes) * 1.5 / 128 * (t.w_rows > 64 ? 1.5 : 2.0);
  const double busy = static_cast<double>(std::min<std::int64_t>(tiles, units)) / units;
  const double memory = t.w_rows * kSlotBytes / 20.7 * busy;
  const double cache = (t.w_rows * kSlotBytes + static_cast<double>(t.x_rows) * codes) / 45;
  const double slot = std::max({products * 1.05, decoding, memory, cache});
  // The start fills the ring; the end stores the results, 16 of them in a cycle.
  const double around = 2000 + t.w_rows * t.x_rows / 16.0;
  return static_cast<double>((tiles + units - 1) / units) * (slots * slot + around);
}

WideTile wide_tile(const Call& call, int units) {
  return *std::min_element(kWideTiles.begin(), kWideTiles.end(), [&](const WideTile& a, const WideTile& b) {
    return predicted_cycles(call, a, units) < predicted_cycles(call, b, units);
  });
}

std::string describe(const SkinnyTile& tile) {
  return tw::format("{} x {}, {} slots, {} warps, {} per SM", tile.rows, tile.x_rows, tile.stages, tile.warps, tile.blocks);
}
std::string describe(const WideTile& tile) { return tw::format("{} x {}", tile.w_rows, tile.x_rows); }

std::string type_of(const SkinnyKernel& k) {
  return tw::format("tw::kernels::bitnet::SkinnyTernaryGemm<{}, {}, {}, {}, {}, {}>",
                    linear_name(k.dtype, Activation::none, {.addends = k.addends}), k.tile.rows, k.tile.x_rows, k.tile.stages, k.tile.warps,
                    k.tile.blocks);
}
std::string type_of(const WideKernel& k) {
  const WideTile& t = k.tile;
  return tw::format("tw::kernels::bitnet::TernaryGemm<{}, tw::kernels::bitnet::TernaryTiles<{}, {}, {}, {}, {}>>", element_name(k.dtype),
                    t.w_rows, t.x_rows, t.w_stages, t.x_stages, t.band);
}

void run_skinny(const Call& call, const SkinnyKernel& kernel) {
  static KernelTable<SkinnyKernel> table(type_of, kProductSource);
  const auto launch_as = [&]<DType dtype, bool addends>() {
    if (dtype != kernel.dtype || addends != kernel.addends) return;
    // Its results are as wide as any, because y's alignment is checked against them.
    using Host = SkinnyHostKernel<SkinnyKernel{dtype, addends, {.rows = 32, .x_rows = kMostRows}}>;
    detail::launch_named<typename Host::template On<sm_90a::Target<>>::Params>(table[kernel], call.stream, skinny_grid(call, kernel.tile),
                                                                               [&](auto& bind, auto& p) { bind_skinny(bind, p, call); });
  };
  const auto launch_type = [&]<DType dtype>() {
    launch_as.template operator()<dtype, false>();
    launch_as.template operator()<dtype, true>();
  };
  launch_type.template operator()<DType::bf16>();
  launch_type.template operator()<DType::f16>();
  launch_type.template operator()<DType::f32>();
}

void run_wide(const Call& call, const WideTile& tile) {
  if (!call.options.accumulate) return launch_wide(call, tile, call.y, call.options.bias != nullptr);
  // Reading y at the end of this kernel would cost registers.
  const Tensor product = workspace({call.m(), call.n()}, DType::f32, call.stream);
  launch_wide(call, tile, product, false);
  scale_sums<float>(call, product, false);
}

void run_on_gpu(const Call& call) {
  const int units = device_info(call.stream.device()).units;
  if (is_skinny(call)) return run_skinny(call, skinny_kernel(call, units, generic_shared_bytes(call.stream)));
  if (is_wide(call)) return run_wide(call, wide_tile(call, units));
  run_unpacked(call);
}

void quantize_activations_on_gpu(const Tensor& x, const Tensor& values, const Tensor& scales, const Stream& stream) {
  static KernelTable<ActivationKernel> table(type_of_activations, kQuantizeSource);
  constexpr int kMostShare = 32;
  const std::int64_t rows = x.shape(0), cols = std::max<std::int64_t>(1, x.shape(1));
  RowTile tile = kChunk;
  if (cols <= longest_held_row(kMostShare)) tile = row_tile(choose_rows(rows, cols, device_info(stream.device()).units, kMostShare));
  const ActivationKernel kernel{x.dtype(), tile.rows, tile.cols, tile.warps};
  with_float_type(x.dtype(), [&]<class In>(std::type_identity<In>) {
    using Params = typename HostActivations<In>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(table[kernel], stream, {.m = tiles_of(rows, tile.rows)},
                                 [&](auto& bind, auto& p) { bind_activations(bind, p, x, values, scales); });
  });
}

void quantize_ternary_on_gpu(const Tensor& weight, const TernaryMatrix& out, const Stream& stream) {
  const std::int64_t n = weight.shape(0), k = weight.shape(1), pieces = tiles_of(k, kColumns);
  const Tensor sums = workspace({n, pieces}, DType::f32, stream), sum = workspace({1, 1}, DType::f32, stream);
  with_float_type(weight.dtype(), [&]<class In>(std::type_identity<In>) {
    if (k > 0) {
      launch_gpu<SumsKernel<In>>(stream, grid_of(n, k), [&](auto& bind, auto& p) {
        bind(p.w, weight);
        bind(p.sums, sums);
      });
    }
    tw::reduce(Reduction::sum, sums.reshape({1, n * pieces}), sum.reshape({1}), {.stream = stream});
    launch_gpu<TernaryKernel<In>>(stream, grid_of(n, std::max<std::int64_t>(1, k / 4)),
                                  [&](auto& bind, auto& p) { bind_ternary(bind, p, weight, sum, out); });
  });
}

void unpack_on_gpu(const TernaryMatrix& weight, const Tensor& out, const Stream& stream) {
  launch_gpu<UnpackKernel>(stream, grid_of(out.shape(0), out.shape(1)), [&](auto& bind, auto& p) {
    bind(p.values, weight.values);
    bind(p.out, out);
  });
}

namespace {

/// A call without memory.
struct Placeholders {
  Tensor x, x_scales, y;
  TernaryMatrix weight;
  BitLinearOptions options = {};
  explicit Placeholders(const ShapeValues& shape)
      : x(placeholder({shape["M"], shape["K"]}, DType::i8)),
        x_scales(placeholder({shape["M"]}, DType::f32)),
        y(placeholder({shape["M"], shape["N"]}, DType::bf16)),
        weight{placeholder({shape["N"], shape["K"] / 4}, DType::u8), placeholder({shape["N"]}, DType::f32)} {}
  Call call() const { return {x, x_scales, weight, y, options, Stream::standard(Device::cpu())}; }
};

template <SkinnyKernel k>
Analysis analyze_skinny(const ShapeValues& shape) {
  const Placeholders of(shape);
  return analyze<SkinnyHostKernel<k>>(skinny_grid(of.call(), k.tile), [&](auto& bind, auto& p) { bind_skinny(bind, p, of.call()); });
}
template <WideKernel k>
Analysis analyze_wide(const ShapeValues& shape) {
  const Placeholders of(shape);
  return analyze<WideHostKernel<k>>(wide_grid(of.call(), k.tile),
                                    [&](auto& bind, auto& p) { bind_wide(bind, p, of.call(), of.y, false, true); });
}
constexpr ActivationKernel kRegistered{DType::bf16, 4, 4096, 16};  // a decoding step's rows of BitNet-2B: 2560 elements
Analysis analyze_activations(const ShapeValues& shape) {
  const Tensor x = placeholder({shape["M"], shape["K"]}, DType::bf16);
  const Tensor values = placeholder(x.shape(), DType::i8), scales = placeholder({shape["M"]}, DType::f32);
  using Kernel = QuantizeActivations<bf16, kRegistered.rows, kRegistered.cols, kRegistered.warps, 8>;
  return analyze<Kernel>({.m = tiles_of(shape["M"], kRegistered.rows)},
                         [&](auto& bind, auto& p) { bind_activations(bind, p, x, values, scales); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  constexpr SkinnyKernel skinny{};
  constexpr WideKernel wide{.tile = kWideTiles.back()};
  const auto spec = [](const std::string& type, const char* source, const char* name) {
    return make_spec({type, source, nullptr}, true, true, name);
  };
  return {{spec(type_of(skinny), kProductSource, "ternary_gemm_bf16_16x8"), analyze_skinny<skinny>},
          {spec(type_of(wide), kProductSource, "ternary_gemm_bf16_128x256"), analyze_wide<wide>},
          {spec(type_of_activations(kRegistered), kQuantizeSource, "quantize_activations_bf16"), analyze_activations}};
}

}  // namespace tw::kernels::bitnet
