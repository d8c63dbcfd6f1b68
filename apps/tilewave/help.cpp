// tilewave help

#include "command.hpp"
#include "runtime/format.hpp"

namespace tw::cli {
namespace {

struct Variable {
  const char* name;
  const char* what;
};

// All that is read, by the library and by the command line; a test holds this against the sources. tilewave/kernel.hpp has the library's.
constexpr Variable kVariables[] = {
    {"TILEWAVE_CACHE", "The folder of compiled kernels and tuned choices; else $XDG_CACHE_HOME/tilewave, else $HOME/.cache/tilewave"},
    {"TILEWAVE_PACK", "A folder of kernels that were compiled ahead (`tilewave kernels compile --output DIR`), read after the cache"},
    {"TILEWAVE_ISA", "baseline, avx2 or avx512: the most that the CPU's kernels use (avx512: without VNNI and BF16)"},
    {"XDG_CACHE_HOME", "Where the cache is without TILEWAVE_CACHE"},
    {"HOME", "Where the cache is without XDG_CACHE_HOME; NVRTC and benchmarks' peers are looked for in Python's folder there"},
    {"CUDA_HOME", "A CUDA toolkit, where NVRTC and benchmarks' peers are looked for first"},
    {"VIRTUAL_ENV", "A Python environment, where NVRTC and benchmarks' peers are looked for next"},
    {"PATH", "Beside its folders `tilewave bench` looks for Python packages that hold peers"},
    {"TERM", "Without it, or with dumb, no progress is drawn on the terminal"},
};

std::string environment_help() {
  std::string text = "Environment variables that Tilewave reads:\n";
  for (const Variable& variable : kVariables) text += tw::format("  {:<16} {}\n", variable.name, variable.what);
  return text + "Python's `import tilewave` also reads TILEWAVE_LIBRARY: the folder of libtilewave.so. Colours are never used.\n";
}

const CLI::App& root_of(const CLI::App& command) { return command.get_parent() == nullptr ? command : root_of(*command.get_parent()); }

std::string text_of(const CLI::App& root, const std::vector<std::string>& topic) {
  if (topic == std::vector<std::string>{"environment"}) return environment_help();
  const CLI::App* command = &root;
  for (const std::string& name : topic) {
    const auto subcommands = command->get_subcommands([&](const CLI::App* each) { return each->get_name() == name; });
    if (command->get_subcommands({}).empty()) throw UsageError(tw::format("help: {} has no command \"{}\"", full_name(*command), name));
    if (subcommands.empty()) throw UsageError(unknown_command(*command, name));
    command = subcommands.front();
  }
  return command->get_formatter()->make_help(command, full_name(*command), CLI::AppFormatMode::Normal);
}

}  // namespace

void add_help(CLI::App& app, int& exit_code) {
  static std::vector<std::string> topic;
  CLI::App* command = app.add_subcommand("help", "What a command does and takes; `tilewave help environment`: the environment variables");
  CLI::Option* option = command->add_option("TOPIC", topic, "A command, with its subcommand, or `environment`; none: all commands");
  completes_with(option, [&app] {
    std::vector<std::string> names{"environment"};
    for (const CLI::App* each : app.get_subcommands({})) names.push_back(each->get_name());
    return names;
  });
  command->callback([&exit_code, command] {
    tw::print("{}", text_of(root_of(*command), topic));
    exit_code = kOk;
  });
}

}  // namespace tw::cli
