#include "kernels/mamba2/chunk_gradients.hpp"

#include "kernels/mamba2/chunk_checks.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/mamba2_chunks.hpp"

// Gradients of the scan's five steps: the public functions and their checks.

namespace tw {

using namespace kernels;
using namespace kernels::mamba2;

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
  run_cumsum_gradients(checked_stream(op, options.stream, device), call, d_dt, options.da, options.d_dt_bias);
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
  const Tensor rounded = workspace(d_states.shape(), x.dtype(), on);
  cast(merged(d_states), merged(rounded), {.stream = on});
  const ChunkCall call{.x = x, .keys = b, .sizes = dt, .sums = da_cumsum, .states = rounded};
  run_added_input_gradients(on, call, dx);
  run_added_key_gradients(on, call, db, {d_dt, d_da_cumsum});
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
  run_passing_gradients(checked_stream(op, options.stream, device), {.passed = passed,
                                                                     .sums = da_chunk_cumsum,
                                                                     .d_passed = d_passed,
                                                                     .d_states = d_states,
                                                                     .d_decays = d_da_chunk_cumsum,
                                                                     .d_final = options.d_final_states,
                                                                     .d_initial = options.d_initial_states});
}

void mamba2_bmm_chunk_backward(const Tensor& c, const Tensor& b, const Tensor& d_cb, const Tensor& dc, const Tensor& db,
                               const Mamba2BmmChunkOptions& options) {
  constexpr const char* op = "mamba2_bmm_chunk_backward";
  check_products(op, c, b, {"d_CB", &d_cb});
  check_like(op, {"dC", &dc}, {"C", &c});
  check_like(op, {"dB", &db}, {"B", &b});
  check_written(op, {{"dC", &dc}, {"dB", &db}}, {{"C", &c}, {"B", &b}, {"d_CB", &d_cb}});
  const Stream stream = checked_stream(op, options.stream, c.device());
  run_product_gradients_of_c(stream, {d_cb, b, dc, options.causal});
  run_product_gradients_of_b(stream, {d_cb, c, db, options.causal});
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
  const Tensor du = options.z != nullptr ? run_gate_gradients(stream, x, *options.z, *options.ungated, dy, *options.dz) : dy;
  if (dd.tensor != nullptr) run_skip_gradients(stream, x, du, *dd.tensor);
  run_scan_state_gradients(stream, {.x = du, .keys = c, .sizes = dt, .sums = da_cumsum, .states = d_states});
  run_scan_input_gradients(stream, {.x = du, .keys = c, .sizes = dt, .sums = da_cumsum, .cb = cb, .skip = skip, .y = dx});
  run_scan_key_gradients(stream, {.x = x, .keys = c, .sizes = dt, .sums = da_cumsum, .states = states, .cb = cb}, du, dc, d_cb,
                         {d_dt, d_da_cumsum});
}

}  // namespace tw
