// The tuner without its command: what is kept and how, what the heuristics make of it, what is not worth timing.

#include "runtime/tuned.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "kernels/gemm/tuning.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/tuner.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/error.hpp"

namespace tw::test {
namespace {

namespace fs = std::filesystem;

/// A cache folder of the test's own; the CPU's choices are read again from it.
class Tuned : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tilewave-tuned-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    if (const char* before = std::getenv("TILEWAVE_CACHE")) before_ = before;
    use_cache((folder_ / "cache").string());
    read_again();
  }
  void TearDown() override {
    forget_tuned(kDevice, "");
    use_cache(before_);
    fs::remove_all(folder_);
  }

  static void use_cache(const std::string& folder) { setenv("TILEWAVE_CACHE", folder.c_str(), 1); }
  static void read_again() { forget_tuned(kDevice, "no such problem"); }
  static std::string text() {
    std::ostringstream all;
    all << std::ifstream(tuned_file(kDevice)).rdbuf();
    return all.str();
  }
  static void write(const std::string& text) { std::ofstream(tuned_file(kDevice)) << text; }

  static constexpr Device kDevice = Device::cpu();
  fs::path folder_;
  std::string before_;
};

TEST_F(Tuned, NothingAtFirst) { EXPECT_TRUE(tuned_choices(kDevice).empty()); }

TEST_F(Tuned, KeepsAndForgets) {
  keep_tuned(kDevice, "gemm one", {"a", {1, 2}});
  keep_tuned(kDevice, "gemm two", {"b \"quoted\"", {}});
  keep_tuned(kDevice, "attention one", {"c", {-3}});
  keep_tuned(kDevice, "gemm one", {"d", {4}});
  for (int round = 0; round < 2; ++round) {  // as kept, then as read
    const TunedChoices& choices = tuned_choices(kDevice);
    ASSERT_EQ(choices.size(), 3u);
    EXPECT_EQ(choices.at("gemm one").name, "d");
    EXPECT_EQ(choices.at("gemm one").values, std::vector<int>{4});
    EXPECT_EQ(choices.at("gemm two").name, "b \"quoted\"");
    EXPECT_EQ(choices.at("attention one").values, std::vector<int>{-3});
    read_again();
  }
  EXPECT_EQ(forget_tuned(kDevice, "gemm "), 2);
  EXPECT_EQ(forget_tuned(kDevice, "gemm "), 0);
  EXPECT_EQ(tuned_choices(kDevice).size(), 1u);
  read_again();
  EXPECT_EQ(tuned_choices(kDevice).size(), 1u);
}

TEST_F(Tuned, TheSameChoicesGiveTheSameFile) {
  keep_tuned(kDevice, "x", {"a", {1}});
  keep_tuned(kDevice, "y", {"b", {2}});
  const std::string before = text();
  EXPECT_NE(before, "");
  forget_tuned(kDevice, "");
  keep_tuned(kDevice, "y", {"b", {2}});
  keep_tuned(kDevice, "x", {"a", {1}});
  EXPECT_EQ(text(), before);
}

TEST_F(Tuned, WhatIsReadBeforeStaysValid) {
  keep_tuned(kDevice, "x", {"a", {1}});
  const TunedChoices& before = tuned_choices(kDevice);
  keep_tuned(kDevice, "x", {"b", {2}});
  EXPECT_EQ(before.at("x").name, "a");
  EXPECT_EQ(tuned_choices(kDevice).at("x").name, "b");
}

TEST_F(Tuned, DamagedFilesAreNone) {
  keep_tuned(kDevice, "x", {"a", {1, 2, 3}});
  const std::string good = text();
  for (std::size_t size = 0; size + 3 < good.size(); size += 7) {  // without its end it is no object
    write(good.substr(0, size));
    read_again();
    EXPECT_TRUE(tuned_choices(kDevice).empty()) << size;
  }
  nlohmann::json json = nlohmann::json::parse(good);
  const auto is_none = [&](const nlohmann::json& damaged) {
    write(damaged.dump());
    read_again();
    EXPECT_TRUE(tuned_choices(kDevice).empty()) << damaged;
  };
  for (const char* field : {"format", "device", "compiler", "choices"}) {
    for (const nlohmann::json& value : {nlohmann::json("another"), nlohmann::json(7), nlohmann::json()}) {
      nlohmann::json damaged = json;
      damaged[field] = value;
      is_none(damaged);
    }
    nlohmann::json without = json;
    without.erase(field);
    is_none(without);
  }
  json["choices"]["x"]["values"] = "many";
  is_none(json);
  write(good);
  read_again();
  EXPECT_EQ(tuned_choices(kDevice).size(), 1u);
  write("{");  // and is replaced by the next choice
  keep_tuned(kDevice, "y", {"b", {2}});
  read_again();
  EXPECT_EQ(tuned_choices(kDevice).size(), 1u);
}

TEST_F(Tuned, ProcessesMayWriteAtTheSameTime) {
  constexpr int processes = 4, each = 12;
  std::vector<pid_t> children;
  for (int p = 0; p < processes; ++p) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int i = 0; i < each; ++i) keep_tuned(kDevice, fmt::format("problem {} {}", p, i), {"a", {p, i}});
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  read_again();
  EXPECT_EQ(tuned_choices(kDevice).size(), static_cast<std::size_t>(processes * each));
  for (const auto& entry : fs::directory_iterator(folder_ / "cache")) EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
}

TEST_F(Tuned, AFolderThatCannotBeWrittenIsAnError) {
  std::ofstream(folder_ / "file") << "text";
  use_cache((folder_ / "file" / "below").string());
  expect_error<Error>([] { keep_tuned(kDevice, "x", {"a", {1}}); }, {"file/below"});
  use_cache((folder_ / "cache").string());
}

// GEMM's heuristic.

kernels::gemm::Call call_of(int m, int n, int k, DType dtype = DType::f32) {
  return {.a = placeholder({m, k}, dtype),
          .b = placeholder({n, k}, dtype),
          .d = placeholder({m, n}, dtype),
          .bias = nullptr,
          .residual = nullptr,
          .a_scale = nullptr,
          .b_scale = Tensor(),
          .activation = Activation::none,
          .alpha = 1,
          .beta = 0,
          .m = m,
          .n = n,
          .k = k,
          .batch = 1,
          .config = -1,
          .splits = 0,
          .stream = Stream::standard(Device::cpu())};
}

int tuned_config(kernels::gemm::Call call) {
  kernels::gemm::use_tuned(call);
  return call.config;
}

TEST_F(Tuned, GemmTakesTheConfigurationOfExactlyItsProblem) {
  using kernels::gemm::cpu_configs;
  const kernels::gemm::Config c = cpu_configs()[1];
  const std::string key = kernels::gemm::problem_key(call_of(100, 200, 300));
  EXPECT_EQ(tuned_config(call_of(100, 200, 300)), -1);
  keep_tuned(kDevice, key, {"small", {c.bm, c.bn, c.stages, c.cluster, c.band, 1}});
  EXPECT_EQ(tuned_config(call_of(100, 200, 300)), 1);
  EXPECT_EQ(tuned_config(call_of(101, 200, 300)), -1);
  EXPECT_EQ(tuned_config(call_of(200, 100, 300)), -1);
  EXPECT_EQ(tuned_config(call_of(100, 200, 300, DType::bf16)), -1);
  kernels::gemm::Call forced = call_of(100, 200, 300);
  forced.config = 0;
  EXPECT_EQ(tuned_config(forced), 0);
  kernels::gemm::Call transposed = call_of(100, 200, 300);
  transposed.b = placeholder({300, 200}, DType::f32).transpose(0, 1);
  EXPECT_EQ(tuned_config(transposed), -1);
  kernels::gemm::Call addends = call_of(100, 200, 300);
  addends.beta = 1;
  EXPECT_EQ(tuned_config(addends), -1);
}

TEST_F(Tuned, GemmIgnoresConfigurationsThatItDoesNotHave) {
  const std::string key = kernels::gemm::problem_key(call_of(100, 200, 300));
  for (const std::vector<int>& values : {std::vector<int>{}, {1}, {32, 192, 2, 1, 7, 1}, {32, 192, 2, 1, 1}, {32, 192, 2, 1, 1, 1, 1}}) {
    keep_tuned(kDevice, key, {"unknown", values});
    EXPECT_EQ(tuned_config(call_of(100, 200, 300)), -1);
  }
}

TEST_F(Tuned, GemmComputesTheSameWithEveryChoice) {
  const Tensor a = Tensor::random({70, 50}, DType::f32, 1), b = Tensor::random({50, 90}, DType::f32, 2);
  const Tensor expected = matmul(a, b);
  const TuneProblem problem =
      kernels::gemm::tune_problem(ShapeValues("M=70,N=90,K=50,b_rows=1", kernels::gemm::kTuneShape), DType::f32, kDevice);
  ASSERT_EQ(problem.candidates.size(), 2u);
  for (const TuneCandidate& candidate : problem.candidates) {
    keep_tuned(kDevice, problem.key, candidate.choice);
    EXPECT_EQ(max_difference(matmul(a, b), expected), 0);
  }
}

// Candidates.

TuneCandidate candidate(std::uint64_t products, std::int64_t shared_bytes) {
  TuneCandidate c;
  c.shared_bytes = shared_bytes;
  c.analysis.tiles = 1;
  c.analysis.operations.products[0] = c.analysis.largest_tile.products[0] = products;
  return c;
}

TEST(TunerProspects, HopelessOnesAreDropped) {
  DeviceModel device{"one unit", "made up", 1, 100, {}, 10, 5, 1000};
  device.products.fill(10);
  TuneProblem problem;
  problem.candidates = {candidate(100, 1000), candidate(200, 0), candidate(201, 0), candidate(10, 1001)};
  const std::vector<Prospect> result = prospects(problem, device);
  ASSERT_EQ(result.size(), 4u);
  EXPECT_EQ(result[0].dropped, "");
  EXPECT_DOUBLE_EQ(result[0].seconds, 10);
  EXPECT_EQ(result[1].dropped, "");
  EXPECT_NE(result[2].dropped.find("2.0 times"), std::string::npos) << result[2].dropped;
  EXPECT_NE(result[3].dropped.find("1001 bytes of shared memory"), std::string::npos);  // and it is not the best that others must reach
  EXPECT_TRUE(prospects({}, device).empty());
}

TEST(TunerProspects, Gemm) {
  const TunableFamily family = tunable_families().at(0);
  EXPECT_EQ(family.name, "gemm");
  const std::map<DType, OperandType> types{{DType::f32, OperandType::f32},
                                           {DType::f16, OperandType::f16},
                                           {DType::bf16, OperandType::bf16},
                                           {DType::fp8_e4m3, OperandType::fp8},
                                           {DType::i8, OperandType::i8}};
  for (const DType dtype : family.dtypes) {
    const TuneProblem problem = family.problem(ShapeValues("M=255,N=257,K=513", family.shape), dtype, Device::cpu());
    ASSERT_EQ(problem.candidates.size(), 2u);
    for (const TuneCandidate& c : problem.candidates)
      EXPECT_EQ(c.analysis.operations.inside[static_cast<std::size_t>(types.at(dtype))], 2u * 255 * 257 * 513);
  }
  expect_error<InvalidArgument>([&] { family.problem(ShapeValues("M=0,N=256,K=512", family.shape), DType::f32, Device::cpu()); },
                                {"M, N, K and batch must be positive"});
}

}  // namespace
}  // namespace tw::test
