#include "kernels/check.hpp"
#include "kernels/mamba2/chunks.hpp"
#include "tilewave/analyze.hpp"

// The kernels that are worth compiling ahead of time, and their analysis.

namespace tw::kernels::mamba2 {

namespace {

/// A call on placeholders, with z, D and dt_bias.
struct Problem {
  explicit Problem(const ShapeValues& shape) {
    const std::int64_t batch = shape["batch"], seqlen = shape["seqlen"], heads = shape["heads"], groups = shape["groups"];
    const std::int64_t dim = shape["dim"], state = shape["state"];
    require(groups > 0 && heads % groups == 0, "shape: heads is {}; it must be a multiple of groups, {}", heads, groups);
    require(batch > 0 && seqlen > 0 && heads > 0, "shape: batch, seqlen and heads must be positive");
    require(dim > 0 && dim <= kDim, "shape: dim is {}; the kernel supports 1 to {}", dim, kDim);
    require(state > 0 && state <= kState, "shape: state is {}; the kernel supports 1 to {}", state, kState);
    const auto by_head_of = [&] { return by_head(placeholder({batch, seqlen, heads, dim}, DType::bf16)); };
    const auto of_steps = [&](DType dtype) { return placeholder({batch, seqlen, heads}, dtype); };
    call.x = by_head_of(), call.z = by_head_of();
    call.dt = of_steps(DType::bf16);
    call.rate = placeholder({1, heads}, DType::f32), call.bias = placeholder({1, heads}, DType::f32);
    call.skip = placeholder({heads, dim}, DType::f32);
    call.b = placeholder({batch, seqlen, groups, state}, DType::bf16), call.c = placeholder({batch, seqlen, groups, state}, DType::bf16);
    call.sequences = batch;
    call.size = {true, 0, kInfinity};
    update = {call, placeholder(call.states(), DType::f32), by_head_of(), {}};
    discretized = {of_steps(DType::f32), of_steps(DType::f32)};
    scaled = by_head_of();
    const auto exponents = [&] { return placeholder({heads, std::int64_t{chunks_of(call)} * kChunk}, DType::f32); };
    final = placeholder({batch, heads, state, dim}, DType::f32);
    scan = {exponents(), exponents(), exponents(), nullptr, &final, by_head_of()};
    const auto steps_of = [&](const Tensor& t) { return t.transpose(1, 2); };
    const std::int64_t chunks = tiles(seqlen, kChunkSize);
    const auto of_chunks = [&] { return placeholder({batch, heads, chunks, kChunkSize}, DType::f32); };
    chunk_state = {.x = steps_of(call.x),
                   .keys = call.b,
                   .sizes = of_chunks(),
                   .sums = of_chunks(),
                   .states = placeholder({batch, chunks, heads, dim, state}, DType::f32)};
    chunk_scan = chunk_state;
    chunk_scan.states = placeholder(chunk_state.states.shape(), DType::bf16);
    chunk_scan.cb = placeholder({batch, chunks, groups, kChunkSize, kChunkSize}, DType::f32);
    chunk_scan.skip = call.skip, chunk_scan.z = steps_of(call.z), chunk_scan.y = steps_of(by_head_of());
    last = placeholder({batch, heads, dim, state}, DType::f32);
    passing = {chunk_state.states, chunk_scan.states, placeholder({batch, heads, chunks}, DType::f32), nullptr, &last};
    gradients = {.dy = by_head_of(),
                 .du = by_head_of(),
                 .o = by_head_of(),
                 .dz = by_head_of(),
                 .dv = by_head_of(),
                 .dx = by_head_of(),
                 .dg = of_steps(DType::f32),
                 .products = of_steps(DType::f32),
                 .d_dt = of_steps(DType::bf16),
                 .skip_sums = placeholder({batch * tiles(seqlen, kRun), heads, dim}, DType::f32),
                 .rate_sums = placeholder({batch * tiles(seqlen, kSizeRows), heads}, DType::f32),
                 .bias_sums = placeholder({batch * tiles(seqlen, kSizeRows), heads}, DType::f32)};
  }
  static constexpr std::int64_t kDim = 64, kState = 128;
  static constexpr int kChunkSize = 256;  ///< mamba_ssm's default
  Call call;
  UpdateCall update;
  Discretized discretized;
  Tensor scaled, final;
  ScanCall scan;
  Gradients gradients;
  ChunkCall chunk_state, chunk_scan;
  StatePassingCall passing;
  Tensor last;
};

using RegisteredSizes = StepSizes<bf16, kSizeRows, kSizeHeads>;
Analysis analyze_sizes(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredSizes>(sizes_grid(p.call), [&](auto& bind, auto& params) { bind_sizes(bind, params, p.call, p.discretized); });
}

using RegisteredScale = ScaleInputs<bf16, 32, 64>;
Analysis analyze_scale(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredScale>(rows_grid(p.call, 32),
                                  [&](auto& bind, auto& params) { bind_scale(bind, params, p.call, p.discretized, p.scaled); });
}

using RegisteredOutputs = SkipAndGate<bf16, 32, 64>;
Analysis analyze_outputs(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredOutputs>(rows_grid(p.call, 32),
                                    [&](auto& bind, auto& params) { bind_outputs(bind, params, p.call, p.update.y); });
}

using RegisteredExponents = ChunkExponents<bf16, kExponentHeads>;
Analysis analyze_exponents(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredExponents>(exponents_grid(p.call),
                                      [&](auto& bind, auto& params) { bind_exponents(bind, params, p.call, p.scan); });
}

constexpr ScanKernel kScanKernel{DType::bf16, true};
using RegisteredScan = Scan<bf16, kScanState, kScanColumns, true>;
Analysis analyze_scan(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredScan>(scan_grid(p.call), [&](auto& bind, auto& params) { bind_scan(bind, params, p.call, p.scan); });
}

constexpr UpdateKernel kUpdateKernel{DType::bf16, DType::bf16, DType::f32, 128};
using RegisteredUpdate = Update<bf16, bf16, float, update_rows(128), 128>;
Analysis analyze_update(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredUpdate>(update_grid(p.call, update_rows(128)),
                                   [&](auto& bind, auto& params) { bind_update(bind, params, p.update); });
}

using RegisteredChunkState = ChunkState<bf16>;
Analysis analyze_chunk_state(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredChunkState>(chunk_state_grid<RegisteredChunkState>(p.chunk_state), [&](auto& bind, auto& params) {
    bind_chunk_state(bind, params, p.chunk_state, RegisteredChunkState::N);
  });
}

using RegisteredPassing = StatePassing<bf16, kPassedElements>;
Analysis analyze_passing(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredPassing>(passing_grid(p.passing, kPassedElements),
                                    [&](auto& bind, auto& params) { bind_passing(bind, params, p.passing); });
}

using RegisteredChunkScan = ChunkScan<bf16>;
Analysis analyze_chunk_scan(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredChunkScan>(chunk_scan_grid<RegisteredChunkScan>(p.chunk_scan), [&](auto& bind, auto& params) {
    bind_chunk_scan(bind, params, p.chunk_scan, RegisteredChunkScan::N);
  });
}

using RegisteredOutputGradients = OutputGradients<bf16, 32, 64>;
Analysis analyze_output_gradients(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredOutputGradients>(rows_grid(p.call, 32),
                                            [&](auto& bind, auto& params) { bind_output_gradients(bind, params, p.call, p.gradients); });
}

using RegisteredInputGradients = InputGradients<bf16, 32, 64>;
Analysis analyze_input_gradients(const ShapeValues& shape) {
  const Problem p(shape);
  return analyze<RegisteredInputGradients>(
      rows_grid(p.call, kRun), [&](auto& bind, auto& params) { bind_input_gradients(bind, params, p.call, p.discretized, p.gradients); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  return {
      {make_spec(kernel_info<RegisteredExponents>, true, true, "mamba2_chunk_exponents_bf16"), analyze_exponents},
      {make_spec({type_of_scan(kScanKernel), RegisteredScan::source, detail::tile_recorder<RegisteredScan>()}, true, true,
                 "mamba2_scan_bf16"),
       analyze_scan},
      {make_spec(kernel_info<RegisteredSizes>, true, true, "mamba2_step_sizes_bf16"), analyze_sizes},
      {make_spec(kernel_info<RegisteredScale>, true, true, "mamba2_scale_bf16_d64"), analyze_scale},
      {make_spec(kernel_info<RegisteredOutputs>, true, true, "mamba2_skip_and_gate_bf16_d64"), analyze_outputs},
      {make_spec({type_of_update(kUpdateKernel), RegisteredUpdate::source, detail::tile_recorder<RegisteredUpdate>()}, true, true,
                 "mamba2_step_bf16_d128"),
       analyze_update},
      {make_spec(kernel_info<RegisteredChunkState>, true, true, "mamba2_chunk_state_bf16"), analyze_chunk_state},
      {make_spec(kernel_info<RegisteredPassing>, true, true, "mamba2_state_passing_bf16"), analyze_passing},
      {make_spec(kernel_info<RegisteredChunkScan>, true, true, "mamba2_chunk_scan_bf16"), analyze_chunk_scan},
      {make_spec(kernel_info<RegisteredOutputGradients>, true, true, "mamba2_output_gradients_bf16_d64"), analyze_output_gradients},
      {make_spec(kernel_info<RegisteredInputGradients>, true, true, "mamba2_input_gradients_bf16_d64"), analyze_input_gradients},
  };
}

std::vector<KernelSpec> registered_generic() {
  std::vector<KernelSpec> specs;
  for (const KernelVariant& variant : registered()) {
    if (variant.spec.name == "mamba2_scan_bf16") continue;
    specs.push_back(for_target(variant.spec, GpuTarget::cuda));
  }
  return specs;
}

}  // namespace tw::kernels::mamba2
