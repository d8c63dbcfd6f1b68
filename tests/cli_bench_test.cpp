// The commands `bench` and `tune` as their users meet them: exit codes, output, messages and the files they write.

#include "cli_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/format.hpp"
#include "support.hpp"
#include "terminal_screen.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tw::test::expect_message;
using tw::test::Outcome;
using tw::test::read;

class CliBench : public tw::test::CommandLine {};

TEST_F(CliBench, BenchNeedsItsDevice) {
  if (tw::test::cuda_device() != nullptr) GTEST_SKIP() << "skipped: there is a CUDA device";
  expect_message(run("bench gemm --device cuda"), 1, "");
  EXPECT_EQ(run("bench gemm --device cuda --list").code, 0);
}

TEST_F(CliBench, BenchWritesRecords) {
  const std::string path = (folder() / "gemm.json").string();
  const Outcome outcome = run(tw::format("bench gemm --device cpu --quick --case nn-1024 --commit c0ffee --output '{}'", path));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("nn-1024"), std::string::npos) << outcome.out;
  const json records = json::parse(read(path));
  ASSERT_EQ(records.size(), 1u);
  const json& record = records[0];
  EXPECT_EQ(record.at("family"), "gemm");
  EXPECT_EQ(record.at("case"), "nn-1024");
  EXPECT_EQ(record.at("dtype"), "f32");
  EXPECT_EQ(record.at("mode"), "one-thread");
  EXPECT_EQ(record.at("unit"), "GFLOP/s");
  EXPECT_GT(record.at("ours").get<double>(), 0);
  EXPECT_EQ(record.at("commit"), "c0ffee");
  for (const char* field : {"peer", "peer_value", "limit", "ratio", "spread", "date", "versions", "device"})
    EXPECT_TRUE(record.contains(field)) << field;
}

TEST_F(CliBench, JsonIsAllOfStandardOutput) {
  const json cases = run_json("bench gemm --list --json --device cpu --dtype f32");
  ASSERT_FALSE(cases.empty());
  EXPECT_EQ(cases.at(0).at("family"), "gemm");
  const Outcome outcome = run("bench gemm --device cpu --quick --json --case nn-1024");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(json::parse(outcome.out).at(0).at("case"), "nn-1024");
  EXPECT_NE(outcome.err.find("nn-1024"), std::string::npos) << outcome.err;  // the table
  EXPECT_EQ(run_json("tune --forget --json --device cpu").at("forgotten"), 0);
}

TEST_F(CliBench, BenchHoldsMemoryBoundOpsAgainstACopy) {
  const std::string path = (folder() / "transpose.json").string();
  const Outcome outcome = run(tw::format("bench transpose --device cpu --quick --dtype f32 --output '{}'", path));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json records = json::parse(read(path));
  ASSERT_EQ(records.size(), 1u);
  const json& record = records[0];
  EXPECT_EQ(record.at("unit"), "GB/s");
  EXPECT_EQ(record.at("peer"), "copy");
  EXPECT_EQ(record.at("peer_variant"), "memcpy");
  const double moved = 2.0 * 4096 * 4096 * 4;
  EXPECT_NEAR(record.at("ours").get<double>() * 1e9 * record.at("time_us").get<double>() * 1e-6, moved, 1e-3 * moved);
}

TEST_F(CliBench, BenchListsTheExercise) {
  const Outcome outcome = run("bench exercise --list --device cuda");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* name :
       {"silu", "gelu-tanh", "softmax", "rms-norm", "layer-norm", "linear", "attention-scores", "softmax-in-place", "attention-output",
        "rope-cos-sin", "fused-swiglu", "fused-linear-swiglu", "fused-linear-gelu", "fused-attention-encoder", "fused-attention-decoder"})
    EXPECT_NE(outcome.out.find(tw::format(" {} ", name)), std::string::npos) << name << "\n" << outcome.out;
}

TEST_F(CliBench, BenchListsTheLadder) {
  const Outcome outcome = run("bench attention --ladder --list --device cuda");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::size_t at = 0;  // in this order
  for (const char* kind : {"full", "causal"}) {
    for (const char* rung : {"1-naive", "2-fa1", "3-fa2", "4-fa3-overlap", "5-fa3-lazy", "6-fa3-order", "7-tilewave"}) {
      at = outcome.out.find(tw::format(" ladder-{}-{} ", rung, kind), at);
      EXPECT_NE(at, std::string::npos) << rung << " " << kind << "\n" << outcome.out;
    }
  }
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 14) << outcome.out;
}

TEST_F(CliBench, BenchHoldsARungAgainstTheOneBefore) {
  const std::string path = (folder() / "ladder.json").string();
  const Outcome outcome = run(tw::format("bench attention --ladder --device cpu --quick --dtype f32 --case causal --output '{}'", path));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json records = json::parse(read(path));
  ASSERT_EQ(records.size(), 7u);
  EXPECT_TRUE(records[0].at("peer").is_null());
  for (std::size_t i = 1; i < records.size(); ++i) {
    const json& record = records[i];
    EXPECT_EQ(record.at("group"), "ladder");
    EXPECT_EQ(record.at("peer"), "rung before");
    EXPECT_EQ(record.at("peer_value"), records[i - 1].at("ours"));
    EXPECT_NEAR(record.at("ratio").get<double>(), record.at("ours").get<double>() / records[i - 1].at("ours").get<double>(), 1e-3);
  }
  EXPECT_EQ(records[2].at("peer_variant"), "fa1");
}

TEST_F(CliBench, TuneNeedsItsDevice) {
  if (tw::test::cuda_device() != nullptr) GTEST_SKIP() << "skipped: there is a CUDA device";
  expect_message(run("tune gemm --device cuda --shape M=64,N=64,K=64"), 1, "");
  expect_message(run("tune --list --device cuda"), 1, "");
}

TEST_F(CliBench, TuneKeepsTheFastestOnTheCpu) {
  const std::string command = "tune gemm --device cpu --dtype f32 --quick --shape M=64,N=64,K=64";
  const json plan = run_json(command + " --dry-run --json").at("problems").at(0);
  ASSERT_EQ(plan.at("candidates").size(), 2u);
  EXPECT_TRUE(plan.at("winner").is_null());
  for (const json& candidate : plan.at("candidates")) {
    EXPECT_TRUE(candidate.at("us").is_null());
    EXPECT_GT(candidate.at("predicted").get<double>(), 0);
  }
  EXPECT_EQ(run_json("tune --list --device cpu --json").at("choices").size(), 0u);
  EXPECT_NE(run(command + " --dry-run").out.find("predicted"), std::string::npos);

  const json all = run_json(command + " --json");
  EXPECT_EQ(all.at("seed"), 1);
  const json tuned = all.at("problems").at(0);
  const std::string fastest = tuned.at("winner");
  for (const json& candidate : tuned.at("candidates")) {
    EXPECT_TRUE(candidate.at("problem").is_string() || candidate.at("us").get<double>() > 0);
    if (candidate.at("name") == fastest) {
      EXPECT_EQ(candidate.at("us"), tuned.at("us"));
    }
    if (candidate.at("name") == tuned.at("heuristic")) {
      EXPECT_EQ(candidate.at("us"), tuned.at("heuristic_us"));
    }
  }
  EXPECT_GE(tuned.at("gain").get<double>(), 1.0);
  EXPECT_NEAR(all.at("geometric_mean_gain").get<double>(), tuned.at("gain").get<double>(), 1e-9);
  const json list = run_json("tune gemm --list --device cpu --json");
  ASSERT_EQ(list.at("choices").size(), 1u);
  EXPECT_EQ(list.at("choices").at(0).at("problem"), tuned.at("problem"));
  EXPECT_EQ(list.at("choices").at(0).at("name"), fastest);
  EXPECT_TRUE(fs::exists(list.at("file").get<std::string>()));
  EXPECT_NE(run("tune --list --device cpu").out.find(fastest), std::string::npos);

  EXPECT_EQ(run("tune attention --forget --device cpu").out.rfind("0 ", 0), 0u);
  EXPECT_EQ(run("tune gemm --forget --device cpu").out.rfind("1 ", 0), 0u);
  EXPECT_EQ(run_json("tune --list --device cpu --json").at("choices").size(), 0u);

  const Outcome table = run(command);
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_NE(table.out.find("The fastest is "), std::string::npos) << table.out;
  EXPECT_EQ(table.err, "") << "progress is for terminals";
}

TEST_F(CliBench, TuneTakesSeveralProblems) {
  const std::string path = (folder() / "shapes").string();
  std::ofstream(path) << "# skinny\nM=40,N=64,K=32\n\n  M=48,N=33,K=32  # ragged\n";
  const json all = run_json("tune gemm --device cpu --dtype f32 --quick --json --shape M=64,N=64,K=64 --shapes '" + path + "'");
  ASSERT_EQ(all.at("problems").size(), 3u);
  double product = 1;
  for (std::size_t i = 0; i < 3; ++i) {
    const json& problem = all.at("problems").at(i);
    EXPECT_NE(problem.at("problem").get<std::string>().find(std::array{"M=64,N=64", "M=40,N=64", "M=48,N=33"}[i]), std::string::npos);
    product *= problem.at("gain").get<double>();
  }
  EXPECT_NEAR(std::pow(all.at("geometric_mean_gain").get<double>(), 3), product, 1e-9 * product);
  EXPECT_EQ(run_json("tune gemm --list --device cpu --json").at("choices").size(), 3u);
  std::ofstream(path) << "# none\n";
  expect_message(run("tune gemm --device cpu --shapes '" + path + "'"), 2, "contains no shape");
  expect_message(run("tune gemm --device cpu --shapes '" + path + "x'"), 1, "cannot be read");
}

TEST_F(CliBench, TuneKeepsAConvolution) {
  const std::string command = "tune convolution --device cpu --dtype f32 --quick --shape N=1,W=64,C=16,F=32,padding=1";
  EXPECT_EQ(run_json(command + " --dry-run --json").at("problems").at(0).at("candidates").size(), 2u);
  const json tuned = run_json(command + " --json").at("problems").at(0);
  const json list = run_json("tune convolution --list --device cpu --json");
  ASSERT_EQ(list.at("choices").size(), 1u);
  EXPECT_EQ(list.at("choices").at(0).at("problem"), tuned.at("problem"));
  EXPECT_EQ(list.at("choices").at(0).at("name"), tuned.at("winner"));
  EXPECT_EQ(run_json("tune gemm --list --device cpu --json").at("choices").size(), 0u);
}

TEST_F(CliBench, BenchLeavesNoFileWithoutRecords) {
  const fs::path path = folder() / "none.json";
  EXPECT_EQ(run(tw::format("bench gemm --device cpu --case nothing-like-it --output '{}'", path.string())).code, 2);
  EXPECT_FALSE(fs::exists(path));
}

}  // namespace
