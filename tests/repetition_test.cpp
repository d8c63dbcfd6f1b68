// Every way in which results leave a GPU's blocks, with many short tiles for each block, again and again into poisoned outputs beside
// copies on another stream: what races is wrong once in a while, and right in a test that looks once.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "kernels/attention/combine.hpp"
#include "runtime/cuda_driver.hpp"
#include "runtime/format.hpp"
#include "runtime/gpu.hpp"
#include "runtime/stream.hpp"
#include "tests/differences.tile.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/convolution.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/launch.hpp"

namespace tw::test {
namespace {

constexpr int kRepetitions = 200;

/// One call. Its inputs are the same on every device.
struct Case {
  std::string name;
  Shape shape;  ///< of the output; its bytes are a multiple of 1024
  DType dtype;
  std::function<void(const Tensor& out, const Stream& stream)> run;
};

/// Copies on a stream of their own, from one part of the device's memory to another.
class Traffic {
 public:
  explicit Traffic(Device device) : stream_(device), from_(allocate(kBytes, stream_)), to_(allocate(kBytes, stream_)) {}
  ~Traffic() { stream_.synchronize(); }
  void copy() {
    const CurrentContext current(Gpu::get(stream_.device().index));
    const auto address = [](const std::shared_ptr<void>& memory) { return reinterpret_cast<cuda::Address>(memory.get()); };
    ASSERT_EQ(cuda::driver().memcpy_async(address(to_), address(from_), kBytes, StreamAccess::native(stream_)), cuda::Result::success);
  }

 private:
  static constexpr std::size_t kBytes = 32 << 20;
  Stream stream_;
  std::shared_ptr<void> from_, to_;
};

/// As rows of 256 words.
Tensor as_words(const Tensor& t) {
  const auto bytes = t.numel() * static_cast<std::int64_t>(size_of(t.dtype()));
  EXPECT_EQ(bytes % 1024, 0);
  return Tensor::borrow(t.data(), {bytes / 1024, 256}, DType::i32, t.device());
}

/// Where `got` is not `expected`, both on the CPU. Types are narrow, sums are of different orders: a wrong row, not a wrong bit, is found.
void expect_close(const Tensor& got, const Tensor& expected) {
  const auto as_f32 = [](const Tensor& t) { return t.dtype() == DType::f32 ? t : t.to(DType::f32); };
  const Tensor a = as_f32(got), b = as_f32(expected);
  std::int64_t wrong = 0, first = -1;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const float x = a.data<float>()[i], y = b.data<float>()[i];
    if (!(std::abs(x - y) <= 0.03f + 0.03f * std::abs(y))) {
      if (first < 0) first = i;
      ++wrong;
    }
  }
  EXPECT_EQ(wrong, 0) << "the first at " << first;
}

void expect_repeatable(const Case& c, const Tensor& expected, const Stream& stream, Traffic& traffic) {
  SCOPED_TRACE(c.name);
  const Tensor first = Tensor::poisoned(c.shape, c.dtype, stream);
  c.run(first, stream);
  const Tensor words = as_words(first);
  const Tensor counts = Tensor::zeros({words.shape(0), 1}, DType::f32, stream);
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    traffic.copy();
    const Tensor out = Tensor::poisoned(c.shape, c.dtype, stream);
    c.run(out, stream);
    launch<Differences>(stream, {.m = ceil_div(static_cast<int>(words.shape(0)), 4)}, [&](auto& bind, auto& p) {
      bind(p.a, words);
      bind(p.b, as_words(out));
      bind(p.counts, counts);
    });
  }
  stream.synchronize();
  expect_close(first.to(Device::cpu()), expected);
  const Tensor differing = counts.to(Device::cpu());
  const double words_differing = std::accumulate(differing.data<float>(), differing.data<float>() + differing.numel(), 0.0);
  EXPECT_EQ(words_differing, 0) << "words of " << kRepetitions << " repetitions differ from the first run's";
}

void expect_all_repeatable(const std::vector<Case>& cases) {
  const Device device = cuda_device()->device;
  const Device cpu = Device::cpu();
  std::vector<Tensor> expected;
  for (const Case& c : cases) {
    expected.push_back(Tensor::poisoned(c.shape, c.dtype));
    c.run(expected.back(), Stream::standard(cpu));
  }
  {
    // What compiles for a second each compiles side by side.
    std::vector<std::jthread> first_calls;
    for (const Case& c : cases) {
      first_calls.emplace_back([&c, device] {
        const Stream stream(device);
        try {
          c.run(Tensor::empty(c.shape, c.dtype, stream), stream);
        } catch (const Error&) {
          // It is thrown again where it is looked at.
        }
        stream.synchronize();
      });
    }
  }
  const Stream stream(device);
  Traffic traffic(device);
  for (std::size_t i = 0; i < cases.size(); ++i) launched([&] { expect_repeatable(cases[i], expected[i], stream, traffic); });
}

/// A case's inputs, on the device of each run.
class Inputs {
 public:
  Inputs(std::vector<Shape> shapes, DType dtype) {
    for (std::size_t i = 0; i < shapes.size(); ++i) host_.push_back(Tensor::random(shapes[i], dtype, seed() + i));
  }
  explicit Inputs(std::vector<Tensor> host) : host_(std::move(host)) {}
  const std::vector<Tensor>& on(Device device) {
    if (device == Device::cpu()) return host_;
    const std::lock_guard lock(mutex_);
    if (device_.empty())
      for (const Tensor& t : host_) device_.push_back(t.to(device));
    return device_;
  }

 private:
  std::mutex mutex_;
  std::vector<Tensor> host_, device_;
};
using SharedInputs = std::shared_ptr<Inputs>;
SharedInputs inputs(std::vector<Shape> shapes, DType dtype) { return std::make_shared<Inputs>(std::move(shapes), dtype); }

// Matrix products

struct GemmCase {
  const char* what;
  std::int64_t m, n, k;
  int config = -1, splits = 1;
  DType dtype = DType::bf16;
  Activation activation = Activation::none;
  bool residual = false;
};

Case gemm_case(const GemmCase& g) {
  const SharedInputs in = inputs({{g.m, g.k}, {g.n, g.k}, {g.m, g.n}}, g.dtype);
  const std::int64_t columns = g.activation == Activation::swiglu ? g.n / 2 : g.n;
  return {tw::format("gemm {}: {} x {} x {}, config {}, splits {}", g.what, g.m, g.n, g.k, g.config, g.splits),
          {g.m, columns},
          g.dtype,
          [in, g](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            GemmOptions options{.activation = g.activation, .stream = stream};
            if (g.residual) options.residual = &t[2];
            if (stream.device().is_cuda()) options.config = g.config, options.splits = g.splits;
            gemm(t[0], t[1].transpose(0, 1), out, options);
          }};
}

TEST(Repetition, cuda_MatrixProducts) {
  skip_without_cuda();
  std::vector<Case> cases;
  // Each tile width, one and two steps, and none.
  const std::int64_t widths[] = {256, 256, 192, 128, 128};
  for (int config = 0; config < 5; ++config) {
    const std::int64_t n = widths[config];
    cases.push_back(gemm_case({"one step", 65536, n, 16, config}));
    cases.push_back(gemm_case({"two steps", 32768, n, 128, config}));
    cases.push_back(gemm_case({"no step", 16384, n, 0, config}));
    cases.push_back(gemm_case({"f16", 32768, n, 64, config, 1, DType::f16}));
    cases.push_back(gemm_case({"tails", 32767 + 1 - 64, n + 64, 64, config}));
    cases.push_back(gemm_case({"swiglu", 32768, n, 32, config, 1, DType::bf16, Activation::swiglu}));
  }
  for (const int config : {3, 4}) cases.push_back(gemm_case({"residual", 32768, 128, 32, config, 1, DType::bf16, Activation::none, true}));
  cases.push_back(gemm_case({"split", 4096, 192, 512, 2, 4}));
  cases.push_back(gemm_case({"split", 4096, 128, 512, 3, 2}));
  cases.push_back(gemm_case({"few rows", 16, 32768, 128, -1, 2}));
  cases.push_back(gemm_case({"one row", 1, 32768, 256, -1}));
  cases.push_back(gemm_case({"tf32", 32768, 128, 32, 3, 1, DType::f32}));
  expect_all_repeatable(cases);
}

TEST(Repetition, cuda_ProductsOf8Bits) {
  skip_without_cuda();
  std::vector<Case> cases;
  const std::int64_t m = 32768, k = 128;
  const auto codes = [](Shape shape, std::uint64_t s) { return Tensor::random(std::move(shape), DType::f32, s).to(DType::fp8_e4m3); };
  const auto ones = [](Shape shape) {
    const Tensor t = Tensor::empty(std::move(shape), DType::f32);
    for (std::int64_t i = 0; i < t.numel(); ++i) t.data<float>()[i] = 0.5f;
    return t;
  };
  for (const std::int64_t n : {128, 256}) {
    for (const bool blocks : {false, true}) {
      const SharedInputs in = std::make_shared<Inputs>(std::vector{
          codes({m, k}, seed()), codes({n, k}, seed() + 1), blocks ? ones({m, 1}) : ones({1}), blocks ? ones({1, n / 128}) : ones({1})});
      cases.push_back({tw::format("fp8, {} columns, {}", n, blocks ? "block scales" : "scalars"),
                       {m, n},
                       DType::bf16,
                       [in](const Tensor& out, const Stream& stream) {
                         const std::vector<Tensor>& t = in->on(stream.device());
                         gemm(t[0], t[1].transpose(0, 1), out, {.a_scale = &t[2], .b_scale = &t[3], .stream = stream});
                       }});
    }
  }
  const auto integers = [](Shape shape, std::uint64_t s) { return Tensor::random(std::move(shape), DType::f32, s).to(DType::i8); };
  for (const std::int64_t n : {128, 256}) {
    const SharedInputs in = std::make_shared<Inputs>(std::vector{integers({m, k}, seed()), integers({n, k}, seed() + 1)});
    cases.push_back({tw::format("i8, {} columns", n), {m, n}, DType::i32, [in](const Tensor& out, const Stream& stream) {
                       const std::vector<Tensor>& t = in->on(stream.device());
                       gemm(t[0], t[1].transpose(0, 1), out, {.stream = stream});
                     }});
  }
  expect_all_repeatable(cases);
}

// Convolution

TEST(Repetition, cuda_Convolutions) {
  skip_without_cuda();
  std::vector<Case> cases;
  const std::int64_t filters[] = {256, 256, 128, 64};
  for (int config = 0; config < 4; ++config) {
    for (const std::int64_t kernel : {1, 3}) {
      const std::int64_t f = filters[config], side = 32;
      const SharedInputs in = inputs({{64, side, side, 16}, {f, kernel, kernel, 16}}, config % 2 == 0 ? DType::bf16 : DType::f16);
      cases.push_back({tw::format("conv2d, config {}, {} x {}", config, kernel, kernel),
                       {64, side, side, f},
                       in->on(Device::cpu())[0].dtype(),
                       [in, config, kernel](const Tensor& out, const Stream& stream) {
                         const std::vector<Tensor>& t = in->on(stream.device());
                         Conv2dOptions options;
                         options.padding = {kernel / 2, kernel / 2};
                         options.stream = stream;
                         if (stream.device().is_cuda()) options.config = config;
                         conv2d(t[0], t[1], out, options);
                       }});
    }
  }
  expect_all_repeatable(cases);
}

// Attention

Case attention_case(const char* what, std::int64_t head_dim, DType dtype, std::int64_t keys, const AttentionOptions& options) {
  const std::int64_t batch = 2, heads = 12, queries = 4096;
  const SharedInputs in =
      inputs({{batch, queries, heads, head_dim}, {batch, keys, heads, head_dim}, {batch, keys, heads, head_dim}}, dtype);
  return {tw::format("attention {}: head dimension {}, {} keys", what, head_dim, keys),
          {batch, queries, heads, head_dim},
          dtype,
          [in, options](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            AttentionOptions with_stream = options;
            with_stream.stream = stream;
            attention(t[0], t[1], t[2], out, with_stream);
          }};
}

/// Sequences of 0 to 300 queries and of 0 to 200 keys, some without any.
Case packed_case(std::int64_t head_dim, bool causal) {
  const std::int64_t heads = 8;
  std::vector<std::int32_t> begin_q = {0}, begin_k = {0};
  std::mt19937_64 random = random_engine();
  for (int b = 0; b < 96; ++b) {
    begin_q.push_back(begin_q.back() + (b % 7 == 3 ? 0 : 1 + static_cast<std::int32_t>(random() % 300)));
    begin_k.push_back(begin_k.back() + (b % 3 == 1 ? 0 : 1 + static_cast<std::int32_t>(random() % 200)));
  }
  begin_q.back() = (begin_q.back() + 15) / 16 * 16;
  const std::int64_t sequences = static_cast<std::int64_t>(begin_q.size()) - 1, q = begin_q.back(), k = begin_k.back();
  const auto random_tensor = [&](std::int64_t rows, std::uint64_t s) {
    return Tensor::random({rows, heads, head_dim}, DType::bf16, seed() + s);
  };
  const SharedInputs in = std::make_shared<Inputs>(std::vector{random_tensor(q, 0), random_tensor(k, 1), random_tensor(k, 2),
                                                               Tensor::from(std::span<const std::int32_t>(begin_q), {sequences + 1}),
                                                               Tensor::from(std::span<const std::int32_t>(begin_k), {sequences + 1})});
  return {tw::format("packed attention: head dimension {}{}", head_dim, causal ? ", causal" : ""),
          {q, heads, head_dim},
          DType::bf16,
          [in, causal](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            attention_varlen(t[0], t[1], t[2], out, {t[3], t[4]}, {.causal = causal, .stream = stream});
          }};
}

TEST(Repetition, cuda_Attention) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t head_dim : {32, 64, 96, 128, 192, 256}) {
    cases.push_back(attention_case("causal", head_dim, DType::f16, 128, {.causal = true}));
    cases.push_back(attention_case("full", head_dim, DType::bf16, 128, {}));
  }
  for (const std::int64_t head_dim : {64, 128, 192}) {
    cases.push_back(attention_case("without keys", head_dim, DType::bf16, 0, {}));
    cases.push_back(attention_case("causal from the first key", head_dim, DType::bf16, 300, {.causal = true, .causal_offset = 0}));
    cases.push_back(attention_case("window", head_dim, DType::bf16, 1500, {.causal = true, .window_left = 64}));
    cases.push_back(packed_case(head_dim, false));
    cases.push_back(packed_case(head_dim, true));
  }
  expect_all_repeatable(cases);
}

TEST(Repetition, cuda_Decoding) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t head_dim : {64, 128, 192}) {
    for (const int splits : {1, 4}) {
      const std::int64_t batch = 256, heads = 8, kv_heads = 2, capacity = 512;
      std::vector<std::int32_t> lengths(static_cast<std::size_t>(batch));
      std::mt19937_64 random = random_engine();
      for (std::int32_t& length : lengths) length = 1 + static_cast<std::int32_t>(random() % 512);
      const Shape cache{batch, capacity, kv_heads, head_dim};
      const SharedInputs in = std::make_shared<Inputs>(
          std::vector{Tensor::random({batch, 2, heads, head_dim}, DType::bf16, seed()), Tensor::random(cache, DType::bf16, seed() + 1),
                      Tensor::random(cache, DType::bf16, seed() + 2), Tensor::from(std::span<const std::int32_t>(lengths), {batch})});
      cases.push_back({tw::format("decode: head dimension {}, {} splits", head_dim, splits),
                       {batch, 2, heads, head_dim},
                       DType::bf16,
                       [in, splits](const Tensor& out, const Stream& stream) {
                         const std::vector<Tensor>& t = in->on(stream.device());
                         attention_decode(t[0], t[1], t[2], out, {.seqlens = &t[3], .num_splits = splits},
                                          {.causal = true, .stream = stream});
                       }});
    }
    const SharedInputs parts = inputs({{5, 16, 8, 32, head_dim}, {5, 16, 8, 32}}, DType::f32);
    cases.push_back({tw::format("combine: head dimension {}", head_dim),
                     {16, 32, 8, head_dim},
                     DType::bf16,
                     [parts](const Tensor& out, const Stream& stream) {
                       const std::vector<Tensor>& t = parts->on(stream.device());
                       kernels::attention::combine({.parts = t[0], .part_lse = t[1], .o = out}, stream);
                     }});
  }
  expect_all_repeatable(cases);
}

}  // namespace
}  // namespace tw::test
