#include "kernels/convolution/tuning.hpp"

#include "kernels/check.hpp"
#include "kernels/product_tuning.hpp"

namespace tw::kernels::convolution {

namespace {

int element_bytes_of(const Call& call) { return static_cast<int>(size_of(call.x.dtype())); }
/// The GPU multiplies weights as they are stored, [.., C, F]: 16-bit types alone.
bool w_rows(const Call& call) { return element_bytes_of(call) == 2 && stored_cf(call.w); }

TuneSpace gpu_space(const Call& call) {
  return TuneSpace(product_ranges(), [bytes = element_bytes_of(call), rows = w_rows(call)](const TunePoint& p) {
    return valid(tile_of(p.values()), bytes, rows);
  });
}

TuneSpace cpu_space() {
  std::vector<std::vector<int>> points;
  for (const Config& c : kCpuConfigs) points.push_back(values_of(c));
  return space_of({"bm", "bn", "stages", "cluster"}, points);
}

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
  if (values == nullptr || values->size() != 4) return;
  const Config tile = tile_of(*values);
  if (!device.is_cuda())
    call.config = find_config(kCpuConfigs, *values, kernels::values_of);
  else if (valid(tile, element_bytes_of(call), w_rows(call)))
    call.tile = tile;
}

FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
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
  const auto options_on = [=](const Stream& stream) {
    return Conv2dOptions{.stride = {flat ? 1 : stride, stride},
                         .padding = {vertical_padding, padding},
                         .dilation = {flat ? 1 : dilation, dilation},
                         .stream = stream};
  };

  const Operands shapes = make([](Shape s, DType type) { return placeholder(std::move(s), type); });
  const Call call = check_conv2d(shapes.x, shapes.w, shapes.y, options_on(Stream::standard(Device::cpu())));
  const auto prepare = [=](const Stream& stream, std::uint64_t seed) {
    const Operands operands = make([&](Shape s, DType type) { return random_operand(std::move(s), type, seed, stream); });
    const auto launch = [=](const TunePoint& point) {
      Call timed = check_conv2d(operands.x, operands.w, operands.y, options_on(stream));
      if (gpu)
        timed.tile = tile_of(point.values());
      else
        timed.config = find_config(kCpuConfigs, point.values(), kernels::values_of);
      run(timed);
    };
    return TuneOperands{launch, operands.y, bytes_of({&operands.x, &operands.w, &operands.y})};
  };
  TuneSpace space = gpu ? gpu_space(call) : cpu_space();
  const Problem work = call.problem(128 / element_bytes_of(call), units_of(device));
  TunePoint standard = point_of(space, values_of(gpu ? configs()[static_cast<std::size_t>(choose_config(work))]
                                                     : kCpuConfigs[static_cast<std::size_t>(choose_cpu_config(call))]));
  const int bytes = element_bytes_of(call);
  const auto predict = [=](const TunePoint& point) {
    const Config tile = tile_of(point.values());
    if (!gpu) return predicted_time(work, cpu_cost(tile));
    return predicted_time(work, costed(tile)) * stages_cost(tile, bytes);
  };
  return {key_on(device, call), std::move(space), std::move(standard), predict, prepare};
}

}  // namespace tw::kernels::convolution
