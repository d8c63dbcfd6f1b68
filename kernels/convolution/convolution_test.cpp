// conv1d() and conv2d() against loops in double, on the CPU and, where there is one, on a GPU.

#include "tilewave/convolution.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/convolution/call.hpp"
#include "kernels/convolution/reference.hpp"
#include "kernels/convolution/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/f32_products.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::convolution {
namespace {

using namespace tw::test;

/// The GPU's configurations, of the target that tests run on.
std::vector<CostedTile> gpu_configs() { return configs(generic_shared_bytes(Stream::standard(Device::cuda()))); }

/// The GPU's last configuration unless a test is about them: few shapes here fill wider tiles, and every further variant costs a
/// compilation.
constexpr int kNarrow = -2;
int config_on(Device device, int config) {
  if (!device.is_cuda()) return -1;
  return config == kNarrow ? static_cast<int>(gpu_configs().size()) - 1 : config;
}

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
            .config = config_on(device, c.config)});
  else
    conv2d(x, w, y,
           {.stride = c.stride,
            .padding = c.padding,
            .dilation = c.dilation,
            .bias = bias_tensor,
            .activation = c.activation,
            .config = config_on(device, c.config)});

  plain.x = x_values;
  plain.weights = w_values;
  plain.bias = bias_values;
  const Arithmetic arithmetic = arithmetic_of(dtype, device);
  EXPECT_TRUE(accurate({y.values(), reference(plain), naive(plain, dtype, arithmetic == Arithmetic::tf32), arithmetic, terms}));
  EXPECT_TRUE(y.gaps_intact());
}

/// Compiles the registered kernels of the target on all cores before the first test on the GPU; the tests use most of them. On Hopper only:
/// compile_all() knows no other architecture.
void warm_up() {
  if (device_info(Device::cuda()).target != GpuTarget::sm_90a) return;
  const std::int64_t generic_shared = generic_shared_bytes(Stream::standard(Device::cuda()));
  [[maybe_unused]] static const bool done =
      (compile_all(generic_shared > 0 ? registered_generic(generic_shared) : specs_of(registered())), true);
}

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
  for (int i = 0; i < random_cases(60); ++i) {
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
  for (int i = 0; i < random_cases(12); ++i) {
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
  for (int i = 0; i < random_cases(20); ++i) {
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
  conv2d(x, w, y, {.padding = {1, 1}, .activation = Activation::relu, .config = config_on(device, kNarrow)});
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
    conv2d(x, w, y, {.padding = {1, 1}, .config = config_on(device, kNarrow)});
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
  conv2d(x, w, y, {.config = config_on(device, kNarrow)});
  const std::vector<double> expected = y.values();  // also waits for the standard stream, which made the operands
  on_stream.values();
  const Stream stream(device);
  conv2d(x, w, on_stream, {.stream = stream, .config = config_on(device, kNarrow)});
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
  for (int config = -1; config < static_cast<int>(gpu_configs().size()); ++config) {
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

class ExactConvolution : public testing::TestWithParam<Device> {};

INSTANTIATE_TEST_SUITE_P(Ops, ExactConvolution, testing::ValuesIn(kDevices), device_name);

// f32 operands as parts that are tf32 numbers: the error is that of f32, also where tensor cores drop their low bits. When these add, they
// round towards zero: every eight products, of which there are three for each one of f32.
TEST_P(ExactConvolution, HasTheErrorOfF32) {
  const Device device = GetParam();
  skip_unless_present(device);
  std::mt19937_64 random = random_engine();
  PlacedTensor x({2, 9, 30, 20}, DType::f32, device), w({24, 2, 3, 20}, DType::f32, device), bias({24}, DType::f32, device);
  const std::vector<float> x_values = x.fill_random(random), w_values = w.fill_random(random), bias_values = bias.fill_random(random);
  const PlainCall plain{.n = 2,
                        .h = 9,
                        .w = 30,
                        .c = 20,
                        .f = 24,
                        .kh = 2,
                        .kw = 3,
                        .stride_w = 2,
                        .padding_h = 1,
                        .padding_w = 1,
                        .x = x_values,
                        .weights = w_values,
                        .bias = bias_values};
  const PlacedTensor y({2, plain.out_h(), plain.out_w(), 24}, DType::f32, device);
  const Conv2dOptions options{.stride = {1, 2}, .padding = {1, 1}, .bias = &bias.tensor()};
  if (device.is_cuda()) {
    const ScopedF32Products exact(F32Products::exact);
    conv2d(x, w, y, options);
  } else {
    Call call = check_conv2d(x, w, y, options);
    use_parts(call);
    EXPECT_EQ(call.in_channels(), 60);
    run(call);
  }
  const std::vector<double> got = y.values(), exact = reference(plain);
  if (!device.is_cuda()) {
    EXPECT_TRUE(accurate({got, exact, naive(plain, DType::f32, false), Arithmetic::f32}));
    return;
  }
  const auto magnitudes = [](std::vector<float> values) {
    for (float& value : values) value = std::abs(value);
    return values;
  };
  const std::vector<float> x_sizes = magnitudes(x_values), w_sizes = magnitudes(w_values), bias_sizes = magnitudes(bias_values);
  PlainCall sizes = plain;
  sizes.x = x_sizes, sizes.weights = w_sizes, sizes.bias = bias_sizes;
  const std::vector<double> largest = reference(sizes);
  const double roundings = 3.0 * static_cast<double>(plain.kh * plain.kw * plain.c) / 8;
  ASSERT_EQ(got.size(), exact.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_LE(std::abs(got[i] - exact[i]), std::ldexp(roundings * largest[i], -23)) << i;
}

}  // namespace
}  // namespace tw::kernels::convolution
