#include "tilewave/moe.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "kernels/check.hpp"
#include "kernels/moe/move.tile.hpp"
#include "kernels/moe/permute.tile.hpp"
#include "kernels/moe/pieces.hpp"
#include "kernels/moe/route.tile.hpp"
#include "kernels/moe/variants.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace kernels::moe {

namespace {

constexpr int kMostExperts = 512;
static_assert(kMostChosenExperts == kMostChosen);

/// More tokens or assignments could not be numbered by an int at the end of a tile.
constexpr std::int64_t kMostAssignments = kLargestExtent;

// Routing

/// The columns of the kernel for so many experts.
int route_columns(std::int64_t experts) { return experts <= 128 ? 128 : experts <= 256 ? 256 : 512; }

struct RouteKernel {
  DType logits;
  int columns;
  auto operator<=>(const RouteKernel&) const = default;
};
std::string type_of(const RouteKernel& k) { return tw::format("tw::kernels::moe::Route<{}, {}>", element_name(k.logits), k.columns); }

/// A vector as a matrix of one row.
Tensor as_row(const Tensor& t) { return Tensor::borrow(t.data(), {1, t.shape(0)}, t.dtype(), t.device(), {0, t.stride(0)}); }

void bind_route(auto& bind, auto& p, const Tensor& logits, const Tensor& weights, const Tensor& experts, const MoeRouteOptions& options) {
  bind(p.logits, logits);
  if (options.bias != nullptr)
    bind(p.bias, as_row(*options.bias));
  else
    bind(p.bias, static_cast<const Tensor*>(nullptr));
  bind(p.weights, weights);
  bind(p.experts, experts);
  p.k = static_cast<int>(weights.shape(1));
  // If all groups are taken there is nothing to find out about them.
  p.groups = options.groups_taken < options.groups ? options.groups : 1;
  p.taken_groups = options.groups_taken;
  p.group_size = static_cast<int>(logits.shape(1)) / options.groups;
  p.group_factor = (1u << 20) / static_cast<u32>(p.group_size) + 1;
  p.sigmoid = options.score == MoeScore::sigmoid;
  p.sum_of_two = options.group_score == MoeGroupScore::sum_of_two;
  p.by_score = options.bias != nullptr || (p.groups > 1 && p.sum_of_two);
  p.renormalise = options.renormalise;
  p.scale = options.scale;
}

TileGrid route_grid(const Tensor& logits) { return {.m = static_cast<int>((logits.shape(0) + 3) / 4)}; }

// Permutation

/// Up to so many assignments are ranked in one chunk: comparing each with all takes less time than two more launches.
constexpr int kOneChunk = 2048;
/// Rows and columns of RankAssignments: in one chunk, for many columns on their way at once; in chunks of many, for few loads.
constexpr int kFewRows = 8, kFewColumns = 512, kManyRows = 32, kManyColumns = 256;
/// The shortest chunk of several. A chunk's assignments are compared with each other, and with every expert's beginning.
constexpr int kChunk = 256;

struct Chunks {
  int length, count;
};
Chunks chunks_of(int assignments) {
  if (assignments <= kOneChunk) return {assignments, 1};
  const int length = (assignments + kMostChunks * kChunk - 1) / (kMostChunks * kChunk) * kChunk;
  return {length, (assignments + length - 1) / length};
}

void set_assignments(auto& all, const Tensor& experts, int n_experts, int first_expert, const Tensor* rows, const Tensor& places,
                     Chunks chunks) {
  all.experts = experts.data<std::int32_t>();
  all.places = places.data<std::int32_t>();
  all.rows = rows != nullptr ? rows->data<std::int32_t>() : nullptr;
  all.count = static_cast<int>(experts.numel());
  all.k = static_cast<int>(experts.shape(1));
  all.first_expert = first_expert;
  all.n_experts = n_experts;
  all.chunk = chunks.length;
  all.chunks = chunks.count;
}

TileGrid rank_grid(Chunks chunks, int n_experts, int tile_rows) {
  return {.m = (chunks.length + n_experts + 1 + tile_rows - 1) / tile_rows, .n = chunks.count};
}

// Dispatch and combine

template <class Kernel>
TileGrid move_grid(const Tensor& tokens) {
  return {.m = static_cast<int>(tokens.shape(0)), .n = static_cast<int>((tokens.shape(1) + Kernel::cols - 1) / Kernel::cols)};
}

void bind_dispatch(auto& bind, auto& p, const Tensor& x, const Tensor& places, const Tensor& y) {
  bind(p.x, x);
  bind(p.places, places);
  bind(p.out, y);
}

/// The groups of 128 of [.., H], H a multiple of 128, as [.., H / 128, 128].
Tensor in_groups(const Tensor& t) {
  constexpr std::int64_t group = cast_fp8::kGroup;
  return Tensor::borrow(t.data(), {t.shape(0), t.shape(1) / group, group}, t.dtype(), t.device(),
                        {t.stride(0), group * t.stride(1), t.stride(1)});
}

template <class Kernel>
TileGrid fp8_grid(const Tensor& tokens) {
  constexpr std::int64_t cols = Kernel::groups * cast_fp8::kGroup;
  return {.m = static_cast<int>((tokens.shape(1) + cols - 1) / cols), .batch = static_cast<int>(tokens.shape(0))};
}

void bind_dispatch_fp8(auto& bind, auto& p, const Tensor& x, const Tensor& places, const Tensor& y, const Tensor& scales) {
  bind(p.x, in_groups(x));
  bind(p.y, in_groups(y));
  bind(p.scales, Tensor::borrow(scales.data(), {scales.shape(0), scales.shape(1), 1}, scales.dtype(), scales.device(),
                                {scales.stride(0), scales.stride(1), 1}));
  bind(p.places, places);
  p.power_of_two = false;
}

void bind_combine(auto& bind, auto& p, const Tensor& y, const Tensor& places, const Tensor& weights, const Tensor* addend,
                  const Tensor& out) {
  bind(p.y, y);
  bind(p.places, places);
  bind(p.weights, weights);
  bind(p.addend, addend);
  bind(p.out, out);
}

/// Runs the kernel for the elements' type; on the CPU one for all.
template <template <class> class Kernel, class Bind>
void launch_move(const Tensor& tokens, const Stream& stream, Bind bind_call) {
  if (!stream.device().is_cuda()) return launch_cpu<Kernel<cpu::AnyFloat>>(move_grid<Kernel<cpu::AnyFloat>>(tokens), bind_call);
  with_float_type(tokens.dtype(),
                  [&]<class T>(std::type_identity<T>) { launch_gpu<Kernel<T>>(stream, move_grid<Kernel<T>>(tokens), bind_call); });
}

}  // namespace

namespace {

/// Throws InvalidArgument unless tokens * k assignments can be numbered.
void check_assignments(const char* op, const char* argument, const Tensor& table) {
  require(table.rank() == 2, "{}: {} is {}; it must be [tokens, k]", op, argument, table);
  require(table.shape(0) <= kMostAssignments && table.shape(1) <= kMostAssignments && table.numel() <= kMostAssignments,
          "{}: {} is {}; tokens * k is limited to {}", op, argument, table, kMostAssignments);
}

}  // namespace

void check_experts(const char* op, const char* what, std::int64_t experts) {
  require(experts >= 1 && experts <= kMostExperts, "{}: {} is {}; it must be 1 to {}", op, what, experts, kMostExperts);
}

void check_route(const char* op, const Tensor& logits, std::int64_t k, Device device, const MoeRouteOptions& options) {
  require(is_float(logits.dtype()), "{}: logits is {}; f32, f16 and bf16 are supported", op, logits);
  check_operand(op, "logits", logits, logits.dtype(), device);
  require(logits.rank() == 2 && logits.shape(1) >= 1 && logits.shape(1) <= kMostExperts,
          "{}: logits is {}; it must be [tokens, experts] with 1 to {} experts", op, logits, kMostExperts);
  check_extents(op, "logits", logits);
  const std::int64_t experts = logits.shape(1);
  if (options.bias != nullptr) {
    check_operand(op, "bias", *options.bias, DType::f32, device);
    require(options.bias->shape() == Shape{experts}, "{}: bias is {}; it must be f32[{}], one for each expert", op, *options.bias, experts);
  }
  require(options.groups >= 1 && options.groups <= kMostGroups && experts % options.groups == 0,
          "{}: groups is {}; it must be 1 to {} and divide the {} experts", op, options.groups, kMostGroups, experts);
  require(options.groups_taken >= 1 && options.groups_taken <= options.groups, "{}: groups_taken is {}; it must be 1 to groups, {}", op,
          options.groups_taken, options.groups);
  const std::int64_t group = experts / options.groups;
  require(options.group_score != MoeGroupScore::sum_of_two || options.groups_taken == options.groups || group >= 2,
          "{}: groups is {}; a group needs two of the {} experts for group_score sum_of_two", op, options.groups, experts);
  require(k >= 1 && k <= kMostChosen, "{}: k is {}; it must be 1 to {}", op, k, kMostChosen);
  require(k <= group * options.groups_taken, "{}: k is {}, but the groups taken have {} of the {} experts", op, k,
          group * options.groups_taken, experts);
  require(std::isfinite(options.scale), "{}: scale is {}; it must be finite", op, options.scale);
}

void route(const Tensor& logits, const Tensor& weights, const Tensor& experts, const MoeRouteOptions& options, const Stream& stream) {
  if (logits.shape(0) == 0) return;
  const TileGrid grid = route_grid(logits);
  const auto bind_call = [&](auto& bind, auto& p) { bind_route(bind, p, logits, weights, experts, options); };
  const int columns = route_columns(logits.shape(1));
  if (!stream.device().is_cuda())
    return columns == 128 ? launch_cpu<Route<cpu::AnyFloat, 128>>(grid, bind_call) : launch_cpu<Route<cpu::AnyFloat, 512>>(grid, bind_call);
  static KernelTable<RouteKernel> table(type_of, Route<float, 512>::source);
  with_float_type(logits.dtype(), [&]<class T>(std::type_identity<T>) {
    detail::launch_named<typename Route<T, 512>::template On<sm_90a::Target<>>::Params>(table[{logits.dtype(), columns}], stream, grid,
                                                                                        bind_call);
  });
}

void permute(const Tensor& experts, int n_experts, int first_expert, const Tensor& offsets, const Tensor* rows, const Tensor& places,
             const Stream& stream) {
  const Chunks chunks = chunks_of(static_cast<int>(experts.numel()));
  const bool one = chunks.count == 1;
  const Tensor begins = one ? offsets : workspace({n_experts + 1, chunks.count}, DType::i32, stream);
  const auto bind_rank = [&](auto&, auto& p) {
    set_assignments(p.all, experts, n_experts, first_expert, rows, places, chunks);
    p.begins = begins.data<std::int32_t>();
  };
  if (one && stream.device().is_cuda())
    return launch_gpu<RankAssignments<kFewRows, kFewColumns>>(stream, rank_grid(chunks, n_experts, kFewRows), bind_rank);
  launch<RankAssignments<kManyRows, kManyColumns>>(stream, rank_grid(chunks, n_experts, kManyRows), bind_rank);
  if (one) return;
  launch<SumBegins>(stream, {.m = ceil_div(n_experts + 1, SumBegins::rows)}, [&](auto& bind, auto& p) {
    bind(p.begins, begins);
    bind(p.offsets, offsets.reshape({n_experts + 1, 1}));
  });
  launch<PlaceAssignments>(stream, {.m = ceil_div(static_cast<int>(experts.numel()), PlaceAssignments::tile)}, [&](auto&, auto& p) {
    set_assignments(p.all, experts, n_experts, first_expert, rows, places, chunks);
    p.sums = begins.data<std::int32_t>();
  });
}

void dispatch(const Tensor& x, const Tensor& places, const Tensor& y, const Tensor* scales, const Stream& stream) {
  if (x.numel() == 0 || places.numel() == 0 || y.numel() == 0) return;
  if (scales != nullptr) {
    return with_float_type(x.dtype(), [&]<class T>(std::type_identity<T>) {
      launch<DispatchFp8<T>>(stream, fp8_grid<DispatchFp8<T>>(x),
                             [&](auto& bind, auto& p) { bind_dispatch_fp8(bind, p, x, places, y, *scales); });
    });
  }
  launch_move<Dispatch>(x, stream, [&](auto& bind, auto& p) { bind_dispatch(bind, p, x, places, y); });
}

void combine(const Tensor& y, const Tensor& places, const Tensor& weights, const Tensor* addend, const Tensor& out, const Stream& stream) {
  if (out.numel() == 0) return;
  launch_move<Combine>(out, stream, [&](auto& bind, auto& p) { bind_combine(bind, p, y, places, weights, addend, out); });
}

}  // namespace kernels::moe

using namespace kernels;
using namespace kernels::moe;

void moe_route(const Tensor& logits, const Tensor& weights, const Tensor& experts, const MoeRouteOptions& options) {
  constexpr const char* op = "moe_route";
  const Device device = logits.device();
  require(weights.rank() == 2 && logits.rank() == 2 && weights.shape(0) == logits.shape(0),
          "{}: weights is {}; for logits {} it must be [tokens, k]", op, weights, logits);
  check_route(op, logits, weights.shape(1), device, options);
  check_operand(op, "weights", weights, DType::f32, device);
  check_operand(op, "experts", experts, DType::i32, device);
  require(experts.shape() == weights.shape(), "{}: experts is {}; it must have weights' shape, {}", op, experts, weights);
  check_output(op, "weights", weights);
  check_output(op, "experts", experts);
  check_disjoint(op, {"weights", &weights}, {{"logits", &logits}, {"experts", &experts}, {"bias", options.bias}});
  check_disjoint(op, {"experts", &experts}, {{"logits", &logits}, {"bias", options.bias}});
  route(logits, weights, experts, options, checked_stream(op, options.stream, device));
}

namespace {

void check_table(const char* op, const char* name, const Tensor& table, const Shape& shape, Device device) {
  check_operand(op, name, table, DType::i32, device);
  require(table.shape() == shape && table.is_contiguous(), "{}: {} is {}; it must be contiguous, i32[{}]", op, name, table,
          tw::join(shape, ", "));
}

void check_floats(const char* op, const char* name, const Tensor& t, DType dtype, Device device) {
  require(is_float(dtype), "{}: {} is {}; f32, f16 and bf16 are supported", op, name, t);
  check_operand(op, name, t, dtype, device);
  require(t.rank() == 2, "{}: {} is {}; it must have 2 dimensions", op, name, t);
  check_extents(op, name, t);
}

/// y of moe_dispatch() with scales.
void check_fp8(const char* op, const Tensor& y, const Tensor* scales) {
  check_operand(op, "y", y, y.dtype(), y.device());
  require(y.rank() == 2 && y.shape(1) % cast_fp8::kGroup == 0, "{}: y is {}; of fp8_e4m3 it must be [rows, H], H a multiple of {}", op, y,
          cast_fp8::kGroup);
  check_extents(op, "y", y);
  require(scales != nullptr, "{}: scales is not given; a y of fp8_e4m3 needs it", op);
  check_operand(op, "scales", *scales, DType::f32, y.device());
  const Shape expected{y.shape(0), y.shape(1) / cast_fp8::kGroup};
  require(scales->shape() == expected, "{}: scales is {}; for y {} it must be [{}]", op, *scales, y, tw::join(expected, ", "));
  check_output(op, "scales", *scales);
}

/// At most this many elements in the pieces of a launch's rows: the tiles stay ints.
void check_tiles(const char* op, const char* name, const Tensor& t) {
  require(t.shape(0) <= kLargestExtent / std::max<std::int64_t>((t.shape(1) + 511) / 512, 1), "{}: {} is {}, which is more than {} tiles",
          op, name, t, kLargestExtent);
}

void check_places(const char* op, const Tensor& places, std::int64_t tokens, Device device) {
  check_operand(op, "places", places, DType::i32, device);
  check_assignments(op, "places", places);
  require(places.shape(0) == tokens, "{}: places is {}; it must be [{}, k], a row for each token", op, places, tokens);
}

}  // namespace

void moe_permutation(const Tensor& experts, int n_experts, const Tensor& offsets, const Tensor& rows, const Tensor& places,
                     const MoePermutationOptions& options) {
  constexpr const char* op = "moe_permutation";
  const Device device = experts.device();
  check_operand(op, "experts", experts, DType::i32, device);
  check_assignments(op, "experts", experts);
  require(experts.is_contiguous(), "{}: experts is {}; it must be contiguous", op, experts);
  check_experts(op, "n_experts", n_experts);
  check_table(op, "offsets", offsets, {n_experts + 1}, device);
  check_table(op, "rows", rows, {experts.numel()}, device);
  check_table(op, "places", places, experts.shape(), device);
  check_disjoint(op, {"offsets", &offsets}, {{"experts", &experts}, {"rows", &rows}, {"places", &places}});
  check_disjoint(op, {"rows", &rows}, {{"experts", &experts}, {"places", &places}});
  check_disjoint(op, {"places", &places}, {{"experts", &experts}});
  permute(experts, n_experts, options.first_expert, offsets, &rows, places, checked_stream(op, options.stream, device));
}

void moe_dispatch(const Tensor& x, const Tensor& places, const Tensor& y, const MoeDispatchOptions& options) {
  constexpr const char* op = "moe_dispatch";
  const Device device = y.device();
  check_floats(op, "x", x, x.dtype(), device);
  if (y.dtype() == DType::fp8_e4m3)
    check_fp8(op, y, options.scales);
  else
    check_floats(op, "y", y, x.dtype(), device);
  require(options.scales == nullptr || y.dtype() == DType::fp8_e4m3, "{}: scales are given, but y is {}; it must be fp8_e4m3", op, y);
  require(y.shape(1) == x.shape(1), "{}: y is {}; it must have as many columns as x, {}", op, y, x);
  check_tiles(op, "x", x);
  check_places(op, places, x.shape(0), device);
  check_output(op, "y", y);
  check_disjoint(op, {"y", &y}, {{"x", &x}, {"places", &places}, {"scales", options.scales}});
  if (options.scales != nullptr) check_disjoint(op, {"scales", options.scales}, {{"x", &x}, {"places", &places}});
  dispatch(x, places, y, options.scales, checked_stream(op, options.stream, device));
}

void moe_combine(const Tensor& y, const Tensor& places, const Tensor& weights, const Tensor& out, const MoeCombineOptions& options) {
  constexpr const char* op = "moe_combine";
  const Device device = out.device();
  check_floats(op, "out", out, out.dtype(), device);
  check_floats(op, "y", y, out.dtype(), device);
  require(y.shape(1) == out.shape(1), "{}: y is {}; it must have as many columns as out, {}", op, y, out);
  check_tiles(op, "out", out);
  check_places(op, places, out.shape(0), device);
  check_operand(op, "weights", weights, DType::f32, device);
  require(weights.shape() == places.shape(), "{}: weights is {}; it must have places' shape, {}", op, weights, places);
  if (options.addend != nullptr) {
    check_operand(op, "addend", *options.addend, out.dtype(), device);
    require(options.addend->shape() == out.shape(), "{}: addend is {}; it must have out's shape, {}", op, *options.addend, out);
    check_in_place(op, {"out", &out}, {"addend", options.addend});
  }
  check_output(op, "out", out);
  check_disjoint(op, {"out", &out}, {{"y", &y}, {"places", &places}, {"weights", &weights}});
  combine(y, places, weights, options.addend, out, checked_stream(op, options.stream, device));
}

namespace kernels::moe {

namespace {

/// The tensors of a call for the analysis.
struct Tables {
  int n_experts, k;
  Tensor experts, offsets, rows, places, weights;
  explicit Tables(const ShapeValues& shape)
      : n_experts(shape.integer("experts")),
        k(shape.integer("k")),
        experts(placeholder({shape["tokens"], k}, DType::i32)),
        offsets(placeholder({n_experts + 1}, DType::i32)),
        rows(placeholder({shape["tokens"] * k}, DType::i32)),
        places(placeholder({shape["tokens"], k}, DType::i32)),
        weights(placeholder({shape["tokens"], k}, DType::f32)) {
    check_assignments("shape", "tokens", experts);
    check_experts("shape", "experts", n_experts);
  }
};

template <class T, int columns>
Analysis analyze_route(const ShapeValues& shape) {
  const Tables tables(shape);
  const Tensor logits = placeholder({shape["tokens"], tables.n_experts}, dtype_of<T>), bias = placeholder({tables.n_experts}, DType::f32);
  require(tables.n_experts <= columns, "shape: experts is {}; the kernel is for up to {}", tables.n_experts, columns);
  const MoeRouteOptions options{.bias = &bias};
  check_route("shape", logits, tables.k, logits.device(), options);
  return analyze<Route<T, columns>>(route_grid(logits),
                                    [&](auto& bind, auto& p) { bind_route(bind, p, logits, tables.weights, tables.experts, options); });
}

template <int tile_rows, int tile_columns>
Analysis analyze_permutation(const ShapeValues& shape) {
  const Tables tables(shape);
  const Chunks chunks{std::max(static_cast<int>(tables.experts.numel()), 1), 1};
  return analyze<RankAssignments<tile_rows, tile_columns>>(rank_grid(chunks, tables.n_experts, tile_rows), [&](auto&, auto& p) {
    set_assignments(p.all, tables.experts, tables.n_experts, 0, &tables.rows, tables.places, chunks);
    p.begins = tables.offsets.template data<std::int32_t>();
  });
}

template <class T>
Analysis analyze_dispatch(const ShapeValues& shape) {
  const Tables tables(shape);
  const Tensor x = placeholder({shape["tokens"], shape["dim"]}, dtype_of<T>);
  const Tensor y = placeholder({shape["tokens"] * tables.k, shape["dim"]}, dtype_of<T>);
  return analyze<Dispatch<T>>(move_grid<Dispatch<T>>(x), [&](auto& bind, auto& p) { bind_dispatch(bind, p, x, tables.places, y); });
}

template <class T>
Analysis analyze_dispatch_fp8(const ShapeValues& shape) {
  const Tables tables(shape);
  require(shape["dim"] % cast_fp8::kGroup == 0, "shape: dim is {}; it must be a multiple of {}", shape["dim"], cast_fp8::kGroup);
  const Tensor x = placeholder({shape["tokens"], shape["dim"]}, dtype_of<T>);
  const Tensor y = placeholder({shape["tokens"] * tables.k, shape["dim"]}, DType::fp8_e4m3);
  const Tensor scales = placeholder({y.shape(0), y.shape(1) / cast_fp8::kGroup}, DType::f32);
  return analyze<DispatchFp8<T>>(fp8_grid<DispatchFp8<T>>(x),
                                 [&](auto& bind, auto& p) { bind_dispatch_fp8(bind, p, x, tables.places, y, scales); });
}

template <class T>
Analysis analyze_combine(const ShapeValues& shape) {
  const Tables tables(shape);
  const Tensor out = placeholder({shape["tokens"], shape["dim"]}, dtype_of<T>);
  const Tensor y = placeholder({shape["tokens"] * tables.k, shape["dim"]}, dtype_of<T>);
  return analyze<Combine<T>>(move_grid<Combine<T>>(out),
                             [&](auto& bind, auto& p) { bind_combine(bind, p, y, tables.places, tables.weights, nullptr, out); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const std::string route = type_of(RouteKernel{DType::f32, 256});
  variants.push_back(
      {make_spec({route, Route<float, 256>::source, detail::tile_recorder<Route<float, 256>>()}, true, true, "moe_route_f32_256"),
       analyze_route<float, 256>});
  variants.push_back({make_spec(kernel_info<RankAssignments<kFewRows, kFewColumns>>, true, true, "moe_permutation"),
                      analyze_permutation<kFewRows, kFewColumns>});
  variants.push_back({make_spec(kernel_info<Dispatch<bf16>>, true, true, "moe_dispatch_bf16"), analyze_dispatch<bf16>});
  variants.push_back({make_spec(kernel_info<DispatchFp8<bf16>>, true, true, "moe_dispatch_fp8_bf16"), analyze_dispatch_fp8<bf16>});
  variants.push_back({make_spec(kernel_info<Combine<bf16>>, true, true, "moe_combine_bf16"), analyze_combine<bf16>});
  return variants;
}

}  // namespace kernels::moe
}  // namespace tw
