// tilewave tune

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "apps/tilewave/terminal.hpp"
#include "command.hpp"
#include "kernels/tuner.hpp"
#include "runtime/format.hpp"
#include "runtime/tune.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

/// Seed of the operands' values.
constexpr std::uint64_t kSeed = 1;

struct TuneArguments {
  std::string family;
  std::vector<std::string> shapes;
  std::string shapes_file;
  std::string dtype = "bf16";
  std::string device = "auto";
  int candidates = TuneOptions().candidates;
  bool dry_run = false, quick = false, hot = false, json = false, list = false, forget = false;
};

/// The result for one problem.
struct Outcome {
  FamilyProblem problem;
  TuneResult result;  ///< in a dry run only the candidates
  std::string failure;
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
      tw::format("tune: there is no tunable family \"{}\"{}; there are: {}", name, did_you_mean(name, names), tw::join(names, ", ")));
}

/// The lines of a file without comments (#) and empty lines.
std::vector<std::string> read_shapes(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> shapes;
  for (std::string line; std::getline(file, line);) {
    line.erase(std::min(line.find('#'), line.size()));
    line.erase(0, line.find_first_not_of(" \t\r"));
    line.erase(line.find_last_not_of(" \t\r") + 1);
    if (!line.empty()) shapes.push_back(line);
  }
  if (file.bad() || !file.eof()) throw Error(tw::format("{}: cannot be read", path));
  if (shapes.empty()) throw UsageError(tw::format("tune: {} contains no shape", path));
  return shapes;
}

FamilyProblem make_problem(const TunableFamily& family, const std::string& shape, const std::string& dtype_text, Device device) {
  try {
    const DType dtype = parse_dtype(dtype_text);
    if (std::find(family.dtypes.begin(), family.dtypes.end(), dtype) == family.dtypes.end()) {
      std::vector<std::string_view> allowed;
      for (const DType each : family.dtypes) allowed.push_back(name_of(each));
      throw InvalidArgument(tw::format("dtype is {}; {} can be tuned for: {}", dtype_text, family.name, tw::join(allowed, ", ")));
    }
    return family.problem(ShapeValues(shape, family.shape), dtype, device);
  } catch (const InvalidArgument& error) {
    throw UsageError(tw::format("tune {}: {}", family.name, error.what()));
  }
}

/// The predicted time of a candidate relative to the heuristic's choice.
double relative(const Outcome& o, const TuneCandidate& c) {
  const double standard = o.problem.predict(o.problem.standard);
  return standard > 0 ? c.predicted / standard : 0;
}

std::string table_of(const Outcome& o) {
  std::string text = tw::format("{}\n{:<56} {:>9} {:>10}\n", o.problem.name, "", "predicted", "us");
  for (const TuneCandidate& c : o.result.candidates) {
    const char* const mark = c.point == o.problem.standard ? "heuristic" : "";
    text += tw::format("{:<56} {:>9.2f} {:>10} {}\n", c.point.text(), relative(o, c),
                       c.milliseconds > 0 ? tw::format("{:.2f}", c.milliseconds * 1e3) : "-", c.problem.empty() ? mark : c.problem);
  }
  if (!o.failure.empty() || o.result.milliseconds == 0) return text + "\n";
  return text +
         tw::format("The fastest is {}: {:.3f} times the speed of the heuristic's choice\n\n", o.result.best.text(), o.result.gain());
}

nlohmann::ordered_json to_json(const Outcome& o) {
  const auto or_null = [](double value) { return value > 0 ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr); };
  auto candidates = nlohmann::ordered_json::array();
  for (const TuneCandidate& c : o.result.candidates)
    candidates.push_back({{"name", c.point.text()},
                          {"values", c.point.values()},
                          {"predicted", relative(o, c)},
                          {"us", or_null(c.milliseconds * 1e3)},
                          {"problem", c.problem.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(c.problem)}});
  const bool timed = o.failure.empty() && o.result.milliseconds > 0;
  return {{"problem", o.problem.name},
          {"candidates", candidates},
          {"heuristic", o.problem.standard.text()},
          {"heuristic_us", timed ? or_null(o.result.standard_milliseconds * 1e3) : nullptr},
          {"winner", timed ? nlohmann::ordered_json(o.result.best.text()) : nlohmann::ordered_json(nullptr)},
          {"us", timed ? or_null(o.result.milliseconds * 1e3) : nullptr},
          {"gain", timed ? or_null(o.result.gain()) : nullptr},
          {"failure", o.failure.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(o.failure)}};
}

/// Compiles the kernels of all problems together, which keeps all cores busy.
void compile_all_candidates(const TuneArguments& a, const std::vector<Outcome>& outcomes, const Stream& stream, Screen& screen) {
  std::vector<KernelSpec> specs;
  for (const Outcome& o : outcomes) {
    screen.progress(o.problem.name);
    const TuneProblem problem = with_operands(o.problem, stream, kSeed, TuneMemory::hot);
    std::vector<TuneCandidate> candidates = tune_candidates(o.problem.space, problem, a.candidates);
    const std::vector<KernelSpec> own = kernels_of_candidates(problem, candidates);
    specs.insert(specs.end(), own.begin(), own.end());
  }
  compile_candidates(specs, stream, [&](std::string_view text) { screen.progress(text); });
}

int tune(const TuneArguments& a) {
  std::vector<std::string> shapes = a.shapes_file.empty() ? std::vector<std::string>() : read_shapes(a.shapes_file);
  shapes.insert(shapes.begin(), a.shapes.begin(), a.shapes.end());
  if (a.family.empty() || shapes.empty()) throw UsageError("tune: give FAMILY and --shape or --shapes, or --list, or --forget");
  if (a.candidates < 1) throw UsageError(tw::format("tune: --candidates is {}; allowed: at least 1", a.candidates));
  const auto begin = std::chrono::steady_clock::now();
  const TunableFamily family = find_family(a.family);
  const Device device = usable_device(a.device);
  std::vector<Outcome> outcomes;
  for (const std::string& shape : shapes) outcomes.push_back({make_problem(family, shape, a.dtype, device), {}, {}});
  const Stream stream = Stream::standard(device);
  Screen screen;
  if (!a.json) screen.text(tw::format("{} ({}), operands from seed {}\n\n", device.name(), device_info(device).name, kSeed));
  if (!a.dry_run && device.is_cuda()) compile_all_candidates(a, outcomes, stream, screen);
  TuneOptions options{.stream = stream, .candidates = a.candidates};
  if (a.quick) options.rounds = 11;
  double log_gain = 0;
  int tuned = 0;
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    Outcome& o = outcomes[i];
    options.progress = [&](std::string_view text) {
      screen.progress(tw::format("[{}/{}] {}: {}", i + 1, outcomes.size(), o.problem.name, text));
    };
    try {
      if (a.dry_run) {
        o.result.candidates = tune_candidates(o.problem.space, without_operands(o.problem), a.candidates);
      } else {
        const TuneProblem problem = with_operands(o.problem, stream, kSeed, a.hot ? TuneMemory::hot : TuneMemory::cold);
        o.result = tw::tune(o.problem.space, problem, options);
        log_gain += std::log(o.result.gain());
        ++tuned;
      }
    } catch (const Error& error) {
      o.failure = error.what();
      screen.message(tw::format("tilewave tune: {}", o.failure));
    }
    if (!a.json) screen.text(table_of(o));
  }
  screen.clear_progress();
  const double gain = tuned > 0 ? std::exp(log_gain / tuned) : 0;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (a.json) {
    auto problems = nlohmann::ordered_json::array();
    for (const Outcome& o : outcomes) problems.push_back(to_json(o));
    print_json({{"device", device_info(device).name},
                {"seed", kSeed},
                {"memory", a.hot || !device.is_cuda() ? "hot" : "cold"},
                {"problems", problems},
                {"geometric_mean_gain", tuned > 0 ? nlohmann::ordered_json(gain) : nlohmann::ordered_json(nullptr)},
                {"seconds", seconds}});
  } else if (tuned > 0) {
    screen.text(tw::format("{} of {} tuned in {:.1f} s; {:.3f} times the heuristic's speed in the geometric mean; stored in {}\n", tuned,
                           outcomes.size(), seconds, gain, tuned_file(device)));
  }
  return a.dry_run || tuned == static_cast<int>(outcomes.size()) ? kOk : kFailure;
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
  tw::print("{} choices for {} removed\n", count, device_info(device).name);
}

std::string family_help() {
  std::string text =
      "Searches tile sizes, stages and all other parameters of the family's kernel: compiles the points with the best predictions and\n"
      "times them interleaved. If the fastest is also faster than the heuristic's choice in a second measurement, it is stored in the\n"
      "cache folder, for this device, driver and compiler version. Later calls of exactly this problem use it. Names in --shape, with\n"
      "their defaults, and element types:";
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
  CLI::App* command =
      app.add_subcommand("tune", "Find the fastest configuration of a kernel family for a problem, and store it for later calls");
  completes_with(command->add_option("FAMILY", a.family, "What to tune"), [] {
    std::vector<std::string> names;
    for (const TunableFamily& family : tunable_families()) names.push_back(family.name);
    return names;
  });
  command->add_option("--shape", a.shapes, "A problem: NAME=NUMBER,...; the names are below; may be repeated")->allow_extra_args(false);
  completes_with_files(command->add_option("--shapes", a.shapes_file, "A file with one problem per line; # begins a comment"));
  command->add_option("--dtype", a.dtype, "The element type")->capture_default_str();
  add_device_option(*command, a.device);
  command->add_option("--candidates", a.candidates, "Number of points to compile and time for each problem")->capture_default_str();
  command->add_flag("--dry-run", a.dry_run, "Show the candidates and their predictions; time and store nothing");
  command->add_flag("--quick", a.quick, "Fewer samples: an accuracy of about 3 % instead of 1 %");
  command->add_flag("--hot", a.hot, "Time with operands in the GPU's cache instead of memory");
  command->add_flag("--list", a.list, "Show the tuned choices for the device; with FAMILY: only those of the family");
  command->add_flag("--forget", a.forget, "Remove the tuned choices for the device; with FAMILY: only those of the family")
      ->excludes("--list");
  command->add_flag("--json", a.json, "Print JSON");
  command->footer(family_help());
  command->callback([&exit_code] {
    exit_code = kOk;
    if (a.list)
      list(a);
    else if (a.forget)
      forget(a);
    else
      exit_code = tune(a);
  });
}

}  // namespace tw::cli
