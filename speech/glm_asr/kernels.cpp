#include "speech/glm_asr/kernels.hpp"

#include <algorithm>
#include <exception>
#include <stop_token>

#include "runtime/jit.hpp"
#include "speech/glm_asr/encoder.hpp"
#include "speech/glm_asr/model.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/topk.hpp"

namespace tw::speech {

using models::KvCache;
using models::Llama;
using models::Weights;

namespace {

constexpr int kMostWindows = 8;  // that Scheduler encodes together
constexpr int kSmallBatch = 16;  // of the decoder, Transcriber's largest
constexpr int kMostSequences = 256;

/// The stages of Scheduler, for a model without numbers.
class Stages {
 public:
  Stages(const GlmAsrConfig& config, Weights& weights, DType dtype, const Stream& stream)
      : config_(config), stream_(stream), mel_(config.mel, stream) {
    const auto build = [&](Weights& from) {
      encoder_.emplace(config, from);
      decoder_.emplace(config.decoder, from);
    };
    weights.load(build, dtype, stream, {});
  }

  void encode(int windows) const {
    const std::vector<float> silence(1);
    const Tensor mel = mel_.extract(std::vector<std::span<const float>>(static_cast<std::size_t>(windows), silence)).features;
    const Tensor window = encoder_->encode(mel, stream_).select(0, windows - 1);
    const Tensor rows = embed(static_cast<int>(window.shape(0)) + 1);
    cast(window, rows.slice(0, 1, rows.shape(0)), {.stream = stream_});  // as GlmAsr::embed does
  }

  void prefill(int sequences, int length) const {
    std::vector<KvCache> caches = decoder_->make_caches(sequences, length, stream_);
    const std::vector<Tensor> prompts(caches.size(), embed(length));
    draw(decoder_->prefill(prompts, pointers_to(caches), stream_));
  }

  /// A step of `sequences` sequences that hold `length` tokens each.
  void decode(int sequences, int length) const {
    std::vector<KvCache> caches = decoder_->make_caches(sequences, length + 1, stream_);
    for (KvCache& cache : caches) cache.length = length;
    draw(decoder_->decode(std::vector<int>(caches.size()), pointers_to(caches), stream_));
  }

 private:
  static std::vector<KvCache*> pointers_to(std::vector<KvCache>& caches) {
    std::vector<KvCache*> pointers;
    for (KvCache& cache : caches) pointers.push_back(&cache);
    return pointers;
  }
  Tensor embed(int tokens) const { return decoder_->embed(std::vector<int>(static_cast<std::size_t>(tokens)), stream_); }
  void draw(const Tensor& logits) const {
    const Tensor ids = Tensor::empty({logits.shape(0)}, DType::i32, stream_);
    const Tensor largest = Tensor::empty({logits.shape(0)}, logits.dtype(), stream_);
    argmax(logits, ids, {.values = &largest, .stream = stream_});
  }

  const GlmAsrConfig& config_;
  const Stream& stream_;
  LogMel mel_;
  std::optional<Encoder> encoder_;
  std::optional<Llama> decoder_;
};

}  // namespace

std::vector<KernelSpec> kernels_of(const GlmAsrConfig& config, Weights weights, DType dtype, const GpuProperties& gpu, GpuTarget target) {
  DryRun run(gpu);
  const Stream stream = target == GpuTarget::automatic ? Stream(run.device()) : Stream(run.device()).with_target(target);
  const Stages stages(config, weights, dtype, stream);
  for (int windows = 1; windows <= kMostWindows; ++windows) stages.encode(windows);
  // Heuristics depend on how many tiles a length fills: larger steps for larger lengths do.
  const int context = config.decoder.max_positions;
  for (int length = 1; length < context; length += std::max(1, length / 8)) stages.prefill(1, length);
  for (int sequences = 2; sequences <= kMostWindows; ++sequences)
    for (const int length : {64, 256, 421}) stages.prefill(sequences, std::min(length, context));
  for (int sequences = 1; sequences <= kMostSequences;
       sequences = sequences < kSmallBatch ? sequences + 1 : models::DecodeGraphs::size_for(sequences + 1, 1).rows)
    for (const int length : {1, std::min(512, context - 1), context - 1}) stages.decode(sequences, length);
  return run.kernels();
}

std::vector<KernelSpec> kernels_of(const std::filesystem::path& directory, std::optional<DType> dtype, const GpuProperties& gpu) {
  const GlmAsrConfig config = GlmAsrConfig::read(directory);
  Weights weights = open_weights(directory, config);
  return kernels_of(config, weights, choose_dtype({.device = Device::cuda(), .dtype = dtype}, weights.main_dtype()), gpu);
}

CompileAhead::CompileAhead(const GlmAsrConfig& config, const Weights& weights, const LoadOptions& options) {
  if (!options.device.is_cuda() || is_dry_run(options.device)) return;
  const auto work = [this, config, weights, options](const std::stop_token& stop) {
    try {
      const GpuProperties gpu = gpu_properties(options.device);
      const auto report = [&](std::size_t done, std::size_t all) {
        const std::lock_guard lock(reporting_);
        if (options.compile_progress) options.compile_progress(done, all);
      };
      compile_ahead(kernels_of(config, weights, *options.dtype, gpu), architecture(gpu.compute_capability), report, stop);
    } catch (const std::exception&) {  // the kernels are compiled at their first launches then, which say what is wrong
    }
  };
  thread_ = std::jthread(work);
}

void CompileAhead::wait() {
  if (thread_.joinable()) thread_.join();
}

std::function<void(std::int64_t, std::int64_t)> CompileAhead::one_at_a_time(
    const std::function<void(std::int64_t, std::int64_t)>& progress) {
  if (!progress) return {};
  return [this, progress](std::int64_t done, std::int64_t all) {
    const std::lock_guard lock(reporting_);
    progress(done, all);
  };
}

GlmAsrConfig nano_shapes() {
  GlmAsrConfig config;
  config.encoder = {.hidden = 1280, .intermediate = 5120, .layers = 1, .heads = 20, .head_dim = 64, .positions = 1500, .rotary_dim = 32};
  config.decoder = {.hidden = 2048,
                    .intermediate = 6144,
                    .layers = 1,
                    .heads = 16,
                    .kv_heads = 4,
                    .head_dim = 128,
                    .vocabulary = 59264,
                    .max_positions = 8192};
  return config;
}

std::vector<KernelSpec> nano_kernels(std::string_view arch, GpuTarget target) {
  return kernels_of(nano_shapes(), Weights("GLM-ASR-Nano-2512", {}, canonical_weight_name), DType::bf16, typical_gpu(arch), target);
}

}  // namespace tw::speech
