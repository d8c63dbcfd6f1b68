// `tilewave bench convolution`: against our own matrix product of the same FLOPs, whose left operand is the one that the convolution does
// not store.

#include <algorithm>

#include "benchmarks/harness.hpp"
#include "kernels/convolution/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tilewave/convolution.hpp"

namespace tw::kernels::convolution {
namespace {

using namespace tw::bench;

struct Case {
  const char* name;
  DType dtype;
  std::vector<Mode> modes;
  std::int64_t n, h, w, c, f, kh, kw;
  std::int64_t stride = 1;
  bool bias_gelu = false;

  std::array<std::int64_t, 2> strides() const { return {h == 1 ? 1 : stride, stride}; }
  std::array<std::int64_t, 2> padding() const { return {kh / 2, kw / 2}; }
  std::int64_t out_h() const { return (h + 2 * (kh / 2) - kh) / strides()[0] + 1; }
  std::int64_t out_w() const { return (w + 2 * (kw / 2) - kw) / strides()[1] + 1; }
  // As a matrix product.
  std::int64_t rows() const { return n * out_h() * out_w(); }
  std::int64_t depth() const { return kh * kw * c; }
  double flops() const { return 2.0 * static_cast<double>(rows()) * static_cast<double>(f) * static_cast<double>(depth()); }
  double bytes() const { return static_cast<double>(n * h * w * c + f * depth() + rows() * f) * static_cast<double>(size_of(dtype)); }
};

std::string describe(const Config& c) { return tw::format("{}x{} stages {} cluster {}", c.bm, c.bn, c.stages, c.cluster); }

std::vector<Case> gpu_cases() {
  const std::vector<Mode> both = {Mode::hot, Mode::cool};
  std::vector<Case> cases;
  for (const DType dtype : {DType::f16, DType::bf16}) cases.push_back({"2d-n32-64x64-256-256-k3", dtype, both, 32, 64, 64, 256, 256, 3, 3});
  cases.push_back({"2d-n128-64x64-128-128-k3", DType::f16, both, 128, 64, 64, 128, 128, 3, 3});
  // The two layers before GLM-ASR's encoder, for 30 s of audio.
  cases.push_back({"1d-3000-128-1280-k3-gelu", DType::bf16, {Mode::graph}, 1, 1, 3000, 128, 1280, 1, 3, 1, true});
  cases.push_back({"1d-3000-1280-1280-k3-s2-gelu", DType::bf16, {Mode::graph}, 1, 1, 3000, 1280, 1280, 1, 3, 2, true});
  return cases;
}

std::vector<Case> cpu_cases() { return {{"2d-n1-56x56-128-128-k3", DType::f32, {Mode::one_thread}, 1, 56, 56, 128, 128, 3, 3}}; }

/// What the arithmetic or the memory allows, in units of 10^12 (GPU) or 10^9 (CPU) operations a second; 0 where it is not known.
double limit_of(const Case& c, const DeviceInfo& device) {
  if (!device.device.is_cuda()) return measure_fma_peak();
  const auto limits = gpu_limits(device.name);
  if (!limits) return 0;
  const double compute = c.flops() / ((c.dtype == DType::f32 ? limits->tf32_tflops : limits->bf16_tflops) * 1e12);
  return c.flops() / std::max(compute, c.bytes() / limits->bytes_per_second) * 1e-12;
}

void run_case(Run& run, const Case& c) {
  const Device device = run.options().device;
  const Stream& stream = run.stream();
  const DeviceInfo& info = device_info(device);
  const Tensor x = random_normal({c.n, c.h, c.w, c.c}, c.dtype, device, 1);
  const Tensor w = random_normal({c.f, c.kh, c.kw, c.c}, c.dtype, device, 2);
  const Tensor bias = random_normal({c.f}, c.dtype, device, 3);
  const Tensor y = Tensor::poisoned({c.n, c.out_h(), c.out_w(), c.f}, c.dtype, stream);
  const Tensor a = random_normal({c.rows(), c.depth()}, c.dtype, device, 4);
  const Tensor b = random_normal({c.f, c.depth()}, c.dtype, device, 5);
  const Tensor d = Tensor::poisoned({c.rows(), c.f}, c.dtype, stream);
  const Tensor* const addend = c.bias_gelu ? &bias : nullptr;
  const Activation activation = c.bias_gelu ? Activation::gelu_erf : Activation::none;
  const int forced = run.options().config;

  const auto ours = [&](int config) {
    conv2d(x, w, y,
           {.stride = c.strides(), .padding = c.padding(), .bias = addend, .activation = activation, .stream = stream, .config = config});
  };
  const std::int64_t generic_shared = generic_shared_bytes(stream);
  const std::vector<CostedTile> known = configs(generic_shared);
  std::vector<Contender> contenders = {{"tilewave", [&] { ours(forced); }}};
  if (run.options().all_configs && device.is_cuda()) {
    for (int i = 0; i < static_cast<int>(known.size()); ++i)
      contenders.push_back({describe(known[static_cast<std::size_t>(i)]), [&ours, i] { ours(i); }});
  }
  contenders.push_back(
      {"tilewave gemm", [&] { tw::gemm(a, b.transpose(0, 1), d, {.bias = addend, .activation = activation, .stream = stream}); }});
  const double unit = device.is_cuda() ? 1e-12 : 1e-9;
  for (const Mode mode : c.modes) {
    const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
    Record record;
    record.family = "convolution";
    record.case_name = c.name;
    record.dtype = c.dtype;
    record.mode = mode;
    record.unit = device.is_cuda() ? "TFLOP/s" : "GFLOP/s";
    record.work = c.flops() * unit;
    record.ours = times.front();
    if (device.is_cuda()) {
      const std::int64_t steps = c.kh * c.kw * ((c.c * static_cast<std::int64_t>(size_of(c.dtype)) + 127) / 128);
      const Problem problem{c.n, c.out_h(), c.out_w(), c.f, steps, c.strides()[0], c.strides()[1], info.units, generic_shared};
      record.config = describe(known[static_cast<std::size_t>(forced >= 0 ? forced : choose_config(problem))]);
    } else {
      record.config = info.isa;
    }
    record.peer = "tilewave gemm";
    record.peer_time = times.back();
    record.limit = limit_of(c, info);
    run.add(record);
    for (std::size_t i = 1; i + 1 < times.size(); ++i)
      tw::print(run.options().table, "  {:<28} {:9.1f} TFLOP/s  {:.3f} of the peer\n", contenders[i].name,
                record.work / (times[i].median * 1e-3), times.back().median / times[i].median);
  }
}

void run_all(Run& run) {
  const bool gpu = run.options().device.is_cuda();
  const int threads = cpu_threads();
  if (!gpu) set_cpu_threads(1);
  for (const Case& c : gpu ? gpu_cases() : cpu_cases()) {
    if (run.wants("convolution", c.name, c.dtype)) run_case(run, c);
  }
  set_cpu_threads(threads);
}

const Family family{"convolution", "convolutions: our own matrix product of the same FLOPs", run_all};

}  // namespace
}  // namespace tw::kernels::convolution
