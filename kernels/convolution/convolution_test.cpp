// conv1d() and conv2d() against loops in double, on the CPU and, where there is one, on a GPU; their bad inputs; the choice of windows.

#include "tilewave/convolution.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/convolution/reference.hpp"
#include "kernels/convolution/variants.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::convolution {
namespace {

using namespace tw::test;

/// The GPU's configuration unless a test is about them: few shapes here fill wider tiles, and every further variant costs a compilation.
constexpr int kNarrow = 3;

/// Where an operand lies. A GPU copies `dense` and `aligned` ones by TMA where their shapes allow it, the others by ordinary loads.
enum class Place { dense, aligned, unaligned, stepped, reversed };

/// In which order a tensor's dimensions are stored.
enum class Order {
  channels_last,   ///< NHWC, and weights as FHWC
  channels_first,  ///< NCHW and FCHW, PyTorch's
  features_last    ///< weights alone: HWCF
};

struct Operand {
  Place place = Place::dense;
  Order order = Order::channels_last;
};

Placement placement(const Operand& o, int rank, DType dtype) {
  Placement p;
  for (int i = 0; i < rank; ++i) p.order.push_back(i);
  if (o.order == Order::channels_first) std::rotate(p.order.begin() + 1, p.order.end() - 1, p.order.end());
  if (o.order == Order::features_last) std::rotate(p.order.begin(), p.order.begin() + 1, p.order.end());
  switch (o.place) {
    case Place::dense:
      break;
    case Place::aligned:
      p.align = p.gap = 16 / static_cast<std::int64_t>(size_of(dtype));
      p.offset = 2 * p.align;
      break;
    case Place::unaligned:
      p.offset = 3;
      p.gap = 5;
      break;
    case Place::stepped:
      p.offset = 1;
      p.step = 2;
      p.gap = 3;
      break;
    case Place::reversed:
      p.gap = 1;
      p.reversed = true;
      break;
  }
  return p;
}

struct Case {
  std::int64_t n = 1, h = 1, w = 1, c = 1, f = 1;
  std::array<std::int64_t, 2> kernel = {1, 1}, stride = {1, 1}, padding = {0, 0}, dilation = {1, 1};
  Operand x = {}, weights = {}, y = {};
  bool bias = false;
  Activation activation = Activation::none;
  int config = kNarrow;
  bool one_dimension = false;  ///< conv1d(), whose image is a row: h and the first of each pair stay as they are

  std::string describe() const {
    const auto text = [](const Operand& o) { return tw::format("{}/{}", static_cast<int>(o.place), static_cast<int>(o.order)); };
    return tw::format("x {}x{}x{}x{} f {} kernel {}x{} stride {}x{} padding {}x{} dilation {}x{} placed {} {} {} bias {} activation {}{}",
                      n, h, w, c, f, kernel[0], kernel[1], stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1], text(x),
                      text(weights), text(y), bias, static_cast<int>(activation), one_dimension ? " conv1d" : "");
  }
  PlainCall plain() const {
    return {.n = n,
            .h = h,
            .w = w,
            .c = c,
            .f = f,
            .kh = kernel[0],
            .kw = kernel[1],
            .stride_h = stride[0],
            .stride_w = stride[1],
            .padding_h = padding[0],
            .padding_w = padding[1],
            .dilation_h = dilation[0],
            .dilation_w = dilation[1],
            .activation = activation};
  }
  bool kernel_fits() const {
    return dilation[0] * (kernel[0] - 1) < h + 2 * padding[0] && dilation[1] * (kernel[1] - 1) < w + 2 * padding[1];
  }
  std::int64_t products() const {
    const PlainCall p = plain();
    return n * p.out_h() * p.out_w() * f * kernel[0] * kernel[1] * c;
  }
};

/// Runs one case on random numbers and holds it against the rule.
void check(const Case& c, Device device, DType dtype, std::mt19937_64& random) {
  SCOPED_TRACE(c.describe());
  ASSERT_TRUE(c.kernel_fits());
  PlainCall plain = c.plain();
  const auto make = [&](const Operand& o, Shape shape) {
    if (c.one_dimension) shape.erase(shape.begin() + 1);
    const int rank = static_cast<int>(shape.size());
    return PlacedTensor(std::move(shape), dtype, device, placement(o, rank, dtype));
  };
  PlacedTensor x = make(c.x, {c.n, c.h, c.w, c.c});
  PlacedTensor w = make(c.weights, {c.f, c.kernel[0], c.kernel[1], c.c});
  PlacedTensor y = make(c.y, {c.n, plain.out_h(), plain.out_w(), c.f});
  PlacedTensor bias({c.f}, dtype, device, {.offset = 1});

  // Elements of y are then about N(0, 1) for any number of terms.
  const std::int64_t terms = c.kernel[0] * c.kernel[1] * c.c;
  const std::vector<float> x_values = x.fill_random(random);
  const std::vector<float> w_values = w.fill_random(random, 1 / std::sqrt(static_cast<float>(std::max<std::int64_t>(terms, 1))));
  std::vector<float> bias_values;
  if (c.bias) bias_values = bias.fill_random(random);
  const Tensor* const bias_tensor = c.bias ? &bias.tensor() : nullptr;

  if (c.one_dimension)
    conv1d(x, w, y,
           {.stride = c.stride[1],
            .padding = c.padding[1],
            .dilation = c.dilation[1],
            .bias = bias_tensor,
            .activation = c.activation,
            .config = c.config});
  else
    conv2d(x, w, y,
           {.stride = c.stride,
            .padding = c.padding,
            .dilation = c.dilation,
            .bias = bias_tensor,
            .activation = c.activation,
            .config = c.config});

  plain.x = x_values;
  plain.weights = w_values;
  plain.bias = bias_values;
  const Arithmetic arithmetic = arithmetic_of(dtype, device);
  EXPECT_TRUE(accurate({y.values(), reference(plain), naive(plain, dtype, arithmetic == Arithmetic::tf32), arithmetic, terms}));
  EXPECT_TRUE(y.gaps_intact());
}

/// Compiles the registered kernels on all cores before the first test on the GPU; the tests use most of them.
void warm_up() { [[maybe_unused]] static const bool done = (compile_all(specs_of(registered())), true); }

class Convolution : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (device.is_cuda()) warm_up();
    cpu::set_poison_released_slots(true);
  }
  void check(const Case& c) { convolution::check(c, device, dtype, random); }
  std::int64_t pick(std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); }
  template <std::size_t count>
  std::int64_t one_of(const std::array<std::int64_t, count>& values) {
    return values[static_cast<std::size_t>(pick(count))];
  }
  /// On a GPU there is a kernel for each order of storage, with and without TMA for loads and for stores. What these differ in does not
  /// depend on the dtype, so bf16 tries them all there, and the others stay with few.
  bool all_variants() const { return !device.is_cuda() || dtype == DType::bf16; }
  /// A convolution drawn at random; small enough for loops in double.
  Case random_case() {
    static constexpr std::array<std::int64_t, 15> kExtents = {1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 31, 33, 37, 64, 67};
    static constexpr std::array<std::int64_t, 12> kChannels = {1, 2, 3, 8, 16, 17, 40, 63, 64, 65, 128, 129};
    while (true) {
      Case c{.n = 1 + pick(3), .h = one_of(kExtents), .w = one_of(kExtents), .c = one_of(kChannels), .f = one_of(kChannels)};
      for (std::size_t axis = 0; axis < 2; ++axis) {
        c.kernel[axis] = 1 + pick(5);
        c.stride[axis] = 1 + pick(3);
        c.padding[axis] = pick(4);
        c.dilation[axis] = 1 + pick(3);
      }
      if (c.kernel_fits() && c.products() < 2'000'000) return c;
    }
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Convolution,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(Convolution, AnyShape) {
  for (int i = 0; i < 60; ++i) {
    Case c = random_case();
    // On a GPU dense tensors of odd channels go without TMA; 8 channels are 16 bytes.
    if (!all_variants()) c.x.place = c.weights.place = c.y.place = Place::aligned;
    check(c);
  }
}

TEST_P(Convolution, OneTap) {
  check({.n = 3, .h = 7, .w = 9, .c = 64, .f = 72});
  check({.n = 1, .h = 1, .w = 1, .c = 1, .f = 1});
  check({.n = 5, .h = 1, .w = 1, .c = 130, .f = 40});
  check({.n = 2, .h = 9, .w = 7, .c = 16, .f = 24, .stride = {2, 3}, .padding = {1, 2}});
}

TEST_P(Convolution, TheUsualOnes) {
  // Whole windows and channels; one more and one less of each.
  for (const std::int64_t extent : {15, 16, 17}) {
    check({.n = 2, .h = extent, .w = extent, .c = 64, .f = 16, .kernel = {3, 3}, .padding = {1, 1}});
    check({.n = 1, .h = extent, .w = extent, .c = 64, .f = 64, .kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}});
  }
  check({.n = 1, .h = 4, .w = 64, .c = 128, .f = 24, .kernel = {3, 3}, .padding = {1, 1}});
  check({.n = 1, .h = 65, .w = 2, .c = 72, .f = 40, .kernel = {5, 3}, .padding = {2, 1}});
  check({.n = 9, .h = 7, .w = 7, .c = 64, .f = 40, .kernel = {3, 3}, .padding = {1, 1}});
  check({.n = 1, .h = 37, .w = 41, .c = 8, .f = 64, .kernel = {7, 7}, .stride = {2, 2}, .padding = {3, 3}});
  check({.n = 1, .h = 21, .w = 21, .c = 40, .f = 24, .kernel = {3, 3}, .padding = {2, 2}, .dilation = {2, 2}});
}

TEST_P(Convolution, ImagesLongAndHigh) {
  check({.n = 1, .h = 2, .w = 700, .c = 16, .f = 24, .kernel = {2, 3}, .padding = {0, 1}});
  check({.n = 1, .h = 700, .w = 2, .c = 16, .f = 24, .kernel = {3, 2}, .stride = {2, 1}});
  check({.n = 300, .h = 1, .w = 1, .c = 16, .f = 24, .kernel = {3, 3}, .padding = {1, 1}});
}

TEST_P(Convolution, PaddingBeyondTheKernel) {
  // Output pixels that see no pixel of the image.
  check({.n = 2, .h = 5, .w = 3, .c = 24, .f = 16, .kernel = {1, 2}, .padding = {3, 3}, .bias = true, .activation = Activation::gelu_erf});
  check({.n = 1, .h = 4, .w = 4, .c = 8, .f = 8, .kernel = {2, 2}, .padding = {140, 3}});
}

TEST_P(Convolution, StridesOfEverySize) {
  for (const std::int64_t stride : {2, 3, 4, 7, 8, 9, 50}) {
    check({.n = 1, .h = 19, .w = 150, .c = 16, .f = 24, .kernel = {3, 3}, .stride = {1, stride}, .padding = {1, 1}});
    check({.n = 2, .h = 150, .w = 19, .c = 16, .f = 24, .kernel = {3, 2}, .stride = {stride, 2}, .padding = {1, 0}});
  }
  check({.n = 1, .h = 5, .w = 1000, .c = 8, .f = 8, .kernel = {5, 3}, .stride = {65536, 2}});
}

TEST_P(Convolution, OneDimension) {
  for (int i = 0; i < 12; ++i) {
    Case c = random_case();
    c.h = c.kernel[0] = c.stride[0] = c.dilation[0] = 1;
    c.padding[0] = 0;
    c.w = 1 + pick(400);
    c.one_dimension = true;
    if (!c.kernel_fits() || c.products() > 2'000'000) continue;
    if (!all_variants()) c.x.place = c.weights.place = c.y.place = Place::aligned;
    check(c);
  }
  // The two layers before GLM-ASR's encoder, narrower: the second halves the length.
  check({.n = 1,
         .w = 300,
         .c = 64,
         .f = 160,
         .kernel = {1, 3},
         .padding = {0, 1},
         .bias = true,
         .activation = Activation::gelu_erf,
         .one_dimension = true});
  check({.n = 2,
         .w = 301,
         .c = 80,
         .f = 72,
         .kernel = {1, 3},
         .stride = {1, 2},
         .padding = {0, 1},
         .bias = true,
         .activation = Activation::gelu_erf,
         .one_dimension = true});
  check({.n = 1,
         .w = 257,
         .c = 16,
         .f = 24,
         .kernel = {1, 3},
         .stride = {1, 2},
         .x = {Place::dense, Order::channels_first},
         .weights = {Place::dense, Order::channels_first},
         .y = {Place::dense, Order::channels_first},
         .one_dimension = true});
}

TEST_P(Convolution, AnyOrderOfStorage) {
  const auto orders = {Order::channels_last, Order::channels_first, Order::features_last};
  for (const Order x : {Order::channels_last, Order::channels_first}) {
    for (const Order w : orders) {
      if (!all_variants() && (x != Order::channels_last || w == Order::channels_first)) continue;
      for (const Place place : {Place::dense, Place::aligned, Place::unaligned}) {
        if (!all_variants() && place == Place::unaligned) continue;
        for (const std::int64_t c : {24, 65}) {
          if (!all_variants() && c % 8 != 0) continue;
          check({.n = 2, .h = 5, .w = 7, .c = c, .f = 72, .kernel = {3, 2}, .padding = {1, 1}, .x = {place, x}, .weights = {place, w}});
        }
      }
    }
  }
  if (all_variants()) {
    check({.n = 2, .h = 9, .w = 11, .c = 16, .f = 70, .kernel = {3, 3}, .y = {Place::dense, Order::channels_first}});
    check({.n = 2, .h = 9, .w = 11, .c = 16, .f = 70, .kernel = {3, 3}, .y = {Place::unaligned, Order::channels_last}});
  }
}

TEST_P(Convolution, AnyStrides) {
  if (!all_variants()) return;
  constexpr Place kPlaces[] = {Place::dense, Place::aligned, Place::unaligned, Place::stepped, Place::reversed};
  constexpr Order kOrders[] = {Order::channels_last, Order::channels_first, Order::features_last};
  for (int i = 0; i < 20; ++i) {
    Case c = random_case();
    c.x = {kPlaces[pick(5)], kOrders[pick(2)]};
    c.weights = {kPlaces[pick(5)], kOrders[pick(3)]};
    c.y = {kPlaces[pick(5)], kOrders[pick(2)]};
    check(c);
  }
}

TEST_P(Convolution, Epilogues) {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    const bool exotic = activation == Activation::gelu_tanh || activation == Activation::silu;
    if (exotic && !all_variants()) continue;
    for (const bool bias : {false, true})
      for (const std::int64_t f : {64, 136})
        check({.n = 1, .h = 9, .w = 11, .c = 32, .f = f, .kernel = {3, 3}, .padding = {1, 1}, .bias = bias, .activation = activation});
  }
}

TEST_P(Convolution, NoElements) {
  check({.n = 0, .h = 5, .w = 6, .c = 7, .f = 8, .kernel = {3, 3}});
  check({.n = 2, .h = 5, .w = 6, .c = 7, .f = 0, .kernel = {3, 3}});
  check({.n = 0, .h = 5, .w = 6, .c = 0, .f = 0});
}

TEST_P(Convolution, NoTermsLeaveTheEpilogue) {
  check({.n = 2, .h = 5, .w = 6, .c = 0, .f = 8, .kernel = {3, 3}, .bias = true, .activation = Activation::gelu_erf});
  // An image without pixels: all that is seen is its padding.
  check({.n = 2, .h = 0, .w = 6, .c = 3, .f = 8, .kernel = {2, 3}, .padding = {1, 0}, .bias = true});
  check({.n = 1, .h = 0, .w = 0, .c = 3, .f = 8, .kernel = {3, 3}, .padding = {2, 2}});
}

TEST_P(Convolution, NanReachesThePixelsThatSeeItAndNothingElse) {
  PlacedTensor x({2, 9, 10, 16}, dtype, device), w({24, 3, 3, 16}, dtype, device), y({2, 9, 10, 24}, dtype, device);
  std::vector<float> values = x.fill_random(random);
  w.fill_random(random);
  const auto at = [](std::int64_t n, std::int64_t h, std::int64_t column) { return (n * 9 + h) * 10 + column; };
  values[static_cast<std::size_t>(at(1, 4, 9) * 16 + 7)] = std::numeric_limits<float>::quiet_NaN();
  x.fill(values);
  conv2d(x, w, y, {.padding = {1, 1}, .activation = Activation::relu, .config = kNarrow});
  const std::vector<double> out = y.values();
  for (std::int64_t n = 0; n < 2; ++n)
    for (std::int64_t h = 0; h < 9; ++h)
      for (std::int64_t column = 0; column < 10; ++column)
        for (std::int64_t f = 0; f < 24; ++f)
          ASSERT_EQ(std::isnan(out[static_cast<std::size_t>(at(n, h, column) * 24 + f)]), n == 1 && std::abs(h - 4) <= 1 && column >= 8)
              << "pixel " << h << ", " << column << " of image " << n;
}

TEST_P(Convolution, IsDeterministic) {
  PlacedTensor x({2, 33, 35, 72}, dtype, device), w({136, 3, 3, 72}, dtype, device);
  x.fill_random(random);
  w.fill_random(random);
  const auto run = [&] {
    PlacedTensor y({2, 33, 35, 136}, dtype, device);
    conv2d(x, w, y, {.padding = {1, 1}, .config = kNarrow});
    return y.values();
  };
  const std::vector<double> first = run();
  EXPECT_EQ(run(), first);
}

TEST_P(Convolution, RunsOnTheStreamGiven) {
  PlacedTensor x({1, 9, 9, 16}, dtype, device), w({24, 3, 3, 16}, dtype, device), y({1, 7, 7, 24}, dtype, device),
      on_stream({1, 7, 7, 24}, dtype, device);
  x.fill_random(random);
  w.fill_random(random);
  conv2d(x, w, y, {.config = kNarrow});
  const std::vector<double> expected = y.values();  // also waits for the standard stream, which made the operands
  on_stream.values();
  const Stream stream(device);
  conv2d(x, w, on_stream, {.stream = stream, .config = kNarrow});
  stream.synchronize();
  EXPECT_EQ(on_stream.values(), expected);
}

/// Every configuration of the GPU, whatever the heuristic would choose.
class ConvolutionConfig : public testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(cuda, ConvolutionConfig, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& instance) { return tw::format("cuda_{}", name_of(instance.param)); });

TEST_P(ConvolutionConfig, IsCorrect) {
  skip_without_cuda();
  const DType dtype = GetParam();
  warm_up();
  std::mt19937_64 random = random_engine();
  for (int config = -1; config < static_cast<int>(configs().size()); ++config) {
    const Order orders[] = {Order::channels_last, Order::features_last};
    for (const Order order : orders) {
      if (order == Order::features_last && dtype != DType::f16) continue;
      Case c{.n = 1,
             .h = 17,
             .w = 35,
             .c = 72,
             .f = 264,
             .kernel = {3, 3},
             .padding = {1, 1},
             .weights = {Place::dense, order},
             .config = config};
      check(c, Device::cuda(), dtype, random);
      c.stride = {2, 2};
      check(c, Device::cuda(), dtype, random);
      // Windows over several images.
      c.n = 13, c.h = c.w = 5;
      check(c, Device::cuda(), dtype, random);
    }
  }
}

// Bad input.

/// What is thrown names the argument, what was given and what is allowed; and y is as it was.
class ConvolutionBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  PlacedTensor make(Shape shape, DType dtype = DType::f32) const { return PlacedTensor(std::move(shape), dtype, device, {.offset = 4}); }
  void refused(const Tensor& x, const Tensor& w, const PlacedTensor& y, std::initializer_list<std::string_view> parts,
               const Conv2dOptions& options = {}) {
    expect_error<InvalidArgument>([&] { conv2d(x, w, y, options); }, parts);
    EXPECT_TRUE(y.untouched());
  }
  void refused_1d(const Tensor& x, const Tensor& w, const PlacedTensor& y, std::initializer_list<std::string_view> parts,
                  const Conv1dOptions& options = {}) {
    expect_error<InvalidArgument>([&] { conv1d(x, w, y, options); }, parts);
    EXPECT_TRUE(y.untouched());
  }

  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ops, ConvolutionBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(ConvolutionBadInput, Shapes) {
  const PlacedTensor x = make({2, 6, 7, 3}), w = make({5, 3, 2, 3}), y = make({2, 4, 6, 5});
  refused(make({6, 7, 3}), w, y, {"conv2d", "x is f32[6, 7, 3]", "[N, H, W, C]"});
  refused(x, make({5, 3, 3}), y, {"w is f32[5, 3, 3]", "[F, KH, KW, C]"});
  refused(x, make({5, 3, 2, 4}), y, {"x is f32[2, 6, 7, 3]", "w is f32[5, 3, 2, 4]", "C"});
  refused(x, w, make({2, 4, 7, 5}), {"y is f32[2, 4, 7, 5]", "[2, 4, 6, 5]"});
  refused(x, w, make({2, 4, 6, 4}), {"y is f32[2, 4, 6, 4]", "[2, 4, 6, 5]"});
  refused(x, w, make({1, 4, 6, 5}), {"y is f32[1, 4, 6, 5]", "[2, 4, 6, 5]"});
  refused(x, w, make({4, 6, 5}), {"y is f32[4, 6, 5]", "[2, 4, 6, 5]"});
  refused(x, w, y, {"y is f32[2, 4, 6, 5]", "stride 2, 1", "[2, 2, 6, 5]"}, {.stride = {2, 1}});
  refused(x, make({5, 0, 2, 3}), y, {"w is f32[5, 0, 2, 3]", "taps"});
  refused(x, make({5, 7, 2, 3}), y, {"x is f32[2, 6, 7, 3]", "7 long in dimension 1", "fit into the padded image, 6"});
  refused(x, w, y, {"dilation 1, 9", "10 long in dimension 2", "padded image, 9"}, {.padding = {0, 1}, .dilation = {1, 9}});

  const PlacedTensor x1 = make({2, 7, 3}), w1 = make({5, 2, 3}), y1 = make({2, 6, 5});
  refused_1d(x, w1, y1, {"conv1d", "x is f32[2, 6, 7, 3]", "[N, L, C]"});
  refused_1d(x1, w, y1, {"w is f32[5, 3, 2, 3]", "[F, K, C]"});
  refused_1d(x1, w1, make({2, 7, 5}), {"y is f32[2, 7, 5]", "[2, 6, 5]"});
  refused_1d(x1, w1, y1, {"y is f32[2, 6, 5]", "stride 3", "[2, 2, 5]"}, {.stride = 3});
}

TEST_P(ConvolutionBadInput, Numbers) {
  const PlacedTensor x = make({2, 6, 7, 3}), w = make({5, 3, 2, 3}), y = make({2, 4, 6, 5});
  refused(x, w, y, {"stride is 1, 0", "1 to 65536"}, {.stride = {1, 0}});
  refused(x, w, y, {"stride is -1, 1"}, {.stride = {-1, 1}});
  refused(x, w, y, {"stride is 65537, 1", "65536"}, {.stride = {65537, 1}});
  refused(x, w, y, {"padding is 0, -1", "0 to"}, {.padding = {0, -1}});
  refused(x, w, y, {"padding is 1099511627776, 0"}, {.padding = {std::int64_t{1} << 40, 0}});
  refused(x, w, y, {"dilation is 0, 1", "1 to"}, {.dilation = {0, 1}});
  refused(x, w, y, {"padding 268435456, 0", "limited to 536870912"}, {.padding = {std::int64_t{1} << 28, 0}});
  refused(x, w, y, {"activation is swiglu", "any other is allowed"}, {.activation = Activation::swiglu});
  refused(x, w, y, {"config is 4", "below 4"}, {.config = 4});
  const PlacedTensor x1 = make({2, 7, 3}), w1 = make({5, 2, 3}), y1 = make({2, 6, 5});
  refused_1d(x1, w1, y1, {"conv1d", "stride is 0"}, {.stride = 0});
  refused_1d(x1, w1, y1, {"padding is -2"}, {.padding = -2});
  refused_1d(x1, w1, y1, {"dilation is -1"}, {.dilation = -1});
}

TEST_P(ConvolutionBadInput, DtypesAndBias) {
  const PlacedTensor x = make({2, 6, 7, 3}), w = make({5, 3, 2, 3}), y = make({2, 4, 6, 5});
  refused(make({2, 6, 7, 3}, DType::f16), w, y, {"w is f32[5, 3, 2, 3]", "f16"});
  refused(x, make({5, 3, 2, 3}, DType::bf16), y, {"w is bf16[5, 3, 2, 3]", "f32"});
  refused(x, w, make({2, 4, 6, 5}, DType::f16), {"y is f16[2, 4, 6, 5]", "f32"});
  const Tensor integers = Tensor::zeros({2, 6, 7, 3}, DType::i32, Stream::standard(device));
  refused(integers, w, y, {"x is i32[2, 6, 7, 3]", "f32, f16 and bf16"});
  const PlacedTensor half = make({5}, DType::f16);
  refused(x, w, y, {"bias is f16[5]", "f32"}, {.bias = &half.tensor()});
  for (const Shape& shape : {Shape{4}, Shape{1, 5}, Shape{0}}) {
    const PlacedTensor bias = make(shape);
    refused(x, w, y, {"bias is f32[", "[5]"}, {.bias = &bias.tensor()});
  }
  const PlacedTensor apart({5}, DType::f32, device, {.step = 2});
  refused(x, w, y, {"bias is f32[5]", "contiguous"}, {.bias = &apart.tensor()});
}

TEST_P(ConvolutionBadInput, Outputs) {
  const PlacedTensor x = make({1, 4, 4, 4}), w = make({4, 1, 1, 4}), y = make({1, 4, 4, 4});
  const Tensor folded = Tensor::borrow(y.tensor().data(), {1, 4, 4, 4}, DType::f32, device, {16, 4, 0, 1});
  expect_error<InvalidArgument>([&] { conv2d(x, w, folded); }, {"y is f32[1, 4, 4, 4]", "stride 0", "distinct"});
  refused(y, w, y, {"y is", "shares memory with x"});
  const PlacedTensor square = make({4, 1, 1, 4}), image = make({1, 1, 1, 4});
  expect_error<InvalidArgument>([&] { conv2d(make({4, 1, 1, 4}), square, square); }, {"y is", "shares memory with w"});
  EXPECT_TRUE(y.untouched());
}

TEST_P(ConvolutionBadInput, TooLarge) {
  // A few elements of memory stand for all: the sizes are refused before anything is read.
  const PlacedTensor memory = make({8});
  const auto repeated = [&](Shape shape) {
    const std::vector<std::int64_t> strides(shape.size(), 0);
    return Tensor::borrow(memory.tensor().data<float>(), std::move(shape), DType::f32, device, strides);
  };
  const auto output = [&](Shape shape) { return Tensor::borrow(memory.tensor().data<float>() + 4, std::move(shape), DType::f32, device); };
  constexpr std::int64_t kHuge = std::int64_t{1} << 31;
  expect_error<InvalidArgument>(
      [&] {
        conv2d(repeated({kHuge, 1, 1, 1}), repeated({1, 1, 1, 1}), output({kHuge, 1, 1, 1}));
      },
      {"x is f32[2147483648, 1, 1, 1]", "limited"});
  expect_error<InvalidArgument>(
      [&] {
        conv2d(repeated({1, kHuge, 1, 1}), repeated({1, 1, 1, 1}), output({1, kHuge, 1, 1}));
      },
      {"x is f32[1, 2147483648, 1, 1]", "limited"});
  constexpr std::int64_t kLarge = 1 << 16;
  expect_error<InvalidArgument>(
      [&] {
        conv2d(repeated({1, kLarge, kLarge, 1}), repeated({1, 1, 1, 1}), output({1, kLarge, kLarge, 1}));
      },
      {"y is f32[1, 65536, 65536, 1]", "limited"});
  expect_error<InvalidArgument>(
      [&] {
        conv2d(repeated({1, kLarge, kLarge, 1}), repeated({1, kLarge, kLarge, 1}), output({1, 1, 1, 1}));
      },
      {"w is f32[1, 65536, 65536, 1]", "taps", "limited"});
  EXPECT_TRUE(memory.untouched());
}

TEST(ConvolutionBadMemory, OperandsOnAnotherDevice) {
  // Only looked at: a tensor may say that it lies on a GPU without there being one.
  alignas(16) float values[32] = {};
  const PlacedTensor x({1, 2, 2, 2}, DType::f32, Device::cpu()), w({2, 1, 1, 2}, DType::f32, Device::cpu()),
      y({1, 2, 2, 2}, DType::f32, Device::cpu());
  const Tensor gpu = Tensor::borrow(values, {1, 2, 2, 2}, DType::f32, Device::cuda());
  expect_error<InvalidArgument>([&] { conv2d(gpu, w, y); }, {"x is f32[1, 2, 2, 2] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { conv2d(x, w, gpu); }, {"x is f32[1, 2, 2, 2] on cpu", "cuda"});
  const Tensor bias = Tensor::borrow(values, {2}, DType::f32, Device::cuda());
  expect_error<InvalidArgument>([&] { conv2d(x, w, y, {.bias = &bias}); }, {"bias is f32[2] on cuda", "cpu"});
  EXPECT_TRUE(y.untouched());
}

// The choice of windows and configurations: plain arithmetic.

constexpr int kUnits = 132;  // an H200's

Problem problem(std::int64_t images, std::int64_t height, std::int64_t width, std::int64_t channels, std::int64_t steps,
                std::int64_t stride = 1) {
  return {images, height, width, channels, steps, stride, stride, kUnits};
}

TEST(ConvolutionWindow, CoversTheOutputAndFitsTheTile) {
  std::mt19937_64 random = random_engine();
  for (int i = 0; i < 2000; ++i) {
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
    return tw::detail::map_request(global, G().map_tile(), window);
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
