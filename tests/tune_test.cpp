// tw::tune with launches that only advance a clock, and the families' spaces: no GPU is needed.

#include "tilewave/tune.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>

#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/convolution/tuning.hpp"
#include "kernels/gemm/kernels.hpp"
#include "kernels/gemm/tuning.hpp"
#include "kernels/norm/tuning.hpp"
#include "kernels/product_tiles.hpp"
#include "kernels/registry.hpp"
#include "kernels/softmax/tuning.hpp"
#include "kernels/tuner.hpp"
#include "runtime/format.hpp"
#include "runtime/tuned.hpp"
#include "tests/expect_error.hpp"
#include "tests/language_kernels.tile.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"

namespace tw::test {
namespace {

namespace gemm = kernels::gemm;

// Spaces.

TEST(TuneSpace, HasThePointsThatTheRuleAllows) {
  const TuneSpace space({{"a", {1, 2, 3}}, {"b", {10, 20}}}, [](const TunePoint& p) { return p["a"] * p["b"] < 50; });
  std::vector<std::string> texts;
  for (const TunePoint& p : space.points()) texts.push_back(p.text());
  EXPECT_EQ(texts, (std::vector<std::string>{"a=1,b=10", "a=1,b=20", "a=2,b=10", "a=2,b=20", "a=3,b=10"}));
  EXPECT_EQ(space.find({2, 20}), space.points()[3]);
  EXPECT_FALSE(space.find({3, 20})) << "not valid";
  EXPECT_FALSE(space.find({2, 30})) << "not in the range";
  EXPECT_FALSE(space.find({2}));
  EXPECT_EQ(space.text(), "a {1, 2, 3}, b {10, 20}");
  expect_error<InvalidArgument>([&] { space.points()[0]["c"]; }, {"no range \"c\"", "a, b"});
  EXPECT_EQ(every(2, 9, 3), (std::vector<int>{2, 5, 8}));
  EXPECT_TRUE(every(3, 2).empty());
}

TEST(TuneSpace, RefusesBadRanges) {
  expect_error<InvalidArgument>([] { TuneSpace(std::vector<TuneRange>{}); }, {"no ranges"});
  expect_error<InvalidArgument>([] { TuneSpace({{"", {1}}}); }, {"empty name"});
  expect_error<InvalidArgument>([] { TuneSpace(std::vector<TuneRange>{{"a", {}}}); }, {"\"a\" has no values"});
  expect_error<InvalidArgument>([] { TuneSpace({{"a", {1}}, {"a", {2}}}); }, {"two ranges", "\"a\""});
  expect_error<InvalidArgument>([] { every(1, 2, 0); }, {"step is 0"});
}

// The search.

/// A cache folder of the test's own, and a clock that launches advance.
class Tune : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "tilewave-tune-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    if (const char* before = std::getenv("TILEWAVE_CACHE")) before_ = before;
    setenv("TILEWAVE_CACHE", (folder_ + "/cache").c_str(), 1);
    forget_tuned(Device::cpu(), "");
  }
  void TearDown() override {
    forget_tuned(Device::cpu(), "");
    setenv("TILEWAVE_CACHE", before_.c_str(), 1);
    std::filesystem::remove_all(folder_);
  }

  /// A launch at x takes cost(x) milliseconds.
  TuneProblem problem(std::function<double(int x)> cost) {
    return {.name = "test", .launch = [this, cost](const TunePoint& p) {
              ++launches_[p["x"]];
              now_ += cost(p["x"]);
            }};
  }
  TuneOptions options(bool keep = false) {
    TuneOptions o{.keep = keep};
    o.timer = [this](const std::vector<std::function<void()>>& works) {
      ++timed_;
      std::vector<double> milliseconds;
      for (const auto& work : works) {
        const double begin = now_;
        work();
        milliseconds.push_back(now_ - begin);
      }
      return milliseconds;
    };
    return o;
  }
  TunePoint at(int x) { return *space_.find({x}); }

  const TuneSpace space_{{{"x", every(0, 9)}}};
  std::map<int, int> launches_;
  double now_ = 0;
  int timed_ = 0;

 private:
  std::string folder_, before_;
};

TEST_F(Tune, FindsTheFastestAndKeepsIt) {
  const auto cost = [](int x) { return 2.0 + 0.1 * (x - 6) * (x - 6); };
  std::vector<std::string> progress;
  TuneOptions keeping = options(true);
  keeping.progress = [&](std::string_view text) { progress.emplace_back(text); };
  EXPECT_FALSE(tuned(space_, "test", Device::cpu()));
  const TuneResult result = tune(space_, problem(cost), keeping);
  EXPECT_EQ(result.best, at(6));
  EXPECT_DOUBLE_EQ(result.milliseconds, 2);
  EXPECT_EQ(result.standard_milliseconds, 0);
  EXPECT_EQ(result.gain(), 1);
  ASSERT_EQ(result.candidates.size(), 10u);
  for (const TuneCandidate& c : result.candidates) EXPECT_NEAR(c.milliseconds, cost(c.point["x"]), 1e-9);
  EXPECT_EQ(tuned(space_, "test", Device::cpu()), at(6));
  EXPECT_FALSE(tuned(space_, "another", Device::cpu()));
  EXPECT_FALSE(tuned(TuneSpace({{"x", {5, 7}}}), "test", Device::cpu())) << "no point of this space";
  EXPECT_NE(std::find(progress.begin(), progress.end(), "first launches: 3 of 10: x=2"), progress.end());
  EXPECT_EQ(read_tuned(Device::cpu()).at("test").name, "x=6");
}

TEST_F(Tune, TimesTheBestPredictionsAndTheStandard) {
  TuneProblem p = problem([](int x) { return 2 - 0.01 * x; });
  p.predict = [](const TunePoint& point) { return 10.0 - point["x"]; };
  p.standard = at(2);
  TuneOptions o = options();
  o.candidates = 3;
  const TuneResult result = tune(space_, p, o);
  std::set<int> launched;
  for (const auto& [x, count] : launches_) launched.insert(x);
  EXPECT_EQ(launched, (std::set<int>{2, 7, 8, 9}));
  EXPECT_EQ(result.candidates.front().point, at(9)) << "the best prediction first";
  EXPECT_EQ(result.candidates.front().predicted, 1);
  EXPECT_EQ(result.best, at(9));
  EXPECT_NEAR(result.gain(), 1.98 / 1.91, 1e-9);
}

TEST_F(Tune, SpreadsCandidatesWithoutPredictions) {
  TuneOptions o = options();
  o.candidates = 5;
  tune(space_, problem([](int) { return 1.0; }), o);
  std::set<int> launched;
  for (const auto& [x, count] : launches_) launched.insert(x);
  EXPECT_EQ(launched, (std::set<int>{0, 2, 4, 6, 8}));
}

TEST_F(Tune, ReplacesTheStandardOnlyByWhatIsClearlyFaster) {
  const auto best_of = [&](double others) {
    TuneProblem p = problem([=](int x) { return x == 4 ? 1.0 : x == 5 ? others : 1.5; });
    p.standard = at(4);
    return tune(space_, p, options()).best;
  };
  EXPECT_EQ(best_of(0.995), at(4));
  EXPECT_EQ(best_of(0.95), at(5));
  EXPECT_EQ(best_of(1.05), at(4));
}

TEST_F(Tune, HoldsTheFastestAgainstTheStandardOnceMore) {
  // x = 5 is fast by luck in the first measurement and slower than the standard in the second: three rounds of estimates, sixteen of the
  // first measurement.
  TuneProblem p = problem([&](int x) { return x == 4 ? 1.0 : x != 5 ? 1.5 : timed_ <= 3 + 16 ? 0.8 : 1.1; });
  p.standard = at(4);
  const TuneResult result = tune(space_, p, options());
  EXPECT_EQ(result.best, at(4));
  EXPECT_EQ(timed_, 3 + 16 + 31);
  EXPECT_NEAR(result.candidates[5].milliseconds, 1.1, 1e-9) << "what the second measurement says";
}

TEST_F(Tune, NamesAndSkipsWhatDoesNotWork) {
  TuneProblem p = problem([](int x) {
    if (x == 3) throw CompileError("kernel three did not compile");
    return x == 8 ? 0.1 : x == 2 ? 50.0 : 1.0 + 0.1 * x;
  });
  p.check = [](const TunePoint& point) { return point["x"] == 8 ? std::string("its results are wrong") : std::string(); };
  const TuneResult result = tune(space_, p, options());
  EXPECT_EQ(result.best, at(0));
  EXPECT_EQ(result.candidates[3].problem, "kernel three did not compile");
  EXPECT_EQ(result.candidates[3].milliseconds, 0);
  EXPECT_EQ(result.candidates[8].problem, "its results are wrong");
  EXPECT_EQ(launches_[8], 1);
  EXPECT_NE(result.candidates[2].problem.find("50.0 times as long"), std::string::npos) << result.candidates[2].problem;
  EXPECT_EQ(result.candidates[1].problem, "");
}

TEST_F(Tune, KeepsNothingWhereNothingWorks) {
  const TuneProblem failing = problem([](int x) -> double { throw DeviceError("launch " + std::to_string(x) + " failed"); });
  expect_error<Error>([&] { tune(space_, failing, options(true)); }, {"test", "no candidate works", "x=0: launch 0 failed", "x=9"});
  expect_error<InvalidArgument>(
      [&] {
        tune(TuneSpace({{"x", {1, 2}}}, [](const TunePoint&) { return false; }), failing, options(true));
      },
      {"test", "no point of the space is valid", "x {1, 2}"});
  TuneProblem nameless = failing;
  nameless.name = "";
  expect_error<InvalidArgument>([&] { tune(space_, nameless, options(true)); }, {"name is empty"});
  expect_error<InvalidArgument>([&] { tune(space_, {.name = "test", .launch = {}}, options(true)); }, {"no launch"});
  EXPECT_TRUE(read_tuned(Device::cpu()).empty());
}

TEST_F(Tune, AUsersKernelIsNamedByText) {
  const Tensor x = Tensor::random({1000, 250}, DType::f32, 1), y = Tensor::empty({1000, 250}, DType::f32);
  const Stream stream = Stream::standard(Device::cpu());                  // launches are noted, not done
  const TuneSpace space({{"rows", {1, 2, 4, 8, 16}}, {"warps", {4, 8}}},  //
                        [](const TunePoint& p) { return p["rows"] >= p["warps"] / 4; });
  using Params = RowSoftmax<float, 4, 256>::On<sm_90a::Target<>>::Params;  // those of all sizes
  const auto launch = [&](const TunePoint& p) {
    const std::string type = "tw::test::RowSoftmax<float, " + std::to_string(p["rows"]) + ", 256, " + std::to_string(p["warps"]) + ">";
    launch_type<Params>(type, kLanguageKernels, stream, {.m = ceil_div(1000, p["rows"])}, [&](auto& bind, auto& params) {
      bind(params.in, x);
      bind(params.out, y);
    });
  };
  EXPECT_FALSE(space.find({1, 8}));
  std::set<std::string> types;
  TuneProblem p = problem([](int) { return 0.0; });
  p.launch = [&](const TunePoint& point) {
    const std::vector<KernelSpec> specs = kernels_of([&] { launch(point); });
    ASSERT_EQ(specs.size(), 1u);
    EXPECT_EQ(specs[0].source, kLanguageKernels);
    types.insert(specs[0].type);
    now_ += 1 + std::abs(point["rows"] - 4) + point["warps"] / 8.0;
  };
  EXPECT_EQ(tune(space, p, options()).best.text(), "rows=4,warps=4");
  EXPECT_EQ(types.size(), space.points().size());
  EXPECT_TRUE(types.contains("tw::test::RowSoftmax<float, 16, 256, 8>"));
}

TEST_F(Tune, FamiliesAreTimedOnTheCpu) {
  const TunableFamily family = tunable_families().at(0);
  const FamilyProblem described = family.problem(ShapeValues("M=40,N=50,K=30", family.shape), DType::f32, Device::cpu());
  const TuneProblem ready = with_operands(described, Stream::standard(Device::cpu()), 1);
  const TuneResult result = tune(described.space, ready, {.rounds = 3});
  ASSERT_EQ(result.candidates.size(), 2u);
  for (const TuneCandidate& c : result.candidates)
    EXPECT_TRUE(c.milliseconds > 0 && (c.problem.empty() || c.problem.find("times") != std::string::npos));
  EXPECT_GT(result.standard_milliseconds, 0);
  EXPECT_EQ(tuned(described.space, described.name, Device::cpu()), result.best);
}

TEST_F(Tune, ResultsThatDifferAreFound) {
  FamilyProblem described{.name = "test", .space = space_, .standard = at(4), .predict = {}, .prepare = {}};
  const Tensor y = Tensor::empty({100}, DType::f32);
  described.prepare = [&](const Stream&, std::uint64_t) {
    return TuneOperands{[y](const TunePoint& p) {
                          const std::int64_t end = p["x"] == 7 ? 99 : 100;  // 7 leaves the last element out
                          for (std::int64_t i = 0; i < end; ++i) y.data<float>()[i] = p["x"] == 2 && i == 50 ? 1.5f : 1.0f;
                        },
                        y, 400};
  };
  const TuneResult result = tune(space_, with_operands(described, Stream::standard(Device::cpu()), 1), {.rounds = 3, .keep = false});
  for (const TuneCandidate& c : result.candidates) {
    const bool wrong = c.problem.find("its results differ") != std::string::npos;
    EXPECT_EQ(wrong, c.point["x"] == 2 || c.point["x"] == 7) << c.point.text() << ": " << c.problem;
  }
}

// The families' spaces. A GPU's are plain arithmetic: none is needed.

constexpr Device kGpu = Device::cuda();

gemm::Call gemm_call(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype = DType::bf16, bool b_rows = false) {
  const Tensor a = placeholder({m, k}, dtype), d = placeholder({m, n}, dtype);
  const Tensor b = b_rows ? placeholder({k, n}, dtype) : placeholder({n, k}, dtype).transpose(0, 1);
  return gemm::make_call(a, b, d, {});
}

gemm::Config config_of(const TunePoint& p) { return {p["bm"], p["bn"], p["stages"], p["cluster"], p["band"], p["teams"]}; }

TEST(TuneGemm, HasHundredsOfTiles) {
  const gemm::Call call = gemm_call(4096, 4096, 4096);
  std::set<gemm::Config> tiles;
  for (const TunePoint& p : gemm::gpu_space(call, 132).points()) {
    EXPECT_TRUE(valid(config_of(p), gemm::problem_of(call, 132))) << p.text();
    tiles.insert(config_of(p));
  }
  EXPECT_GE(tiles.size(), 200u);
  // Of these all but a handful have no instantiation on the host.
  EXPECT_LE(gemm::configs().size(), 15u);
}

TEST(TuneGemm, PointsThatDoTheSameAreOne) {
  const gemm::Call call = gemm_call(200, 4096, 640);  // ten steps; at most four rows of tiles, which every band holds
  std::set<int> splits;
  for (const TunePoint& p : gemm::gpu_space(call, 132).points()) {
    EXPECT_EQ(p["band"], 16) << p.text();
    splits.insert(p["splits"]);
  }
  EXPECT_EQ(splits, (std::set<int>{kStreamK, 1, 2})) << "of at least four steps each";
}

TEST(TuneGemm, TheHeuristicsChoiceIsInTheSpace) {
  const TunableFamily family = tunable_families().at(0);
  for (const int m : {2, 16, 17, 200, 1500, 8192}) {
    for (const std::int64_t n : {8, 1000, 4096}) {
      for (const std::int64_t k : {8, 1288, 16384}) {
        const std::string shape = tw::format("M={},N={},K={}", m, n, k);
        const FamilyProblem problem = family.problem(ShapeValues(shape, family.shape), DType::bf16, kGpu);
        const std::vector<TuneCandidate> candidates = tune_candidates(problem.space, without_operands(problem), 16);
        EXPECT_TRUE(std::any_of(candidates.begin(), candidates.end(), [&](const auto& c) { return c.point == problem.standard; })) << shape;
        const gemm::Config standard = config_of(problem.standard);
        if (m <= gemm::kMostSkinnyRows && k % gemm::kSkinnyPanel == 0) {
          EXPECT_EQ(standard, gemm::skinny_tile(m)) << shape;
          continue;
        }
        const int units = units_of(kGpu);
        const gemm::Problem p = gemm::problem_of(gemm_call(m, n, k), units);
        const gemm::Choice choice = gemm::choose(p, true);
        EXPECT_EQ(standard, choice.tile) << shape;
        EXPECT_EQ(problem.standard["splits"], choice.splits > 1 ? gemm::used_splits(k, 2, choice.splits) : choice.splits) << shape;
      }
    }
  }
  const auto refuse = [&](const char* shape, DType dtype, Device device, const char* part) {
    expect_error<InvalidArgument>([&] { family.problem(ShapeValues(shape, family.shape), dtype, device); }, {part});
  };
  refuse("M=0,N=256,K=512", DType::f32, kGpu, "M, N, K and batch must be positive");
  refuse("M=1,N=256,K=512", DType::bf16, kGpu, "no choice for one row");
  refuse("M=64,N=256,K=512,b_rows=1", DType::f32, kGpu, "f16 and bf16 only");
}

TEST(TuneGemm, FewRowsHaveTilesOfTheirOwn) {
  for (const int m : {5, 13}) {
    const gemm::Call call = gemm_call(m, 4096, 4096);
    std::set<int> bm, bn;
    for (const TunePoint& p : gemm::gpu_space(call, 132).points()) {
      EXPECT_EQ(p["splits"], 1);
      EXPECT_TRUE(gemm::valid_skinny(config_of(p), m)) << p.text();
      bm.insert(p["bm"]);
      bn.insert(p["bn"]);
    }
    EXPECT_EQ(bm, (std::set<int>{16, 32}));
    EXPECT_EQ(bn, m <= 8 ? (std::set<int>{8, 16}) : std::set<int>{16});
  }
}

/// The one line that adds a tile configuration: nothing is instantiated for it on the host.
constexpr gemm::Config kNewTile{192, 80, 4, 2, 8};

TEST(TuneGemm, ATileIsNamedByItsNumbers) {
  gemm::Call call = gemm_call(300, 500, 512);
  ASSERT_TRUE(valid(kNewTile, gemm::problem_of(call, 132)));
  for (const gemm::Config& known : gemm::configs()) ASSERT_FALSE(known.bm == kNewTile.bm && known.bn == kNewTile.bn);
  call.tile = kNewTile;
  call.splits = 1;
  const std::vector<KernelSpec> whole = kernels_of([&] { run_on_gpu(call); });
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_EQ(whole[0].type, type_of(gemm::Kernel{.tile = kNewTile}));
  call.splits = 2;
  EXPECT_EQ(kernels_of([&] { run_on_gpu(call); }).size(), 2u) << "the splits, and their sum";
  call = gemm_call(9, 500, 512);
  call.tile = gemm::Config{16, 16, 5, 1, 1};
  EXPECT_NE(kernels_of([&] { run_on_gpu(call); }).at(0).type.find("16, 16, 5, 8>"), std::string::npos);

  skip_without_nvrtc();
  const CompiledKernel compiled = compile(whole[0]);
  EXPECT_EQ(compiled.module.threads, (192 / 64 + 1) * 128);
  EXPECT_EQ(compiled.module.cluster, 2);
  EXPECT_EQ(compiled.spill_bytes, 0);
  const int expected = kernels::product_shared_bytes({192, 80, 4, 2}, 2);
  EXPECT_GE(compiled.module.shared_bytes, expected);
  EXPECT_LE(compiled.module.shared_bytes, expected + 1024) << "barriers and the base's alignment";
}

TEST(TuneGemm, PredictionsAgreeWithTheAnalysisTarget) {
  const ShapeValues shape("M=300,N=520,K=1024", gemm::kShape);
  const gemm::Call call = gemm_call(300, 520, 1024);
  for (const kernels::CostedTile& c : kernels::kProductTiles) {
    const std::string name = tw::format("gemm_bf16_nt_{}x{}{}", c.bm, c.bn, c.cluster > 1 ? "_cluster" : "");
    const std::vector<KernelVariant> all = gemm::registered();
    const auto found = std::find_if(all.begin(), all.end(), [&](const KernelVariant& v) { return v.spec.name == name; });
    ASSERT_TRUE(found != all.end() && found->analyze != nullptr) << name;
    const Analysis analysis = found->analyze(shape);
    EXPECT_EQ(analysis.shared_bytes, kernels::product_shared_bytes({c.bm, c.bn, c.stages, c.cluster}, 2)) << name;
    const double steps =
        static_cast<double>(analysis.operations.all_products()) / static_cast<double>(analysis.tiles) / (2.0 * c.bm * c.bn * 64);
    const auto tiles = static_cast<double>((analysis.tiles + c.cluster - 1) / c.cluster * c.cluster);
    EXPECT_DOUBLE_EQ(gemm::predicted_time(gemm::problem_of(call, 1), c, 1), tiles * (steps * c.step + c.around)) << name << " on one SM";
  }
}

TEST(TuneConvolution, HasTheHeuristicsChoice) {
  namespace conv = kernels::convolution;
  for (const char* shape : {"N=1,W=3000,C=1280,F=64,padding=1", "N=2,H=8,W=9,C=65,F=300,stride=2,padding=1", "N=32,H=56,W=56,C=64,F=256"}) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const FamilyProblem problem = conv::tune_problem(ShapeValues(shape, conv::kTuneShape), dtype, kGpu);
      const std::vector<TunePoint> points = problem.space.points();
      EXPECT_GE(points.size(), 200u);
      const std::vector<int>& v = problem.standard.values();
      EXPECT_TRUE(std::any_of(conv::kConfigs.begin(), conv::kConfigs.end(), [&](const conv::Config& c) {
        return std::vector<int>{c.bm, c.bn, c.stages, c.cluster} == v;
      }));
      for (const TunePoint& p : points) ASSERT_GT(problem.predict(p), 0);
      const FamilyProblem cf =
          conv::tune_problem(ShapeValues(tw::format("{},cf={}", shape, dtype == DType::bf16 ? 1 : 0), conv::kTuneShape), dtype, kGpu);
      for (const TunePoint& p : cf.space.points()) ASSERT_TRUE(dtype == DType::f32 || p["bn"] % 64 == 0) << p.text();
    }
  }
  EXPECT_EQ(conv::tune_problem(ShapeValues("N=1,W=3000,C=1280,F=64,padding=1", conv::kTuneShape), DType::bf16, kGpu).name,
            "convolution bf16 fc N=1,H=1,W=3000,C=1280,F=64,K=1x3,stride=1x1,padding=0x1,dilation=1x1");
  const auto expect = [](const char* shape, DType dtype, Device device, const char* part) {
    expect_error<InvalidArgument>([&] { conv::tune_problem(ShapeValues(shape, conv::kTuneShape), dtype, device); }, {part});
  };
  expect("N=0,W=9,C=65,F=300", DType::bf16, kGpu, "must be positive");
  expect("N=1,W=9,C=65,F=300,stride=0", DType::bf16, kGpu, "must be positive");
  expect("N=1,W=9,C=65,F=300,K=12,padding=1", DType::bf16, kGpu, "the kernel, 12 long, must fit into the padded image, 11");
  expect("N=1,H=2,W=9,C=65,F=300,K=3", DType::bf16, Device::cpu(), "the kernel, 3 long, must fit into the padded image, 2");
  expect("N=1,W=9,C=65,F=300,cf=1", DType::f32, kGpu, "cf has kernels for f16 and bf16 only");
}

namespace attn = kernels::attention;

TEST(TuneAttention, HasTheHeuristicsChoice) {
  for (const char* sizes : {"seqlen_q=512", "seqlen_q=4096", "seqlen_q=100,seqlen_k=8192", "seqlen_q=4096,window=512"}) {
    for (const int head_dim : {64, 80, 128, 192, 256}) {
      for (const int causal : {0, 1}) {
        const std::string shape = tw::format("heads=32,kv_heads=8,{},head_dim={},causal={}", sizes, head_dim, causal);
        const FamilyProblem problem = attn::tune_problem(ShapeValues(shape, attn::kTuneShape), DType::bf16, kGpu);
        EXPECT_GE(problem.space.points().size(), 10u) << shape;
        const std::vector<TuneCandidate> candidates = tune_candidates(problem.space, without_operands(problem), 16);
        EXPECT_TRUE(std::any_of(candidates.begin(), candidates.end(), [&](const auto& c) { return c.point == problem.standard; })) << shape;
        for (const TuneCandidate& c : candidates) EXPECT_GT(c.predicted, 0) << shape;
      }
    }
  }
  const FamilyProblem one =
      attn::tune_problem(ShapeValues("heads=32,seqlen_q=4096,head_dim=128,causal=1", attn::kTuneShape), DType::bf16, kGpu);
  EXPECT_EQ(one.name, "attention bf16 batch=1,heads=32,kv_heads=32,seqlen_q=4096,seqlen_k=4096,head_dim=128,value_dim=128,right=0");
  EXPECT_EQ(one.standard.text(), "rows=128,keys=128,stages=2,min_blocks=1,lag=1,queries_in_registers=1,maxima_first=0");
  for (const TunePoint& p : one.space.points()) EXPECT_LE(p["rows"], 192) << "four warpgroups have no registers for that: " << p.text();
  const auto refuse = [](const char* shape, Device device, const char* part) {
    expect_error<InvalidArgument>([&] { attn::tune_problem(ShapeValues(shape, attn::kTuneShape), DType::bf16, device); }, {part});
  };
  refuse("heads=32,seqlen_q=4096,head_dim=128", Device::cpu(), "only a GPU has a choice");
  refuse("heads=32,seqlen_q=0,head_dim=128", kGpu, "must be positive");
}

TEST_F(Tune, AttentionTakesWhatIsKept) {
  const auto call_of = [](std::int64_t seqlen) {
    const Tensor q = placeholder({1, seqlen, 4, 64}, DType::bf16);
    return detail::check_attention(q, q, q, placeholder({1, seqlen, 4, 64}, DType::bf16), {});
  };
  const AttentionConfig standard = attn::choose_config(call_of(1024));
  const std::string name = "attention bf16 batch=1,heads=4,kv_heads=4,seqlen_q=1024,seqlen_k=1024,head_dim=64,value_dim=64";
  EXPECT_EQ(attn::tuned_config(call_of(1024)), standard);
  keep_tuned(Device::cpu(), name, {"any", {192, 96, 3, 1, 0, 0, 1}});
  const AttentionConfig tuned = attn::tuned_config(call_of(1024));
  EXPECT_EQ(std::tie(tuned.rows, tuned.keys, tuned.stages, tuned.lag), std::make_tuple(192, 96, 3, 0));
  EXPECT_EQ(tuned.head_dim, standard.head_dim);
  EXPECT_EQ(attn::tuned_config(call_of(1025)), attn::choose_config(call_of(1025)));
  // Unknown numbers, too many registers, too much shared memory, keys that no product has.
  for (const std::vector<int>& values : {std::vector<int>{},
                                         {192, 96, 3},
                                         {256, 176, 2, 1, 1, 0, 0},
                                         {128, 128, 9, 1, 1, 1, 0},
                                         {128, 100, 2, 1, 1, 1, 0},
                                         {0, 96, 3, 1, 0, 0, 1}}) {
    keep_tuned(Device::cpu(), name, {"bad", values});
    EXPECT_EQ(attn::tuned_config(call_of(1024)), standard);
  }
}

TEST_F(Tune, DecodingTakesTheSplitsThatAreKept) {
  const FamilyProblem problem = attn::tune_decode_problem(
      ShapeValues("batch=2,heads=32,kv_heads=8,seqlen_k=8192,head_dim=128", attn::kTuneDecodeShape), DType::bf16, kGpu);
  EXPECT_EQ(problem.name, "decode bf16 sequences=16,rows=4,seqlen_k=8192,head_dim=128,value_dim=128");
  EXPECT_EQ(problem.space.points().size(), 64u);
  EXPECT_EQ(problem.standard["splits"], decode_splits(16, 8192, 128, units_of(kGpu), 128));
  EXPECT_LT(problem.predict(problem.standard), problem.predict(problem.space.points()[0])) << "one part for each of 16 sequences";

  const Tensor q = placeholder({2, 32, 1, 128}, DType::bf16), k = placeholder({2, 8, 8192, 128}, DType::bf16);
  detail::AttentionCall call{.q = q, .k = k, .v = k, .o = q, .partial = {}};
  call.keys = 8192;
  const int standard = attn::tuned_splits(call, 4);
  EXPECT_EQ(standard, decode_splits(16, 8192, 128, std::max(1, device_info(Device::cpu()).units), 128));
  keep_tuned(Device::cpu(), problem.name, {"any", {standard + 7}});
  EXPECT_EQ(attn::tuned_splits(call, 4), standard + 7);
  EXPECT_EQ(attn::tuned_splits(call, 8), standard) << "another problem";
  for (const std::vector<int>& values : {std::vector<int>{}, {0}, {129}, {3, 4}}) {
    keep_tuned(Device::cpu(), problem.name, {"bad", values});
    EXPECT_EQ(attn::tuned_splits(call, 4), standard);
  }
  expect_error<InvalidArgument>(
      [&] {
        attn::tune_decode_problem(ShapeValues("batch=2,heads=32,kv_heads=8,seqlen_q=17,seqlen_k=8192,head_dim=128", attn::kTuneDecodeShape),
                                  DType::bf16, kGpu);
      },
      {"68 queries", "no choice"});
}

std::vector<std::string> texts_of(const FamilyProblem& problem) {
  std::vector<std::string> texts;
  for (const TunePoint& p : problem.space.points()) texts.push_back(p.text());
  return texts;
}

TEST(TuneRows, Softmax) {
  const auto problem = [](const char* shape, DType dtype, Device device = kGpu) {
    return kernels::softmax::tune_problem(ShapeValues(shape, kernels::softmax::kTuneShape), dtype, device);
  };
  const FamilyProblem bf16_rows = problem("rows=1000,cols=1280", DType::bf16);
  EXPECT_EQ(bf16_rows.name, "softmax bf16 rows=1000,cols=1280");
  EXPECT_EQ(texts_of(bf16_rows), (std::vector<std::string>{"row_warps=1,share=40", "row_warps=2,share=24", "row_warps=4,share=16",
                                                           "row_warps=8,share=8", "row_warps=16,share=8"}));
  EXPECT_EQ(problem("rows=1000,cols=1280", DType::f32).space.points().size(), 4u) << "40 columns of f32 are too many for a thread";
  // One row of 300: sixteen warps of 8 columns each do 4096 exponentials of which 300 are wanted.
  const FamilyProblem one = problem("rows=1,cols=300", DType::bf16);
  const std::vector<TunePoint> points = one.space.points();
  ASSERT_EQ(points.size(), 5u);
  EXPECT_GT(one.predict(points[4]), 2 * one.predict(points[1]));
  expect_error<InvalidArgument>([&] { problem("rows=4,cols=64", DType::bf16, Device::cpu()); }, {"softmax has nothing to tune on the CPU"});
  expect_error<InvalidArgument>([&] { problem("rows=4,cols=20481", DType::bf16); }, {"cols is 20481", "more than 20480"});
  expect_error<InvalidArgument>([&] { problem("rows=0,cols=64", DType::bf16); }, {"must be positive"});
}

TEST(TuneRows, Norm) {
  const auto problem = [](const char* shape, DType dtype, Device device = kGpu) {
    return kernels::norm::tune_problem(ShapeValues(shape, kernels::norm::kTuneShape), dtype, device);
  };
  const FamilyProblem rms = problem("rows=1000,cols=4096,residual=1", DType::bf16);
  EXPECT_EQ(rms.name, "norm rms bf16 rows=1000,cols=4096 residual weight");
  EXPECT_EQ(texts_of(rms), (std::vector<std::string>{"row_warps=4,share=32", "row_warps=8,share=16", "row_warps=16,share=8"}));
  const FamilyProblem layer = problem("rows=1000,cols=4096,layer=1", DType::f32);
  EXPECT_EQ(layer.name, "norm layer f32 rows=1000,cols=4096 weight bias");
  EXPECT_EQ(texts_of(layer), texts_of(rms));
  EXPECT_EQ(problem("rows=1000,cols=4096,layer=1,weight=0", DType::f16).name, "norm layer f16 rows=1000,cols=4096");
  expect_error<InvalidArgument>([&] { problem("rows=4,cols=64", DType::bf16, Device::cpu()); }, {"norm has nothing to tune on the CPU"});
  expect_error<InvalidArgument>([&] { problem("rows=4,cols=16385,layer=1", DType::bf16); }, {"cols is 16385", "more than 16384"});
}

}  // namespace
}  // namespace tw::test
