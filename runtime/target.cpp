#include "runtime/target.hpp"

#include <algorithm>
#include <atomic>
#include <iterator>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"

namespace tw {
namespace {

constexpr ComputeCapability kHopper{9, 0};
std::atomic<GpuTarget> standard_target = GpuTarget::automatic;

}  // namespace

GpuTarget parse_gpu_target(std::string_view text) {
  for (const GpuTarget target : {GpuTarget::automatic, GpuTarget::sm_90a, GpuTarget::cuda})
    if (text == name_of(target)) return target;
  throw InvalidArgument(tw::format("target is \"{}\"; allowed: \"auto\", \"sm_90a\", \"cuda\"", text));
}

std::string_view name_of(GpuTarget target) { return target == GpuTarget::sm_90a ? "sm_90a" : target == GpuTarget::cuda ? "cuda" : "auto"; }

void set_gpu_target(GpuTarget target) { standard_target = target; }
GpuTarget standard_gpu_target() { return standard_target; }

std::string target_problem(std::string_view gpu_name, ComputeCapability gpu) {
  if (gpu.major >= 8) return "";
  return tw::format("sm_{}{} ({}): Tilewave's GPU kernels need compute capability 8.0 or higher", gpu.major, gpu.minor, gpu_name);
}

GpuTarget best_target(ComputeCapability gpu) { return gpu == kHopper ? GpuTarget::sm_90a : GpuTarget::cuda; }

void require_target(GpuTarget target, Device device, ComputeCapability gpu) {
  if (target == GpuTarget::sm_90a && gpu != kHopper) {
    throw InvalidArgument(tw::format("target is sm_90a; {} is sm_{}{}; allowed: \"auto\", \"cuda\"", device.name(), gpu.major, gpu.minor));
  }
}

std::string architecture(ComputeCapability gpu) {
  // Machine code for an "a" architecture runs only on that architecture and may use all of its features.
  const bool specific = gpu == kHopper || gpu == ComputeCapability{10, 0};
  return tw::format("sm_{}{}{}", gpu.major, gpu.minor, specific ? "a" : "");
}

GpuTarget target_of_architecture(std::string_view arch) {
  constexpr std::string_view known[] = {"sm_80",   "sm_86",  "sm_87",   "sm_89",  "sm_90",   "sm_90a", "sm_100",
                                        "sm_100a", "sm_103", "sm_103a", "sm_120", "sm_120a", "sm_121", "sm_121a"};
  if (std::find(std::begin(known), std::end(known), arch) == std::end(known)) {
    throw InvalidArgument(tw::format(
        "arch is \"{}\"; allowed: sm_80 (A100), sm_86 (RTX 30), sm_89 (RTX 40, L4), sm_90a (Hopper), sm_100a (B200), sm_120 (RTX 50) and "
        "others since compute capability 8.0",
        arch));
  }
  return arch == "sm_90a" ? GpuTarget::sm_90a : GpuTarget::cuda;
}

int max_shared_bytes(std::string_view arch) {
  // CUDA C++ Programming Guide, technical specifications per compute capability.
  if (arch.starts_with("sm_80") || arch.starts_with("sm_87")) return 166912;
  if (arch.starts_with("sm_86") || arch.starts_with("sm_89") || arch.starts_with("sm_12")) return 101376;
  return 232448;
}

TargetVariant target_variant(GpuTarget target, bool loads, bool stores) {
  constexpr TargetVariant variants[kTargetVariants] = {
      {0, "tw::sm_90a::Target<false, false>"},          {1, "tw::sm_90a::Target<false, true>"},
      {2, "tw::sm_90a::Target<true, false>"},           {3, "tw::sm_90a::Target<true, true>"},
      {4, "tw::cuda::TargetFor<Kernel, false, false>"}, {5, "tw::cuda::TargetFor<Kernel, false, true>"},
      {6, "tw::cuda::TargetFor<Kernel, true, false>"},  {7, "tw::cuda::TargetFor<Kernel, true, true>"}};
  return variants[(target == GpuTarget::cuda ? 4 : 0) + (loads ? 2 : 0) + (stores ? 1 : 0)];
}

KernelSpec for_target(KernelSpec spec, GpuTarget target) {
  for (const GpuTarget from : {GpuTarget::sm_90a, GpuTarget::cuda}) {
    for (const bool loads : {false, true}) {
      for (const bool stores : {false, true}) {
        if (spec.target != target_variant(from, loads, stores).text) continue;
        spec.target = target_variant(target, loads, stores).text;
        return spec;
      }
    }
  }
  throw InvalidArgument(
      tw::format("kernel {}: target is \"{}\", of which there is no variant for {}", spec.name, spec.target, name_of(target)));
}

}  // namespace tw
