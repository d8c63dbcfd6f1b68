#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "runtime/format.hpp"
#include "runtime/paths.hpp"

namespace tw::test {

/// A file's bytes; empty when it cannot be read.
inline std::string read(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// What a run of the program came to.
struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
};

/// Runs the program as its users do. Each test has a folder of its own, which is removed after it.
class CommandLine : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(program())) GTEST_SKIP() << "skipped: built without the command line";
    std::string pattern = (std::filesystem::temp_directory_path() / "tilewave-cli-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  std::filesystem::path folder() const { return folder_; }

  /// Runs the program with an own, empty cache and no standard input. `environment`: assignments in front of the command.
  Outcome run(const std::string& arguments, const std::string& environment = "") const {
    const std::string command = tw::format("TILEWAVE_CACHE='{0}/cache' {1} '{2}' {3} >'{0}/out' 2>'{0}/err' </dev/null", folder_.string(),
                                           environment, program().string(), arguments);
    const int status = std::system(command.c_str());
    Outcome outcome;
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.out = read(folder_ / "out");
    outcome.err = read(folder_ / "err");
    return outcome;
  }

  nlohmann::json run_json(const std::string& arguments, const std::string& environment = "") const {
    const Outcome outcome = run(arguments, environment);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    nlohmann::json parsed = nlohmann::json::parse(outcome.out, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << outcome.out;
    return parsed;
  }

  /// The first registered kernel that uses the tensor cores of plain bf16 products: quick to compile.
  std::string some_kernel() const { return run_json("kernels list --json").at(0).at("name"); }

  /// As built; or, in a bundle, in the folder beside this program's.
  static std::filesystem::path program() {
    const std::filesystem::path built = TILEWAVE_BINARY_DIR "/tilewave";
    return std::filesystem::exists(built) ? built : own_folder().parent_path() / "bin/tilewave";
  }

 private:
  std::filesystem::path folder_;
};

/// Expects the exit code and a message on standard error that contains `part`.
inline void expect_message(const Outcome& outcome, int code, const std::string& part) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(outcome.err.rfind("tilewave: ", 0), 0u) << outcome.err;
  EXPECT_NE(outcome.err.find(part), std::string::npos) << "no \"" << part << "\" in: " << outcome.err;
}

}  // namespace tw::test
