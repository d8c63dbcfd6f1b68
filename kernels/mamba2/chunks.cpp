#include "kernels/mamba2/chunks.hpp"

#include "kernels/check.hpp"
#include "kernels/mamba2/chunk_checks.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "tilewave/mamba2_chunks.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

// The scan in five steps: the public functions, their checks and their launches.

namespace tw {

namespace kernels::mamba2 {

void run_chunk_cumsum(const Stream& stream, const ChunkCumsumCall& call) {
  const TileGrid grid = steps_grid(call.sums);
  if (grid.count() == 0) return;
  const auto fill = [&](auto& bind, auto& p) { bind_cumsum(bind, p, call); };
  if (!stream.device().is_cuda()) return launch_cpu<ChunkCumsum<cpu::AnyFloat, kCumsumHeads, kLargestChunk>>(grid, fill);
  with_float_type(call.dt.dtype(),
                  [&]<class T>(std::type_identity<T>) { launch_gpu<ChunkCumsum<T, kCumsumHeads, kLargestChunk>>(stream, grid, fill); });
}

void run_chunk_state(const Stream& stream, const ChunkCall& call) {
  launch_products<AddedStates>(
      stream, call.x.dtype(), [&]<class Kernel>(std::type_identity<Kernel>) { return chunk_state_grid<Kernel>(call); },
      [&](auto& bind, auto& p, int tile_columns) { bind_chunk_state(bind, p, call, tile_columns); });
}

void run_state_passing(const Stream& stream, const StatePassingCall& call) {
  const TileGrid grid = passing_grid(call, kPassedElements);
  if (grid.count() == 0) return;
  const auto fill = [&](auto& bind, auto& p) { bind_passing(bind, p, call); };
  if (!stream.device().is_cuda()) return launch_cpu<StatePassing<cpu::AnyFloat, kPassedElements>>(grid, fill);
  with_float_type(call.passed.dtype(),
                  [&]<class T>(std::type_identity<T>) { launch_gpu<StatePassing<T, kPassedElements>>(stream, grid, fill); });
}

void run_chunk_products(const Stream& stream, const ChunkProductsCall& call) {
  launch_products<ChunkProducts>(
      stream, call.a.dtype(), [&]<class Kernel>(std::type_identity<Kernel>) { return products_grid<Kernel>(call); },
      [&](auto& bind, auto& p, int tile_columns) { bind_products(bind, p, call, tile_columns); });
}

void run_chunk_scan(const Stream& stream, const ChunkCall& call) {
  launch_products<ChunkScan>(
      stream, call.x.dtype(), [&]<class Kernel>(std::type_identity<Kernel>) { return chunk_scan_grid<Kernel>(call); },
      [&](auto& bind, auto& p, int tile_columns) { bind_chunk_scan(bind, p, call, tile_columns); });
}

}  // namespace kernels::mamba2

using namespace kernels;
using namespace kernels::mamba2;

void mamba2_chunk_cumsum(const Tensor& dt, const Tensor& a, const Tensor& da_cumsum, const Tensor& dt_out,
                         const Mamba2ChunkCumsumOptions& options) {
  constexpr const char* op = "mamba2_chunk_cumsum";
  const Device device = dt.device();
  const ChunkCumsumCall call = checked_cumsum(op, dt, a, {"dA_cumsum", &da_cumsum}, {"dt_out", &dt_out}, options);
  check_written(op, {{"dA_cumsum", &da_cumsum}, {"dt_out", &dt_out}},
                {{"dt", &dt}, {"A", &a}, {"dt_bias", options.dt_bias}, {"seq_idx", options.seq_idx}});
  run_chunk_cumsum(checked_stream(op, options.stream, device), call);
}

void mamba2_chunk_state(const Tensor& b, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& states,
                        const std::optional<Stream>& stream) {
  constexpr const char* op = "mamba2_chunk_state";
  check_16_bits(op, {"x", &x});
  check_inputs(op, x);
  check_keys(op, "B", b, x);
  check_steps(op, x, dt, da_cumsum);
  check_f32_between(op, {"states", &states}, {x.shape(0), da_cumsum.shape(2), x.shape(2), x.shape(3), b.shape(3)}, kOfStates, x.device());
  check_written(op, {{"states", &states}}, {{"B", &b}, {"x", &x}, {"dt", &dt}, {"dA_cumsum", &da_cumsum}});
  run_chunk_state(checked_stream(op, stream, x.device()), {.x = x, .keys = b, .sizes = dt, .sums = da_cumsum, .states = states});
}

void mamba2_state_passing(const Tensor& states, const Tensor& da_chunk_cumsum, const Tensor& passed,
                          const Mamba2StatePassingOptions& options) {
  constexpr const char* op = "mamba2_state_passing";
  const Device device = states.device();
  check_states(op, {"states", &states});
  const Shape& shape = states.shape();
  check_f32_between(op, {"states", &states}, shape, kOfStates, device);
  check_f32(op, {"dA_chunk_cumsum", &da_chunk_cumsum}, {shape[0], shape[2], shape[1]}, device);
  require(is_float(passed.dtype()), "{}: passed is {}; f32, f16 and bf16 are supported", op, passed);
  check_between(op, {"passed", &passed}, shape, kOfStates, device);
  const NamedTensor initial{"initial_states", options.initial_states}, final{"final_states", options.final_states};
  for (const NamedTensor& t : {initial, final})
    if (t.tensor != nullptr) check_f32_between(op, t, {shape[0], shape[2], shape[3], shape[4]}, "[batch, nheads, headdim, dstate]", device);
  check_written(op, {{"passed", &passed}, final}, {{"states", &states}, {"dA_chunk_cumsum", &da_chunk_cumsum}});
  check_disjoint(op, {"passed", &passed}, {initial});
  if (options.final_states != nullptr && options.initial_states != nullptr) check_in_place(op, final, initial);
  run_state_passing(checked_stream(op, options.stream, device),
                    {states, passed, da_chunk_cumsum, options.initial_states, options.final_states});
}

void mamba2_bmm_chunk(const Tensor& c, const Tensor& b, const Tensor& cb, const Mamba2BmmChunkOptions& options) {
  constexpr const char* op = "mamba2_bmm_chunk";
  check_products(op, c, b, {"CB", &cb});
  check_written(op, {{"CB", &cb}}, {{"C", &c}, {"B", &b}});
  run_chunk_products(checked_stream(op, options.stream, c.device()), {c, b, cb, options.causal});
}

void mamba2_chunk_scan(const Tensor& cb, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& c, const Tensor& states,
                       const Tensor& y, const Mamba2ChunkScanOptions& options) {
  constexpr const char* op = "mamba2_chunk_scan";
  check_scan(op, cb, x, dt, da_cumsum, c, states);
  check_like(op, {"y", &y}, {"x", &x});
  const NamedTensor z{"z", options.z}, ungated{"ungated", options.ungated};
  for (const NamedTensor& t : {z, ungated})
    if (t.tensor != nullptr) check_like(op, t, {"x", &x});
  const Tensor skip = options.d != nullptr ? checked_skip(op, *options.d, x) : Tensor();
  check_written(op, {{"y", &y}, ungated},
                {{"CB", &cb}, {"x", &x}, {"dt", &dt}, {"dA_cumsum", &da_cumsum}, {"C", &c}, {"states", &states}, {"D", options.d}, z});
  const auto or_nothing = [](const Tensor* t) { return t != nullptr ? *t : Tensor(); };
  run_chunk_scan(checked_stream(op, options.stream, x.device()), {.x = x,
                                                                  .keys = c,
                                                                  .sizes = dt,
                                                                  .sums = da_cumsum,
                                                                  .states = states,
                                                                  .cb = cb,
                                                                  .skip = skip,
                                                                  .z = or_nothing(options.z),
                                                                  .ungated = or_nothing(options.ungated),
                                                                  .y = y});
}

}  // namespace tw
