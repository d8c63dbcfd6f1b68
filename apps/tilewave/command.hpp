#pragma once

// Shared by the subcommands. Each subcommand has a file of its own, with one function that adds it to the parser.

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/registry.hpp"

namespace tw::cli {

/// The process's exit codes.
inline constexpr int kOk = 0;
inline constexpr int kFailure = 1;
inline constexpr int kUsage = 2;

/// Wrong usage that the parser cannot detect. It is reported like a parser's error, with exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Each of these adds one subcommand, which sets `exit_code` unless it throws.
void add_transcribe(CLI::App& app, int& exit_code);
void add_listen(CLI::App& app, int& exit_code);
void add_serve(CLI::App& app, int& exit_code);
void add_convert(CLI::App& app, int& exit_code);
void add_vad(CLI::App& app, int& exit_code);
void add_generate(CLI::App& app, int& exit_code);
void add_devices(CLI::App& app, int& exit_code);
void add_kernels(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_tune(CLI::App& app, int& exit_code);
void add_profile(CLI::App& app, int& exit_code);
void add_debug(CLI::App& app, int& exit_code);
void add_help(CLI::App& app, int& exit_code);
void add_completion(CLI::App& app, int& exit_code);
/// Add `transcribe` and `generate` to `bench`.
void add_bench_transcribe(CLI::App& bench, int& exit_code);
void add_bench_generate(CLI::App& bench, int& exit_code);
/// Adds `analyze` to `kernels`.
void add_analyze(CLI::App& kernels, int& exit_code);
/// Adds `warm` to `kernels`.
void add_warm(CLI::App& kernels, int& exit_code);

/// Prints `json` and a newline to stdout.
void print_json(const nlohmann::ordered_json& json);
/// The text that print_json() prints. Bytes that are not UTF-8 are replaced; NaN and infinities become null. All control characters are
/// escaped, because the text may be shown on a terminal.
std::string json_text(const nlohmann::ordered_json& json);

/// Accepts 0 to 2^64 - 1. (CLI11 takes -1 for 2^64 - 1.)
CLI::Validator unsigned_number();

/// Sets the values that the shell offers for an option or a positional argument. Not needed for the members of a CLI::IsMember and for
/// arguments with the type name FILE or DIR.
void completes_with(CLI::Option* option, std::function<std::vector<std::string>()> values);
void completes_with_files(CLI::Option* option);

/// Adds --device, with the default auto, and --target.
void add_device_option(CLI::App& command, std::string& device);

/// The hidden command that calls complete().
inline constexpr std::string_view kCompleteCommand = "__complete";
/// Prints the possible completions of the last of `words`, which are the arguments after "tilewave". The scripts of `tilewave completion`
/// call it.
int complete(const CLI::App& app, std::vector<std::string> words);

/// The hidden command that calls print_manual().
inline constexpr std::string_view kManualCommand = "__man";
/// Prints the manual page tilewave(1) in roff.
int print_manual(const CLI::App& app);

struct Variable {
  const char* name;
  const char* what;
};
/// All environment variables that the library and the command line read.
std::span<const Variable> environment_variables();

/// `command` with the names before it: "tilewave kernels list".
std::string full_name(const CLI::App& command);

/// "there is no command ...", with a list of the commands.
std::string unknown_command(const CLI::App& app, const std::string& given);

/// Finds a kernel by name. Throws UsageError, with similar names, if there is none.
RegisteredKernel find_kernel(const std::vector<RegisteredKernel>& kernels, const std::string& name);

/// registered_kernels(), and after them, as a family of their own, the other kernels that GLM-ASR-Nano-2512 launches. They have no
/// analysis.
inline constexpr const char* kModelFamily = "glm_asr";
std::vector<RegisteredKernel> known_kernels(std::string_view arch = "sm_90a", GpuTarget target = GpuTarget::sm_90a);

/// Their names.
std::vector<std::string> kernel_names();

/// json_text() without spaces or line ends.
std::string json_line(const nlohmann::ordered_json& json);

/// Suggests at most 5 of the `known` names that are similar to `given`, best first: ` (did you mean "gemm"?)`; "" if there are none.
std::string did_you_mean(const std::string& given, std::span<const std::string> known);

/// "1.5 GiB", "60 MiB", "227 KiB".
std::string bytes_text(std::size_t bytes);

}  // namespace tw::cli
