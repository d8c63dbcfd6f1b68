// `tilewave bench exercise`: the kernels that the GLM-ASR exercise names, each on its own, at that model's sizes.

#include <algorithm>
#include <cmath>
#include <optional>

#include "benchmarks/harness.hpp"
#include "benchmarks/memory_bound.hpp"
#include "benchmarks/yardsticks.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/norm.hpp"
#include "tilewave/rope.hpp"
#include "tilewave/softmax.hpp"
#include "tilewave/swiglu.hpp"

namespace tw::bench {
namespace {

// The encoder's window, and a decoder's prompt of as many tokens as a window gives.
constexpr std::int64_t kFrames = 1500, kEncoderWidth = 1280, kEncoderMlp = 5120, kEncoderHeads = 20, kEncoderHeadDim = 64;
constexpr std::int64_t kTokens = 375, kDecoderWidth = 2048, kDecoderMlp = 6144, kDecoderHeads = 16, kDecoderKvHeads = 4,
                       kDecoderHeadDim = 128;

/// One kernel, ready to run.
struct Prepared {
  double bytes = 0;              ///< read plus written, each tensor once
  double flops = 0;              ///< of products; 0 where there are none
  std::function<void()> launch;  ///< enqueues one execution
};

/// What the kernels are made on.
struct Place {
  DType dtype;
  Stream stream;
  Tensor random(Shape shape, std::uint64_t seed) const { return random_normal(std::move(shape), dtype, stream.device(), seed); }
  Tensor result(Shape shape) const { return Tensor::poisoned(std::move(shape), dtype, stream); }
};

struct Kernel {
  std::string name;
  Prepared (*prepare)(const Place&);
  bool on_gpu_f32 = true;
};

double product(std::initializer_list<std::int64_t> extents) {
  double result = 1;
  for (const std::int64_t extent : extents) result *= static_cast<double>(extent);
  return result;
}

// --- The kernels

/// y = f(x).
Prepared unary(const Place& on, std::int64_t rows, std::int64_t cols, void (*f)(const Tensor& x, const Tensor& y, const Stream& stream)) {
  const Tensor x = on.random({rows, cols}, 1), y = on.result({rows, cols});
  return {bytes_of({x, y}), 0, [=, stream = on.stream] { f(x, y, stream); }};
}

Prepared run_rms_norm(const Place& on) {
  const Tensor x = on.random({kTokens, kDecoderWidth}, 1), weight = on.random({kDecoderWidth}, 2), y = on.result({kTokens, kDecoderWidth});
  return {bytes_of({x, weight, y}), 0, [=, stream = on.stream] { rms_norm(x, y, {.weight = &weight, .stream = stream}); }};
}

Prepared run_layer_norm(const Place& on) {
  const Tensor x = on.random({kFrames, kEncoderWidth}, 1), y = on.result({kFrames, kEncoderWidth});
  const Tensor weight = on.random({kEncoderWidth}, 2), bias = on.random({kEncoderWidth}, 3);
  return {bytes_of({x, weight, bias, y}), 0,
          [=, stream = on.stream] { layer_norm(x, y, {.weight = &weight, .bias = &bias, .stream = stream}); }};
}

/// cos and sin of pos * inv_freq for every position of the decoder.
Prepared rope_cos_sin(const Place& on) {
  constexpr std::int64_t kPositions = 8192;
  const Tensor cos = on.result({kPositions, kDecoderHeadDim / 2}), sin = on.result({kPositions, kDecoderHeadDim / 2});
  return {bytes_of({cos, sin}), 0, [=, stream = on.stream] { rope_table(cos, sin, {.stream = stream}); }};
}

/// y = silu(gate) up.
Prepared fused_swiglu(const Place& on) {
  const Tensor gate = on.random({kTokens, kDecoderMlp}, 1), up = on.random({kTokens, kDecoderMlp}, 2),
               y = on.result({kTokens, kDecoderMlp});
  return {bytes_of({gate, up, y}), 0, [=, stream = on.stream] { swiglu(gate, up, y, {stream}); }};
}

/// y = activation(x w^T + bias), w [out, in].
Prepared linear(const Place& on, std::int64_t rows, std::int64_t in, std::int64_t out, Activation activation) {
  const Tensor x = on.random({rows, in}, 1), w = on.random({out, in}, 2), bias = on.random({out}, 3), y = on.result({rows, out});
  const auto launch = [=, stream = on.stream] {
    gemm(x, w.transpose(0, 1), y, {.bias = &bias, .activation = activation, .stream = stream});
  };
  return {bytes_of({x, w, bias, y}), 2 * product({rows, in, out}), launch};
}

/// The encoder's scores or weights, [heads, frames, frames]: rows begin at multiples of 16 bytes, as TMA wants them.
Tensor frames_by_frames(const Tensor& padded) { return padded.slice(2, 0, kFrames); }
constexpr std::int64_t kPaddedFrames = 1504;

/// y = silu(x gate^T) (x up^T), with the rows of the two weights in turn.
Prepared fused_linear_swiglu(const Place& on) {
  const Tensor x = on.random({kTokens, kDecoderWidth}, 1), w = on.random({2 * kDecoderMlp, kDecoderWidth}, 2);
  const Tensor y = on.result({kTokens, kDecoderMlp});
  const auto launch = [=, stream = on.stream] { gemm(x, w.transpose(0, 1), y, {.activation = Activation::swiglu, .stream = stream}); };
  return {bytes_of({x, w, y}), 2 * product({kTokens, kDecoderWidth, 2 * kDecoderMlp}), launch};
}

/// scores = scale Q K^T for every head of the encoder.
Prepared attention_scores(const Place& on) {
  const Tensor q = on.random({kEncoderHeads, kFrames, kEncoderHeadDim}, 1), k = on.random({kEncoderHeads, kFrames, kEncoderHeadDim}, 2);
  const Tensor scores = frames_by_frames(on.result({kEncoderHeads, kFrames, kPaddedFrames}));
  const float scale = 1 / std::sqrt(static_cast<float>(kEncoderHeadDim));
  const auto launch = [=, stream = on.stream] { gemm(q, k.transpose(1, 2), scores, {.alpha = scale, .stream = stream}); };
  return {bytes_of({q, k, scores}), 2 * product({kEncoderHeads, kFrames, kFrames, kEncoderHeadDim}), launch};
}

Prepared softmax_rows(const Place& on) {
  const Tensor x = frames_by_frames(on.random({kEncoderHeads, kFrames, kPaddedFrames}, 1));
  const Tensor y = frames_by_frames(on.result({kEncoderHeads, kFrames, kPaddedFrames}));
  return {bytes_of({x, y}), 0, [=, stream = on.stream] { softmax(x, y, {.stream = stream}); }};
}

Prepared softmax_in_place(const Place& on) {
  const Tensor x = frames_by_frames(on.random({kEncoderHeads, kFrames, kPaddedFrames}, 1));
  return {2 * bytes_of({x}), 0, [=, stream = on.stream] { softmax(x, x, {.stream = stream}); }};
}

/// O = P V for every head of the encoder.
Prepared attention_output(const Place& on) {
  const Tensor p = frames_by_frames(on.random({kEncoderHeads, kFrames, kPaddedFrames}, 1));
  // tf32 products sum over the contiguous dimension of both operands: V is stored [head_dim, frames] for them.
  const Tensor v = on.dtype == DType::f32 ? on.random({kEncoderHeads, kEncoderHeadDim, kFrames}, 2).transpose(1, 2)
                                          : on.random({kEncoderHeads, kFrames, kEncoderHeadDim}, 2);
  const Tensor o = on.result({kEncoderHeads, kFrames, kEncoderHeadDim});
  const auto launch = [=, stream = on.stream] { gemm(p, v, o, {.stream = stream}); };
  return {bytes_of({p, v, o}), 2 * product({kEncoderHeads, kFrames, kFrames, kEncoderHeadDim}), launch};
}

/// Scores, softmax and output in one kernel.
Prepared fused_attention(const Place& on, std::int64_t seqlen, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim,
                         bool causal) {
  const Tensor q = on.random({1, seqlen, heads, head_dim}, 1), o = on.result({1, seqlen, heads, head_dim});
  const Tensor k = on.random({1, seqlen, kv_heads, head_dim}, 2), v = on.random({1, seqlen, kv_heads, head_dim}, 3);
  const auto launch = [=, stream = on.stream] { attention(q, k, v, o, {.causal = causal, .stream = stream}); };
  return {bytes_of({q, k, v, o}), (causal ? 2 : 4) * product({seqlen, seqlen, heads, head_dim}), launch};
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> list = {
      {"silu",
       [](const Place& on) { return unary(on, kTokens, kDecoderMlp, [](auto& x, auto& y, auto& stream) { silu(x, y, {stream}); }); }},
      {"gelu-tanh",
       [](const Place& on) { return unary(on, kFrames, kEncoderMlp, [](auto& x, auto& y, auto& stream) { gelu_tanh(x, y, {stream}); }); }},
      {"softmax", softmax_rows},
      {"rms-norm", run_rms_norm},
      {"layer-norm", run_layer_norm},
      {"linear", [](const Place& on) { return linear(on, kFrames, kEncoderWidth, kEncoderMlp, Activation::none); }},
      {"attention-scores", attention_scores},
      {"softmax-in-place", softmax_in_place},
      {"attention-output", attention_output},
      {"rope-cos-sin", rope_cos_sin},
      {"fused-swiglu", fused_swiglu},
      {"fused-linear-swiglu", fused_linear_swiglu},
      {"fused-linear-gelu", [](const Place& on) { return linear(on, kFrames, kEncoderWidth, kEncoderMlp, Activation::gelu_tanh); }},
      {"fused-attention-encoder",
       [](const Place& on) { return fused_attention(on, kFrames, kEncoderHeads, kEncoderHeads, kEncoderHeadDim, false); }, false},
      {"fused-attention-decoder",
       [](const Place& on) { return fused_attention(on, kTokens, kDecoderHeads, kDecoderKvHeads, kDecoderHeadDim, true); }, false},
  };
  return list;
}

// --- Measuring

/// Operations per second that products of `dtype` can reach, 0 where it is not known.
double peak(DType dtype, Device device) {
  if (!device.is_cuda()) {
    static const double measured = measure_fma_peak() * 1e9;
    return measured;
  }
  const std::optional<GpuLimits> limits = gpu_limits(device_info(device).name);
  if (!limits) return 0;
  return (dtype == DType::f32 ? limits->tf32_tflops : limits->bf16_tflops) * 1e12;
}

void run_kernel(Run& run, const Kernel& kernel, DType dtype) {
  const Stream& stream = run.stream();
  const bool cuda = stream.device().is_cuda();
  const Prepared prepared = kernel.prepare({dtype, stream});
  const double bandwidth = run.copy_bandwidth();

  Record record;
  record.family = "exercise";
  record.case_name = kernel.name;
  record.dtype = dtype;
  record.mode = cuda ? Mode::graph : Mode::one_thread;
  const std::vector<Timing> times =
      measure(record.mode, {{"tilewave", prepared.launch}, empty_kernel(stream)}, stream, run.effort(record.mode));
  record.ours = times[0];

  const double flops_unit = cuda ? 1e12 : 1e9;
  record.unit = prepared.flops == 0 ? "GB/s" : cuda ? "TFLOP/s" : "GFLOP/s";
  record.work = prepared.flops == 0 ? prepared.bytes * 1e-9 : prepared.flops / flops_unit;

  const double launch = times[1].median * 1e-3;
  const double memory = prepared.bytes / bandwidth;
  const double peak_rate = prepared.flops == 0 ? 0 : peak(dtype, stream.device());
  const double arithmetic = peak_rate > 0 ? prepared.flops / peak_rate : 0;
  record.limit = record.work / (launch + std::max(memory, arithmetic));
  record.bound = launch > std::max(memory, arithmetic) ? "launch" : memory > arithmetic ? "memory" : "arithmetic";
  run.add(record);
}

void run_exercise(Run& run) {
  const bool cuda = run.options().device.is_cuda();
  const OneThread one;
  for (const DType dtype : cuda ? std::vector{DType::bf16, DType::f32} : std::vector{DType::f32}) {
    for (const Kernel& kernel : kernels()) {
      if (cuda && dtype == DType::f32 && !kernel.on_gpu_f32) continue;
      if (run.wants("exercise", kernel.name, dtype)) run_kernel(run, kernel, dtype);
    }
  }
}

const Family family{"exercise", "the kernels that the GLM-ASR exercise names, at that model's sizes: time, rate and what bounds it",
                    run_exercise};

}  // namespace
}  // namespace tw::bench
