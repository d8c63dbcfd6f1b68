#pragma once

// What the subcommands share. Each has a file of its own with one function that adds it to the parser.

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

/// The command line asks for something that does not exist: reported like a parser's error, exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Each adds one subcommand. When it is run it sets `exit_code`, unless it throws.
void add_transcribe(CLI::App& app, int& exit_code);
void add_devices(CLI::App& app, int& exit_code);
void add_kernels(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_tune(CLI::App& app, int& exit_code);
void add_help(CLI::App& app, int& exit_code);
void add_completion(CLI::App& app, int& exit_code);
/// To `bench`.
void add_bench_transcribe(CLI::App& bench, int& exit_code);
/// To `kernels`.
void add_analyze(CLI::App& kernels, int& exit_code);

/// Prints `json` and a newline to stdout.
void print_json(const nlohmann::ordered_json& json);
/// The text that print_json prints; bytes that are not UTF-8 are replaced, NaN and infinities become null. Control characters are escaped,
/// all of them: a terminal may be what shows it.
std::string json_text(const nlohmann::ordered_json& json);

/// Accepts 0 to 2^64 - 1. (CLI11 takes -1 for 2^64 - 1.)
CLI::Validator unsigned_number();

/// The values that the shell offers for an option or a positional argument. Members of a CLI::IsMember and what has the type name FILE or
/// DIR need none of these.
void completes_with(CLI::Option* option, std::function<std::vector<std::string>()> values);
void completes_with_files(CLI::Option* option);

/// --device, with auto as its default.
void add_device_option(CLI::App& command, std::string& device);

/// The hidden command that calls complete().
inline constexpr std::string_view kCompleteCommand = "__complete";
/// Prints what may stand where the last of `words`, those after "tilewave", is being typed. The scripts of `tilewave completion` call it.
int complete(const CLI::App& app, std::vector<std::string> words);

/// `command` with the names before it: "tilewave kernels list".
std::string full_name(const CLI::App& command);

/// "there is no command ...", with what there is.
std::string unknown_command(const CLI::App& app, const std::string& given);

/// Throws UsageError, with names that look like it, when there is none.
RegisteredKernel find_kernel(const std::vector<RegisteredKernel>& kernels, const std::string& name);

/// Of all registered kernels.
std::vector<std::string> kernel_names();

/// The same without spaces or line ends.
std::string json_line(const nlohmann::ordered_json& json);

/// Those of `known` that look like `given`, best first, 5 at most: ` (did you mean "gemm"?)`, or "" when none does.
std::string did_you_mean(const std::string& given, std::span<const std::string> known);

/// "1.5 GiB", "60 MiB", "227 KiB".
std::string bytes_text(std::size_t bytes);

}  // namespace tw::cli
