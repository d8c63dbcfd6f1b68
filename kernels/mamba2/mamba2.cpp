#include "tilewave/mamba2.hpp"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "kernels/check.hpp"
#include "kernels/mamba2/call.hpp"
#include "kernels/mamba2/checks.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/linear_attention.hpp"

namespace tw {

namespace {

using namespace kernels;
using namespace kernels::mamba2;

/// Operands of all functions of the family.
struct Arguments {
  const char* op;
  const Tensor &x, &dt, &a, &b, &c;
};

/// A vector [n] of f32 as [1, n].
Tensor as_row(const Tensor& t) { return Tensor::borrow(t.data(), {1, t.shape(0)}, t.dtype(), t.device(), {0, t.stride(0)}); }

std::int64_t checked_sequences(const Arguments& a, const Tensor* cu_seqlens) {
  const auto& [op, x, dt, rate, b, c] = a;
  if (cu_seqlens == nullptr) return x.shape(0);
  const Tensor& cu = *cu_seqlens;
  require(cu.rank() == 1 && cu.dtype() == DType::i32 && cu.is_contiguous() && cu.shape(0) >= 1,
          "{}: cu_seqlens is {}; it must be i32[sequences + 1], contiguous", op, cu);
  check_operand(op, "cu_seqlens", cu, DType::i32, x.device());
  require(x.shape(0) == 1, "{}: x is {}; with cu_seqlens the batch must be 1", op, x);
  if (!x.device().is_cuda()) {
    std::int64_t before = 0;
    for (std::int64_t n = 0; n < cu.shape(0); ++n) {
      const std::int64_t offset = cu.data<std::int32_t>()[n];
      require(offset >= before && offset <= x.shape(1), "{}: cu_seqlens[{}] is {}; it must be from {} to the number of steps, {}", op, n,
              offset, before, x.shape(1));
      before = offset;
    }
  }
  return cu.shape(0) - 1;
}

/// `options`: of any function of the family. Sequences are the batch.
Call check(const Arguments& arguments, const auto& options) {
  const auto& [op, x, dt, a, b, c] = arguments;
  const Device device = x.device();
  require(is_float(x.dtype()), "{}: x is {}; f32, f16 and bf16 are supported", op, x);
  check_inputs(op, x);
  const Shape per_step{x.shape(0), x.shape(1), x.shape(2)}, per_head{x.shape(2)};
  require(dt.shape() == per_step, "{}: dt is {}; it must be [{}]", op, dt, tw::join(per_step, ", "));
  require(dt.dtype() == x.dtype() || dt.dtype() == DType::f32, "{}: dt is {}; it must be of x's dtype, {}, or f32", op, dt,
          name_of(x.dtype()));
  check_operand(op, "dt", dt, dt.dtype(), device);
  check_f32(op, {"A", &a}, per_head, device);
  check_keys(op, "B", b, x);
  check_like(op, {"C", &c}, {"B", &b});
  check_extents(op, "x", x);
  check_extents(op, "B", b);
  require(x.shape(0) * x.shape(1) <= kLargestExtent && x.shape(0) * x.shape(2) <= kLargestExtent,
          "{}: x is {}; batch * seqlen and batch * nheads must be at most {}", op, x, kLargestExtent);

  Call call;
  call.op = op;
  call.x = by_head(x);
  call.dt = dt;
  call.rate = as_row(a);
  call.b = b;
  call.c = c;
  call.sequences = x.shape(0);
  if (options.z != nullptr) {
    check_like(op, {"z", options.z}, {"x", &x});
    call.z = by_head(*options.z);
  }
  if (options.d != nullptr) call.skip = checked_skip(op, *options.d, x);
  if (options.dt_bias != nullptr) {
    check_f32(op, {"dt_bias", options.dt_bias}, per_head, device);
    call.bias = as_row(*options.dt_bias);
  }
  call.size = checked_step_size(op, options);
  call.stream = checked_stream(op, options.stream, device);
  return call;
}

/// Of a whole scan: the sequences, and the states.
void check_sequences(Call& call, const Arguments& arguments, const auto& options, std::initializer_list<NamedTensor> states,
                     int most_config) {
  const auto& [op, x, dt, a, b, c] = arguments;
  require(options.cu_seqlens == nullptr || options.seq_idx == nullptr,
          "{}: cu_seqlens and seq_idx are given; only one of them is supported", op);
  call.sequences = checked_sequences(arguments, options.cu_seqlens);
  if (options.cu_seqlens != nullptr) call.cu_seqlens = *options.cu_seqlens;
  if (options.seq_idx != nullptr) {
    check_seq_idx(op, *options.seq_idx, {x.shape(0), x.shape(1)}, x.device());
    call.seq_idx = *options.seq_idx;
  }
  for (const NamedTensor& t : states) check_f32(op, t, call.states(), x.device());
  require(options.config >= -1 && options.config <= most_config, "{}: config is {}; it must be -1 to {}", op, options.config, most_config);
  call.config = options.config;
}

/// States [.., headdim, dstate] as linear attention has them, [.., dstate, headdim].
struct Transposed {
  explicit Transposed(const Tensor* t) : given(t != nullptr), tensor(given ? t->transpose(2, 3) : Tensor()) {}
  const Tensor* pointer() const { return given ? &tensor : nullptr; }
  bool given;
  Tensor tensor;
};

/// y = the states' products with C.
void run_recurrence(const Call& call, const Discretized& d, const Tensor& scaled, const Tensor* initial, const Tensor* final,
                    const Tensor& y) {
  const Transposed from(initial), to(final);
  linear_attention(call.c, call.b, scaled, y,
                   {.scale = 1.0f,
                    .g = &d.g,
                    .initial_state = from.pointer(),
                    .final_state = to.pointer(),
                    .cu_seqlens = or_null(call.cu_seqlens),
                    .stream = call.stream,
                    .config = call.config});
}

bool can_walk(const Call& call) { return call.x.dtype() != DType::f32 && call.state() <= kScanState && scan_fits(call.stream); }
/// Whether the scan is one walk.
bool walks(const Call& call) { return can_walk(call) && call.length() > 0 && (call.config == 2 || (call.config == -1 && scan_pays(call))); }

}  // namespace

void mamba2(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& y,
            const Mamba2Options& options) {
  constexpr const char* op = "mamba2";
  const Arguments arguments{op, x, dt, a, b, c};
  Call call = check(arguments, options);
  const NamedTensor initial{"initial_states", options.initial_states}, final{"final_states", options.final_states};
  check_sequences(call, arguments, options, {initial, final}, 2);
  check_like(op, {"y", &y}, {"x", &x});
  check_written(op, {{"y", &y}, final},
                {{"x", &x},
                 {"dt", &dt},
                 {"A", &a},
                 {"B", &b},
                 {"C", &c},
                 {"D", options.d},
                 {"z", options.z},
                 {"dt_bias", options.dt_bias},
                 {"cu_seqlens", options.cu_seqlens},
                 {"seq_idx", options.seq_idx}});
  check_disjoint(op, {"y", &y}, {initial});
  if (options.final_states != nullptr && options.initial_states != nullptr) check_in_place(op, final, initial);
  require(call.config < 2 || can_walk(call),
          "{}: config is 2, x is {} and B {}; one walk is for f16 and bf16, dstate up to {}, and on GPUs for sm_90a", op, x, b, kScanState);
  if (call.sequences == 0 || call.heads() == 0) return;
  if (walks(call)) {
    const Transposed from(options.initial_states), to(options.final_states);
    return run_scan(call, from.pointer(), to.pointer(), by_head(y));
  }
  call.config = std::min(call.config, 1);  // without steps
  const Discretized d = run_discretize(call);
  const Tensor scaled = run_scale(call, d);
  run_recurrence(call, d, scaled, options.initial_states, options.final_states, y);
  if (given(call.skip) || given(call.z)) run_outputs(call, by_head(y));
}

void mamba2_step(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& states,
                 const Tensor& y, const Mamba2StepOptions& options) {
  constexpr const char* op = "mamba2_step";
  const Call call = check({op, x, dt, a, b, c}, options);
  check_like(op, {"y", &y}, {"x", &x});
  const Shape of_state = call.states();
  const bool indexed = options.state_indices != nullptr;
  require(states.rank() == 4 && (indexed || states.shape(0) == of_state[0]) &&
              std::equal(of_state.begin() + 1, of_state.end(), states.shape().begin() + 1),
          "{}: states is {}; it must be [{}, {}, {}, {}]", op, states, indexed ? "count" : std::to_string(of_state[0]), of_state[1],
          of_state[2], of_state[3]);
  require(states.dtype() == DType::f32 || states.dtype() == x.dtype(), "{}: states is {}; it must be f32 or of x's dtype, {}", op, states,
          name_of(x.dtype()));
  check_operand(op, "states", states, states.dtype(), x.device());
  check_extents(op, "states", states);
  if (indexed) {
    const Tensor& indices = *options.state_indices;
    require(indices.shape() == Shape{x.shape(0)} && indices.is_contiguous(), "{}: state_indices is {}; it must be contiguous, i32[{}]", op,
            indices, x.shape(0));
    check_operand(op, "state_indices", indices, DType::i32, x.device());
  }
  check_written(op, {{"y", &y}, {"states", &states}},
                {{"x", &x},
                 {"dt", &dt},
                 {"A", &a},
                 {"B", &b},
                 {"C", &c},
                 {"D", options.d},
                 {"z", options.z},
                 {"dt_bias", options.dt_bias},
                 {"state_indices", options.state_indices}});
  if (x.numel() == 0 || states.numel() == 0) return;
  run_update({call, states, by_head(y), indexed ? *options.state_indices : Tensor()});
}

void mamba2_backward(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& dy,
                     const Tensor& dx, const Tensor& d_dt, const Tensor& db, const Tensor& dc, const Mamba2BackwardOptions& options) {
  constexpr const char* op = "mamba2_backward";
  const Mamba2BackwardOptions& o = options;
  const Arguments arguments{op, x, dt, a, b, c};
  Call call = check(arguments, o);
  const NamedTensor initial{"initial_states", o.initial_states}, d_final{"d_final_states", o.d_final_states};
  const NamedTensor d_initial{"d_initial_states", o.d_initial_states};
  check_sequences(call, arguments, o, {initial, d_final, d_initial}, 2);
  check_like(op, {"dy", &dy}, {"x", &x});
  check_like(op, {"dx", &dx}, {"x", &x});
  check_like(op, {"d_dt", &d_dt}, {"dt", &dt});
  check_like(op, {"dB", &db}, {"B", &b});
  check_like(op, {"dC", &dc}, {"C", &c});
  const NamedTensor da{"dA", o.da}, dd{"dD", o.dd}, dz{"dz", o.dz}, d_bias{"d_dt_bias", o.d_dt_bias};
  check_gradient_of(op, da, {"A", &a});
  check_gradient_of(op, dd, {"D", o.d});
  check_gradient_of(op, dz, {"z", o.z});
  check_gradient_of(op, d_bias, {"dt_bias", o.dt_bias});
  require(o.z == nullptr || o.dz != nullptr, "{}: z is given, but dz is not; it must be given", op);
  check_written(op, {{"dx", &dx}, {"d_dt", &d_dt}, {"dB", &db}, {"dC", &dc}, da, dd, dz, d_bias, d_initial},
                {{"x", &x},
                 {"dt", &dt},
                 {"A", &a},
                 {"B", &b},
                 {"C", &c},
                 {"dy", &dy},
                 {"D", o.d},
                 {"z", o.z},
                 {"dt_bias", o.dt_bias},
                 {"cu_seqlens", o.cu_seqlens},
                 {"seq_idx", o.seq_idx},
                 initial,
                 d_final});
  require(call.config < 2 || steps_fit(call),
          "{}: config is 2, and x is {}; the gradients in five steps are for f16 and bf16 without cu_seqlens", op, x);
  if (call.heads() == 0) return;
  if (steps_fit(call) && (call.config == 2 || call.config == -1)) return run_backward_in_steps(call, {dy, dx, d_dt, db, dc}, o);
  const auto room = [&](Shape shape, DType dtype) { return workspace(std::move(shape), dtype, call.stream); };
  const Shape of_x = x.shape(), of_steps = dt.shape();
  const std::int64_t runs = x.shape(0) * tiles(call.length(), kRun), size_tiles = x.shape(0) * tiles(call.length(), kSizeRows);
  const bool of_dims = o.dd != nullptr && o.dd->rank() == 2;
  Gradients g;
  g.dy = g.du = by_head(dy);
  g.dx = by_head(dx);
  g.d_dt = d_dt;
  if (o.dd != nullptr) g.skip_sums = room({runs, x.shape(2), of_dims ? x.shape(3) : 1}, DType::f32);
  g.rate_sums = room({size_tiles, x.shape(2)}, DType::f32);
  g.bias_sums = room({size_tiles, x.shape(2)}, DType::f32);
  if (call.sequences > 0) {
    const Discretized d = run_discretize(call);
    const Tensor scaled = run_scale(call, d), dv = room(of_x, x.dtype());
    if (given(call.z)) {
      const Tensor scanned = room(of_x, x.dtype()), du = room(of_x, x.dtype());
      if (walks(call)) {
        Call plain = call;  // without D and the gate
        plain.z = plain.skip = Tensor();
        const Transposed from(o.initial_states);
        run_scan(plain, from.pointer(), nullptr, by_head(scanned));
      } else {
        run_recurrence(call, d, scaled, o.initial_states, nullptr, scanned);
      }
      g.o = by_head(scanned), g.du = by_head(du), g.dz = by_head(*o.dz);
      run_output_gradients(call, g);
    }
    g.dv = by_head(dv);
    g.dg = room(of_steps, DType::f32);
    g.products = room(of_steps, DType::f32);
    const Transposed from(o.initial_states), d_to(o.d_final_states), d_from(o.d_initial_states);
    linear_attention_backward(c, b, scaled, by_head(g.du), dc, db, dv,
                              {.scale = 1.0f,
                               .g = &d.g,
                               .initial_state = from.pointer(),
                               .cu_seqlens = or_null(call.cu_seqlens),
                               .d_final_state = d_to.pointer(),
                               .dg = &g.dg,
                               .d_initial_state = d_from.pointer(),
                               .stream = call.stream,
                               .config = call.config});
    run_input_gradients(call, d, g);
    run_size_gradients(call, d, g);
  }
  // Without steps there are no runs, and the sums are 0.
  const auto of_heads = [](const Tensor& sums) { return sums.reshape({sums.shape(0), 1, sums.shape(1)}); };
  if (o.da != nullptr) run_sum(call.stream, of_heads(g.rate_sums), as_row(*o.da));
  if (o.d_dt_bias != nullptr) run_sum(call.stream, of_heads(g.bias_sums), as_row(*o.d_dt_bias));
  if (o.dd == nullptr) return;
  if (of_dims)
    run_sum(call.stream, g.skip_sums, *o.dd);
  else
    run_sum(call.stream, of_heads(g.skip_sums.reshape({runs, x.shape(2)})), as_row(*o.dd));
}

}  // namespace tw
