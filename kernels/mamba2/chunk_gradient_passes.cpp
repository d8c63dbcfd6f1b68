#include "kernels/mamba2/chunk_gradients.hpp"
#include "kernels/mamba2/chunk_output_gradients.tile.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::mamba2 {

namespace {

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
/// These as [part * batch, head, chunk * chunk_size + step, 1].
Tensor parts_of_rows(const Tensor& parts) { return parts.reshape({parts.shape(0), parts.shape(1), parts.shape(2) * parts.shape(3), 1}); }

/// total [column] = the sums of [run, column] over runs, in f32.
void sum_runs(const Stream& stream, const Tensor& sums, const Tensor& total) {
  const Tensor row = Tensor::borrow(total.data(), {1, total.shape(0)}, DType::f32, total.device(), {0, total.stride(0)});
  run_sum(stream, sums.reshape({sums.shape(0), 1, sums.shape(1)}), row);
}

template <class Kernel>
TileGrid group_grid(const Tensor& keys, std::int64_t chunks, std::int64_t rows, std::int64_t columns) {
  return {static_cast<int>(keys.shape(0) * chunks * keys.shape(2)), tiles(rows, Kernel::M) * tiles(columns, Kernel::N)};
}

/// dB or dC, in the dtype or in f32, and the products of keys with d^T x in parts of columns.
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
        if (d_keys.dtype() == DType::f32) {
          bind(p.d_keys, nullptr), bind(p.unrounded, by_head(d_keys));
        } else {
          bind(p.d_keys, by_head(d_keys)), bind(p.unrounded, nullptr);
        }
        bind(p.dots, parts_of_rows(dots));
        p.sums = call.sums.template data<float>();
        p.batches = static_cast<int>(call.x.shape(0));
        p.columns = columns;
      });
  return dots;
}

Tensor by_chunk(const Tensor& t) { return t.transpose(1, 2); }

void bind_step_gradients(auto& bind, auto& p, const ChunkCall& call, const Tensor& dots, const StepGradients& to) {
  bind(p.dots, by_chunk(dots));
  bind(p.sizes, by_chunk(call.sizes));
  bind(p.sums, by_chunk(call.sums));
  bind(p.d_sizes, by_chunk(to.sizes));
  bind(p.d_sums, by_chunk(to.sums));
  p.batches = static_cast<int>(call.x.shape(0));
  p.parts = static_cast<int>(dots.shape(0)) / p.batches;
  p.chunks = static_cast<int>(call.sums.shape(2));
  p.length = static_cast<int>(call.x.shape(1));
}

template <template <class> class Kernel>
void run_product_gradients(const Stream& stream, const ProductGradientsCall& call) {
  launch_products<Kernel>(
      stream, call.out.dtype(),
      [&]<class Of>(std::type_identity<Of>) { return group_grid<Of>(call.out, call.d_cb.shape(1), call.d_cb.shape(3), call.out.shape(3)); },
      [&](auto& bind, auto& p, int tile_columns) {
        bind(p.d_cb, merged(call.d_cb));
        bind(p.values, by_head(call.values));
        bind(p.out, by_head(call.out));
        call.addend != nullptr ? bind(p.addend, by_head(*call.addend)) : bind(p.addend, nullptr);
        p.groups = static_cast<int>(call.out.shape(2));
        p.chunks = static_cast<int>(call.d_cb.shape(1));
        p.chunk_size = static_cast<int>(call.d_cb.shape(3));
        p.length = static_cast<int>(call.out.shape(1));
        p.columns = tiles(call.out.shape(3), tile_columns);
        p.causal = call.causal;
      });
}

}  // namespace

void run_cumsum_gradients(const Stream& stream, const ChunkCumsumCall& call, const Tensor& d_dt, const Tensor* da, const Tensor* d_bias) {
  const std::int64_t runs = call.sums.shape(0) * call.sums.shape(2), heads = call.sums.shape(1);
  if (heads == 0) return;
  const Tensor rate_sums = workspace({runs, heads}, DType::f32, stream), bias_sums = workspace({runs, heads}, DType::f32, stream);
  const auto of_tiles = [&](const Tensor& sums) { return sums.reshape({runs, heads, 1}); };
  const auto fill = [&](auto& bind, auto& p) {
    bind_step_sizes(bind, p, call);
    bind(p.d_sums, by_chunk(call.sums));
    bind(p.d_sizes, by_chunk(call.sizes));
    bind(p.d_dt, d_dt.transpose(1, 2));
    bind(p.rate_sums, of_tiles(rate_sums));
    bind(p.bias_sums, of_tiles(bias_sums));
  };
  const TileGrid grid = steps_grid(call.sums);
  if (grid.count() > 0) {
    if (!stream.device().is_cuda())
      launch_cpu<ChunkCumsumGradients<cpu::AnyFloat, kCumsumHeads, kLargestChunk>>(grid, fill);
    else
      with_float_type(call.dt.dtype(), [&]<class T>(std::type_identity<T>) {
        launch_gpu<ChunkCumsumGradients<T, kCumsumHeads, kLargestChunk>>(stream, grid, fill);
      });
  }
  if (da != nullptr) sum_runs(stream, rate_sums, *da);
  if (d_bias != nullptr) sum_runs(stream, bias_sums, *d_bias);
}

void run_added_input_gradients(const Stream& stream, const ChunkCall& call, const Tensor& dx) {
  launch_products<AddedInputGradients>(
      stream, call.x.dtype(),
      [&]<class Of>(std::type_identity<Of>) { return chunk_grid(call, tiles(call.sums.shape(3), Of::M), tiles(dx.shape(3), Of::N)); },
      [&](auto& bind, auto& p, int tile_columns) {
        bind_steps(bind, p, call);
        bind(p.b, by_head(call.keys));
        bind(p.d_states, merged(call.states));
        bind(p.dx, by_head(dx));
        p.sums = call.sums.template data<float>();
        p.columns = tiles(dx.shape(3), tile_columns);
      });
}

void run_added_key_gradients(const Stream& stream, const ChunkCall& call, const Tensor& db, const StepGradients& to,
                             const Tensor* d_decays) {
  const Tensor dots = run_key_gradients<KeyGradientsOfB>(stream, call, db);
  const std::int64_t size = call.sums.shape(3);
  launch<StepsOfAdded>(stream, steps_grid(call.sums), [&](auto& bind, auto& p) {
    bind_step_gradients(bind, p, call, dots, to);
    bind(p.last, by_chunk(call.sums.slice(3, size - 1, size)));
    if (d_decays != nullptr) {
      bind(p.more_sizes, by_chunk(to.sizes));
      bind(p.more_sums, by_chunk(to.sums));
      bind(p.more_last, by_chunk(d_decays->reshape({to.sums.shape(0), to.sums.shape(1), to.sums.shape(2), 1})));
    } else {
      bind(p.more_sizes, nullptr), bind(p.more_sums, nullptr), bind(p.more_last, nullptr);
    }
  });
}

void run_passing_gradients(const Stream& stream, const StatePassingGradientsCall& call) {
  const TileGrid grid = passing_grid(call, kPassedElements);
  const std::int64_t heads = call.sums.shape(0) * call.sums.shape(1), chunks = call.sums.shape(2);
  const Tensor decay_sums = workspace({grid.n, heads * chunks}, DType::f32, stream);
  if (grid.count() > 0) {
    const auto fill = [&](auto& bind, auto& p) {
      const auto bind_chunks = [&](auto& global, const Tensor& t) { given(t) ? bind(global, of_chunks(t)) : bind(global, nullptr); };
      fill_decays(p, call.sums);
      bind(p.passed, of_chunks(call.passed));
      bind(p.d_passed, of_chunks(call.d_passed));
      bind_chunks(p.d_states, call.d_states);
      bind_chunks(p.rounded, call.rounded);
      bind_state(bind, p.d_final, call.d_final);
      bind_state(bind, p.d_initial, call.d_initial);
      bind(p.decay_sums, decay_sums.reshape({grid.n, heads, chunks, 1}));
    };
    if (!stream.device().is_cuda())
      launch_cpu<StatePassingGradients<cpu::AnyFloat, kPassedElements>>(grid, fill);
    else
      with_float_type(call.passed.dtype(),
                      [&]<class T>(std::type_identity<T>) { launch_gpu<StatePassingGradients<T, kPassedElements>>(stream, grid, fill); });
  }
  if (heads * chunks > 0) sum_runs(stream, decay_sums, call.d_decays.reshape({heads * chunks}));
}

void run_product_gradients_of_c(const Stream& stream, const ProductGradientsCall& call) {
  run_product_gradients<ProductGradientsOfC>(stream, call);
}
void run_product_gradients_of_b(const Stream& stream, const ProductGradientsCall& call) {
  run_product_gradients<ProductGradientsOfB>(stream, call);
}

Tensor run_gate_gradients(const Stream& stream, const Tensor& x, const Tensor& z, const Tensor& ungated, const Tensor& dy,
                          const Tensor& dz) {
  const Tensor du = workspace(x.shape(), x.dtype(), stream);
  Gradients g;
  g.dy = by_head(dy), g.o = by_head(ungated), g.du = by_head(du), g.dz = by_head(dz);
  Call call;
  call.x = by_head(x), call.z = by_head(z), call.sequences = x.shape(0), call.stream = stream;
  run_output_gradients(call, g);
  return du;
}

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

void run_scan_input_gradients(const Stream& stream, const ChunkCall& call) {
  const std::int64_t size = call.sums.shape(3), dim = call.x.shape(3);
  launch_products<ScanInputGradients>(
      stream, call.x.dtype(), [&]<class Of>(std::type_identity<Of>) { return chunk_grid(call, tiles(size, Of::M), tiles(dim, Of::N)); },
      [&](auto& bind, auto& p, int tile_columns) {
        const auto by_row = [](const Tensor& t) { return t.reshape({t.shape(0) * t.shape(1), t.shape(2) * t.shape(3), 1}); };
        fill_counts(p, call);
        bind(p.g, by_step(call.sums));
        bind(p.row_g, by_row(call.sums));
        bind(p.row_sizes, by_row(call.sizes));
        if (given(call.states)) {
          bind(p.b, by_head(call.keys));
          bind(p.d_states, merged(call.states));
        } else {
          bind(p.b, nullptr), bind(p.d_states, nullptr);
        }
        bind(p.cb, merged(call.cb));
        bind(p.du, by_head(call.x));
        p.sums = call.sums.template data<float>();
        bind(p.skip, or_null(call.skip));
        bind(p.dx, by_head(call.y));
        p.columns = tiles(dim, tile_columns);
      });
}

void run_scan_state_gradients(const Stream& stream, const ChunkCall& call) {
  launch_products<StateGradients>(
      stream, call.x.dtype(), [&]<class Of>(std::type_identity<Of>) { return chunk_state_grid<Of>(call); },
      [&](auto& bind, auto& p, int tile_columns) { bind_chunk_state(bind, p, call, tile_columns); });
}

void run_scan_key_gradients(const Stream& stream, const ChunkCall& call, const Tensor& du, const Tensor& dc, const Tensor& d_cb,
                            const StepGradients& to) {
  ChunkCall of_outputs = call;
  of_outputs.x = du;
  const Tensor dots = run_key_gradients<KeyGradientsOfC>(stream, of_outputs, dc);
  const std::int64_t size = call.sums.shape(3);
  const int score_tiles = tiles(size, StepsOfScan::kTile);
  const Tensor row_sums = step_parts(call.sums, score_tiles, stream), column_sums = step_parts(call.sums, score_tiles, stream);
  launch_products<ScoreGradients>(
      stream, call.x.dtype(), [&]<class Of>(std::type_identity<Of>) { return group_grid<Of>(call.keys, call.sums.shape(2), size, size); },
      [&](auto& bind, auto& p, int) {
        bind_steps(bind, p, call);
        bind(p.du, by_head(du));
        bind(p.x, by_head(call.x));
        bind(p.cb, merged(call.cb));
        bind(p.d_cb, merged(d_cb));
        bind(p.row_sums, parts_of_rows(row_sums));
        bind(p.column_sums, by_step(column_sums));
        p.batches = static_cast<int>(call.x.shape(0));
        p.columns = score_tiles;
      });
  launch<StepsOfScan>(stream, steps_grid(call.sums), [&](auto& bind, auto& p) {
    bind_step_gradients(bind, p, call, dots, to);
    bind(p.row_sums, by_chunk(row_sums));
    bind(p.column_sums, by_chunk(column_sums));
  });
}

}  // namespace tw::kernels::mamba2
