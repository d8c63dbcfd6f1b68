// tilewave devices

#include "apps/tilewave/terminal.hpp"
#include "command.hpp"
#include "runtime/cache.hpp"
#include "runtime/format.hpp"
#include "tilewave/device.hpp"
#include "tilewave/kernel.hpp"

namespace tw::cli {
namespace {

nlohmann::ordered_json text_or_null(const std::string& text) {
  return text.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(text);
}

void show_json(const DeviceReport& report) {
  nlohmann::ordered_json json;
  json["devices"] = nlohmann::ordered_json::array();
  for (const DeviceInfo& d : report.devices) {
    nlohmann::ordered_json entry;
    entry["device"] = d.device.name();
    entry["name"] = d.name;
    entry["isa"] = d.isa;
    entry["units"] = d.units;
    entry["total_memory"] = d.total_memory;
    entry["free_memory"] = d.free_memory;
    entry["cache_bytes"] = d.l2_bytes;
    entry["shared_per_block"] = d.shared_per_block;
    if (d.device.is_cuda()) entry["target"] = d.usable ? nlohmann::ordered_json(name_of(d.target)) : nlohmann::ordered_json(nullptr);
    entry["usable"] = d.usable;
    entry["problem"] = text_or_null(d.problem);
    json["devices"].push_back(std::move(entry));
  }
  json["cuda_driver"] = text_or_null(report.cuda_driver);
  json["cuda_problem"] = text_or_null(report.cuda_problem);
  json["nvrtc"] = text_or_null(report.nvrtc);
  json["nvrtc_problem"] = text_or_null(report.nvrtc_problem);
  json["cache"] = text_or_null(cache_directory());
  json["cache_problem"] = text_or_null(folder_problem(cache_directory()));
  print_json(json);
}

void show_table(const DeviceReport& report) {
  for (const DeviceInfo& d : report.devices) {
    tw::print("{:<8} {}: {}, {} {}, {} memory ({} free), {} {}\n", d.device.name(), d.name, d.isa, d.units,
              d.device.is_cuda() ? "SMs" : "threads", bytes_text(d.total_memory), bytes_text(d.free_memory), bytes_text(d.l2_bytes),
              d.device.is_cuda() ? "L2" : "L3");
    if (!d.usable) tw::print("         not usable: {}\n", d.problem);
    if (d.usable && d.device.is_cuda()) tw::print("         target of kernels: {}\n", name_of(d.target));
  }
  if (!report.cuda_driver.empty()) tw::print("CUDA     driver for CUDA {}\n", report.cuda_driver);
  if (!report.cuda_problem.empty()) tw::print("CUDA     none: {}\n", report.cuda_problem);
  if (!report.nvrtc.empty()) tw::print("NVRTC    {}\n", shown_line(stdout, report.nvrtc));
  if (!report.nvrtc_problem.empty()) tw::print("NVRTC    none: {}\n", report.nvrtc_problem);
  const std::string cache = cache_directory();
  const std::string problem = folder_problem(cache);
  tw::print("cache    {}\n", cache.empty()     ? "none: TILEWAVE_CACHE, XDG_CACHE_HOME and HOME are not set"
                             : problem.empty() ? shown_line(stdout, cache)
                                               : "not used: " + shown_line(stdout, problem));
}

}  // namespace

void add_devices(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("devices", "Show the CPU, the GPUs and the run-time compiler, and why any of them cannot be used");
  static bool json = false;
  command->add_flag("--json", json, "Print JSON");
  command->callback([&exit_code] {
    const DeviceReport report = find_devices();
    json ? show_json(report) : show_table(report);
    exit_code = kOk;
  });
}

}  // namespace tw::cli
