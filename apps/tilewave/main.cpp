// build/tilewave: what was found, the kernels, and how fast they are.

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "command.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

/// The innermost subcommand that was named, for the hint below an error.
const CLI::App& innermost(const CLI::App& app) {
  const auto named = app.get_subcommands();
  return named.empty() ? app : innermost(*named.front());
}

std::string full_name(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : full_name(*app.get_parent()) + " " + app.get_name();
}

int usage_error(const CLI::App& app, const std::string& message) {
  const std::string name = full_name(innermost(app));
  tw::print(stderr, "tilewave: {}\nRun `{} --help` for what is allowed.\n", message, name);
  return kUsage;
}

std::string unknown_command(const CLI::App& app, const std::string& given) {
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
  return tw::format("there is no command \"{}\"{}; there are: {}", given, did_you_mean(given, known), tw::join(known, ", "));
}

int run(int argc, char** argv) {
  CLI::App app("Tilewave: one kernel source for CPUs and Hopper GPUs", "tilewave");
  app.set_version_flag("--version", std::string("tilewave ") + TILEWAVE_VERSION);
  app.require_subcommand(1);
  app.footer("Exit codes: 0 done, 1 failed, 2 wrong usage. `tilewave COMMAND --help` tells more of each.");
  int exit_code = kOk;
  add_transcribe(app, exit_code);
  add_devices(app, exit_code);
  add_kernels(app, exit_code);
  add_bench(app, exit_code);
  add_tune(app, exit_code);
  try {
    app.parse(argc, argv);
    return exit_code;
  } catch (const CLI::Success& asked) {  // --help, --version
    app.exit(asked);
    return kOk;
  } catch (const CLI::ParseError& error) {
    const CLI::App& command = innermost(app);
    const std::vector<std::string> unknown = command.remaining();
    if (!command.get_subcommands({}).empty() && !unknown.empty()) return usage_error(app, unknown_command(command, unknown.front()));
    return usage_error(app, error.what());
  } catch (const UsageError& error) {
    return usage_error(app, error.what());
  } catch (const std::bad_alloc&) {
    tw::print(stderr, "tilewave: out of memory\n");
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::broken_pipe) tw::print(stderr, "tilewave: {}\n", error.what());
  } catch (const std::exception& error) {
    tw::print(stderr, "tilewave: {}\n", error.what());
  }
  return kFailure;
}

}  // namespace
}  // namespace tw::cli

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a reader that has seen enough (`| head`) shows as a failed write, below
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
