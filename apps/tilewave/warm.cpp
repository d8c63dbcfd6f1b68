// tilewave kernels warm, and the kernels of GLM-ASR among the known ones

#include <algorithm>
#include <cctype>
#include <chrono>
#include <map>

#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "command.hpp"
#include "compile.hpp"
#include "runtime/dry_run.hpp"
#include "runtime/format.hpp"
#include "speech/glm_asr/kernels.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

struct WarmArguments {
  ModelArguments model;
  std::string arch, output;
  bool json = false;
};

bool same_kernel(const KernelSpec& a, const KernelSpec& b) { return a.type == b.type && a.target == b.target && a.source == b.source; }

/// Those of `specs` that are among `known`, under their names there, then the others as "glm_asr_gemm_1", "glm_asr_gemm_2".
std::vector<RegisteredKernel> named(const std::vector<KernelSpec>& specs, const std::vector<RegisteredKernel>& known) {
  std::vector<RegisteredKernel> all, others;
  std::map<std::string, int> count;
  for (const RegisteredKernel& kernel : known)
    if (kernel.family == kModelFamily) ++count[kernel.spec.name.substr(0, kernel.spec.name.rfind('_'))];
  for (const KernelSpec& spec : specs) {
    const auto found =
        std::find_if(known.begin(), known.end(), [&](const RegisteredKernel& kernel) { return same_kernel(kernel.spec, spec); });
    if (found != known.end()) {
      all.push_back(*found);
      continue;
    }
    const std::string whole = spec.type.substr(0, spec.type.find('<'));
    std::string stem = tw::format("{}_{}", kModelFamily, whole.substr(whole.rfind(':') + 1));
    std::transform(stem.begin(), stem.end(), stem.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    KernelSpec own = spec;
    own.name = tw::format("{}_{}", stem, ++count[stem]);
    others.push_back({kModelFamily, std::move(own), {}, nullptr});
  }
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

GpuProperties gpu_of(const WarmArguments& a, const speech::LoadOptions& options) {
  if (!a.arch.empty()) {
    try {
      return typical_gpu(a.arch);
    } catch (const InvalidArgument& error) {
      throw UsageError(tw::format("kernels warm: {}", error.what()));
    }
  }
  if (!options.device.is_cuda())
    throw UsageError(
        tw::format("kernels warm: the device is cpu, which needs no compiled kernels; --arch sm_90a compiles for a GPU that is "
                   "not in this machine. {}",
                   find_devices().cuda_problem));
  return gpu_properties(options.device);
}

int warm(const WarmArguments& a) {
  const auto begin = std::chrono::steady_clock::now();
  const speech::LoadOptions options = load_options(a.model);
  const GpuProperties gpu = gpu_of(a, options);
  const std::string arch = architecture(gpu.compute_capability);
  const std::string model = a.model.model.empty() ? default_model() : a.model.model;
  const std::vector<RegisteredKernel> known = known_kernels(arch, best_target(gpu.compute_capability));
  const std::vector<RegisteredKernel> kernels = named(speech::kernels_of(model, options.dtype, gpu), known);
  const std::vector<CompileResult> results =
      compile_kernels(kernels, {.arch = arch, .output = a.output, .threads = a.model.threads, .no_cache = false});
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (a.json) {
    auto json = nlohmann::ordered_json::array();
    for (const CompileResult& result : results) json.push_back(to_json(result));
    print_json(json);
  } else {
    const auto found = std::count_if(results.begin(), results.end(), [](const CompileResult& r) { return r.kernel.from_cache; });
    const auto failed = std::count_if(results.begin(), results.end(), [](const CompileResult& r) { return !r.failure.empty(); });
    tw::print("{} kernels for {}: {} compiled, {} already there, {} failed, {:.1f} s\n", results.size(), arch,
              std::ssize(results) - found - failed, found, failed, seconds);
  }
  bool good = true;
  for (const CompileResult& result : results) {
    if (result.failure.empty()) continue;
    good = false;
    tw::print(stderr, "tilewave: {}\n", shown(stderr, result.failure));
  }
  return good ? kOk : kFailure;
}

}  // namespace

std::vector<RegisteredKernel> known_kernels(std::string_view arch, GpuTarget target) {
  std::vector<RegisteredKernel> all = registered_kernels(arch, target);
  for (RegisteredKernel& kernel : named(speech::nano_kernels(arch, target), all))
    if (kernel.family == kModelFamily) all.push_back(std::move(kernel));
  return all;
}

void add_warm(CLI::App& kernels, int& exit_code) {
  CLI::App* command = kernels.add_subcommand("warm", "Compile the kernels of a GLM-ASR checkpoint, so that its first use does not wait");
  static WarmArguments a;
  add_model_options(*command, a.model);
  command
      ->add_option("--arch", a.arch,
                   "Compile for this architecture instead of a GPU in this machine: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120. Needs no "
                   "GPU and no driver")
      ->excludes("--device")
      ->type_name("ARCH");
  command->add_option("--output", a.output, "Also write the compiled kernels to this folder, for use as $TILEWAVE_PACK")->type_name("DIR");
  command->add_flag("--json", a.json, "Print JSON");
  command->footer(
      "Only the shapes of the weights are read. With --arch the kernels are those that the most common GPU of the architecture would\n"
      "use (sm_90a: H200); tile sizes also depend on the number of SMs.");
  command->callback([&exit_code] { exit_code = warm(a); });
}

}  // namespace tw::cli
