// tilewave tune

#include <algorithm>
#include <cstdio>

#include "analyze.hpp"
#include "apps/tilewave/terminal.hpp"
#include "benchmarks/harness.hpp"
#include "command.hpp"
#include "kernels/tuner.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

/// Of the operands' values.
constexpr std::uint64_t kSeed = 1;

struct TuneArguments {
  std::string family;
  std::string shape;
  std::string dtype = "bf16";
  std::string device = "auto";
  bool dry_run = false, quick = false, json = false, list = false, forget = false;
};

/// What became of a candidate.
struct Result {
  TuneCandidate candidate;
  Prospect prospect;
  bench::Timing time;  ///< milliseconds; 0: not timed
};

Device usable_device(const std::string& name) {
  Device device;
  try {
    device = Device::parse(name);
  } catch (const InvalidArgument& error) {
    throw UsageError(error.what());
  }
  const DeviceInfo& info = device_info(device);
  if (!info.usable) throw DeviceError(tw::format("{}: {}", info.device.name(), info.problem));
  return device;
}

TunableFamily find_family(const std::string& name) {
  const std::vector<TunableFamily> families = tunable_families();
  std::vector<std::string> names;
  for (const TunableFamily& family : families) {
    if (family.name == name) return family;
    names.push_back(family.name);
  }
  throw UsageError(
      tw::format("tune: there is no family \"{}\" with choices{}; there are: {}", name, did_you_mean(name, names), tw::join(names, ", ")));
}

/// What prunes: the device's data sheet; of a GPU that has none here, an H200's, for what is compared are its candidates.
DeviceModel model_of(Device device) {
  if (!device.is_cuda()) return named_device_model("cpu");
  const DeviceInfo& info = device_info(device);
  const DeviceModel* known = find_device_model(info.name);
  DeviceModel model = known != nullptr ? *known : *find_device_model("H200");
  model.units = info.units;
  model.shared_per_block = static_cast<std::int64_t>(info.shared_per_block);
  return model;
}

void print_header(const TuneArguments& a, Device device, const TuneProblem& problem) {
  tw::print("{} on {} ({}), operands from seed {}\n\n", problem.key, device.name(), device_info(device).name, kSeed);
  tw::print("{:<20} {:>12} {:>12} {:>12} {:>10}\n", "configuration", "least us", a.dry_run ? "tiles" : "us", a.dry_run ? "read" : "p10",
            a.dry_run ? "shared" : "p90");
}

void print_result(const TuneArguments& a, const Result& r) {
  const std::string least = tw::format("{:.2f}", r.prospect.seconds * 1e6);
  if (!r.prospect.dropped.empty()) {
    tw::print("{:<20} {:>12} not timed: {}\n", r.candidate.choice.name, least, r.prospect.dropped);
  } else if (a.dry_run) {
    tw::print("{:<20} {:>12} {:>12} {:>12} {:>10}\n", r.candidate.choice.name, least, r.candidate.analysis.tiles,
              bytes_text(r.candidate.analysis.global_read), bytes_text(static_cast<std::size_t>(r.candidate.shared_bytes)));
  } else {
    tw::print("{:<20} {:>12} {:>12.2f} {:>12.2f} {:>10.2f}\n", r.candidate.choice.name, least, r.time.median * 1e3, r.time.p10 * 1e3,
              r.time.p90 * 1e3);
  }
  std::fflush(stdout);
}

/// All that are worth it, interleaved: a GPU's clock settles at what they draw together.
void time_all(const TuneArguments& a, std::vector<Result>& results, const TuneProblem& problem, Device device) {
  const Stream stream = Stream::standard(device);
  const auto launch = problem.prepare(stream, kSeed);
  std::vector<bench::Contender> contenders;
  std::vector<Result*> timed;
  for (Result& result : results) {
    if (!result.prospect.dropped.empty()) continue;
    tw::print(stderr, "tilewave tune: {} of {}: {}\n", &result - results.data() + 1, results.size(), result.candidate.choice.name);
    launch(result.candidate);  // compiles it
    stream.synchronize();
    contenders.push_back({result.candidate.choice.name, [&launch, &result] { launch(result.candidate); }});
    timed.push_back(&result);
  }
  const auto effort = a.quick ? bench::Effort::quick(bench::Mode::hot) : bench::Effort::standard(bench::Mode::hot);
  tw::print(stderr, "tilewave tune: timing {} configurations together, {} samples each\n", contenders.size(), effort.samples);
  const std::vector<bench::Timing> times = bench::measure(bench::Mode::hot, contenders, stream, effort);
  for (std::size_t i = 0; i < times.size(); ++i) timed[i]->time = times[i];
}

nlohmann::ordered_json to_json(const Result& r) {
  nlohmann::ordered_json json{{"name", r.candidate.choice.name},
                              {"values", r.candidate.choice.values},
                              {"least_us", r.prospect.seconds * 1e6},
                              {"tiles", r.candidate.analysis.tiles},
                              {"global_read", r.candidate.analysis.global_read},
                              {"shared_bytes", r.candidate.shared_bytes},
                              {"dropped", nullptr},
                              {"us", nullptr}};
  if (!r.prospect.dropped.empty()) json["dropped"] = r.prospect.dropped;
  if (r.time.median > 0) json["us"] = r.time.median * 1e3;
  return json;
}

void tune(const TuneArguments& a) {
  if (a.family.empty() || a.shape.empty()) throw UsageError("tune: FAMILY and --shape say what to tune; or give --list or --forget");
  const TunableFamily family = find_family(a.family);
  const Device device = usable_device(a.device);
  TuneProblem problem;
  try {
    const DType dtype = parse_dtype(a.dtype);
    if (std::find(family.dtypes.begin(), family.dtypes.end(), dtype) == family.dtypes.end()) {
      std::vector<std::string_view> allowed;
      for (const DType each : family.dtypes) allowed.push_back(name_of(each));
      throw InvalidArgument(tw::format("dtype is {}; {} is tuned for: {}", a.dtype, family.name, tw::join(allowed, ", ")));
    }
    problem = family.problem(ShapeValues(a.shape, family.shape), dtype, device);
  } catch (const InvalidArgument& error) {
    throw UsageError(tw::format("tune {}: {}", family.name, error.what()));
  }
  const std::vector<Prospect> expected = prospects(problem, model_of(device));
  std::vector<Result> results;
  for (std::size_t i = 0; i < expected.size(); ++i) results.push_back({problem.candidates[i], expected[i], {}});
  if (!a.dry_run) time_all(a, results, problem, device);
  if (!a.json) {
    print_header(a, device, problem);
    for (const Result& result : results) print_result(a, result);
  }
  const Result* best = nullptr;
  for (const Result& result : results)
    if (result.time.median > 0 && (best == nullptr || result.time.median < best->time.median)) best = &result;
  if (best != nullptr) keep_tuned(device, problem.key, best->candidate.choice);
  if (!a.json) {
    if (best != nullptr)
      tw::print("\n{} is the fastest; kept in {}\n", best->candidate.choice.name, shown_line(stdout, tuned_file(device)));
    return;
  }
  auto json = nlohmann::ordered_json::array();
  for (const Result& result : results) json.push_back(to_json(result));
  print_json({{"problem", problem.key},
              {"device", device_info(device).name},
              {"seed", kSeed},
              {"configurations", json},
              {"winner", best != nullptr ? nlohmann::ordered_json(best->candidate.choice.name) : nlohmann::ordered_json(nullptr)}});
}

void list(const TuneArguments& a) {
  const Device device = usable_device(a.device);
  auto json = nlohmann::ordered_json::array();
  for (const auto& [problem, choice] : tuned_choices(device)) {
    if (!a.family.empty() && !problem.starts_with(a.family + " ")) continue;
    if (!a.json) tw::print("{:<20} {}\n", choice.name, problem);
    json.push_back({{"problem", problem}, {"name", choice.name}, {"values", choice.values}});
  }
  if (a.json) print_json({{"device", device_info(device).name}, {"file", tuned_file(device)}, {"choices", json}});
  if (!a.json && json.empty()) tw::print("nothing is tuned on {} ({})\n", device.name(), device_info(device).name);
}

void forget(const TuneArguments& a) {
  const Device device = usable_device(a.device);
  const int count = forget_tuned(device, a.family.empty() ? "" : a.family + " ");
  if (a.json) return print_json({{"device", device_info(device).name}, {"forgotten", count}});
  tw::print("{} of {} forgotten\n", count, device_info(device).name);
}

std::string family_help() {
  std::string text =
      "Times the family's configurations, interleaved, except those that their analysis rules out. Keeps the fastest in the cache folder,\n"
      "for this device and compiler: later calls of exactly this problem use it. Names in --shape, with their defaults, and element\n"
      "types:";
  for (const TunableFamily& family : tunable_families()) {
    std::vector<std::string_view> dtypes;
    for (const DType dtype : family.dtypes) dtypes.push_back(name_of(dtype));
    text += tw::format("\n  {:<12} {}; {}", family.name, key_list(family.shape), tw::join(dtypes, ", "));
    for (const ShapeKey& key : family.shape) text += tw::format("\n    {:<14} {}", key.name, key.what);
  }
  return text;
}

}  // namespace

void add_tune(CLI::App& app, int& exit_code) {
  static TuneArguments a;
  CLI::App* command = app.add_subcommand("tune", "Find the fastest configuration of a family for a problem, and keep it for later calls");
  completes_with(command->add_option("FAMILY", a.family, "What to tune"), [] {
    std::vector<std::string> names;
    for (const TunableFamily& family : tunable_families()) names.push_back(family.name);
    return names;
  });
  command->add_option("--shape", a.shape, "The problem: NAME=NUMBER,...; the names are below");
  command->add_option("--dtype", a.dtype, "The element type")->capture_default_str();
  add_device_option(*command, a.device);
  command->add_flag("--dry-run", a.dry_run, "Show the candidates and their analysis; time and keep nothing");
  command->add_flag("--quick", a.quick, "Fewer samples: about +-3 % rather than +-1 %");
  command->add_flag("--list", a.list, "Show the tuned choices for the device (of FAMILY)");
  command->add_flag("--forget", a.forget, "Remove the tuned choices for the device (of FAMILY)")->excludes("--list");
  command->add_flag("--json", a.json, "Print JSON");
  command->footer(family_help());
  command->callback([&exit_code] {
    a.list ? list(a) : a.forget ? forget(a) : tune(a);
    exit_code = kOk;
  });
}

}  // namespace tw::cli
