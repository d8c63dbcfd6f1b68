#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "apps/tilewave/terminal.hpp"
#include "command.hpp"
#include "tilewave/speech.hpp"

namespace tw::cli {

/// Shared by the commands that load a model.
struct ModelArguments {
  std::string model, mmproj, device = "auto", dtype = "auto", weights = "plain", f32_products = "tf32";
  int threads = 0;
};

void add_model_options(CLI::App& command, ModelArguments& arguments);

/// Also sets the number of threads. Throws UsageError.
speech::LoadOptions load_options(const ModelArguments& arguments);

void add_weights_option(CLI::App& command, std::string& weights);
/// What --weights may be, for the shell.
inline std::vector<std::string> weight_formats() { return {"int8", "fp8", "int4", "int4:32:zeros", "int4:128", "int4:128:zeros"}; }

/// 1 - (words inserted, removed or replaced) / (words of the reference), at least 0. Case and punctuation are ignored.
double word_accuracy(const std::string& text, const std::string& reference);

/// The read bandwidth of the device's memory in bytes per second, measured; on the CPU with as many threads as kernels use.
double read_bandwidth(Device device);

/// FLOP/s of products of `dtype`, and in `source` where the figure comes from: on a GPU its data sheet, or else a large product; on the CPU
/// fused multiply-adds in f32, measured, times the number of threads.
double peak_flops(Device device, DType dtype, std::string& source);

/// Shows the progress of loading a model.
class LoadProgress {
 public:
  /// Sets callbacks in `options`, which must not be called after the object's end.
  LoadProgress(Screen& screen, const std::string& model, speech::LoadOptions& options);
  LoadProgress(const LoadProgress&) = delete;
  LoadProgress& operator=(const LoadProgress&) = delete;

 private:
  void show();

  Screen& screen_;
  std::string loading_, compiling_;  ///< what goes on; empty: done
  std::int64_t reported_ = 0;
};

/// For those who give no --model.
inline constexpr const char* kBundledModelNote =
    "tilewave: no --model: the bundled checkpoint knows spoken English digits only. For other speech: hf download "
    "zai-org/GLM-ASR-Nano-2512 --local-dir glm-asr-nano, then --model glm-asr-nano";

/// The directory of the bundled checkpoint. Throws Error if it is missing.
std::string default_model();

}  // namespace tw::cli
