// tilewave kernels analyze

#include "analyze.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "benchmarks/harness.hpp"
#include "command.hpp"
#include "kernels/registry.hpp"
#include "runtime/format.hpp"
#include "tilewave/detail/parallel.hpp"

namespace tw::cli {
namespace {

struct AnalyzeArguments {
  bool json = false;
  std::string name;
  std::string shape;
  std::vector<std::string> devices;
};

/// The read bandwidth of all threads together in bytes per second, for arrays much larger than the caches.
double measure_memory() {
  constexpr std::size_t numbers = std::size_t{8} << 20;  // 64 MB per thread
  const int threads = cpu_threads();
  std::vector<std::vector<std::uint64_t>> arrays(static_cast<std::size_t>(threads));
  std::vector<std::uint64_t> sums(arrays.size());
  const auto pass = [&] {
    detail::parallel_for(threads, [&](long thread) {
      auto& array = arrays[static_cast<std::size_t>(thread)];
      if (array.empty()) array.assign(numbers, 1);
      sums[static_cast<std::size_t>(thread)] += std::accumulate(array.begin(), array.end(), std::uint64_t{0});
    });
  };
  pass();
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    pass();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(numbers * sizeof(std::uint64_t) * arrays.size()) / seconds.count());
  }
  return best;
}

/// Whether the device has enough shared memory for a block.
bool fits(const Analysis& a, const DeviceModel& device) {
  return device.shared_per_block == 0 || a.shared_bytes <= device.shared_per_block;
}

nlohmann::ordered_json to_json(const Operations& operations) {
  auto products = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < operations.products.size(); ++i)
    if (operations.products[i] > 0)
      products[name_of(static_cast<OperandType>(i))] = {{"all", operations.products[i]}, {"inside", operations.inside[i]}};
  return {{"products", products}, {"f32", operations.f32}, {"special", operations.special}};
}

nlohmann::ordered_json to_json(const DeviceModel& device, const Roofline& r) {
  return {{"device", device.name}, {"source", device.source}, {"seconds", r.seconds}, {"bound", r.bound},
          {"memory", r.memory},    {"products", r.products},  {"f32", r.f32},         {"special", r.special}};
}

void print_table(const RegisteredKernel& kernel, const ShapeValues& shape, const Analysis& a, const std::vector<DeviceModel>& devices) {
  tw::print("{}, {}\n\n", kernel.spec.name, shape.text());
  tw::print("{:<16} {}; a block has {} threads and {} of shared memory\n", "tiles", a.tiles, a.threads,
            bytes_text(static_cast<std::size_t>(a.shared_bytes)));
  tw::print("{:<16} {} read, {} written; each byte once: {} read, {} written\n", "global memory", bytes_text(a.global_read),
            bytes_text(a.global_written), bytes_text(a.unique_read), bytes_text(a.unique_written));
  tw::print("{:<16} {}\n", "shared memory", bytes_text(a.shared_traffic));
  for (std::size_t i = 0; i < a.operations.products.size(); ++i) {
    if (a.operations.products[i] > 0)
      tw::print("{:<16} {} of {}, {} of them inside the tensors\n", "products", a.operations.products[i],
                name_of(static_cast<OperandType>(i)), a.operations.inside[i]);
  }
  tw::print("{:<16} {}\n{:<16} {}\n", "f32 operations", a.operations.f32, "special", a.operations.special);
  if (a.uncounted > 0)
    tw::print("{:<16} {} elements are passed to functions of float, whose arithmetic is not counted\n", "uncounted", a.uncounted);
  tw::print("\n{:<18} {:>12} {:>12} {:>12} {:>12} {:>12}  {}\n", "at least, us", "memory", "products", "f32", "special", "all", "bound by");
  for (const DeviceModel& device : devices) {
    const Roofline r = roofline(a, device);
    tw::print("{:<18} {:>12.2f} {:>12.2f} {:>12.2f} {:>12.2f} {:>12.2f}  {}{}\n", device.name, r.memory * 1e6, r.products * 1e6,
              r.f32 * 1e6, r.special * 1e6, r.seconds * 1e6, r.bound, fits(a, device) ? "" : "; needs more shared memory than it has");
  }
}

void analyze(const AnalyzeArguments& a) {
  const RegisteredKernel kernel = find_kernel(known_kernels(), a.name);
  std::vector<DeviceModel> devices;
  Analysis counts;
  std::unique_ptr<ShapeValues> shape;
  try {
    if (kernel.analyze == nullptr)
      throw InvalidArgument(tw::format("kernel {} is not built for the analysis target; choose another one of its kind", a.name));
    shape = std::make_unique<ShapeValues>(a.shape, kernel.shape);
    for (const std::string& name : a.devices) devices.push_back(named_device_model(name));
    counts = kernel.analyze(*shape);
    if (a.devices.empty()) {  // those that support the products
      std::copy_if(device_models().begin(), device_models().end(), std::back_inserter(devices), [&](const DeviceModel& device) {
        for (std::size_t i = 0; i < device.products.size(); ++i)
          if (counts.operations.products[i] > 0 && device.products[i] == 0) return false;
        return true;
      });
    }
    for (const DeviceModel& device : devices) static_cast<void>(roofline(counts, device));
  } catch (const InvalidArgument& error) {
    throw UsageError(tw::format("kernels analyze {}: {}", a.name, error.what()));
  }
  if (!a.json) return print_table(kernel, *shape, counts, devices);
  auto times = nlohmann::ordered_json::array();
  for (const DeviceModel& device : devices) {
    times.push_back(to_json(device, roofline(counts, device)));
    times.back()["fits"] = fits(counts, device);
  }
  print_json({{"name", kernel.spec.name},
              {"shape", shape->text()},
              {"tiles", counts.tiles},
              {"threads", counts.threads},
              {"shared_bytes", counts.shared_bytes},
              {"global_read", counts.global_read},
              {"global_written", counts.global_written},
              {"unique_read", counts.unique_read},
              {"unique_written", counts.unique_written},
              {"shared_traffic", counts.shared_traffic},
              {"operations", to_json(counts.operations)},
              {"uncounted", counts.uncounted},
              {"devices", times}});
}

std::string shape_help() {
  std::string text =
      "All figures are counted from the kernel's source; docs/language.md says which are exact. The times are lower bounds from the "
      "device's\n"
      "data sheet (cpu: from measured peaks). Names in --shape, with their defaults:";
  std::string family;
  for (const RegisteredKernel& kernel : registered_kernels()) {
    if (kernel.family == family) continue;
    family = kernel.family;
    text += tw::format("\n  {:<12} {}", family, key_list(kernel.shape));
    for (const ShapeKey& key : kernel.shape) text += tw::format("\n    {:<14} {}", key.name, key.what);
  }
  return text;
}

}  // namespace

DeviceModel named_device_model(const std::string& name) {
  if (name == "cpu") {
    const double peak = bench::measure_fma_peak() * 1e9;
    if (peak == 0) throw InvalidArgument("device is cpu; the peak of this processor cannot be measured");
    return cpu_model("cpu", cpu_threads(), peak, measure_memory());
  }
  const DeviceModel* model = find_device_model(name);
  if (model == nullptr) throw InvalidArgument(tw::format("device is \"{}\"; allowed: H200, A100, 4090, cpu", name));
  return *model;
}

void add_analyze(CLI::App& kernels, int& exit_code) {
  static AnalyzeArguments a;
  CLI::App* command =
      kernels.add_subcommand("analyze", "Count a kernel's bytes and operations from its source, and predict its roofline time");
  completes_with(command->add_option("NAME", a.name, "A name that `tilewave kernels list` shows")->required(), kernel_names);
  command->add_option("--shape", a.shape, "The problem: NAME=NUMBER,...; the names are below")->required();
  command->add_option("--device", a.devices, "H200, A100, 4090 or cpu; may be repeated. Default: all GPUs")
      ->type_name("DEVICE")
      ->allow_extra_args(false);
  command->add_flag("--json", a.json, "Print JSON");
  command->footer(shape_help());
  command->callback([&exit_code] {
    analyze(a);
    exit_code = kOk;
  });
}

}  // namespace tw::cli
