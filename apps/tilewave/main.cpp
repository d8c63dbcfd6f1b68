// The command line, build/tilewave.

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "apps/tilewave/terminal.hpp"
#include "command.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

/// The innermost subcommand on the command line, for the hint after an error message.
const CLI::App& innermost(const CLI::App& app) {
  const auto named = app.get_subcommands();
  return named.empty() ? app : innermost(*named.front());
}

int usage_error(const CLI::App& app, const std::string& message) {
  const std::string name = full_name(innermost(app));
  tw::print(stderr, "tilewave: {}\nRun `{} --help` for what is allowed.\n", shown(stderr, message), name);
  return kUsage;
}

/// CLI11 writes the limits of an option with six decimals: not in range 0.000000 to 1.000000.
std::string without_zeros(const std::string& message) {
  const std::size_t limits = std::min(message.find(" not in range "), message.size());
  static const std::regex kZeros("(\\.[0-9]*[1-9])0+\\b|\\.0+\\b");
  return message.substr(0, limits) + std::regex_replace(message.substr(limits), kZeros, "$1");
}

/// The message for an argument that should be a command but is not.
std::optional<std::string> unknown_command_of(const CLI::App& command) {
  const std::vector<std::string> unknown = command.remaining();
  if (command.get_subcommands({}).empty() || unknown.empty()) return {};
  return unknown_command(command, unknown.front());
}

int failure(const std::string& message) {
  tw::print(stderr, "tilewave: {}\n", shown(stderr, message));
  return kFailure;
}

int run(int argc, char** argv) {
  CLI::App app("Tilewave: speech to text, and kernels from one source for CPUs and NVIDIA GPUs", "tilewave");
  app.set_version_flag("--version", std::string("tilewave ") + TILEWAVE_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 failed, 2 wrong usage. `tilewave COMMAND --help` describes each command; `tilewave help environment` lists "
      "the\n"
      "environment variables. With --json, standard output is JSON and nothing else.");
  int exit_code = kOk;
  add_transcribe(app, exit_code);
  add_listen(app, exit_code);
  add_serve(app, exit_code);
  add_convert(app, exit_code);
  add_vad(app, exit_code);
  add_generate(app, exit_code);
  add_devices(app, exit_code);
  add_kernels(app, exit_code);
  add_bench(app, exit_code);
  add_tune(app, exit_code);
  add_profile(app, exit_code);
  add_debug(app, exit_code);
  add_help(app, exit_code);
  add_completion(app, exit_code);
  if (argc > 1 && std::string_view(argv[1]) == kCompleteCommand) return complete(app, {argv + 2, argv + argc});
  if (argc > 1 && std::string_view(argv[1]) == kManualCommand) return print_manual(app);
  try {
    app.parse(argc, argv);
    return exit_code;
  } catch (const CLI::Success& asked) {  // --help, --version
    if (const auto unknown = unknown_command_of(innermost(app))) return usage_error(app, *unknown);
    app.exit(asked);
    return kOk;
  } catch (const CLI::ParseError& error) {
    return usage_error(app, unknown_command_of(innermost(app)).value_or(without_zeros(error.what())));
  } catch (const UsageError& error) {
    return usage_error(app, error.what());
  } catch (const std::bad_alloc&) {
    return failure("out of memory");
  } catch (const std::system_error& error) {
    return error.code() == std::errc::broken_pipe ? kFailure : failure(error.what());
  } catch (const std::exception& error) {
    return failure(error.what());
  }
}

}  // namespace
}  // namespace tw::cli

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a reader that stops early (`| head`) then shows as a failed write
  int code = tw::cli::kFailure;
  try {
    code = tw::cli::run(argc, argv);
  } catch (...) {  // stderr itself cannot be written
    return tw::cli::kFailure;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    if (errno != EPIPE) std::fprintf(stderr, "tilewave: standard output: %s\n", std::strerror(errno));
    return tw::cli::kFailure;
  }
  return code;
}
