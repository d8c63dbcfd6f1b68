#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "models/weights.hpp"
#include "runtime/dry_run.hpp"
#include "speech/glm_asr/config.hpp"
#include "tilewave/speech.hpp"

namespace tw::speech {

/// The kernels that loading a model and transcribing launch on `gpu`, each once. Runs the model's stages as a DryRun: with every number of
/// windows and sequences, and with lengths up to the context. Nothing of `weights` is read. If they have no files, the result is that of a
/// checkpoint with the shapes in `config`.
std::vector<KernelSpec> kernels_of(const GlmAsrConfig& config, models::Weights weights, DType dtype, const GpuProperties& gpu,
                                   GpuTarget target = GpuTarget::automatic);

/// The same for the checkpoint in `directory`. `dtype` as in LoadOptions. Throws FileError, InvalidArgument.
std::vector<KernelSpec> kernels_of(const std::filesystem::path& directory, std::optional<DType> dtype, const GpuProperties& gpu);

/// Compiles the kernels of a model that neither the cache nor a pack has, on threads of its own, while the weights are read.
class CompileAhead {
 public:
  /// Begins, if `options` name a GPU. `weights` have passed check().
  CompileAhead(const GlmAsrConfig& config, const models::Weights& weights, const LoadOptions& options);
  /// Stops after the kernels that are being compiled.
  ~CompileAhead() = default;
  /// Waits for all kernels.
  void wait();
  /// `progress`, never called at the same time as options.compile_progress.
  std::function<void(std::int64_t, std::int64_t)> one_at_a_time(const std::function<void(std::int64_t, std::int64_t)>& progress);

 private:
  std::mutex reporting_;
  std::jthread thread_;
};

/// The shapes of GLM-ASR-Nano-2512, with one layer instead of 32 and 28: every layer launches the same kernels.
GlmAsrConfig nano_shapes();

/// The kernels of GLM-ASR-Nano-2512 in bf16 on typical_gpu(arch).
std::vector<KernelSpec> nano_kernels(std::string_view arch, GpuTarget target = GpuTarget::automatic);

}  // namespace tw::speech
