// What the tuner keeps and how, and what the heuristics make of it.

#include "runtime/tuned.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "kernels/convolution/tuning.hpp"
#include "kernels/gemm/tuning.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/row_tuning.hpp"
#include "kernels/tuner.hpp"
#include "runtime/format.hpp"
#include "runtime/tuned_json.hpp"
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

TEST_F(Tuned, NothingIsReadOrKeptWhereOthersCanWrite) {
  keep_tuned(kDevice, "x", {"a", {1}});
  fs::permissions(folder_ / "cache", fs::perms(0777));
  expect_error<Error>([&] { keep_tuned(kDevice, "x", {"b", {2}}); }, {"tuned choices cannot be kept", "can be written by others"});
  EXPECT_TRUE(read_tuned(kDevice).empty());
  EXPECT_EQ(tuned_choices(kDevice).at("x").name, "a") << "what is known already stays";
  fs::permissions(folder_ / "cache", fs::perms(0700));
  EXPECT_EQ(read_tuned(kDevice).at("x").name, "a");
}

TEST_F(Tuned, FifoIsNoFile) {
  keep_tuned(kDevice, "x", {"a", {1}});
  fs::remove(tuned_file(kDevice));
  ASSERT_EQ(mkfifo(tuned_file(kDevice).c_str(), 0600), 0);
  EXPECT_TRUE(read_tuned(kDevice).empty()) << "and nobody is waited for";
}

TEST(TunedText, ManyChoicesTakeLinearTime) {
  TunedChoices choices;
  for (int i = 0; i < 80000; ++i) choices[std::to_string(i)] = {"a", {i}};
  const std::clock_t begin = std::clock();  // of this process: other programs do not count
  EXPECT_EQ(parse_tuned(format_tuned(choices, "CPU", "avx2"), "CPU", "avx2").size(), choices.size());
  EXPECT_LT(std::clock() - begin, 10 * CLOCKS_PER_SEC) << "half a minute if each key is compared with all others";
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
  for (const nlohmann::json& values :
       {nlohmann::json("many"), nlohmann::json(3), nlohmann::json::array({1.5}), nlohmann::json::array({"1"}),
        nlohmann::json::array({std::int64_t{1} << 31}), nlohmann::json::array({~std::uint64_t{0}})}) {
    json["choices"]["x"]["values"] = values;
    is_none(json);
  }
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
      for (int i = 0; i < each; ++i) keep_tuned(kDevice, tw::format("problem {} {}", p, i), {"a", {p, i}});
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

kernels::gemm::Call call_of(int m, int n, int k, DType dtype = DType::f32, const GemmOptions& options = {}) {
  const Tensor b = placeholder({n, k}, dtype).transpose(0, 1);
  return kernels::gemm::make_call(placeholder({m, k}, dtype), b, placeholder({m, n}, dtype), options);
}

int tuned_config(kernels::gemm::Call call) {
  kernels::gemm::use_tuned(call);
  return call.config;
}

TEST_F(Tuned, GemmTakesTheConfigurationOfExactlyItsProblem) {
  const kernels::gemm::Config c = kernels::gemm::kCpuConfigs[1];
  const std::string key = kernels::gemm::problem_key(call_of(100, 200, 300));
  EXPECT_EQ(tuned_config(call_of(100, 200, 300)), -1);
  keep_tuned(kDevice, key, {"small", {c.bm, c.bn, c.stages, c.cluster, c.band, 1, 1}});
  EXPECT_EQ(tuned_config(call_of(100, 200, 300)), 1);
  EXPECT_EQ(tuned_config(call_of(101, 200, 300)), -1);
  EXPECT_EQ(tuned_config(call_of(200, 100, 300)), -1);
  EXPECT_EQ(tuned_config(call_of(100, 200, 300, DType::bf16)), -1);
  kernels::gemm::Call forced = call_of(100, 200, 300);
  forced.config = 0;
  EXPECT_EQ(tuned_config(forced), 0);
  const Tensor rows_a = placeholder({100, 300}, DType::f32), rows_b = placeholder({300, 200}, DType::f32);
  EXPECT_EQ(tuned_config(kernels::gemm::make_call(rows_a, rows_b, placeholder({100, 200}, DType::f32), {})), -1);
  EXPECT_EQ(tuned_config(call_of(100, 200, 300, DType::f32, {.beta = 1})), -1);
}

TEST_F(Tuned, GemmIgnoresConfigurationsThatItDoesNotHave) {
  const std::string key = kernels::gemm::problem_key(call_of(100, 200, 300));
  for (const std::vector<int>& values :
       {std::vector<int>{}, {1}, {32, 192, 2, 1, 7, 1, 1}, {32, 192, 2, 1, 1, 1}, {32, 192, 2, 1, 1, 1, 2}}) {
    keep_tuned(kDevice, key, {"unknown", values});
    EXPECT_EQ(tuned_config(call_of(100, 200, 300)), -1);
  }
}

TEST_F(Tuned, GemmComputesTheSameWithEveryChoice) {
  const Tensor a = Tensor::random({70, 50}, DType::f32, 1), b = Tensor::random({50, 90}, DType::f32, 2);
  const Tensor expected = matmul(a, b);
  const FamilyProblem problem =
      kernels::gemm::tune_problem(ShapeValues("M=70,N=90,K=50,b_rows=1", kernels::gemm::kTuneShape), DType::f32, kDevice);
  ASSERT_EQ(problem.space.points().size(), 2u);
  for (const TunePoint& point : problem.space.points()) {
    keep_tuned(kDevice, problem.name, {point.text(), point.values()});
    EXPECT_EQ(max_difference(matmul(a, b), expected), 0);
  }
}

// Convolution's.

namespace conv = kernels::convolution;

/// Images of 9 x 10 pixels and 8 channels, 12 kernels of 3 x 3.
conv::Call convolution_call(const Conv2dOptions& options = {}, DType dtype = DType::f32) {
  const auto extent = [&](std::size_t axis, std::int64_t size) {
    return (size + 2 * options.padding[axis] - 3) / options.stride[axis] + 1;
  };
  return conv::check_conv2d(placeholder({1, 9, 10, 8}, dtype), placeholder({12, 3, 3, 8}, dtype),
                            placeholder({1, extent(0, 9), extent(1, 10), 12}, dtype), options);
}

int tuned_config(conv::Call call) {
  conv::use_tuned(call);
  return call.config;
}

FamilyProblem convolution_problem(const char* shape, DType dtype, Device device) {
  return conv::tune_problem(ShapeValues(shape, conv::kTuneShape), dtype, device);
}

TEST_F(Tuned, ConvolutionTakesTheConfigurationOfExactlyItsProblem) {
  const FamilyProblem problem = convolution_problem("N=1,H=9,W=10,C=8,F=12", DType::f32, kDevice);
  ASSERT_EQ(problem.space.points().size(), 2u);
  EXPECT_EQ(problem.name, conv::problem_key(convolution_call()));
  EXPECT_EQ(tuned_config(convolution_call()), -1);
  for (int config = 0; config < 2; ++config) {
    const conv::Config& c = conv::kCpuConfigs[static_cast<std::size_t>(config)];
    keep_tuned(kDevice, problem.name, {"any", {c.bm, c.bn, c.stages, c.cluster}});
    EXPECT_EQ(tuned_config(convolution_call()), config);
  }
  EXPECT_EQ(tuned_config(convolution_call({.stride = {1, 2}})), -1);
  EXPECT_EQ(tuned_config(convolution_call({.padding = {1, 0}})), -1);
  EXPECT_EQ(tuned_config(convolution_call({}, DType::bf16)), -1);
  conv::Call forced = convolution_call();
  forced.config = 0;
  EXPECT_EQ(tuned_config(forced), 0);
  conv::Call other_weights = convolution_call();
  other_weights.w = placeholder({3, 3, 8, 12}, DType::f32).transpose(2, 3).transpose(1, 2).transpose(0, 1);
  EXPECT_EQ(tuned_config(other_weights), -1);
  EXPECT_EQ(conv::problem_key(other_weights), convolution_problem("N=1,H=9,W=10,C=8,F=12,cf=1", DType::f32, kDevice).name);
  for (const std::vector<int>& values : {std::vector<int>{}, {1}, {32, 192, 2, 7}, {32, 192, 2, 1, 1}}) {
    keep_tuned(kDevice, problem.name, {"unknown", values});
    EXPECT_EQ(tuned_config(convolution_call()), -1);
  }
}

TEST_F(Tuned, ConvolutionComputesTheSameWithEveryChoice) {
  const Tensor x = Tensor::random({2, 40, 30}, DType::f32, 1), w = Tensor::random({50, 3, 30}, DType::f32, 2);
  const Tensor expected = Tensor::empty({2, 20, 50}, DType::f32), y = Tensor::empty({2, 20, 50}, DType::f32);
  const Conv1dOptions options{.stride = 2, .padding = 1};
  conv1d(x, w, expected, options);
  const FamilyProblem problem = convolution_problem("N=2,W=40,C=30,F=50,stride=2,padding=1", DType::f32, kDevice);
  const TuneOperands operands = problem.prepare(Stream::standard(kDevice), 1);
  for (const TunePoint& point : problem.space.points()) {
    operands.launch(point);
    keep_tuned(kDevice, problem.name, {point.text(), point.values()});
    y.copy_from(Tensor::poisoned(y.shape(), DType::f32));
    conv1d(x, w, y, options);
    EXPECT_LT(max_difference(y, expected), 1e-4);  // sums of 90 products in another order at most
  }
}

// That of rows.

TEST_F(Tuned, RowsTakeTheConfigurationThatIsKept) {
  using kernels::RowConfig;
  const auto chosen = [&](const char* key) {
    return kernels::tuned_rows(
        kDevice, [&] { return key; }, 100, 1280, 24);
  };
  const RowConfig standard = kernels::choose_rows(100, 1280, device_info(kDevice).units, 24);
  EXPECT_EQ(chosen("rows a"), standard);
  for (const RowConfig& config : kernels::row_configs(1280, 24)) {
    keep_tuned(kDevice, "rows a", {"any", kernels::values_of(config)});
    EXPECT_EQ(chosen("rows a"), config);
    EXPECT_EQ(chosen("rows b"), standard);
  }
  for (const std::vector<int>& values : {std::vector<int>{}, {1, 40}, {2, 16}, {2, 24, 0}}) {  // too many registers, too few columns
    keep_tuned(kDevice, "rows a", {"unknown", values});
    EXPECT_EQ(chosen("rows a"), standard);
  }
}

}  // namespace
}  // namespace tw::test
