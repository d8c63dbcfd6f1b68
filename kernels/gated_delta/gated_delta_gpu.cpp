#include <compare>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gated_delta/call.hpp"
#include "kernels/gated_delta/variants.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::gated_delta {
namespace {

enum class Kind { prepare, walk, step, normalise };

struct DeltaKernel {
  Kind kind;
  DType x, beta;
  int dim;
  bool normalise;     ///< step
  int slice, stages;  ///< walk
  auto operator<=>(const DeltaKernel&) const = default;
};

std::string type_of(const DeltaKernel& k) {
  const char* const x = element_name(k.x);
  switch (k.kind) {
    case Kind::prepare:
      return tw::format("tw::kernels::gated_delta::Prepare<{}, {}, {}>", x, element_name(k.beta), k.dim);
    case Kind::walk:
      return tw::format("tw::kernels::gated_delta::Walk<{}, {}, {}, {}>", x, k.dim, k.slice, k.stages);
    case Kind::step:
      return tw::format("tw::kernels::gated_delta::Step<{}, {}, {}, {}>", x, element_name(k.beta), k.dim, bool_name(k.normalise));
    default:
      return tw::format("tw::kernels::gated_delta::Normalise<{}, {}>", x, k.dim);
  }
}

/// Two warpgroups and stages take most of a Hopper SM's shared memory. Some GPUs of the generic target have 99 KB for a block.
DeltaKernel walk_kernel(DType x, int dim, bool generic) { return {Kind::walk, x, x, dim, false, generic ? 64 : 128, generic ? 1 : 2}; }

KernelTable<DeltaKernel>& table() {
  static KernelTable<DeltaKernel> kernels(type_of, kSource);
  return kernels;
}

/// Calls f(std::type_identity<X>, std::type_identity<Beta>) with the types of q and beta.
template <class F>
void with_types(const Call& call, F f) {
  with_float_type(call.q.dtype(), [&]<class X>(std::type_identity<X> x) {
    if (call.beta.dtype() == DType::f32)
      f(x, std::type_identity<float>{});
    else
      f(x, x);
  });
}

using Target = sm_90a::Target<>;

/// Normalised queries or keys.
template <class X>
Tensor normalised_on_gpu(const Tensor& x, const Stream& stream) {
  const Tensor y = workspace(x.shape(), x.dtype(), stream);
  const RowViews views(std::initializer_list<const Tensor*>{&x, &y});
  using Params = typename Normalise<X, 128>::template On<Target>::Params;
  detail::launch_named<Params>(table()[{Kind::normalise, x.dtype(), x.dtype(), 128, false, 0, 0}], stream,
                               row_grid("gated_delta_rule", views, 1, Normalise<X, 128>::tile_rows, 1), [&](auto& bind, auto& p) {
                                 bind(p.x, views[0]);
                                 bind(p.y, views[1]);
                               });
  return y;
}

int dim_of(const Call& call) { return call.dim() <= 64 ? 64 : 128; }

template <class X, class Beta>
void launch_chunks(Call& call) {
  if (call.normalise && call.q.numel() > 0) {
    call.q = normalised_on_gpu<X>(call.q, call.stream);
    call.k = normalised_on_gpu<X>(call.k, call.stream);
  }
  make_workspace(call, [&](Shape shape, DType dtype) { return workspace(std::move(shape), dtype, call.stream); });
  const DType x = call.q.dtype();
  if (call.chunks() > 0)
    detail::launch_named<typename Prepare<X, Beta, 128>::template On<Target>::Params>(
        table()[{Kind::prepare, x, call.beta.dtype(), dim_of(call), false, 0, 0}], call.stream, prepare_grid(call),
        [&](auto& bind, auto& p) { bind_prepare(bind, p, call); });
  const DeltaKernel walk = walk_kernel(x, dim_of(call), call.stream.target() == GpuTarget::cuda);
  detail::launch_named<typename Walk<X, 128, 128, 2>::template On<Target>::Params>(table()[walk], call.stream, walk_grid(call, walk.slice),
                                                                                   [&](auto& bind, auto& p) { bind_walk(bind, p, call); });
}

}  // namespace

void chunks_on_gpu(Call call) {
  const auto with_beta = [&]<class X>() { call.beta.dtype() == DType::f32 ? launch_chunks<X, float>(call) : launch_chunks<X, X>(call); };
  call.q.dtype() == DType::f16 ? with_beta.template operator()<f16>() : with_beta.template operator()<bf16>();
}

void steps_on_gpu(const Call& call) {
  with_types(call, [&]<class X, class Beta>(std::type_identity<X>, std::type_identity<Beta>) {
    using Kernel = Step<X, Beta, 128, false>;
    detail::launch_named<typename Kernel::template On<Target>::Params>(
        table()[{Kind::step, call.q.dtype(), call.beta.dtype(), dim_of(call), call.normalise, 0, 0}], call.stream,
        walk_grid(call, Kernel::cols), [&](auto& bind, auto& p) { bind_step(bind, p, call); });
  });
}

namespace {

/// A call for a shape, with gates, the final state and no initial one.
template <class T>
struct Placeholders {
  Tensor q, k, v, beta, o, g, state;
  explicit Placeholders(const ShapeValues& shape) {
    const std::int64_t batch = shape["batch"], seqlen = shape["seqlen"], heads = shape["heads"], dim = shape["dim"];
    q = placeholder({batch, seqlen, heads, dim}, dtype_of<T>);
    k = placeholder(q.shape(), dtype_of<T>);
    v = placeholder(q.shape(), dtype_of<T>);
    o = placeholder(q.shape(), dtype_of<T>);
    beta = placeholder({batch, seqlen, heads}, DType::f32);
    g = placeholder({batch, seqlen, heads}, DType::f32);
    state = placeholder({batch, heads, dim, dim}, DType::f32);
  }
  Call call() const {
    Call result = check("gated_delta_rule", q, k, v, beta, o, {.g = &g, .final_state = &state});
    make_workspace(result, [](Shape shape, DType dtype) { return placeholder(std::move(shape), dtype); });
    return result;
  }
};

void require_dim(const ShapeValues& shape, int dim) {
  require(shape["dim"] <= dim, "shape: dim is {}; the kernel supports up to {}", shape["dim"], dim);
}

template <class T, int dim>
Analysis analyze_prepare(const ShapeValues& shape) {
  require_dim(shape, dim);
  const Call call = Placeholders<T>(shape).call();
  return analyze<Prepare<T, float, dim>>(prepare_grid(call), [&](auto& bind, auto& p) { bind_prepare(bind, p, call); });
}
template <class T, int dim>
Analysis analyze_walk(const ShapeValues& shape) {
  require_dim(shape, dim);
  const Call call = Placeholders<T>(shape).call();
  return analyze<Walk<T, dim, 128, 2>>(walk_grid(call, 128), [&](auto& bind, auto& p) { bind_walk(bind, p, call); });
}
template <class T, int dim>
Analysis analyze_step(const ShapeValues& shape) {
  require_dim(shape, dim);
  const Call call = Placeholders<T>(shape).call();
  return analyze<Step<T, float, dim, false>>(walk_grid(call, Step<T, float, dim, false>::cols),
                                             [&](auto& bind, auto& p) { bind_step(bind, p, call); });
}

}  // namespace

namespace {

const DeltaKernel kPrepare{Kind::prepare, DType::bf16, DType::f32, 128, false, 0, 0},
    kStep{Kind::step, DType::bf16, DType::f32, 128, false, 0, 0};

KernelSpec spec_of(const DeltaKernel& kernel, const char* name) { return make_spec({type_of(kernel), kSource, nullptr}, true, true, name); }

}  // namespace

std::vector<KernelVariant> registered() {
  return {{spec_of(kPrepare, "gated_delta_prepare_bf16_128"), analyze_prepare<bf16, 128>},
          {spec_of(walk_kernel(DType::bf16, 128, false), "gated_delta_walk_bf16_128"), analyze_walk<bf16, 128>},
          {spec_of(walk_kernel(DType::bf16, 64, false), "gated_delta_walk_bf16_64"), analyze_walk<bf16, 64>},
          {spec_of(kStep, "gated_delta_step_bf16_128"), analyze_step<bf16, 128>}};
}

std::vector<KernelSpec> registered_generic() {
  std::vector<KernelSpec> specs{
      spec_of(kPrepare, "gated_delta_prepare_bf16_128"), spec_of(walk_kernel(DType::bf16, 128, true), "gated_delta_walk_bf16_128"),
      spec_of(walk_kernel(DType::bf16, 64, true), "gated_delta_walk_bf16_64"), spec_of(kStep, "gated_delta_step_bf16_128")};
  for (KernelSpec& spec : specs) spec = for_target(spec, GpuTarget::cuda);
  return specs;
}

}  // namespace tw::kernels::gated_delta
