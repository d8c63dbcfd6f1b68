// The choice of windows and configurations, plain arithmetic, and the kernels that are registered.

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/convolution/variants.hpp"
#include "runtime/format.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::convolution {
namespace {

using namespace tw::test;

constexpr int kUnits = 132;  // an H200's

Problem problem(std::int64_t images, std::int64_t height, std::int64_t width, std::int64_t channels, std::int64_t steps,
                std::int64_t stride = 1) {
  return {images, height, width, channels, steps, stride, stride, kUnits};
}

TEST(ConvolutionWindow, CoversTheOutputAndFitsTheTile) {
  std::mt19937_64 random = random_engine();
  for (int i = 0; i < random_cases(2000); ++i) {
    const auto extent = [&] { return static_cast<std::int64_t>(1 + random() % (std::uint64_t{1} << random() % 12)); };
    const auto stride = static_cast<std::int64_t>(1 + random() % 12);
    const Problem p = problem(extent(), extent(), extent(), 64, 9, stride);
    for (const int rows : {32, 64, 128, 256}) {
      const Tiling t = choose_window(p, rows);
      const std::int64_t width = t.window.width(), height = t.window.height(), images = rows / (width * height);
      ASSERT_EQ(width * height * images, rows);
      EXPECT_TRUE(t.across * width >= p.width && (t.across - 1) * width < p.width);
      EXPECT_TRUE(t.down * height >= p.height && (t.down - 1) * height < p.height);
      EXPECT_TRUE(t.deep * images >= p.images && (t.deep - 1) * images < p.images);
      if (stride <= 8) {
        EXPECT_TRUE(width == 1 || width * stride <= 256);
        EXPECT_TRUE(height == 1 || height * stride <= 256);
      }
      // What conv2d() refuses by.
      EXPECT_LE(t.tiles(), p.images * p.height * p.width / 4 + 1);
    }
  }
}

TEST(ConvolutionWindow, WastesLittle) {
  const auto window = [](const Problem& p) {
    const Tiling t = choose_window(p, 128);
    return std::tuple(t.window.width(), t.window.height(), t.tiles());
  };
  EXPECT_EQ(window(problem(32, 64, 64, 256, 36)), std::tuple(64, 2, 1024));
  EXPECT_EQ(window(problem(1, 1, 3000, 1280, 6)), std::tuple(128, 1, 24));
  EXPECT_EQ(window(problem(1, 1, 1500, 1280, 60, 2)), std::tuple(128, 1, 12));
  EXPECT_EQ(window(problem(16, 8, 8, 64, 9)), std::tuple(8, 8, 8));
  EXPECT_EQ(window(problem(128, 1, 1, 64, 9)), std::tuple(1, 1, 1));
  EXPECT_EQ(window(problem(1, 1024, 1, 64, 9)), std::tuple(1, 128, 8));
  // TMA passes over 256 pixels at most, so 64 with stride 4.
  EXPECT_EQ(window(problem(1, 2, 640, 64, 9, 4)), std::tuple(64, 2, 10));
}

TEST(ConvolutionWindow, KnowsWhereItsRowsLie) {
  const Window w{.log_width = 3, .log_height = 2, .row_step = 2, .i_step = 3};
  for (int r = 0; r < 128; ++r) {
    EXPECT_EQ(w.row(r), r % 8 * 2);
    EXPECT_EQ(w.i(r), r / 8 % 4 * 3);
    EXPECT_EQ(w.j(r), r / 32);
  }
  for (int r = 0; r < 256; ++r) EXPECT_EQ(std::tuple(Window{}.row(r), Window{}.i(r), Window{}.j(r)), std::tuple(r, 0, 0));
}

TEST(ConvolutionWindow, BecomesTheBoxOfTheTensorMap) {
  using X = sm_90a::Shared<f16, 128, 64, Contract::columns>;
  using Out = sm_90a::Staging<f16, 128, 256>;
  sm_90a::Global<const f16, X> x{};
  x.cols = 256, x.rows = 64, x.size_i = 65, x.size_j = 32;
  x.stride_row = 256, x.stride_i = 64 * 256, x.stride_j = 65 * 64 * 256;
  const auto box = [](const tw::detail::TensorMapRequest& r) { return std::vector<std::uint32_t>(r.box, r.box + 4); };
  const auto map_request_of = []<class G>(const G& global, const Window& window) {
    return tw::detail::map_request(global, G{}.map_tile(), window);
  };
  const auto steps = [](const tw::detail::TensorMapRequest& r) { return std::vector<std::uint32_t>(r.steps, r.steps + 4); };
  const auto strided = map_request_of(x, {.log_width = 4, .log_height = 2, .row_step = 2, .i_step = 3});
  EXPECT_EQ(box(strided), (std::vector<std::uint32_t>{64, 32, 12, 2}));
  EXPECT_EQ(steps(strided), (std::vector<std::uint32_t>{1, 2, 3, 1}));
  EXPECT_EQ(strided.extents[2], 65u);
  EXPECT_EQ(strided.strides[1], 64u * 256 * 2);
  EXPECT_EQ(box(map_request_of(x, {})), (std::vector<std::uint32_t>{64, 128, 1, 1}));
  // A store moves the 64 rows of one warpgroup: a part of the window.
  sm_90a::Global<f16, Out> y{};
  y.cols = 256, y.rows = 64, y.size_i = 65, y.size_j = 32;
  EXPECT_EQ(box(map_request_of(y, {.log_width = 6, .log_height = 1})), (std::vector<std::uint32_t>{64, 64, 1, 1}));
  EXPECT_EQ(box(map_request_of(y, {.log_width = 7, .log_height = 0})), (std::vector<std::uint32_t>{64, 64, 1, 1}));
  EXPECT_EQ(box(map_request_of(y, {.log_width = 4, .log_height = 3})), (std::vector<std::uint32_t>{64, 16, 4, 1}));
  EXPECT_EQ(box(map_request_of(y, {.log_width = 2, .log_height = 1})), (std::vector<std::uint32_t>{64, 4, 2, 8}));
}

TEST(ConvolutionHeuristics, LargeImagesTakeWideTilesAndSmallOnesFillTheDevice) {
  const auto chosen = [](const Problem& p) { return configs()[static_cast<std::size_t>(choose_config(p))]; };
  EXPECT_EQ(chosen(problem(32, 64, 64, 256, 36)).bn, 256);
  EXPECT_EQ(chosen(problem(128, 64, 64, 128, 18)).bn, 128);
  EXPECT_EQ(chosen(problem(1, 1, 1500, 1280, 60, 2)).bn, 128);
  EXPECT_EQ(chosen(problem(1, 7, 7, 512, 72)).bm, 64);
}

TEST(ConvolutionRegistered, NamesAreUniqueAndLaunchesPossible) {
  std::set<std::string> names, kernels;
  for (const KernelSpec& spec : specs_of(registered())) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name << " twice";
    EXPECT_TRUE(kernels.insert(spec.type + " on " + spec.target).second) << spec.name << " is another name's kernel";
    EXPECT_NE(find_embedded(spec.source), nullptr) << spec.source;
  }
  EXPECT_FALSE(names.empty());
}

}  // namespace
}  // namespace tw::kernels::convolution
