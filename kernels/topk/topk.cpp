#include "tilewave/topk.hpp"

#include <algorithm>
#include <bit>
#include <compare>
#include <string>
#include <type_traits>

#include "kernels/check.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "kernels/topk/argmax.tile.hpp"
#include "kernels/topk/topk.tile.hpp"
#include "kernels/topk/variants.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace kernels::topk {
namespace {

constexpr const char* kArgmax = "argmax";
constexpr const char* kTopk = "topk";
constexpr int kLargestK = 2048;
/// The largest number of rows, columns and tiles: indices stay ints, even at the end of the last part.
constexpr std::int64_t kLargest = std::int64_t{1} << 30;

/// Blocks on the GPU: 4 warps suffice for many rows of a few thousand columns. Threads have 8 columns at a time, so a wide block has 4096.
constexpr int kNarrowWarps = 4, kMiddleWarps = 8, kWideWarps = 16;
/// An SM has room for four blocks of middle width. With at least as many rows for each SM, they are faster than wide ones.
constexpr int kManyRows = 4;
constexpr int kNarrowColumns = 4096;
/// On the CPU tiles of 256 columns, for short rows.
constexpr int kCpuWarps = 1;
/// Keys that a block can sort: enough for twice the largest k, so that most selections stop after a digit or two.
constexpr int kNarrowCapacity = 512, kWideCapacity = 4096;
/// Parts of a row are a multiple of this, so that all threads of a wide block are busy.
constexpr std::int64_t kPartColumns = 4096;
/// Sorting this many keys takes no longer than finding another digit.
constexpr int kFewKeys = 256;

/// The maximum number of keys to sort.
int sorted_keys(int k, int capacity) { return std::min(std::max(2 * k, kFewKeys), capacity); }

Plan plan(std::int64_t rows, std::int64_t cols, Width width, int part_limit, int units) {
  // A part must be much longer than its candidates, or the second stage reads as much as the first.
  const std::int64_t shortest = std::max<std::int64_t>(kPartColumns, 16 * part_limit);
  const std::int64_t wanted = rows > 0 && rows < units ? std::min(2 * units / rows, cols / shortest) : 1;
  if (wanted <= 1) return {width, 1, 0, 0};
  const std::int64_t part = (cols / wanted + kPartColumns / 2) / kPartColumns * kPartColumns;
  return {Width::wide, static_cast<int>((cols + part - 1) / part), static_cast<int>(part), part_limit};
}

}  // namespace

Plan plan_argmax(std::int64_t rows, std::int64_t cols, int units) {
  return plan(rows, cols, cols <= kNarrowColumns ? Width::narrow : Width::wide, 1, units);
}

Plan plan_topk(std::int64_t rows, std::int64_t cols, int k, int units) {
  const bool narrow = cols <= kNarrowColumns && sorted_keys(k, kWideCapacity) <= kNarrowCapacity;
  const Width width = narrow ? Width::narrow : rows >= std::int64_t{kManyRows} * units ? Width::middle : Width::wide;
  return plan(rows, cols, width, std::max(k, kFewKeys), units);
}

namespace {

/// A checked call of argmax or topk: tensors [.., columns]; those with one number per row have one column.
struct Call {
  const char* op;
  Tensor x, indices;
  std::optional<Tensor> values, starts, ends, workspace;
  int k;
  bool smallest, by_index;
  int rows;
  Stream stream;
};

std::int64_t rows_of(const Tensor& x) {
  std::int64_t rows = 1;
  for (int dim = 0; dim < x.rank() - 1; ++dim) rows *= x.shape(dim);
  return rows;
}

/// [.., 1], from a tensor without the last dimension.
Tensor with_column(const Tensor& t) {
  Shape shape = t.shape();
  std::vector<std::int64_t> strides = t.strides();
  shape.push_back(1);
  strides.push_back(1);
  return Tensor::borrow(t.data(), std::move(shape), t.dtype(), t.device(), std::move(strides));
}

void check_x(const char* op, const Tensor& x) {
  require(x.rank() >= 1 && x.rank() <= 4, "{}: x is {}; it must have 1 to 4 dimensions", op, x);
  require(x.dtype() == DType::f32 || x.dtype() == DType::f16 || x.dtype() == DType::bf16, "{}: x is {}; f32, f16 and bf16 are supported",
          op, x);
  std::int64_t rows = 1;
  for (int dim = 0; dim < x.rank(); ++dim) {
    if (dim < x.rank() - 1) rows *= x.shape(dim);
    require(x.shape(dim) <= kLargest && rows <= kLargest, "{}: x is {}; rows and columns are limited to {}", op, x, kLargest);
  }
}

void check_shape(const char* op, const char* argument, const Tensor& tensor, const Shape& shape) {
  require(tensor.shape() == shape, "{}: {} is {}; its shape must be [{}]", op, argument, tensor, tw::join(shape, ", "));
}

/// `shape`: the shape of indices and values.
Call check(const char* op, const Tensor& x, const Shape& shape, const Tensor& indices, const Tensor* values,
           const std::optional<Stream>& given) {
  const Device device = x.device();
  check_operand(op, "x", x, x.dtype(), device);
  require(indices.dtype() == DType::i32 || indices.dtype() == DType::i64, "{}: indices is {}; it must be i32 or i64", op, indices);
  check_operand(op, "indices", indices, indices.dtype(), device);
  check_shape(op, "indices", indices, shape);
  check_output(op, "indices", indices);
  if (values) {
    check_operand(op, "values", *values, x.dtype(), device);
    check_shape(op, "values", *values, shape);
    check_output(op, "values", *values);
  }
  check_disjoint(op, {"values", values}, {{"x", &x}, {"indices", &indices}});
  check_disjoint(op, {"indices", &indices}, {{"x", &x}});
  const Stream stream = given ? *given : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  return {.op = op,
          .x = x,
          .indices = indices,
          .values = values ? std::optional(*values) : std::nullopt,
          .starts = {},
          .ends = {},
          .workspace = {},
          .k = 1,
          .smallest = false,
          .by_index = false,
          .rows = static_cast<int>(rows_of(x)),
          .stream = stream};
}

void check_workspace(Call& call, const Plan& plan, const Tensor* given) {
  if (!given) return;
  check_operand(call.op, "workspace", *given, DType::i64, call.x.device());
  const std::int64_t needed = plan.workspace(call.rows);
  require(given->is_contiguous() && given->numel() >= needed, "{}: workspace is {}; it must be contiguous, of at least {} elements",
          call.op, *given, needed);
  check_disjoint(call.op, {"workspace", given},
                 {{"x", &call.x}, {"indices", &call.indices}, {"values", call.values ? &*call.values : nullptr}});
  call.workspace = *given;
}

/// A block's threads, and the number of keys that it can sort (0 for Argmax).
struct BlockSize {
  int warps, capacity;
  auto operator<=>(const BlockSize&) const = default;
};
constexpr BlockSize kNarrowArgmax{kNarrowWarps, 0}, kWideArgmax{kWideWarps, 0};
constexpr BlockSize kNarrowTopk{kNarrowWarps, kNarrowCapacity}, kMiddleTopk{kMiddleWarps, kWideCapacity},
    kWideTopk{kWideWarps, kWideCapacity};

/// Argmax or Topk on a GPU. Stages that write candidates do not write indices, so they are the same for all index types.
struct StageKernel {
  DType x, indices;
  Stage stage;
  BlockSize size;
  auto operator<=>(const StageKernel&) const = default;
};

std::string type_of(const StageKernel& k) {
  const char* const stage = k.stage == Stage::whole ? "whole" : k.stage == Stage::part ? "part" : "merge";
  const char* const index = k.stage != Stage::part && k.indices == DType::i64 ? "tw::i64" : "tw::i32";
  const std::string common = tw::format("{}, {}, tw::kernels::topk::Stage::{}, {}", element_name(k.x), index, stage, k.size.warps);
  return k.size.capacity > 0 ? tw::format("tw::kernels::topk::Topk<{}, {}>", common, k.size.capacity)
                             : tw::format("tw::kernels::topk::Argmax<{}>", common);
}

/// The kernels of an operation.
struct ArgmaxKernels {
  template <class T, class Index, Stage stage, BlockSize size>
  using Kernel = Argmax<T, Index, stage, size.warps>;
  static constexpr BlockSize cpu{kCpuWarps, 0};
  static constexpr BlockSize size(Width width) { return width == Width::narrow ? kNarrowArgmax : kWideArgmax; }
  static constexpr const char* source = "kernels/topk/argmax.tile.hpp";
  static constexpr Width merge = Width::narrow;  // there is one key for each part
};
struct TopkKernels {
  template <class T, class Index, Stage stage, BlockSize size>
  using Kernel = Topk<T, Index, stage, size.warps, size.capacity>;
  static constexpr BlockSize cpu{kCpuWarps, kWideCapacity};
  static constexpr BlockSize size(Width width) {
    return width == Width::narrow ? kNarrowTopk : width == Width::middle ? kMiddleTopk : kWideTopk;
  }
  static constexpr const char* source = "kernels/topk/topk.tile.hpp";
  static constexpr Width merge = Width::wide;
};

/// For binding: null if there is none.
const Tensor* pointer_to(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

void bind_call(auto& bind, auto& p, const Call& call, const Plan& plan, const Tensor* candidates, int limit) {
  bind(p.x, call.x);
  bind(p.starts, pointer_to(call.starts));
  bind(p.ends, pointer_to(call.ends));
  bind(p.candidates, candidates);
  const auto cols = static_cast<std::uint32_t>(call.x.shape(-1));
  p.order = {static_cast<int>(cols), static_cast<int>(std::bit_width(cols)), call.smallest};
  p.k = call.k;
  p.limit = limit;
  p.part = plan.part;
  p.by_index = call.by_index;
}

/// The same with the stage's outputs.
void bind_stage(auto& bind, auto& p, const Call& call, const Plan& plan, Stage stage, const Tensor* candidates, int limit) {
  bind_call(bind, p, call, plan, candidates, limit);
  bind(p.indices, stage == Stage::part ? nullptr : &call.indices);
  bind(p.values, stage == Stage::part ? nullptr : pointer_to(call.values));
}

TileGrid grid_of(const Call& call, const Plan& plan, Stage stage) { return {.m = call.rows, .n = stage == Stage::part ? plan.parts : 1}; }

Shape candidates_shape(const Call& call, const Plan& plan) { return {call.rows, std::int64_t{plan.parts} * plan.part_limit}; }

/// Calls f<T, Index>() with the types of x and indices.
template <class F>
void with_types(const Call& call, F f) {
  with_float_type(call.x.dtype(), [&]<class T>(std::type_identity<T>) {
    call.indices.dtype() == DType::i64 ? f.template operator()<T, i64>() : f.template operator()<T, i32>();
  });
}

/// Only the element types affect the layout of Params, not the other template arguments.
void launch_on_gpu(const detail::NamedKernel& kernel, const Call& call, const Plan& plan, Stage stage, int limit,
                   const Tensor* candidates) {
  with_types(call, [&]<class T, class Index>() {
    detail::launch_named<typename Row<sm_90a::Target<>, T, Index, Stage::whole>::Params>(
        kernel, call.stream, grid_of(call, plan, stage),
        [&](auto& bind, auto& p) { bind_stage(bind, p, call, plan, stage, candidates, limit); });
  });
}

template <class Kernels, Stage stage>
void launch_stage(const Call& call, const Plan& plan, Width width, int limit, const Tensor* candidates) {
  if (call.stream.device().is_cuda()) {
    static KernelTable<StageKernel> table(type_of, Kernels::source);
    const StageKernel kernel{call.x.dtype(), call.indices.dtype(), stage, Kernels::size(width)};
    return launch_on_gpu(table[kernel], call, plan, stage, limit, candidates);
  }
  with_types(call, [&]<class T, class Index>() {
    using Written = conditional<stage == Stage::part, i32, Index>;
    launch_cpu<typename Kernels::template Kernel<T, Written, stage, Kernels::cpu>>(
        grid_of(call, plan, stage), [&](auto& bind, auto& p) { bind_stage(bind, p, call, plan, stage, candidates, limit); });
  });
}

template <class Kernels>
void run(const Call& call, const Plan& plan, int limit) {
  if (plan.parts == 1) return launch_stage<Kernels, Stage::whole>(call, plan, plan.width, limit, nullptr);
  const Shape shape = candidates_shape(call, plan);
  const Tensor candidates = call.workspace ? Tensor::borrow(call.workspace->data(), shape, DType::i64, call.x.device())
                                           : Tensor::empty(shape, DType::i64, call.stream);
  launch_stage<Kernels, Stage::part>(call, plan, plan.width, plan.part_limit, &candidates);
  launch_stage<Kernels, Stage::merge>(call, plan, Kernels::merge, limit, &candidates);
}

int units_of(Device device) { return device.is_cuda() ? device_info(device).units : cpu_threads(); }

Plan argmax_plan(const Tensor& x) { return plan_argmax(rows_of(x), x.shape(-1), units_of(x.device())); }
Plan topk_plan(const Tensor& x, int k) { return plan_topk(rows_of(x), x.shape(-1), k, units_of(x.device())); }

Shape without_columns(const Tensor& x) { return {x.shape().begin(), x.shape().end() - 1}; }

void check_k(int k) { require(k >= 1 && k <= kLargestK, "{}: k is {}; it must be 1 to {}", kTopk, k, kLargestK); }

}  // namespace

namespace {

/// `capacity`: the number of keys that the kernel can sort; 0: it finds the largest one.
template <class Kernel, class T, Stage stage, int capacity>
Analysis analyze_shape(const ShapeValues& shape) {
  const std::int64_t rows = shape["rows"], cols = shape["cols"];
  const int k = capacity > 0 ? shape.integer("k") : 1, units = shape.integer("units");
  check_k(k);
  require(sorted_keys(k, std::max(capacity, 1)) >= k, "shape: k is {}; the kernel sorts up to {} elements", k, capacity);
  const Tensor x = placeholder({rows, cols}, dtype_of<T>), indices = placeholder({rows, k}, DType::i32);
  const Tensor values = placeholder({rows, k}, dtype_of<T>);
  check_x(kTopk, x);
  Call call = check(kTopk, x, indices.shape(), indices, &values, {});
  call.k = k;
  Plan plan = capacity > 0 ? plan_topk(rows, cols, k, units) : plan_argmax(rows, cols, units);
  if (stage != Stage::whole && plan.parts == 1) plan = {Width::wide, 1, static_cast<int>(cols), capacity > 0 ? std::max(k, kFewKeys) : 1};
  const Tensor candidates = placeholder(candidates_shape(call, plan), DType::i64);
  const int limit = capacity == 0 ? 1 : stage == Stage::part ? plan.part_limit : sorted_keys(k, capacity);
  return analyze<Kernel>(grid_of(call, plan, stage), [&](auto& bind, auto& p) {
    bind_stage(bind, p, call, plan, stage, stage == Stage::whole ? nullptr : &candidates, limit);
  });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add_dtype = [&]<class T>(const char* dtype) {
    const auto add = [&]<class Kernels, Stage stage, BlockSize size>(const char* name) {
      using Kernel = typename Kernels::template Kernel<T, i32, stage, size>;
      const std::string type = type_of(StageKernel{dtype_of<T>, DType::i32, stage, size});
      variants.push_back({make_spec({type, Kernels::source, detail::tile_recorder<Kernel>()}, true, true, tw::format("{}_{}", name, dtype)),
                          analyze_shape<Kernel, T, stage, size.capacity>});
    };
    add.template operator()<ArgmaxKernels, Stage::whole, kNarrowArgmax>("argmax_short");
    add.template operator()<ArgmaxKernels, Stage::part, kWideArgmax>("argmax_part");
    add.template operator()<ArgmaxKernels, Stage::merge, kNarrowArgmax>("argmax_merge");
    add.template operator()<TopkKernels, Stage::whole, kNarrowTopk>("topk_short");
    add.template operator()<TopkKernels, Stage::whole, kMiddleTopk>("topk");
    add.template operator()<TopkKernels, Stage::part, kWideTopk>("topk_part");
    add.template operator()<TopkKernels, Stage::merge, kWideTopk>("topk_merge");
  };
  add_dtype.template operator()<float>("f32");
  add_dtype.template operator()<bf16>("bf16");
  return variants;
}

}  // namespace kernels::topk

using namespace kernels::topk;

void argmax(const Tensor& x, const Tensor& indices, const ArgmaxOptions& options) {
  check_x(kArgmax, x);
  Call call = check(kArgmax, x, without_columns(x), indices, options.values, options.stream);
  require(x.shape(-1) > 0 || call.rows == 0, "{}: x is {}; rows without elements have no largest one", kArgmax, x);
  const Plan plan = argmax_plan(x);
  check_workspace(call, plan, options.workspace);
  if (call.rows == 0) return;
  call.indices = with_column(call.indices);
  if (call.values) call.values = with_column(*call.values);
  run<ArgmaxKernels>(call, plan, 1);
}

std::int64_t argmax_workspace(const Tensor& x) {
  check_x(kArgmax, x);
  return argmax_plan(x).workspace(rows_of(x));
}

void topk(const Tensor& x, int k, const Tensor& values, const Tensor& indices, const TopkOptions& options) {
  check_x(kTopk, x);
  check_k(k);
  Shape shape = without_columns(x);
  shape.push_back(k);
  Call call = check(kTopk, x, shape, indices, &values, options.stream);
  call.k = k;
  call.smallest = !options.largest;
  call.by_index = !options.sorted;
  const auto bound = [&](const char* name, const Tensor* given) -> std::optional<Tensor> {
    if (!given) return {};
    check_operand(kTopk, name, *given, DType::i32, x.device());
    check_shape(kTopk, name, *given, without_columns(x));
    for (const NamedTensor& output : {NamedTensor{"values", &values}, {"indices", &indices}, {"workspace", options.workspace}})
      check_disjoint(kTopk, output, {{name, given}});
    return with_column(*given);
  };
  call.starts = bound("starts", options.starts);
  call.ends = bound("ends", options.ends);
  const Plan plan = topk_plan(x, k);
  check_workspace(call, plan, options.workspace);
  if (call.rows == 0) return;
  const bool narrow = plan.width == Width::narrow && x.device().is_cuda();
  run<TopkKernels>(call, plan, sorted_keys(k, narrow ? kNarrowCapacity : kWideCapacity));
}

std::int64_t topk_workspace(const Tensor& x, int k) {
  check_x(kTopk, x);
  check_k(k);
  return topk_plan(x, k).workspace(rows_of(x));
}

}  // namespace tw
