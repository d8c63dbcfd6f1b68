// tilewave bench

#include <algorithm>
#include <cstdio>
#include <memory>

#include "apps/tilewave/output.hpp"
#include "benchmarks/harness.hpp"
#include "command.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

struct BenchArguments {
  std::vector<std::string> families;
  std::string device = "auto";
  std::string output;
  bool json = false;
  std::vector<std::string> dtypes;
  bench::Options options;
};

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const bench::Family* family : bench::Family::all()) names.push_back(family->name());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> families_with_ladder() {
  std::vector<std::string> names = family_names();
  std::erase_if(names, [](const std::string& name) { return !bench::Family::find(name)->has_ladder(); });
  return names;
}

std::string family_help() {
  std::string text = "Families:";
  for (const std::string& name : family_names()) text += tw::format("\n  {:<12} {}", name, bench::Family::find(name)->what());
  text += "\nFigures are medians. Contenders are interleaved in random order; benchmarks/README.md explains the modes.";
  return text;
}

void list(const bench::Run& run, const BenchArguments& arguments) {
  auto json = nlohmann::ordered_json::array();
  for (const bench::Run::Listed& each : run.listed()) {
    if (!arguments.json) tw::print("{:<12} {:<28} {}\n", each.family, each.case_name, name_of(each.dtype));
    json.push_back({{"family", each.family}, {"case", each.case_name}, {"dtype", name_of(each.dtype)}});
  }
  if (arguments.json) print_json(json);
}

void run(BenchArguments& arguments) {
  if (arguments.json) arguments.options.table = stderr;
  std::vector<const bench::Family*> families;
  const std::vector<std::string> known = family_names();
  for (const std::string& name : arguments.families) {
    const bench::Family* family = bench::Family::find(name);
    if (family == nullptr) {
      if (name.ends_with(".json")) throw UsageError(tw::format("bench: --json prints to standard output; --output {} writes a file", name));
      throw UsageError(
          tw::format("bench: there is no family \"{}\"{}; there are: {}", name, did_you_mean(name, known), tw::join(known, ", ")));
    }
    if (arguments.options.ladder && !family->has_ladder()) {
      throw UsageError(tw::format("bench: {} has no ladder; families with one: {}", name, tw::join(families_with_ladder(), ", ")));
    }
    families.push_back(family);
  }
  try {
    for (const std::string& name : arguments.dtypes) arguments.options.dtypes.push_back(parse_dtype(name));
    arguments.options.device = Device::parse(arguments.device);
  } catch (const InvalidArgument& error) {
    throw UsageError(error.what());
  }
  if (!arguments.options.list) {
    const DeviceInfo& info = device_info(arguments.options.device);
    if (!info.usable) throw DeviceError(tw::format("{}: {}", info.device.name(), info.problem));
    tw::print(arguments.options.table, "{}: {}\n", info.device.name(), info.name);
  }
  std::unique_ptr<Output> output;
  if (!arguments.output.empty() && !arguments.options.list) output = std::make_unique<Output>(arguments.output);
  bench::Run run(arguments.options);
  for (const bench::Family* family : families) family->run(run);
  if (arguments.options.list) return list(run, arguments);
  if (run.count() == 0) throw UsageError("bench: no case matches --case and --dtype on this device; --list shows all");
  if (output) output->write(json_text(run.json()));
  if (arguments.json) print_json(run.json());
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("bench", "Measure kernel families, their peers and the hardware's limit in one run");
  static BenchArguments a;
  completes_with(command->add_option("FAMILY", a.families, "What to measure"), family_names);
  add_device_option(*command, a.device);
  command->add_flag("--json", a.json, "Print JSON: a list of records; the table goes to standard error");
  command->add_option("--output", a.output, "Also write the records to this file, as JSON")->type_name("FILE");
  command->add_option("--case", a.options.cases, "Only cases whose name contains this; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command->add_option("--dtype", a.dtypes, "Only this element type: f32, f16 or bf16; may be repeated")
      ->type_name("DTYPE")
      ->allow_extra_args(false);
  command->add_flag("--quick", a.options.quick, "Fewer samples: an accuracy of about 3 % instead of 1 %");
  command->add_flag("--list", a.options.list, "List the cases and measure nothing");
  command->add_flag("--all-configs", a.options.all_configs, "Also time every configuration of Tilewave's kernel");
  command->add_flag("--ladder", a.options.ladder,
                    tw::format("Instead of the cases: from the simplest implementation to the final one, one idea per step ({})",
                               tw::join(families_with_ladder(), ", ")));
  command->add_option("--config", a.options.config, "Time this configuration instead of the heuristic's choice");
  command->add_option("--commit", a.options.commit, "The commit to record; default: the one that this program was built from")
      ->type_name("TEXT");
  command->footer(family_help());
  add_bench_transcribe(*command, exit_code);
  add_bench_generate(*command, exit_code);
  command->callback([command, &exit_code] {
    if (!command->get_subcommands().empty()) return;
    if (a.families.empty()) throw CLI::RequiredError("FAMILY");
    run(a);
    exit_code = kOk;
  });
}

}  // namespace tw::cli
