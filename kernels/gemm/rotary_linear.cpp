#include "kernels/gemm/rotary_linear.hpp"

#include <compare>
#include <map>
#include <mutex>

#include "kernels/check.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/rotary_linear.tile.hpp"

namespace tw::kernels::gemm {

namespace {

constexpr const char* kOp = "rotary_linear";

/// Which RotaryLinear.
struct Form {
  DType dtype;
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
    named.type = tw::format("tw::kernels::gemm::RotaryLinear<{}, {}, {}>", element_name(form.dtype), form.half, form.dim);
    named.info = {named.type, "kernels/gemm/rotary_linear.tile.hpp"};
  }
  return named.info;
}

template <class T>
void launch(const Call& call, const Kernel& kernel, const RotaryLinearOptions& o) {
  // Neither tile sizes nor those of heads change the layout of Params.
  using Params = typename Gemm<Operands<T, Contract::columns, Contract::columns>, RotaryLinear<T, 8, 64>,
                               Tiles<64, 64, 64, 2, 1, 1>>::template On<sm_90a::Target<>>::Params;
  const Launch x = make_launch(call, kernel);
  detail::launch_named<Params>(named(kernel), call.stream, x.grid, [&](auto& bind, auto& p) {
    bind(p.in.a, x.a);
    bind(p.in.b, x.b);
    p.in.depth = call.k;
    p.in.a_batches = p.in.b_batches = 0;
    p.splits = 1;
    bind(p.epilogue.d, x.d);
    p.epilogue.bias = o.bias ? o.bias->data<T>() : nullptr;
    p.epilogue.cosines = o.cos.data<float>();
    p.epilogue.sines = o.sin.data<float>();
    p.epilogue.positions = o.positions;
    p.epilogue.rotated = o.heads * o.head_dim;
    p.epilogue.has_bias = o.bias != nullptr;
  });
}

}  // namespace

bool has_rotary_linear(DType dtype, int head_dim, int rotary_dim, const Stream& stream) {
  const bool hopper = stream.device().is_cuda() && generic_shared_bytes(stream) == 0;
  const bool of_heads = (head_dim == 64 || head_dim == 128) && rotary_dim > 0 && rotary_dim % 16 == 0 && rotary_dim <= head_dim;
  return hopper && of_heads && size_of(dtype) == 2;
}

void rotary_linear(const Tensor& x, const Tensor& weight, const Tensor& y, const RotaryLinearOptions& o) {
  for (const auto& [name, table] : {std::pair{"cos", &o.cos}, {"sin", &o.sin}}) {
    check_operand(kOp, name, *table, DType::f32, o.stream.device());
    require(table->rank() == 2 && table->is_contiguous() && table->shape(0) >= o.positions && table->shape() == o.cos.shape(),
            "{}: {} is {}; both tables must be contiguous, [at least {}, rotary_dim / 2]", kOp, name, *table, o.positions);
  }
  const int half = static_cast<int>(o.cos.shape(1));
  const Call call = make_call(x, weight.transpose(0, 1), y, {.bias = o.bias, .stream = o.stream});
  require(has_rotary_linear(y.dtype(), o.head_dim, 2 * half, o.stream) && call.k > 0 && call.layout == Layout{} && x.is_contiguous() &&
              y.is_contiguous(),
          "{}: x is {}, y {}, head_dim {} and rotary_dim {}; x and y must be contiguous, of f16 or bf16, on a Hopper GPU, with K of 1 or "
          "more, head_dim 64 or 128, and rotary_dim a multiple of 16 up to it",
          kOp, x, y, o.head_dim, 2 * half);
  require(o.positions > 0 && o.heads >= 0 && call.n % o.head_dim == 0 && std::int64_t{o.heads} * o.head_dim <= call.n,
          "{}: {} of {} columns in heads of {} are rotated, at {} positions; columns must be whole heads, and positions 1 or more", kOp,
          std::int64_t{o.heads} * o.head_dim, call.n, o.head_dim, o.positions);
  if (y.numel() == 0) return;

  Problem problem = problem_of(call, device_info(call.stream.device()).units);
  problem.column_step = o.head_dim;
  const Kernel kernel{.dtype = y.dtype(),
                      .tile = configs()[static_cast<std::size_t>(choose_config(problem))],
                      .epilogue = &epilogue_of({y.dtype(), half, o.head_dim})};
  y.dtype() == DType::bf16 ? launch<bf16>(call, kernel, o) : launch<f16>(call, kernel, o);
}

}  // namespace tw::kernels::gemm
