// tilewave help

#include "command.hpp"
#include "runtime/format.hpp"

namespace tw::cli {
namespace {

// All variables that the library and the command line read. A test compares the list with the sources. tilewave/kernel.hpp describes the
// library's.
constexpr Variable kVariables[] = {
    {"TILEWAVE_CACHE",
     "The folder for compiled kernels and tuned choices; default: $XDG_CACHE_HOME/tilewave, or else $HOME/.cache/tilewave"},
    {"TILEWAVE_PACK", "A folder of kernels compiled ahead of time (`tilewave kernels compile --output DIR`), read after the cache"},
    {"TILEWAVE_ISA", "baseline, avx2 or avx512: the widest instruction set that CPU kernels use (avx512: without VNNI and BF16)"},
    {"XDG_CACHE_HOME", "The parent of the cache folder if TILEWAVE_CACHE is not set"},
    {"HOME", "The cache is in its .cache if XDG_CACHE_HOME is not set; also searched for Python packages with NVRTC and benchmark peers"},
    {"CUDA_HOME", "A CUDA toolkit, searched first for NVRTC and benchmark peers"},
    {"VIRTUAL_ENV", "A Python environment, searched next for NVRTC and benchmark peers"},
    {"PATH", "`tilewave bench` looks for Python packages with peers next to its folders"},
    {"NVTX_INJECTION64_PATH", "A profiler's library that receives NVTX ranges of stages and operators; profilers set it"},
    {"TERM", "If unset or dumb, no progress and no colours are shown"},
    {"NO_COLOR", "If set and not empty, no colours are shown; only `transcribe --logprobs` has any"},
};

std::string environment_help() {
  std::string text = "Environment variables that Tilewave reads:\n";
  for (const Variable& variable : kVariables) text += tw::format("  {:<21} {}\n", variable.name, variable.what);
  return text + "Python's `import tilewave` also reads TILEWAVE_LIBRARY: the folder of libtilewave.so.\n";
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

std::span<const Variable> environment_variables() { return kVariables; }

void add_help(CLI::App& app, int& exit_code) {
  static std::vector<std::string> topic;
  CLI::App* command =
      app.add_subcommand("help", "Describe a command and its options; `tilewave help environment`: the environment variables");
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
