#include "kernels/mamba2/chunk_checks.hpp"
#include "kernels/mamba2/chunk_output_gradients.tile.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/mamba2_chunks.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

// Gradients of the scan's five steps: the public functions, their checks and their launches.

namespace tw {

namespace {

using namespace kernels;
using namespace kernels::mamba2;

template <class T>
using KeyGradientsOfB = KeyGradients<T, UntilEnd>;
template <class T>
using KeyGradientsOfC = KeyGradients<T, FromStart>;
template <class T>
using ProductGradientsOfC = ProductGradients<T, false>;
template <class T>
using ProductGradientsOfB = ProductGradients<T, true>;

using StepsOfAdded = AddedStepGradients<kCumsumHeads, kLargestChunk>;
using StepsOfScan = ScanStepGradients<kCumsumHeads, kLargestChunk>;
static_assert(StepsOfScan::kTile == ScoreGradients<f16>::M && StepsOfScan::kTile == ScoreGradients<f16>::N);

/// A number for each step in each of `count` parts: f32 [part * batch, head, chunk, step].
Tensor step_parts(const Tensor& sums, int count, const Stream& stream) {
  return workspace({count * sums.shape(0), sums.shape(1), sums.shape(2), sums.shape(3)}, DType::f32, stream);
}
/// These as [part * batch, head, chunk * chunk_size + step, 1], or as [part * batch * head, chunk * chunk_size + step].
Tensor parts_of_rows(const Tensor& parts) { return parts.reshape({parts.shape(0), parts.shape(1), parts.shape(2) * parts.shape(3), 1}); }
Tensor parts_of_columns(const Tensor& parts) { return parts.reshape({parts.shape(0) * parts.shape(1), parts.shape(2) * parts.shape(3)}); }

/// total [column] = the sums of [run, column] over runs, in f32.
void sum_runs(const Stream& stream, const Tensor& sums, const Tensor& total) {
  const Tensor row = Tensor::borrow(total.data(), {1, total.shape(0)}, DType::f32, total.device(), {0, total.stride(0)});
  run_sum(stream, sums.reshape({sums.shape(0), 1, sums.shape(1)}), row);
}

template <class Kernel>
TileGrid group_grid(const Tensor& keys, std::int64_t chunks, std::int64_t rows, std::int64_t columns) {
  return {static_cast<int>(keys.shape(0) * chunks * keys.shape(2)), tiles(rows, Kernel::M) * tiles(columns, Kernel::N)};
}

/// dB or dC, and the products of keys with d^T x in parts of columns.
template <template <class> class Kernel>
Tensor run_key_gradients(const Stream& stream, const ChunkCall& call, const Tensor& d_keys) {
  const std::int64_t state = call.keys.shape(3);
  const int columns = tiles(state, Kernel<f16>::N);
  const Tensor dots = step_parts(call.sums, columns, stream);
  launch_products<Kernel>(
      stream, call.x.dtype(),
      [&]<class Of>(std::type_identity<Of>) { return group_grid<Of>(call.keys, call.sums.shape(2), call.sums.shape(3), state); },
      [&](auto& bind, auto& p, int) {
        bind_chunk(bind, p, call);
        bind(p.keys, by_head(call.keys));
        bind(p.d_keys, by_head(d_keys));
        bind(p.dots, parts_of_rows(dots));
        p.sums = call.sums.template data<float>();
        p.batches = static_cast<int>(call.x.shape(0));
        p.columns = columns;
      });
  return dots;
}

void bind_step_gradients(auto& bind, auto& p, const ChunkCall& call, const Tensor& dots, const Tensor& d_sizes, const Tensor& d_sums) {
  const auto by_chunk = [](const Tensor& t) { return t.transpose(1, 2); };
  bind(p.dots, by_chunk(dots));
  bind(p.sizes, by_chunk(call.sizes));
  bind(p.sums, by_chunk(call.sums));
  bind(p.d_sizes, by_chunk(d_sizes));
  bind(p.d_sums, by_chunk(d_sums));
  p.batches = static_cast<int>(call.x.shape(0));
  p.parts = static_cast<int>(dots.shape(0)) / p.batches;
  p.chunks = static_cast<int>(call.sums.shape(2));
  p.length = static_cast<int>(call.x.shape(1));
}

/// dD, f32 [head] or [head, dim]: the sums of x du over steps.
void run_skip_gradients(const Stream& stream, const Tensor& x, const Tensor& du, const Tensor& dd) {
  const int runs = tiles(x.shape(1), kRun), batch = static_cast<int>(x.shape(0)), heads = static_cast<int>(x.shape(2));
  const Tensor sums = workspace({batch * runs, heads, dd.rank() == 2 ? x.shape(3) : 1}, DType::f32, stream);
  const auto fill = [&](auto& bind, auto& p) {
    bind(p.x, by_head(x));
    bind(p.du, by_head(du));
    bind(p.dv, nullptr), bind(p.sizes, nullptr), bind(p.skip, nullptr), bind(p.dx, nullptr), bind(p.products, nullptr);
    bind(p.skip_sums, sums.transpose(0, 1));
    p.steps = {.cu_seqlens = nullptr, .sequences = batch, .length = static_cast<int>(x.shape(1))};
    p.heads = heads, p.run = kRun, p.runs = runs;
  };
  const TileGrid grid{runs, batch * heads};
  with_gradient_rows(x.shape(3), [&]<int R, int C>() {
    if (grid.count() == 0) return;
    if (!x.device().is_cuda()) return launch_cpu<InputGradients<cpu::AnyFloat, R, C>>(grid, fill);
    with_float_type(x.dtype(), [&]<class T>(std::type_identity<T>) { launch_gpu<InputGradients<T, R, C>>(stream, grid, fill); });
  });
  if (dd.rank() == 2)
    run_sum(stream, sums, dd);
  else
    sum_runs(stream, sums.reshape({sums.shape(0), sums.shape(1)}), dd);
}

/// du and dz, from the outputs before the gate.
Tensor run_gate_gradients(const Stream& stream, const Tensor& x, const Tensor& dy, const Mamba2ChunkScanBackwardOptions& options) {
  const Tensor du = workspace(x.shape(), x.dtype(), stream);
  Gradients g;
  g.dy = by_head(dy), g.o = by_head(*options.ungated), g.du = by_head(du), g.dz = by_head(*options.dz);
  Call call;
  call.x = by_head(x), call.z = by_head(*options.z), call.sequences = x.shape(0), call.stream = stream;
  run_output_gradients(call, g);
  return du;
}

/// A gradient that is optional, of an input that must be given with it.
void check_gradient_of(const char* op, NamedTensor gradient, NamedTensor of) {
  if (gradient.tensor == nullptr) return;
  require(of.tensor != nullptr, "{}: {} is {}, but {} is not given", op, gradient.name, *gradient.tensor, of.name);
  check_like(op, gradient, of);
}

}  // namespace

void mamba2_chunk_cumsum_backward(const Tensor& dt, const Tensor& a, const Tensor& d_da_cumsum, const Tensor& d_dt_out, const Tensor& d_dt,
                                  const Mamba2ChunkCumsumBackwardOptions& options) {
  constexpr const char* op = "mamba2_chunk_cumsum_backward";
  const Device device = dt.device();
  const ChunkCumsumCall call = checked_cumsum(op, dt, a, {"d_dA_cumsum", &d_da_cumsum}, {"d_dt_out", &d_dt_out}, options);
  check_like(op, {"d_dt", &d_dt}, {"dt", &dt});
  const NamedTensor da{"dA", options.da}, d_bias{"d_dt_bias", options.d_dt_bias};
  check_gradient_of(op, da, {"A", &a});
  check_gradient_of(op, d_bias, {"dt_bias", options.dt_bias});
  check_written(op, {{"d_dt", &d_dt}, da, d_bias},
                {{"dt", &dt},
                 {"A", &a},
                 {"d_dA_cumsum", &d_da_cumsum},
                 {"d_dt_out", &d_dt_out},
                 {"dt_bias", options.dt_bias},
                 {"seq_idx", options.seq_idx}});
  const Stream stream = checked_stream(op, options.stream, device);
  const std::int64_t runs = d_da_cumsum.shape(0) * d_da_cumsum.shape(2), heads = dt.shape(2);
  if (heads == 0) return;
  const Tensor rate_sums = workspace({runs, heads}, DType::f32, stream), bias_sums = workspace({runs, heads}, DType::f32, stream);
  const auto of_tiles = [&](const Tensor& sums) { return sums.reshape({runs, heads, 1}); };
  const auto fill = [&](auto& bind, auto& p) {
    bind_step_sizes(bind, p, call);
    bind(p.d_sums, d_da_cumsum.transpose(1, 2));
    bind(p.d_sizes, d_dt_out.transpose(1, 2));
    bind(p.d_dt, d_dt.transpose(1, 2));
    bind(p.rate_sums, of_tiles(rate_sums));
    bind(p.bias_sums, of_tiles(bias_sums));
  };
  const TileGrid grid = steps_grid(d_da_cumsum);
  if (grid.count() > 0) {
    if (!device.is_cuda())
      launch_cpu<ChunkCumsumGradients<cpu::AnyFloat, kCumsumHeads, kLargestChunk>>(grid, fill);
    else
      with_float_type(dt.dtype(), [&]<class T>(std::type_identity<T>) {
        launch_gpu<ChunkCumsumGradients<T, kCumsumHeads, kLargestChunk>>(stream, grid, fill);
      });
  }
  if (options.da != nullptr) sum_runs(stream, rate_sums, *options.da);
  if (options.d_dt_bias != nullptr) sum_runs(stream, bias_sums, *options.d_dt_bias);
}

void mamba2_chunk_state_backward(const Tensor& b, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& d_states,
                                 const Tensor& db, const Tensor& dx, const Tensor& d_dt, const Tensor& d_da_cumsum,
                                 const std::optional<Stream>& stream) {
  constexpr const char* op = "mamba2_chunk_state_backward";
  check_16_bits(op, {"x", &x});
  check_inputs(op, x);
  check_keys(op, "B", b, x);
  check_steps(op, x, dt, da_cumsum);
  const Device device = x.device();
  check_f32_between(op, {"d_states", &d_states}, {x.shape(0), da_cumsum.shape(2), x.shape(2), x.shape(3), b.shape(3)}, kOfStates, device);
  check_like(op, {"dB", &db}, {"B", &b});
  check_like(op, {"dx", &dx}, {"x", &x});
  for (const NamedTensor& t : {NamedTensor{"d_dt", &d_dt}, NamedTensor{"d_dA_cumsum", &d_da_cumsum}})
    check_f32_between(op, t, dt.shape(), kOfSteps, device);
  check_written(op, {{"dB", &db}, {"dx", &dx}, {"d_dt", &d_dt}, {"d_dA_cumsum", &d_da_cumsum}},
                {{"B", &b}, {"x", &x}, {"dt", &dt}, {"dA_cumsum", &da_cumsum}, {"d_states", &d_states}});
  const Stream on = checked_stream(op, stream, device);
  if (x.numel() == 0) return;
  const Tensor rounded = workspace(d_states.shape(), x.dtype(), on);
  cast(merged(d_states), merged(rounded), {.stream = on});
  const ChunkCall call{.x = x, .keys = b, .sizes = dt, .sums = da_cumsum, .states = rounded};
  launch_products<AddedInputGradients>(
      on, x.dtype(),
      [&]<class Of>(std::type_identity<Of>) { return chunk_grid(call, tiles(dt.shape(3), Of::M), tiles(x.shape(3), Of::N)); },
      [&](auto& bind, auto& p, int tile_columns) {
        bind_steps(bind, p, call);
        bind(p.b, by_head(b));
        bind(p.d_states, merged(rounded));
        bind(p.dx, by_head(dx));
        p.sums = da_cumsum.data<float>();
        p.columns = tiles(x.shape(3), tile_columns);
      });
  const Tensor dots = run_key_gradients<KeyGradientsOfB>(on, call, db);
  launch<StepsOfAdded>(on, steps_grid(da_cumsum), [&](auto& bind, auto& p) {
    bind_step_gradients(bind, p, call, dots, d_dt, d_da_cumsum);
    bind(p.last, da_cumsum.slice(3, da_cumsum.shape(3) - 1, da_cumsum.shape(3)).transpose(1, 2));
  });
}

void mamba2_state_passing_backward(const Tensor& passed, const Tensor& da_chunk_cumsum, const Tensor& d_passed, const Tensor& d_states,
                                   const Tensor& d_da_chunk_cumsum, const Mamba2StatePassingBackwardOptions& options) {
  constexpr const char* op = "mamba2_state_passing_backward";
  const Device device = passed.device();
  check_states(op, {"passed", &passed});
  const Shape& shape = passed.shape();
  require(is_float(passed.dtype()), "{}: passed is {}; f32, f16 and bf16 are supported", op, passed);
  check_between(op, {"passed", &passed}, shape, kOfStates, device);
  const Shape of_decays{shape[0], shape[2], shape[1]};
  check_f32(op, {"dA_chunk_cumsum", &da_chunk_cumsum}, of_decays, device);
  check_f32_between(op, {"d_passed", &d_passed}, shape, kOfStates, device);
  check_f32_between(op, {"d_states", &d_states}, shape, kOfStates, device);
  check_f32_between(op, {"d_dA_chunk_cumsum", &d_da_chunk_cumsum}, of_decays, "[batch, nheads, nchunks]", device);
  const NamedTensor d_initial{"d_initial_states", options.d_initial_states}, d_final{"d_final_states", options.d_final_states};
  for (const NamedTensor& t : {d_initial, d_final})
    if (t.tensor != nullptr) check_f32_between(op, t, {shape[0], shape[2], shape[3], shape[4]}, "[batch, nheads, headdim, dstate]", device);
  const std::initializer_list<NamedTensor> inputs{{"passed", &passed}, {"dA_chunk_cumsum", &da_chunk_cumsum}, {"d_passed", &d_passed}};
  check_written(op, {{"d_states", &d_states}, {"d_dA_chunk_cumsum", &d_da_chunk_cumsum}, d_initial}, inputs);
  check_disjoint(op, {"d_states", &d_states}, {d_final});
  check_disjoint(op, {"d_dA_chunk_cumsum", &d_da_chunk_cumsum}, {d_final});
  if (d_initial.tensor != nullptr && d_final.tensor != nullptr) check_in_place(op, d_initial, d_final);
  const Stream stream = checked_stream(op, options.stream, device);
  const StatePassingCall call{d_states, passed, da_chunk_cumsum, options.d_final_states, options.d_initial_states};
  const TileGrid grid = passing_grid(call, kPassedElements);
  const Tensor decay_sums = workspace({grid.n, da_chunk_cumsum.numel()}, DType::f32, stream);
  if (grid.count() > 0) {
    const auto fill = [&](auto& bind, auto& p) {
      fill_decays(p, da_chunk_cumsum);
      bind(p.passed, of_chunks(passed));
      bind(p.d_passed, of_chunks(d_passed));
      bind(p.d_states, of_chunks(d_states));
      bind_state(bind, p.d_final, options.d_final_states);
      bind_state(bind, p.d_initial, options.d_initial_states);
      bind(p.decay_sums, decay_sums.reshape({grid.n, shape[0] * shape[2], shape[1], 1}));
    };
    if (!device.is_cuda())
      launch_cpu<StatePassingGradients<cpu::AnyFloat, kPassedElements>>(grid, fill);
    else
      with_float_type(passed.dtype(),
                      [&]<class T>(std::type_identity<T>) { launch_gpu<StatePassingGradients<T, kPassedElements>>(stream, grid, fill); });
  }
  if (d_da_chunk_cumsum.numel() > 0) sum_runs(stream, decay_sums, d_da_chunk_cumsum.reshape({d_da_chunk_cumsum.numel()}));
}

void mamba2_bmm_chunk_backward(const Tensor& c, const Tensor& b, const Tensor& d_cb, const Tensor& dc, const Tensor& db,
                               const Mamba2BmmChunkOptions& options) {
  constexpr const char* op = "mamba2_bmm_chunk_backward";
  check_products(op, c, b, {"d_CB", &d_cb});
  check_like(op, {"dC", &dc}, {"C", &c});
  check_like(op, {"dB", &db}, {"B", &b});
  check_written(op, {{"dC", &dc}, {"dB", &db}}, {{"C", &c}, {"B", &b}, {"d_CB", &d_cb}});
  const Stream stream = checked_stream(op, options.stream, c.device());
  if (c.numel() == 0) return;
  const auto run = [&]<template <class> class Kernel>(const Tensor& values, const Tensor& out) {
    launch_products<Kernel>(
        stream, c.dtype(), [&]<class Of>(std::type_identity<Of>) { return group_grid<Of>(c, d_cb.shape(1), d_cb.shape(3), c.shape(3)); },
        [&](auto& bind, auto& p, int tile_columns) {
          bind(p.d_cb, merged(d_cb));
          bind(p.values, by_head(values));
          bind(p.out, by_head(out));
          p.groups = static_cast<int>(c.shape(2));
          p.chunks = static_cast<int>(d_cb.shape(1));
          p.chunk_size = static_cast<int>(d_cb.shape(3));
          p.length = static_cast<int>(c.shape(1));
          p.columns = tiles(c.shape(3), tile_columns);
          p.causal = options.causal;
        });
  };
  run.template operator()<ProductGradientsOfC>(b, dc);
  run.template operator()<ProductGradientsOfB>(c, db);
}

void mamba2_chunk_scan_backward(const Tensor& cb, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& c,
                                const Tensor& states, const Tensor& dy, const Tensor& d_cb, const Tensor& dx, const Tensor& d_dt,
                                const Tensor& d_da_cumsum, const Tensor& dc, const Tensor& d_states,
                                const Mamba2ChunkScanBackwardOptions& options) {
  constexpr const char* op = "mamba2_chunk_scan_backward";
  check_scan(op, cb, x, dt, da_cumsum, c, states);
  const Device device = x.device();
  const NamedTensor z{"z", options.z}, ungated{"ungated", options.ungated}, dz{"dz", options.dz}, dd{"dD", options.dd};
  check_like(op, {"dy", &dy}, {"x", &x});
  check_like(op, {"dx", &dx}, {"x", &x});
  check_like(op, {"dC", &dc}, {"C", &c});
  for (const NamedTensor& t : {NamedTensor{"d_dt", &d_dt}, NamedTensor{"d_dA_cumsum", &d_da_cumsum}})
    check_f32_between(op, t, dt.shape(), kOfSteps, device);
  check_f32_between(op, {"d_CB", &d_cb}, cb.shape(), kOfProducts, device);
  check_f32_between(op, {"d_states", &d_states}, states.shape(), kOfStates, device);
  if (z.tensor != nullptr) check_like(op, z, {"x", &x});
  check_gradient_of(op, ungated, z);
  check_gradient_of(op, dz, z);
  require(z.tensor == nullptr || (dz.tensor != nullptr && ungated.tensor != nullptr), "{}: z is given, but {} is not; it must be given", op,
          dz.tensor == nullptr ? "dz" : "ungated");
  const Tensor skip = options.d != nullptr ? checked_skip(op, *options.d, x) : Tensor();
  check_gradient_of(op, dd, {"D", options.d});
  check_written(
      op, {{"d_CB", &d_cb}, {"dx", &dx}, {"d_dt", &d_dt}, {"d_dA_cumsum", &d_da_cumsum}, {"dC", &dc}, {"d_states", &d_states}, dd, dz},
      {{"CB", &cb},
       {"x", &x},
       {"dt", &dt},
       {"dA_cumsum", &da_cumsum},
       {"C", &c},
       {"states", &states},
       {"dy", &dy},
       {"D", options.d},
       z,
       ungated});
  const Stream stream = checked_stream(op, options.stream, device);
  if (x.numel() == 0) {
    if (dd.tensor != nullptr && x.shape(2) > 0) run_skip_gradients(stream, x, dy, *dd.tensor);
    return;
  }
  const Tensor du = options.z != nullptr ? run_gate_gradients(stream, x, dy, options) : dy;
  if (dd.tensor != nullptr) run_skip_gradients(stream, x, du, *dd.tensor);

  const std::int64_t size = da_cumsum.shape(3);
  launch_products<ScanInputGradients>(
      stream, x.dtype(),
      [&]<class Of>(std::type_identity<Of>) { return chunk_grid({.sums = da_cumsum}, tiles(size, Of::M), tiles(x.shape(3), Of::N)); },
      [&](auto& bind, auto& p, int tile_columns) {
        bind_steps(bind, p, {.x = x, .keys = c, .sizes = dt, .sums = da_cumsum});
        bind(p.cb, merged(cb));
        bind(p.du, by_head(du));
        bind(p.skip, or_null(skip));
        bind(p.dx, by_head(dx));
        p.columns = tiles(x.shape(3), tile_columns);
      });

  const ChunkCall of_states{.x = du, .keys = c, .sizes = dt, .sums = da_cumsum, .states = d_states};
  launch_products<StateGradients>(
      stream, x.dtype(), [&]<class Of>(std::type_identity<Of>) { return chunk_state_grid<Of>(of_states); },
      [&](auto& bind, auto& p, int tile_columns) { bind_chunk_state(bind, p, of_states, tile_columns); });

  const ChunkCall of_keys{.x = du, .keys = c, .sizes = dt, .sums = da_cumsum, .states = states};
  const Tensor dots = run_key_gradients<KeyGradientsOfC>(stream, of_keys, dc);

  const int score_tiles = tiles(size, StepsOfScan::kTile);
  const Tensor row_sums = step_parts(da_cumsum, score_tiles, stream), column_sums = step_parts(da_cumsum, score_tiles, stream);
  launch_products<ScoreGradients>(
      stream, x.dtype(), [&]<class Of>(std::type_identity<Of>) { return group_grid<Of>(c, da_cumsum.shape(2), size, size); },
      [&](auto& bind, auto& p, int) {
        bind_steps(bind, p, of_keys);
        bind(p.du, by_head(du));
        bind(p.x, by_head(x));
        bind(p.cb, merged(cb));
        bind(p.d_cb, merged(d_cb));
        bind(p.row_sums, parts_of_rows(row_sums));
        bind(p.column_sums, parts_of_columns(column_sums));
        p.batches = static_cast<int>(x.shape(0));
        p.columns = score_tiles;
      });
  launch<StepsOfScan>(stream, steps_grid(da_cumsum), [&](auto& bind, auto& p) {
    bind_step_gradients(bind, p, of_keys, dots, d_dt, d_da_cumsum);
    bind(p.row_sums, row_sums.transpose(1, 2));
    bind(p.column_sums, column_sums.transpose(1, 2));
  });
}

}  // namespace tw
