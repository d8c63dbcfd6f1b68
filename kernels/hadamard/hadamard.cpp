#include "tilewave/hadamard.hpp"

#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "kernels/hadamard/hadamard.tile.hpp"
#include "kernels/hadamard/plan.hpp"
#include "kernels/hadamard/variants.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels;
using namespace kernels::hadamard;

constexpr const char* kOp = "hadamard";

template <class In, class Out, bool kFactors, int n>
using HeldKernel = HeldRows<In, Out, kFactors, held_tile(n, kPieceColumns<In, Out>).rows, held_tile(n, kPieceColumns<In, Out>).cols,
                            held_tile(n, kPieceColumns<In, Out>).warps, kPieceColumns<In, Out>>;
template <class In, class Out, bool kFactors, int n>
using SharedKernel = SharedRows<In, Out, kFactors, shared_plan(n).order, shared_plan(n).span, shared_plan(n).first, shared_plan(n).second,
                                shared_plan(n).warps, kPieceColumns<In, Out>>;

struct RowKernel {
  DType in, out;
  bool factors;
  int n;
  auto operator<=>(const RowKernel&) const = default;
};

std::string type_of(const RowKernel& k) {
  const int width = piece_columns({k.in, k.out});
  const std::string types = tw::format("{}, {}, {}", element_name(k.in), element_name(k.out), bool_name(k.factors));
  if (is_held(k.n)) {
    const RowTile tile = held_tile(k.n, width);
    return tw::format("tw::kernels::hadamard::HeldRows<{}, {}, {}, {}, {}>", types, tile.rows, tile.cols, tile.warps, width);
  }
  const SharedPlan plan = shared_plan(k.n);
  return tw::format("tw::kernels::hadamard::SharedRows<{}, {}, {}, {}, {}, {}, {}>", types, plan.order, plan.span, plan.first, plan.second,
                    plan.warps, width);
}

struct Call {
  RowViews views;
  const Tensor* factors;
  int n;
  float scale;
  Stream stream;
};

void bind_call(auto& bind, auto& p, const Call& call) {
  bind(p.x, call.views[0]);
  bind(p.y, call.views[1]);
  bind(p.factors, call.factors);
  p.scale = call.scale;
}

void run_on_gpu(const Call& call) {
  static KernelTable<RowKernel> table(type_of, HeldKernel<float, float, false, 8>::source);
  const DType in = call.views[0].dtype(), out = call.views[1].dtype();
  const int tile_rows = is_held(call.n) ? held_tile(call.n, piece_columns({in, out})).rows : 1;
  const TileGrid grid = row_grid(kOp, call.views, 1, tile_rows, 1);
  with_float_type(in, [&]<class In>(std::type_identity<In>) {
    with_float_type(out, [&]<class Out>(std::type_identity<Out>) {
      // The tile changes neither the layout of Params nor the way tensors are bound.
      detail::launch_named<typename HeldKernel<In, Out, false, 1024>::template On<sm_90a::Target<>>::Params>(
          table[{in, out, call.factors != nullptr, call.n}], call.stream, grid, [&](auto& bind, auto& p) { bind_call(bind, p, call); });
    });
  });
}

template <class Kernel>
void launch_rows(const Call& call, int tile_rows) {
  launch_cpu<Kernel>(row_grid(kOp, call.views, 1, tile_rows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

/// Rows of order * 2^log2 elements: the power of two in registers, and the small matrix in one pass.
template <int order, int log2>
void run_size(const Call& call) {
  if constexpr (order == 1) {
    constexpr int cols = log2 < 3 ? 8 : 1 << log2, rows = cols < 4096 ? 4096 / cols : 1;  // a tile of 16 KB stays in the L1 cache
    launch_rows<HeldRows<cpu::AnyFloat, cpu::AnyFloat, true, rows, cols, 4, 0>>(call, rows);
  } else {
    launch_rows<SharedRows<cpu::AnyFloat, cpu::AnyFloat, true, order, 1 << log2, 1, 1, 4, 1>>(call, 1);
  }
}

/// The function for each power of two, from 2^0 on, with which rows of `order` times as many elements are not too long.
template <int order>
constexpr auto kRunSize = []<int... log2>(std::integer_sequence<int, log2...>) {
  return std::array{run_size<order, log2>...};
}
(std::make_integer_sequence<int, std::bit_width(static_cast<unsigned>(kLongestRow / order))>{});

void run_on_cpu(const Call& call) {
  const auto [order, log2] = factors_of(call.n);
  const auto at = static_cast<std::size_t>(log2);
  if (order == 1) return kRunSize<1>[at](call);
  if (order == 12) return kRunSize<12>[at](call);
  if (order == 20) return kRunSize<20>[at](call);
  kRunSize<28>[at](call);
}

Call check(const Tensor& x, const Tensor& y, const HadamardOptions& options) {
  const Device device = y.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", kOp, x);
  require(is_float(y.dtype()), "{}: y is {}; f32, f16 and bf16 are supported", kOp, y);
  check_operand(kOp, "x", x, x.dtype(), device);
  check_operand(kOp, "y", y, y.dtype(), device);
  check_output(kOp, "y", y);
  require(x.rank() >= 1 && x.rank() <= 4, "{}: x is {}; it must have 1 to 4 dimensions", kOp, x);
  require(y.shape() == x.shape(), "{}: y is {}; it must have x's shape, {}", kOp, y, x);
  check_extents(kOp, "x", x);
  check_in_place(kOp, {"y", &y}, {"x", &x});
  const std::int64_t n = x.shape(-1);
  require(is_hadamard_size(n),
          "{}: x is {}; its last dimension must be 2, 4, 8, ... 32768, or 12, 20 or 28 times 1, 2, 4, ..., at most 32768", kOp, x);
  if (options.factors != nullptr) {
    const Tensor& factors = *options.factors;
    check_operand(kOp, "factors", factors, DType::f32, device);
    require(factors.shape() == Shape{n}, "{}: factors is {}; it must be f32[{}], one for each element of x's last dimension", kOp, factors,
            n);
    check_disjoint(kOp, {"y", &y}, {{"factors", &factors}});
  }
  require(std::isfinite(options.scale), "{}: scale is {}; it must be finite", kOp, options.scale);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  return {RowViews(std::array{&x, &y}), options.factors, static_cast<int>(n), options.scale, stream};
}

}  // namespace

bool is_hadamard_size(std::int64_t n) { return factors_of(n).order != 0; }

void hadamard(const Tensor& x, const Tensor& y, const HadamardOptions& options) {
  const Call call = check(x, y, options);
  if (x.numel() > 0) call.stream.device().is_cuda() ? run_on_gpu(call) : run_on_cpu(call);
}

namespace kernels::hadamard {

namespace {

template <class Kernel, int n>
Analysis analyze_shape(const ShapeValues& shape) {
  using On = typename Kernel::template On<analysis::Target>;
  using Params = typename On::Params;
  const Tensor x = placeholder({shape["rows"], n}, dtype_of<typename decltype(Params::x)::Element>);
  const Tensor y = placeholder({shape["rows"], n}, dtype_of<typename decltype(Params::y)::Element>);
  const Tensor factors = placeholder({n}, DType::f32);
  const Call call = check(x, y, {.factors = Kernel::has_factors ? &factors : nullptr});
  return analyze<Kernel>(row_grid(kOp, call.views, 1, On::Values::rows, 1), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class In, class Out, bool factors, int n>(const char* name) {
    const std::string type = type_of(RowKernel{dtype_of<In>, dtype_of<Out>, factors, n});
    const auto of = [&]<class Kernel>(std::type_identity<Kernel>) {
      variants.push_back({make_spec({type, Kernel::source, nullptr}, true, true, name), analyze_shape<Kernel, n>});
    };
    if constexpr (is_held(n))
      of(std::type_identity<HeldKernel<In, Out, factors, n>>{});
    else
      of(std::type_identity<SharedKernel<In, Out, factors, n>>{});
  };
  add.template operator()<bf16, bf16, true, 128>("hadamard_bf16_128_factors");
  add.template operator()<float, float, true, 2048>("hadamard_f32_2048_factors");
  add.template operator()<bf16, bf16, false, 32768>("hadamard_bf16_32768");
  return variants;
}

}  // namespace kernels::hadamard
}  // namespace tw
