#include "kernels/gemm/normed_linear.hpp"

#include <compare>
#include <map>
#include <mutex>

#include "kernels/check.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/normed_linear.tile.hpp"

namespace tw::kernels::gemm {

namespace {

constexpr const char* kOp = "normed_linear";

/// Which NormedLinear.
struct Form {
  DType dtype;
  Activation activation;
  int half, dim;
  auto operator<=>(const Form&) const = default;
};

/// The epilogue of a Kernel. It lives until the process ends.
const detail::EpilogueInfo& epilogue_of(const Form& form) {
  struct Named {
    std::string type;
    detail::EpilogueInfo info;
  };
  static std::mutex mutex;
  static std::map<Form, Named>& known = *new std::map<Form, Named>;
  const std::lock_guard lock(mutex);
  Named& named = known[form];
  if (named.type.empty()) {
    named.type = tw::format("tw::kernels::gemm::NormedLinear<{}, {}, {}, {}>", element_name(form.dtype), functor_name(form.activation),
                            form.half, form.dim);
    named.info = {named.type, "kernels/gemm/normed_linear.tile.hpp"};
  }
  return named.info;
}

void check_rotation(const Rotation& r, std::int64_t columns, Device device) {
  for (const auto& [name, table] : {std::pair{"cos", &r.cos}, {"sin", &r.sin}}) {
    check_operand(kOp, name, *table, DType::f32, device);
    require(table->rank() == 2 && table->is_contiguous() && table->shape(0) >= r.positions && table->shape() == r.cos.shape(),
            "{}: {} is {}; both tables must be contiguous, [at least {}, rotary_dim / 2]", kOp, name, *table, r.positions);
  }
  const int rotary_dim = static_cast<int>(2 * r.cos.shape(1));
  require(has_rotation(r.head_dim, rotary_dim),
          "{}: head_dim is {} and rotary_dim {}; head_dim must be 64 or 128, and rotary_dim a multiple of 16 up to it", kOp, r.head_dim,
          rotary_dim);
  require(r.positions > 0 && r.heads >= 0 && columns % r.head_dim == 0 && std::int64_t{r.heads} * r.head_dim <= columns,
          "{}: {} of {} columns in heads of {} are rotated, at {} positions; columns must be whole heads, and positions 1 or more", kOp,
          std::int64_t{r.heads} * r.head_dim, columns, r.head_dim, r.positions);
}

template <class T>
void launch(const Call& call, const Kernel& kernel, const NormedLinearOptions& o) {
  // Neither tile sizes nor what the epilogue computes changes the layout of Params.
  using Params = typename Gemm<Operands<T, Contract::columns, Contract::columns>, NormedLinear<T, Identity>,
                               Tiles<64, 64, 64, 2, 1, 1>>::template On<sm_90a::Target<>>::Params;
  const Launch x = make_launch(call, kernel);
  const Tensor scales = o.row_scale ? o.row_scale->reshape({call.m, 1}) : Tensor();
  detail::launch_named<Params>(named(kernel), call.stream, x.grid, [&](auto& bind, auto& p) {
    bind(p.in.a, x.a);
    bind(p.in.b, x.b);
    p.in.depth = call.k;
    p.in.a_batches = p.in.b_batches = 0;
    p.splits = 1;
    bind(p.epilogue.d, x.d);
    bind(p.epilogue.scales, o.row_scale ? &scales : nullptr);
    p.epilogue.bias = o.bias ? o.bias->data<T>() : nullptr;
    p.epilogue.cosines = o.rotation ? o.rotation->cos.data<float>() : nullptr;
    p.epilogue.sines = o.rotation ? o.rotation->sin.data<float>() : nullptr;
    p.epilogue.positions = o.rotation ? o.rotation->positions : 1;
    p.epilogue.rotated = o.rotation ? o.rotation->heads * o.rotation->head_dim : 0;
    p.epilogue.has_scales = o.row_scale != nullptr;
    p.epilogue.has_bias = o.bias != nullptr;
  });
}

}  // namespace

bool has_rotation(int head_dim, int rotary_dim) {
  return (head_dim == 64 || head_dim == 128) && rotary_dim > 0 && rotary_dim % 16 == 0 && rotary_dim <= head_dim;
}

bool has_normed_linear(DType dtype, const Stream& stream) {
  return size_of(dtype) == 2 && stream.device().is_cuda() && generic_shared_bytes(stream) == 0;
}

void normed_linear(const Tensor& x, const Tensor& weight, const Tensor& y, const NormedLinearOptions& options) {
  const Call call = make_call(x, weight.transpose(0, 1), y, {.bias = options.bias, .stream = options.stream});
  require(has_normed_linear(y.dtype(), options.stream) && call.k > 0 && call.layout == Layout{} && x.is_contiguous() && y.is_contiguous(),
          "{}: x is {} and y {}; they must be contiguous, of f16 or bf16, on a Hopper GPU, with K of 1 or more", kOp, x, y);
  if (options.row_scale != nullptr) {
    check_operand(kOp, "row_scale", *options.row_scale, DType::f32, x.device());
    require(options.row_scale->shape() == Shape{x.shape(0)} && options.row_scale->is_contiguous(),
            "{}: row_scale is {}; it must be contiguous, [{}]", kOp, *options.row_scale, x.shape(0));
  }
  if (options.rotation != nullptr) check_rotation(*options.rotation, y.shape(1), x.device());
  if (y.numel() == 0) return;

  const int half = options.rotation ? static_cast<int>(options.rotation->cos.shape(1)) : 0;
  const int dim = options.rotation ? options.rotation->head_dim : 64;
  Problem problem = problem_of(call, device_info(call.stream.device()).units);
  problem.end = end_of(options.activation);
  if (options.rotation) problem.column_step = dim;
  const Kernel kernel{.dtype = y.dtype(),
                      .tile = configs()[static_cast<std::size_t>(choose_config(problem))],
                      .epilogue = &epilogue_of({y.dtype(), options.activation, half, dim})};
  y.dtype() == DType::bf16 ? launch<bf16>(call, kernel, options) : launch<f16>(call, kernel, options);
}

}  // namespace tw::kernels::gemm
