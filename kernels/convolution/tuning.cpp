#include "kernels/convolution/tuning.hpp"

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw::kernels::convolution {

namespace {

/// A configuration by its numbers, which mean the same whatever the list of configurations becomes.
std::vector<int> values_of(const Config& c) { return {c.bm, c.bn, c.stages, c.cluster}; }

std::span<const Config> configs_of(Device device) { return device.is_cuda() ? configs() : cpu_configs(); }

std::string key_on(Device device, const Call& call) {
  const auto extent = [](const Tensor& t, int dim) { return t.shape(dim); };
  const Axis &v = call.vertical, &h = call.horizontal;
  std::string key =
      tw::format("convolution {} {} N={},H={},W={},C={},F={},K={}x{},stride={}x{},padding={}x{},dilation={}x{}", name_of(call.x.dtype()),
                 stored_cf(call.w) ? "cf" : "fc", extent(call.x, 0), extent(call.x, 1), extent(call.x, 2), extent(call.x, 3),
                 extent(call.w, 0), extent(call.w, 1), extent(call.w, 2), v.stride, h.stride, v.padding, h.padding, v.dilation, h.dilation);
  if (!device.is_cuda()) key += tw::format(" threads={}", cpu_threads());
  return key;
}

}  // namespace

std::string problem_key(const Call& call) { return key_on(call.stream.device(), call); }

void use_tuned(Call& call) {
  if (call.config >= 0 || generic_shared_bytes(call.stream) > 0) return;  // tuned configurations are sm_90a's
  const Device device = call.stream.device();
  const std::vector<int>* const values = tuned_values(device, [&] { return problem_key(call); });
  if (values != nullptr) call.config = find_config(configs_of(device), *values, values_of);
}

TuneProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  const std::int64_t n = shape["N"], height = shape["H"], width = shape["W"], c = shape["C"], f = shape["F"], taps = shape["K"];
  const std::int64_t stride = shape["stride"], padding = shape["padding"], dilation = shape["dilation"];
  require(n > 0 && height > 0 && width > 0 && c > 0 && f > 0 && taps > 0 && stride > 0 && dilation > 0,
          "shape: all but padding and cf must be positive");
  const bool cf = shape["cf"] != 0, flat = height == 1, gpu = device.is_cuda();
  require(!cf || !gpu || dtype != DType::f32, "shape: cf has kernels for f16 and bf16 only");
  const std::int64_t vertical_padding = flat ? 0 : padding, vertical_taps = flat ? 1 : taps;
  const auto extent = [&](std::int64_t padded, std::int64_t k) {
    const std::int64_t reach = dilation * (k - 1) + 1;
    require(reach <= padded, "shape: the kernel, {} long, must fit into the padded image, {}", reach, padded);
    return (padded - reach) / stride + 1;
  };
  const std::int64_t out_height = flat ? 1 : extent(height + 2 * padding, taps), out_width = extent(width + 2 * padding, taps);

  // Operands as conv2d() takes them: views of how they are stored.
  struct Operands {
    Tensor x, w, y;
  };
  const auto make = [=](auto tensor) {
    const Tensor w = tensor(cf ? Shape{vertical_taps, taps, c, f} : Shape{f, vertical_taps, taps, c}, dtype);
    return Operands{tensor(Shape{n, height, width, c}, dtype), cf ? w.transpose(2, 3).transpose(1, 2).transpose(0, 1) : w,
                    tensor(Shape{n, out_height, out_width, f}, dtype)};
  };
  const Conv2dOptions options{
      .stride = {flat ? 1 : stride, stride}, .padding = {vertical_padding, padding}, .dilation = {flat ? 1 : dilation, dilation}};

  TuneProblem problem;
  const Operands shapes = make([](Shape s, DType type) { return placeholder(std::move(s), type); });
  const Call call = check_conv2d(shapes.x, shapes.w, shapes.y, options);
  problem.key = key_on(device, call);
  const std::span<const Config> all = configs_of(device);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Analysis analysis = gpu ? Analysis() : analyze_cpu_config(call, static_cast<int>(i));
    std::string name = tw::format("{}x{}{}", all[i].bm, all[i].bn, all[i].cluster > 1 ? " cluster" : "");
    problem.candidates.push_back({{std::move(name), values_of(all[i])}, analysis, gpu ? analysis.shared_bytes : 0});
  }
  problem.prepare = [=](const Stream& stream, std::uint64_t seed) {
    const Operands operands = make([&](Shape s, DType type) { return random_operand(std::move(s), type, seed, stream); });
    return [=](const TuneCandidate& candidate) {
      Conv2dOptions on_stream = options;
      on_stream.stream = stream;
      Call timed = check_conv2d(operands.x, operands.w, operands.y, on_stream);
      timed.config = find_config(all, candidate.choice.values, values_of);
      run(timed);
    };
  };
  return problem;
}

}  // namespace tw::kernels::convolution
