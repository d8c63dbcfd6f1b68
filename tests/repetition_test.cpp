// Races give wrong results only once in a while, so a test that looks once does not find them. Here every way in which results leave a
// GPU's blocks runs 200 times, with many short tiles for each block, into poisoned outputs, while another stream copies memory.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/attention/call.hpp"
#include "kernels/block_sparse_gemm/kernels.hpp"
#include "kernels/convolution/variants.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/grouped_gemm/kernels.hpp"
#include "kernels/sparse_gemm/kernels.hpp"
#include "runtime/cuda_driver.hpp"
#include "runtime/format.hpp"
#include "runtime/gpu.hpp"
#include "runtime/stream.hpp"
#include "tests/differences.tile.hpp"
#include "tests/language_launches.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/bitnet.hpp"
#include "tilewave/block_sparse_gemm.hpp"
#include "tilewave/causal_conv1d.hpp"
#include "tilewave/convolution.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/gated_delta.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/grouped_gemm.hpp"
#include "tilewave/hadamard.hpp"
#include "tilewave/indexer.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/linear_attention.hpp"
#include "tilewave/mamba2.hpp"
#include "tilewave/mamba2_chunks.hpp"
#include "tilewave/mla.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/nsa.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/sparse_gemm.hpp"
#include "tilewave/topk.hpp"
#include "tilewave/vertical_slash.hpp"

namespace tw::test {
namespace {

constexpr int kRepetitions = 200;

/// One call. Its inputs are the same on every device.
struct Case {
  std::string name;
  Shape shape;  ///< of the output; its bytes are a multiple of 1024
  DType dtype;
  std::function<void(const Tensor& out, const Stream& stream)> run;
  float tolerance = 0.03f;  ///< of the result on the CPU, absolute and relative; 0 where all arithmetic is exact
  bool adds = false;        ///< it adds to its output, which must be zero before

  Tensor output(const Stream& stream) const { return adds ? Tensor::zeros(shape, dtype, stream) : Tensor::poisoned(shape, dtype, stream); }
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

/// Compares tensors on the CPU. The default tolerance allows for narrow types and for sums in another order: it finds wrong rows, not wrong
/// bits. NaN is expected where the CPU has it: in what NaN inputs reach, and in rows that must not be written.
void expect_close(const Tensor& got, const Tensor& expected, float tolerance) {
  const auto as_f32 = [](const Tensor& t) { return t.dtype() == DType::f32 ? t : t.to(DType::f32); };
  const Tensor a = as_f32(got), b = as_f32(expected);
  std::int64_t wrong = 0, first = -1;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const float x = a.data<float>()[i], y = b.data<float>()[i];
    const bool close = std::isnan(y) ? std::isnan(x) : x == y || std::abs(x - y) <= tolerance + tolerance * std::abs(y);
    if (!close) {
      if (first < 0) first = i;
      ++wrong;
    }
  }
  EXPECT_EQ(wrong, 0) << "elements differ from the CPU's, the first is number " << first;
}

void expect_repeatable(const Case& c, const Tensor& expected, const Stream& stream, Traffic& traffic) {
  SCOPED_TRACE(c.name);
  const Tensor first = c.output(stream);
  c.run(first, stream);
  const Tensor words = as_words(first);
  const Tensor counts = Tensor::zeros({words.shape(0), 1}, DType::f32, stream);
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    traffic.copy();
    const Tensor out = c.output(stream);
    c.run(out, stream);
    launch<Differences>(stream, {.m = ceil_div(static_cast<int>(words.shape(0)), 4)}, [&](auto& bind, auto& p) {
      bind(p.a, words);
      bind(p.b, as_words(out));
      bind(p.counts, counts);
    });
  }
  stream.synchronize();
  expect_close(first.to(Device::cpu()), expected, c.tolerance);
  const Tensor differing = counts.to(Device::cpu());
  const double words_differing = std::accumulate(differing.data<float>(), differing.data<float>() + differing.numel(), 0.0);
  EXPECT_EQ(words_differing, 0) << "words of " << kRepetitions << " repetitions differ from the first run's";
}

void expect_all_repeatable(const std::vector<Case>& cases) {
  const Device device = cuda_device()->device;
  const Device cpu = Device::cpu();
  std::vector<Tensor> expected;
  for (const Case& c : cases) {
    expected.push_back(c.output(Stream::standard(cpu)));
    c.run(expected.back(), Stream::standard(cpu));
  }
  {
    // Kernels take a second or more to compile: compile them side by side.
    std::vector<std::jthread> first_calls;
    for (const Case& c : cases) {
      first_calls.emplace_back([&c, device] {
        const Stream stream(device);
        try {
          c.run(c.output(stream), stream);
        } catch (const Error&) {
          // The next call throws it again, where it is reported.
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

/// Few rows through several layers whose weights are constant: each product reads its weight while the one before still runs, but not its
/// result.
Case chain_case(std::int64_t rows) {
  constexpr std::int64_t width = 1024;
  constexpr std::size_t layers = 6;
  std::vector<Shape> shapes(layers, {width, width});
  shapes.push_back({rows, width});
  const SharedInputs in = inputs(std::move(shapes), DType::bf16);
  return {tw::format("gemm chain of {} rows", rows), {rows, width}, DType::bf16, [in, rows](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            Tensor x = t.back();
            for (std::size_t i = 0; i < layers; ++i) {
              const Tensor y = i + 1 == layers ? out : Tensor::poisoned({rows, width}, DType::bf16, stream);
              gemm(x, t[i].transpose(0, 1), y, {.alpha = 1.0f / 32, .stream = stream, .constant_b = true});
              x = y;
            }
          }};
}

TEST(Repetition, cuda_MatrixProducts) {
  skip_without_cuda();
  std::vector<Case> cases;
  // Each tile width, one and two steps, and none.
  const std::int64_t generic_shared = kernels::generic_shared_bytes(Stream::standard(Device::cuda()));
  const std::vector<kernels::gemm::Config> tiles = kernels::gemm::configs(generic_shared);
  for (int config = 0; config < static_cast<int>(tiles.size()); ++config) {
    const std::int64_t n = tiles[static_cast<std::size_t>(config)].bn;
    cases.push_back(gemm_case({"one step", 65536, n, 16, config}));
    cases.push_back(gemm_case({"two steps", 32768, n, 128, config}));
    cases.push_back(gemm_case({"no step", 16384, n, 0, config}));
    cases.push_back(gemm_case({"f16", 32768, n, 64, config, 1, DType::f16}));
    if (tiles[static_cast<std::size_t>(config)].cluster == 1 && tiles[static_cast<std::size_t>(config)].teams == 1) {
      cases.push_back(gemm_case({"shares of K", 1500, 1280, 1280, config, kStreamK}));
      cases.push_back(gemm_case({"shares of K, many tiles", 4160, 10 * n, 128, config, kStreamK}));
    }
    cases.push_back(gemm_case({"tails", 32767 + 1 - 64, n + 64, 64, config}));
    if (tiles[static_cast<std::size_t>(config)].teams > 1) {
      cases.push_back(gemm_case({"teams", 32768, 3 * n, 192, config}));
      continue;
    }
    cases.push_back(gemm_case({"swiglu", 32768, n, 32, config, 1, DType::bf16, Activation::swiglu}));
    if (generic_shared == 0 && n <= 192)
      cases.push_back(gemm_case({"sums that begin with a residual", 32768, n, 192, config, 1, DType::bf16, Activation::none, true}));
  }
  const int narrowest = static_cast<int>(tiles.size()) - 1;
  for (const int config : {narrowest - 1, narrowest})
    cases.push_back(gemm_case({"residual", 32768, 128, 32, config, 1, DType::bf16, Activation::none, true}));
  cases.push_back(gemm_case({"split", 4096, 192, 512, narrowest - 2, 4}));
  cases.push_back(gemm_case({"split", 4096, 128, 512, narrowest - 1, 2}));
  cases.push_back(gemm_case({"few rows", 16, 32768, 128, -1}));
  cases.push_back(gemm_case({"few rows, split", 16, 32768, 128, -1, 2}));
  for (const int rows : {3, 16}) cases.push_back(chain_case(rows));
  cases.push_back(gemm_case({"one row", 1, 32768, 256, -1}));
  cases.push_back(gemm_case({"tf32", 32768, 128, 32, narrowest - 1, 1, DType::f32}));
  expect_all_repeatable(cases);
}

/// Groups of many sizes, of which each tile's last rows are often the next group's.
Tensor ragged_offsets(std::int64_t groups, std::int64_t rows) {
  std::vector<std::int32_t> offsets;
  std::mt19937_64 random(seed());
  for (std::int64_t i = 1; i < groups; ++i) offsets.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(rows)));
  offsets.push_back(0);
  offsets.push_back(static_cast<std::int32_t>(rows));
  std::sort(offsets.begin(), offsets.end());
  return Tensor::from(std::span<const std::int32_t>(offsets), {groups + 1});
}

Case grouped_gemm_case(std::int64_t groups, std::int64_t m, std::int64_t n, std::int64_t k, int config, Activation activation) {
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{
      Tensor::random({m, k}, DType::bf16, seed()), Tensor::random({groups, n, k}, DType::bf16, seed() + 1), ragged_offsets(groups, m)});
  return {tw::format("grouped_gemm: {} groups, {} x {} x {}, config {}", groups, m, n, k, config),
          {m, activation == Activation::swiglu ? n / 2 : n},
          DType::bf16,
          [in, config, activation](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            grouped_gemm(t[0], t[1].transpose(1, 2), t[2], out,
                         {.activation = activation, .stream = stream, .config = stream.device().is_cuda() ? config : -1});
          }};
}

Case k_grouped_gemm_case(std::int64_t groups, std::int64_t m, std::int64_t n, std::int64_t k, int config, DType out_dtype,
                         bool accumulate) {
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{Tensor::random({k, m}, DType::bf16, seed()),
                                                               Tensor::random({k, n}, DType::bf16, seed() + 1), ragged_offsets(groups, k)});
  return {tw::format("k_grouped_gemm: {} groups, {} x {} x {}, config {}", groups, m, n, k, config),
          {groups, m, n},
          out_dtype,
          [in, config, accumulate](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            k_grouped_gemm(t[0].transpose(0, 1), t[1], t[2], out,
                           {.accumulate = accumulate, .stream = stream, .config = stream.device().is_cuda() ? config : -1});
          },
          0.03f,
          accumulate};
}

TEST(Repetition, cuda_GroupedProducts) {
  skip_without_cuda();
  std::vector<Case> cases;
  const std::vector<kernels::CostedTile> tiles =
      kernels::grouped_gemm::configs(kernels::generic_shared_bytes(Stream::standard(Device::cuda())));
  for (const std::size_t config : {std::size_t{0}, std::size_t{3}, std::size_t{4}, tiles.size() - 1}) {
    const int index = static_cast<int>(std::min(config, tiles.size() - 1)), n = tiles[static_cast<std::size_t>(index)].bn;
    cases.push_back(grouped_gemm_case(300, 16384, n, 64, index, Activation::none));
    cases.push_back(grouped_gemm_case(40, 16384, n, 136, index, Activation::swiglu));
    if (n % 64 != 0) continue;
    cases.push_back(k_grouped_gemm_case(64, 256, n, 3000, index, DType::bf16, false));
    if (n <= 128) cases.push_back(k_grouped_gemm_case(64, 256, n, 3000, index, DType::f32, true));
  }
  expect_all_repeatable(cases);
}

/// A 2:4 sparse weight, whose result leaves transposed, or its product with x^T.
Case sparse_case(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, bool linear, int config) {
  struct Weight {
    SparseMatrix host, device = {};
    std::mutex mutex = {};
  };
  const auto weight = std::make_shared<Weight>();
  Tensor w = Tensor::random({n, k}, DType::f32, seed()), x = Tensor::random({m, k}, DType::f32, seed() + 1);
  if (dtype == DType::i8) {  // integers from -8 to 7
    for (const Tensor& t : {w, x})
      for (std::int64_t i = 0; i < t.numel(); ++i) t.data<float>()[i] = std::floor(8 * t.data<float>()[i]);
  }
  w = w.to(dtype);
  prune_2_4(w, w);
  weight->host = SparseMatrix::allocate(n, k, dtype);
  compress_2_4(w, weight->host);
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{x.to(dtype)});
  const Shape shape = linear ? Shape{m, n} : Shape{n, m};
  return {tw::format("sparse_{}: {} x {} x {}, {}, config {}", linear ? "linear" : "gemm", m, n, k, name_of(dtype), config), shape,
          kernels::gemm::result_of(dtype),
          [=](const Tensor& out, const Stream& stream) {
            const bool on_gpu = stream.device().is_cuda();
            const SparseGemmOptions options{.stream = stream, .config = on_gpu ? config : -1};
            const Tensor& of_x = in->on(stream.device())[0];
            const std::lock_guard lock(weight->mutex);
            if (on_gpu && weight->device.values.numel() == 0)
              weight->device = {weight->host.values.to(stream.device()), weight->host.metadata.to(stream.device())};
            const SparseMatrix& matrix = on_gpu ? weight->device : weight->host;
            linear ? sparse_linear(of_x, matrix, out, options) : sparse_gemm(matrix, of_x.transpose(0, 1), out, options);
          },
          dtype == DType::i8 ? 0.0f : 0.03f};
}

TEST(Repetition, cuda_SparseProducts) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const DType dtype : {DType::bf16, DType::i8}) {
    const auto tiles =
        kernels::sparse_gemm::configs(kernels::generic_shared_bytes(Stream::standard(Device::cuda())), static_cast<int>(size_of(dtype)));
    for (int config = 0; config < static_cast<int>(tiles.size()); ++config) {
      cases.push_back(sparse_case(2048, 1024, 264, dtype, true, config));
      cases.push_back(sparse_case(1024, 2048, 1000, dtype, false, config));
    }
  }
  expect_all_repeatable(cases);
}

/// Masks of A and of D, which hide half of the blocks each.
Case block_sparse_case(std::int64_t m, std::int64_t n, std::int64_t k, int config) {
  constexpr std::int64_t kBlock = 256;
  const auto mask = [](std::int64_t rows, std::int64_t cols, std::int64_t step) {
    std::vector<std::uint8_t> values;
    for (std::int64_t i = 0; i < rows * cols; ++i) values.push_back(i * step % 5 % 2 == 0);
    return Tensor::from(std::span<const std::uint8_t>(values), {rows, cols});
  };
  const auto in = std::make_shared<Inputs>(
      std::vector<Tensor>{Tensor::random({m, k}, DType::bf16, seed()), Tensor::random({n, k}, DType::bf16, seed() + 1),
                          mask(m / kBlock, (k + kBlock - 1) / kBlock, 3), mask(m / kBlock, (n + kBlock - 1) / kBlock, 7)});
  return {tw::format("block_sparse_gemm: {} x {} x {}, config {}", m, n, k, config),
          {m, n},
          DType::bf16,
          [in, config](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            block_sparse_gemm(
                t[0], t[1].transpose(0, 1), out,
                {.block = kBlock, .a_mask = &t[2], .d_mask = &t[3], .stream = stream, .config = stream.device().is_cuda() ? config : -1});
          }};
}

TEST(Repetition, cuda_BlockSparseProducts) {
  skip_without_cuda();
  std::vector<Case> cases;
  const auto tiles = kernels::block_sparse_gemm::configs(kernels::generic_shared_bytes(Stream::standard(Device::cuda())));
  for (int config = 0; config < static_cast<int>(tiles.size()); ++config) {
    const auto& tile = tiles[static_cast<std::size_t>(config)];
    if (256 % tile.bm == 0 && 256 % tile.bn == 0) cases.push_back(block_sparse_case(4096, 1024, 1000, config));
  }
  expect_all_repeatable(cases);
}

/// A weight in fewer bits, which is decoded on its way to the tensor cores; results leave transposed.
Case dequant_gemm_case(std::int64_t m, std::int64_t n, std::int64_t k, const QuantizedMatrix::Layout& layout, bool accumulate = false) {
  struct Weight {
    QuantizedMatrix host, device = {};
    std::mutex mutex = {};
  };
  const SharedInputs in = inputs({{m, k}}, DType::bf16);
  const Tensor values = Tensor::random({n, k}, DType::f32, seed());
  const float size = std::sqrt(256.0f / static_cast<float>(k));  // elements of the product are about 16, for any k
  for (float& x : std::span(values.data<float>(), static_cast<std::size_t>(values.numel()))) x *= size;
  const auto weight = std::make_shared<Weight>(quantize(values, layout));
  return {tw::format("dequant_gemm of {}: {} x {} x {}", text_of(layout), m, n, k),
          {m, n},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const DequantGemmOptions options{.accumulate = accumulate, .stream = stream};
            const Tensor& x = in->on(stream.device())[0];
            if (stream.device() == Device::cpu()) {
              // The weight as it is stored: dequant_gemm() would round few rows of x to 8 bits on a CPU, and gemm() in bf16 the weight.
              const Tensor wide = Tensor::empty({n, k}, DType::f32), product = Tensor::empty({m, n}, DType::f32);
              dequantize(weight->host, wide);
              gemm(x.to(DType::f32), wide.transpose(0, 1), product, {.stream = stream});
              std::copy_n(product.to(DType::bf16).data<bf16>(), out.numel(), out.data<bf16>());  // the case that adds begins with zeros
              return;
            }
            const std::lock_guard lock(weight->mutex);
            if (weight->device.empty()) weight->device = weight->host.to(stream.device());
            dequant_gemm(x, weight->device, out, options);
          },
          0.25f,  // many kernels round the weight to bf16 as they decode it
          accumulate};
}

/// The same with x in 8-bit integers.
Case w4a8_case(std::int64_t m, std::int64_t n, std::int64_t k, bool zeros) {
  struct Operands {
    Tensor x, x_scales;
    QuantizedMatrix weight;
    Operands to(Device device) const { return {x.to(device), x_scales.to(device), weight.to(device)}; }
  };
  struct Shared {
    Operands host;
    std::optional<Operands> device = {};
    std::mutex mutex = {};
  };
  const Tensor drawn = Tensor::random({m, k}, DType::f32, seed()), x = Tensor::empty({m, k}, DType::i8);
  for (std::int64_t i = 0; i < x.numel(); ++i)
    x.data<std::int8_t>()[i] = static_cast<std::int8_t>(std::clamp(32 * drawn.data<float>()[i], -127.0f, 127.0f));
  const Tensor x_scales = Tensor::empty({m}, DType::f32), values = Tensor::random({n, k}, DType::f32, seed() + 1);
  std::fill_n(x_scales.data<float>(), m, 0.5f / std::sqrt(static_cast<float>(k)));  // elements of the product are about 16, for any k
  const auto shared = std::make_shared<Shared>(Operands{x, x_scales, quantize(values, {WeightFormat::int4, 128, zeros})});
  return {tw::format("dequant_gemm of 8-bit integers and int4, zero points {}: {} x {} x {}", zeros, m, n, k),
          {m, n},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            if (stream.device() == Device::cpu()) {
              const Tensor wide = Tensor::empty({n, k}, DType::f32), product = Tensor::empty({m, n}, DType::f32);
              dequantize(shared->host.weight, wide);
              const Tensor rows = Tensor::empty({m, k}, DType::f32);
              for (std::int64_t i = 0; i < rows.numel(); ++i)
                rows.data<float>()[i] = static_cast<float>(x.data<std::int8_t>()[i]) * x_scales.data<float>()[i / k];
              gemm(rows, wide.transpose(0, 1), product, {.stream = stream});
              std::copy_n(product.to(DType::bf16).data<bf16>(), out.numel(), out.data<bf16>());
              return;
            }
            const std::lock_guard lock(shared->mutex);
            if (!shared->device) shared->device = shared->host.to(stream.device());
            dequant_gemm(shared->device->x, shared->device->weight, out, {.stream = stream, .x_scales = &shared->device->x_scales});
          },
          0.25f};
}

TEST(Repetition, cuda_ProductsWithPackedWeights) {
  skip_without_cuda();
  std::vector<Case> cases;
  using enum WeightFormat;
  for (const QuantizedMatrix::Layout& layout : {QuantizedMatrix::Layout{int8}, {int4, 32, true}, {int4, 128}, {nf4}, {mxfp4}}) {
    cases.push_back(dequant_gemm_case(4096, 1024, 256, layout));
    cases.push_back(dequant_gemm_case(64, 8192, 256, layout));
    cases.push_back(dequant_gemm_case(24, 4096, 1024, layout));
  }
  cases.push_back(dequant_gemm_case(1000, 512, 512, {int4, 32}, true));
  for (const bool zeros : {false, true}) {
    cases.push_back(w4a8_case(4096, 1024, 256, zeros));
    cases.push_back(w4a8_case(64, 8192, 512, zeros));
    cases.push_back(w4a8_case(24, 4096, 1024, zeros));
  }
  // Few rows: a ring of codes, scales from the cache.
  for (const QuantizedMatrix::Layout& layout : {QuantizedMatrix::Layout{int8}, {int4, 32, true}, {int2, 32}, {nf4}, {fp4}, {mxfp4}}) {
    cases.push_back(dequant_gemm_case(1, 9216, 2048, layout));
    cases.push_back(dequant_gemm_case(16, 2048, 2048, layout));
  }
  expect_all_repeatable(cases);
}

/// A BitNet layer: rows rounded to integers, times a ternary weight.
Case bit_linear_case(std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate = false) {
  struct Weight {
    TernaryMatrix host, device = {};
    std::mutex mutex = {};
  };
  const SharedInputs in = inputs({{m, k}}, DType::bf16);
  const auto weight = std::make_shared<Weight>(quantize_ternary(Tensor::random({n, k}, DType::f32, seed())));
  return {tw::format("bit_linear: {} x {} x {}", m, n, k),
          {m, n},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const BitLinearOptions options{.accumulate = accumulate, .stream = stream};
            const Tensor& x = in->on(stream.device())[0];
            if (stream.device() == Device::cpu()) return bit_linear(x, weight->host, out, options);
            const std::lock_guard lock(weight->mutex);
            if (weight->device.empty()) weight->device = weight->host.to(stream.device());
            bit_linear(x, weight->device, out, options);
          },
          accumulate ? 0.25f : 0.0f,  // the same integers and the same two products: every bit
          accumulate};
}

TEST(Repetition, cuda_ProductsWithTernaryWeights) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t m : {1, 16, 24, 64, 100, 4096}) {
    cases.push_back(bit_linear_case(m, m < 100 ? 4096 : 1024, 640));
    cases.push_back(bit_linear_case(m, 1024, 2560, true));
  }
  expect_all_repeatable(cases);
}

/// A causal convolution, and the gradients of its input and of its filter.
Case causal_conv1d_case(std::int64_t seqlen, std::int64_t channels, bool backward, bool of_weight = false) {
  const SharedInputs in = inputs({{2, seqlen, channels}, {2, seqlen, channels}, {channels, 4}}, DType::bf16);
  return {tw::format("causal_conv1d: {} x {} backward {} of the weight {}", seqlen, channels, backward, of_weight),
          of_weight ? Shape{channels, 4} : Shape{2, seqlen, channels}, DType::bf16, [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            if (!backward) return causal_conv1d(t[0], t[2], out, {.silu = true, .stream = stream});
            if (!of_weight) return causal_conv1d_backward(t[1], t[0], t[2], out, {.silu = true, .stream = stream});
            const Tensor dx = Tensor::poisoned(t[0].shape(), DType::bf16, stream);
            causal_conv1d_backward(t[1], t[0], t[2], dx, {.silu = true, .d_weight = &out, .stream = stream});
          }};
}

/// The gated delta rule without gates or with those of channels, in chunks or token by token. The scale makes results about as large as
/// values.
Case gated_delta_case(std::int64_t seqlen, std::int64_t heads, std::int64_t dim, bool steps, bool channels) {
  const Shape shape{2, seqlen, heads, dim};
  std::vector<Tensor> host;
  for (int i = 0; i < 3; ++i) host.push_back(Tensor::random(shape, DType::bf16, seed() + static_cast<std::uint64_t>(i)));
  host.push_back(Tensor::empty({2, seqlen, heads}, DType::bf16));
  std::fill_n(host[3].data<bf16>(), host[3].numel(), bf16(0.5f));
  host.push_back(Tensor::empty(shape, DType::f32));
  std::fill_n(host[4].data<float>(), host[4].numel(), -0.02f);
  const auto in = std::make_shared<Inputs>(std::move(host));
  return {tw::format("gated_delta_rule: {} tokens, {} heads of {}, steps {}, gates of channels {}", seqlen, heads, dim, steps, channels),
          shape, DType::bf16, [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const Tensor* const g = channels ? &t[4] : nullptr;
            if (!steps)
              return gated_delta_rule(t[0], t[1], t[2], t[3], out, {.g = g, .scale = 2.0f, .normalise_qk = true, .stream = stream});
            const Tensor state = Tensor::zeros({2, heads, dim, dim}, DType::f32, stream);
            gated_delta_rule_step(t[0], t[1], t[2], t[3], state, out, {.g = g, .scale = 2.0f, .normalise_qk = true, .stream = stream});
          }};
}

/// The gradient with respect to q, k or v, of two heads for each of q and k.
Case gated_delta_backward_case(std::int64_t seqlen, std::int64_t heads, std::int64_t dim, std::size_t gradient, bool channels) {
  const Shape keys{2, seqlen, heads, dim}, values{2, seqlen, 2 * heads, dim}, of_tokens{2, seqlen, 2 * heads};
  const Shape gates = channels ? values : of_tokens;
  std::vector<Tensor> host{Tensor::random(keys, DType::bf16, seed()),       Tensor::random(keys, DType::bf16, seed() + 1),
                           Tensor::random(values, DType::bf16, seed() + 2), Tensor::random(values, DType::bf16, seed() + 3),
                           Tensor::empty(of_tokens, DType::bf16),           Tensor::empty(gates, DType::f32)};
  std::fill_n(host[4].data<bf16>(), host[4].numel(), bf16(0.5f));
  std::fill_n(host[5].data<float>(), host[5].numel(), -0.02f);
  const auto in = std::make_shared<Inputs>(std::move(host));
  const Shape shape = gradient == 2 ? values : keys;
  return {tw::format("gated_delta_rule_backward: {} tokens, {} heads of {}, gradient {}, gates of channels {}", seqlen, heads, dim,
                     gradient, channels),
          shape, DType::bf16, [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            Tensor to[3];
            for (std::size_t i = 0; i < 3; ++i) to[i] = i == gradient ? out : Tensor::empty(i == 2 ? values : keys, DType::bf16, stream);
            const Tensor d_beta = Tensor::empty(of_tokens, DType::bf16, stream), dg = Tensor::empty(gates, DType::f32, stream);
            gated_delta_rule_backward(t[0], t[1], t[2], t[4], t[3], to[0], to[1], to[2], d_beta,
                                      {.g = &t[5], .normalise_qk = true, .dg = &dg, .stream = stream});
          }};
}

TEST(Repetition, cuda_Recurrences) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t channels : {1024, 1536}) {
    for (const std::int64_t seqlen : {16, 500}) {
      cases.push_back(causal_conv1d_case(seqlen, channels, false));
      cases.push_back(causal_conv1d_case(seqlen, channels, true));
      cases.push_back(causal_conv1d_case(seqlen, channels, true, true));
    }
  }
  for (const std::int64_t dim : {64, 128}) {
    for (const bool channels : {false, true}) {
      for (const std::int64_t seqlen : {64, 200}) cases.push_back(gated_delta_case(seqlen, 4, dim, false, channels));
      cases.push_back(gated_delta_case(4, 4, dim, true, channels));
      for (const std::size_t gradient : {0, 1, 2}) cases.push_back(gated_delta_backward_case(200, 4, dim, gradient, channels));
    }
  }
  cases.push_back(gated_delta_case(200, 4, 256, false, false));
  cases.push_back(gated_delta_case(4, 4, 256, true, false));
  for (const std::size_t gradient : {0, 1, 2}) cases.push_back(gated_delta_backward_case(200, 4, 256, gradient, false));
  expect_all_repeatable(cases);
}

/// Linear attention, or its gradient with respect to q, k or v.
Case recurrence_case(std::int64_t seqlen, std::int64_t heads, std::int64_t dim, DType dtype, int gradient) {
  const Shape shape{2, seqlen, heads, dim};
  std::vector<float> decay(static_cast<std::size_t>(heads));
  for (std::size_t i = 0; i < decay.size(); ++i) decay[i] = -0.02f * static_cast<float>(i);
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{
      Tensor::random(shape, dtype, seed()), Tensor::random(shape, dtype, seed() + 1), Tensor::random(shape, dtype, seed() + 2),
      Tensor::random(shape, dtype, seed() + 3), Tensor::from<float>(decay, {heads})});
  return {tw::format("linear_attention of {} steps, {} heads, Dk and Dv {}, {}, gradient {}", seqlen, heads, dim, name_of(dtype), gradient),
          shape, dtype, [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            if (gradient < 0) return linear_attention(t[0], t[1], t[2], out, {.scale = 1.0f / 64, .g = &t[4], .stream = stream});
            Tensor to[3];
            for (int i = 0; i < 3; ++i) to[i] = i == gradient ? out : Tensor::empty(shape, dtype, stream);
            linear_attention_backward(t[0], t[1], t[2], t[3], to[0], to[1], to[2], {.scale = 1.0f / 64, .g = &t[4], .stream = stream});
          }};
}

TEST(Repetition, cuda_LinearAttention) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t dim : {64, 128, 256})
    for (const int gradient : {-1, 0, 1, 2}) cases.push_back(recurrence_case(200, 16, dim, DType::bf16, gradient));
  cases.push_back(recurrence_case(2000, 4, 128, DType::f16, -1));
  cases.push_back(recurrence_case(40, 4, 64, DType::f32, 1));
  expect_all_repeatable(cases);
}

/// Random numbers of an eighth of the usual size, or another part: of sums over all steps and states they make results about as large as
/// values. The CPU's operands are rounded to the dtype as the GPU's are, but one that lies between two numbers may become the other.
Tensor small(const Shape& shape, DType dtype, std::uint64_t which, float part = 1.0f / 8) {
  const Tensor values = Tensor::random(shape, DType::f32, seed() + which);
  for (float& v : std::span(values.data<float>(), static_cast<std::size_t>(values.numel()))) v *= part;
  return values.to(dtype);
}

/// Mamba-2: its outputs, or the gradient of x, dt, B, C or z.
Case mamba2_case(std::int64_t seqlen, std::int64_t heads, std::int64_t dim, DType dtype, int gradient) {
  constexpr std::int64_t kState = 128;
  const Shape of_x{2, seqlen, heads, dim}, of_steps{2, seqlen, heads}, of_keys{2, seqlen, 2, kState};
  const std::vector<Shape> shapes{of_x, of_steps, of_keys, of_keys, of_x};
  std::vector<float> rates(static_cast<std::size_t>(heads));
  for (std::size_t i = 0; i < rates.size(); ++i) rates[i] = -0.1f * static_cast<float>(i);
  // Sums over the states are larger than x, and the gradients of B and C add up those of several heads: with larger operands roundings of
  // their parts alone come to the tolerance.
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{
      small(of_x, dtype, 0), Tensor::random(of_steps, dtype, seed() + 1), small(of_keys, dtype, 2), small(of_keys, dtype, 3),
      Tensor::random(of_x, dtype, seed() + 4), small(of_x, dtype, 5, 1.0f / 16), Tensor::from<float>(rates, {heads})});
  return {tw::format("mamba2 of {} steps, {} heads of {}, {}, gradient {}", seqlen, heads, dim, name_of(dtype), gradient),
          gradient < 0 ? of_x : shapes[static_cast<std::size_t>(gradient)], dtype, [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const Tensor &x = t[0], &dt = t[1], &b = t[2], &c = t[3], &z = t[4], &rate = t[6];
            if (gradient < 0) return mamba2(x, dt, rate, b, c, out, {.d = &rate, .z = &z, .dt_softplus = true, .stream = stream});
            Tensor to[5];
            for (std::size_t i = 0; i < 5; ++i) to[i] = static_cast<int>(i) == gradient ? out : Tensor::empty(shapes[i], dtype, stream);
            mamba2_backward(x, dt, rate, b, c, t[5], to[0], to[1], to[2], to[3],
                            {.d = &rate, .z = &z, .dt_softplus = true, .dz = &to[4], .stream = stream});
          }};
}

/// A decoding step from a state of zeros.
Case mamba2_step_case(std::int64_t heads, std::int64_t dim, DType states) {
  constexpr std::int64_t kState = 128;
  const DType dtype = DType::bf16;
  const Shape of_x{3, 1, heads, dim};
  std::vector<float> rates(static_cast<std::size_t>(heads), -0.5f);
  const auto in = std::make_shared<Inputs>(
      std::vector<Tensor>{Tensor::random(of_x, dtype, seed()), Tensor::random({3, 1, heads}, dtype, seed() + 1),
                          Tensor::random({3, 1, 2, kState}, dtype, seed() + 2), Tensor::from<float>(rates, {heads})});
  return {tw::format("mamba2_step of {} heads of {}, states {}", heads, dim, name_of(states)), of_x, dtype,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const Tensor state = Tensor::zeros({3, heads, dim, kState}, states, stream);
            mamba2_step(t[0], t[1], t[3], t[2], t[2], state, out, {.d = &t[3], .z = &t[0], .dt_softplus = true, .stream = stream});
          }};
}

/// The scan in five steps, whose results are written over memory of NaN.
Case mamba2_chunks_case(std::int64_t seqlen, std::int64_t heads, std::int64_t chunk_size, DType dtype) {
  constexpr std::int64_t kDim = 64, kState = 128;
  const Shape of_x{2, seqlen, heads, kDim}, of_keys{2, seqlen, 2, kState};
  const std::int64_t chunks = ceil_div(seqlen, chunk_size);
  const Shape of_steps{2, heads, chunks, chunk_size}, of_states{2, chunks, heads, kDim, kState};
  std::vector<float> rates(static_cast<std::size_t>(heads));
  for (std::size_t i = 0; i < rates.size(); ++i) rates[i] = -0.1f * static_cast<float>(i);
  const auto in = std::make_shared<Inputs>(
      std::vector<Tensor>{small(of_x, dtype, 0), Tensor::random({2, seqlen, heads}, dtype, seed() + 1), small(of_keys, dtype, 2),
                          small(of_keys, dtype, 3), Tensor::random(of_x, dtype, seed() + 4), Tensor::from<float>(rates, {heads})});
  return {tw::format("mamba2 in five steps, {} steps, {} heads, chunks of {}, {}", seqlen, heads, chunk_size, name_of(dtype)), of_x, dtype,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const auto room = [&](const Shape& shape, DType type) { return Tensor::poisoned(shape, type, stream); };
            const Tensor sums = room(of_steps, DType::f32), sizes = room(of_steps, DType::f32), added = room(of_states, DType::f32);
            const Tensor states = room(of_states, dtype), cb = room({2, chunks, 2, chunk_size, chunk_size}, DType::f32);
            mamba2_chunk_cumsum(t[1], t[5], sums, sizes, {.dt_softplus = true, .stream = stream});
            mamba2_chunk_state(t[2], t[0], sizes, sums, added, stream);
            mamba2_state_passing(added, sums.select(3, static_cast<int>(chunk_size) - 1), states, {.stream = stream});
            mamba2_bmm_chunk(t[3], t[2], cb, {.causal = true, .stream = stream});
            mamba2_chunk_scan(cb, t[0], sizes, sums, t[3], states, out, {.d = &t[5], .z = &t[4], .stream = stream});
          }};
}

/// The gradients of the five steps, one after the other. Which of x's shape is compared: of chunk_scan, chunk_state; or of C's: of
/// bmm_chunk, chunk_scan, chunk_state.
Case mamba2_chunk_gradients_case(std::int64_t seqlen, std::int64_t heads, std::int64_t chunk_size, DType dtype, int gradient) {
  constexpr std::int64_t kDim = 64, kState = 128;
  const Shape of_x{2, seqlen, heads, kDim}, of_keys{2, seqlen, 2, kState};
  const std::int64_t chunks = ceil_div(seqlen, chunk_size);
  const Shape of_steps{2, heads, chunks, chunk_size}, of_states{2, chunks, heads, kDim, kState};
  std::vector<float> rates(static_cast<std::size_t>(heads));
  for (std::size_t i = 0; i < rates.size(); ++i) rates[i] = -0.1f * static_cast<float>(i);
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{
      small(of_x, dtype, 0), Tensor::random({2, seqlen, heads}, dtype, seed() + 1), small(of_keys, dtype, 2), small(of_keys, dtype, 3),
      Tensor::random(of_x, dtype, seed() + 4), Tensor::from<float>(rates, {heads}), small(of_x, dtype, 5, 1.0f / 16)});
  return {tw::format("gradient {} of mamba2 in five steps, {} steps, {} heads, chunks of {}, {}", gradient, seqlen, heads, chunk_size,
                     name_of(dtype)),
          gradient < 2 ? of_x : of_keys, dtype, [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const auto room = [&](const Shape& shape, DType type) { return Tensor::poisoned(shape, type, stream); };
            const auto f32 = [&](const Shape& shape) { return room(shape, DType::f32); };
            const auto or_room = [&](int which, const Tensor& like) { return which == gradient ? out : room(like.shape(), dtype); };
            const Tensor sums = f32(of_steps), sizes = f32(of_steps), added = f32(of_states), states = room(of_states, dtype);
            const Tensor cb = f32({2, chunks, 2, chunk_size, chunk_size}), ungated = room(of_x, dtype), y = room(of_x, dtype);
            const Tensor decays = sums.select(3, static_cast<int>(chunk_size) - 1);
            mamba2_chunk_cumsum(t[1], t[5], sums, sizes, {.dt_softplus = true, .stream = stream});
            mamba2_chunk_state(t[2], t[0], sizes, sums, added, stream);
            mamba2_state_passing(added, decays, states, {.stream = stream});
            mamba2_bmm_chunk(t[3], t[2], cb, {.causal = true, .stream = stream});
            mamba2_chunk_scan(cb, t[0], sizes, sums, t[3], states, y, {.z = &t[4], .ungated = &ungated, .stream = stream});
            const Tensor d_cb = f32(cb.shape()), d_sizes = f32(of_steps), d_sums = f32(of_steps), d_states = f32(of_states);
            const Tensor d_added = f32(of_states), d_decays = f32({2, heads, chunks}), dz = room(of_x, dtype), da = f32({heads});
            const Tensor d_dt = room(t[1].shape(), dtype);
            mamba2_chunk_scan_backward(cb, t[0], sizes, sums, t[3], states, t[6], d_cb, or_room(0, t[0]), d_sizes, d_sums, or_room(3, t[3]),
                                       d_states, {.z = &t[4], .ungated = &ungated, .dz = &dz, .stream = stream});
            mamba2_bmm_chunk_backward(t[3], t[2], d_cb, or_room(2, t[3]), room(of_keys, dtype), {.causal = true, .stream = stream});
            mamba2_state_passing_backward(states, decays, d_states, d_added, d_decays, {.stream = stream});
            mamba2_chunk_state_backward(t[2], t[0], sizes, sums, d_added, or_room(4, t[2]), or_room(1, t[0]), d_sizes, d_sums, stream);
            mamba2_chunk_cumsum_backward(t[1], t[5], d_sums, d_sizes, d_dt, {.dt_softplus = true, .da = &da, .stream = stream});
          }};
}

TEST(Repetition, cuda_Mamba2) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const int gradient : {-1, 0, 1, 2, 3, 4}) cases.push_back(mamba2_case(192, 8, 64, DType::bf16, gradient));
  for (const int gradient : {0, 1, 2, 3, 4}) cases.push_back(mamba2_case(640, 8, 64, DType::bf16, gradient));  // of several chunks
  cases.push_back(mamba2_case(600, 4, 128, DType::f16, -1));
  cases.push_back(mamba2_case(640, 4, 128, DType::f16, 1));
  cases.push_back(mamba2_case(64, 4, 64, DType::f32, 1));
  for (const DType states : {DType::f32, DType::bf16}) cases.push_back(mamba2_step_case(8, 64, states));
  cases.push_back(mamba2_chunks_case(600, 8, 256, DType::bf16));
  cases.push_back(mamba2_chunks_case(190, 4, 64, DType::f16));
  for (const int gradient : {0, 1, 2, 3, 4}) cases.push_back(mamba2_chunk_gradients_case(600, 8, 256, DType::bf16, gradient));
  cases.push_back(mamba2_chunk_gradients_case(190, 4, 64, DType::f16, 1));
  expect_all_repeatable(cases);
}

/// A whole layer: routing, the sort, both products and the sum of a token's experts.
Case moe_case(std::int64_t tokens, std::int64_t n_experts, int k) {
  constexpr std::int64_t hidden = 256, inner = 128;
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{Tensor::random({tokens, hidden}, DType::bf16, seed()),
                                                               Tensor::random({tokens, n_experts}, DType::f32, seed() + 1),
                                                               Tensor::random({n_experts, 2 * inner, hidden}, DType::bf16, seed() + 2),
                                                               Tensor::random({n_experts, hidden, inner}, DType::bf16, seed() + 3)});
  return {tw::format("fused_moe of {} tokens, {} experts", tokens, n_experts),
          {tokens, hidden},
          DType::bf16,
          [in, k](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            fused_moe(t[0], t[1], k, t[2], t[3], out, {.route = {.renormalise = true, .scale = 1.0f / 1024}, .stream = stream});
          },
          0.06f};
}

/// The same with weights of fp8_e4m3, a shared expert too. On the CPU the same numbers are cast.
Case fp8_moe_case(std::int64_t tokens, std::int64_t n_experts, int k) {
  constexpr std::int64_t hidden = 256, inner = 128;
  const auto codes = [](Shape shape, std::uint64_t s) { return Tensor::random(std::move(shape), DType::f32, s).to(DType::fp8_e4m3); };
  const auto scales = [](Shape shape) {
    const Tensor t = Tensor::empty(std::move(shape), DType::f32);
    for (std::int64_t i = 0; i < t.numel(); ++i) t.data<float>()[i] = 1.0f / 16;
    return t;
  };
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{
      Tensor::random({tokens, hidden}, DType::bf16, seed()), Tensor::random({tokens, n_experts}, DType::f32, seed() + 1),
      codes({n_experts, 2 * inner, hidden}, seed() + 2), codes({n_experts, hidden, inner}, seed() + 3),
      scales({n_experts, 2 * inner / 128, hidden / 128}), scales({n_experts, hidden / 128, inner / 128}),
      codes({2 * inner, hidden}, seed() + 4), codes({hidden, inner}, seed() + 5), scales({2 * inner / 128, hidden / 128}),
      scales({hidden / 128, inner / 128})});
  return {tw::format("fused_moe of {} tokens, {} experts of fp8", tokens, n_experts),
          {tokens, hidden},
          DType::bf16,
          [in, k](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const MoeExpertsOptions experts{.shared_gate_up = &t[6],
                                            .shared_down = &t[7],
                                            .gate_up_scale = &t[4],
                                            .down_scale = &t[5],
                                            .shared_gate_up_scale = &t[8],
                                            .shared_down_scale = &t[9]};
            fused_moe(t[0], t[1], k, t[2], t[3], out, {.route = {.renormalise = true}, .experts = experts, .stream = stream});
          },
          0.1f};
}

/// The same with weights of mxfp4.
Case packed_moe_case(std::int64_t tokens, std::int64_t n_experts, int k) {
  constexpr std::int64_t hidden = 256, inner = 128;
  const auto weight = [](std::int64_t rows, std::int64_t cols, std::uint64_t s) {
    return quantize(Tensor::random({rows, cols}, DType::f32, s), {WeightFormat::mxfp4});
  };
  const QuantizedMatrix gate_up = weight(n_experts * 2 * inner, hidden, seed() + 2), down = weight(n_experts * hidden, inner, seed() + 3);
  const auto in = std::make_shared<Inputs>(std::vector<Tensor>{
      Tensor::random({tokens, hidden}, DType::bf16, seed()), Tensor::random({tokens, n_experts}, DType::f32, seed() + 1),
      gate_up.values.reshape({n_experts, 2 * inner, hidden / 2}), down.values.reshape({n_experts, hidden, inner / 2}),
      gate_up.scales.reshape({n_experts, 2 * inner, hidden / 32}), down.scales.reshape({n_experts, hidden, inner / 32})});
  return {tw::format("fused_moe of {} tokens, {} experts of mxfp4", tokens, n_experts),
          {tokens, hidden},
          DType::bf16,
          [in, k](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const MoeExpertsOptions experts{.gate_up_scale = &t[4], .down_scale = &t[5]};
            fused_moe(t[0], t[1], k, t[2], t[3], out,
                      {.route = {.renormalise = true, .scale = 1.0f / 1024}, .experts = experts, .stream = stream});
          },
          0.06f};
}

TEST(Repetition, cuda_MixturesOfExperts) {
  skip_without_cuda();
  expect_all_repeatable({moe_case(1024, 16, 4), moe_case(1000, 100, 8), moe_case(64, 256, 8), fp8_moe_case(1024, 16, 4),
                         fp8_moe_case(64, 100, 8), packed_moe_case(1024, 16, 4), packed_moe_case(300, 100, 8), packed_moe_case(2, 256, 8)});
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
  const auto add = [&](std::string_view scales, std::int64_t n, const Shape& of_a, const Shape& of_b, DType result) {
    const SharedInputs in = std::make_shared<Inputs>(std::vector{codes({m, k}, seed()), codes({n, k}, seed() + 1), ones(of_a), ones(of_b)});
    cases.push_back({tw::format("fp8, {} columns, {}, to {}", n, scales, name_of(result)),
                     {m, n},
                     result,
                     [in](const Tensor& out, const Stream& stream) {
                       const std::vector<Tensor>& t = in->on(stream.device());
                       gemm(t[0], t[1].transpose(0, 1), out, {.a_scale = &t[2], .b_scale = &t[3], .stream = stream});
                     },
                     result == DType::fp8_e4m3 ? 0.13f : 0.03f});  // neighbouring numbers of fp8 are an eighth apart
  };
  for (const std::int64_t n : {128, 256}) {
    add("block scales", n, {m, 1}, {1, n / 128}, DType::bf16);
    for (const DType result : {DType::bf16, DType::f32, DType::fp8_e4m3}) {
      add("scalars", n, {1}, {1}, result);
      add("scales of rows", n, {m, 1}, {1, n}, result);
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
  const std::int64_t generic_shared = kernels::generic_shared_bytes(Stream::standard(Device::cuda()));
  const int configs = static_cast<int>(kernels::convolution::configs(generic_shared).size());
  for (int config = 0; config < configs; ++config) {
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

/// Of e4m3: values are transposed first, into memory that the call before may still read.
Case fp8_case(std::int64_t head_dim, std::int64_t keys, const AttentionOptions& options) {
  const std::int64_t batch = 2, heads = 12, queries = 2048;
  const auto random_tensor = [&](std::int64_t rows, std::uint64_t s) {
    const Tensor x = Tensor::random({batch, rows, heads, head_dim}, DType::f32, seed() + s), y = Tensor::empty(x.shape(), DType::fp8_e4m3);
    cast(x, y);
    return y;
  };
  const SharedInputs in = std::make_shared<Inputs>(std::vector{random_tensor(queries, 0), random_tensor(keys, 1), random_tensor(keys, 2)});
  Case c{tw::format("attention of e4m3: head dimension {}, {} keys", head_dim, keys),
         {batch, queries, heads, head_dim},
         DType::bf16,
         [in, options](const Tensor& out, const Stream& stream) {
           const std::vector<Tensor>& t = in->on(stream.device());
           AttentionOptions with_stream = options;
           with_stream.stream = stream;
           attention(t[0], t[1], t[2], out, with_stream);
         }};
  c.tolerance = 0.1f;  // a GPU rounds weights to e4m3
  return c;
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

/// Of about half of the blocks; each fifth block of queries has none.
Tensor some_blocks(Shape shape) {
  const Tensor mask = Tensor::empty(std::move(shape), DType::boolean);
  auto* const bytes = static_cast<unsigned char*>(mask.data());
  std::mt19937_64 random = random_engine();
  for (std::int64_t i = 0; i < mask.numel(); ++i) bytes[i] = i / mask.shape(3) % mask.shape(2) % 5 != 3 && random() % 2 == 0 ? 1 : 0;
  return mask;
}

/// Blocks of keys: their lists are written in memory that the call before may still read.
Case blocks_case(std::int64_t head_dim, int query_block, int key_block, bool causal) {
  const std::int64_t batch = 2, heads = 12, kv_heads = 4, queries = 4096, keys = 700;
  std::vector<Tensor> tensors;
  for (const Shape& shape :
       {Shape{batch, queries, heads, head_dim}, Shape{batch, keys, kv_heads, head_dim}, Shape{batch, keys, kv_heads, head_dim}})
    tensors.push_back(Tensor::random(shape, DType::bf16, seed() + tensors.size()));
  tensors.push_back(some_blocks({batch, heads, queries / query_block, (keys + key_block - 1) / key_block}));
  const SharedInputs in = std::make_shared<Inputs>(std::move(tensors));
  return {tw::format("attention of blocks of {} x {}: head dimension {}{}", query_block, key_block, head_dim, causal ? ", causal" : ""),
          {batch, queries, heads, head_dim},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const AttentionBlocks blocks{.mask = &t[3], .query_block = query_block, .key_block = key_block};
            attention(t[0], t[1], t[2], out, {.causal = causal, .blocks = &blocks, .stream = stream});
          }};
}

TEST(Repetition, cuda_AttentionOfBlocks) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t head_dim : {64, 128, 256})
    for (const int query_block : {64, 128})
      for (const int key_block : {64, 128}) cases.push_back(blocks_case(head_dim, query_block, key_block, query_block == key_block));
  expect_all_repeatable(cases);
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
  for (const std::int64_t head_dim : {64, 128, 256}) {
    cases.push_back(fp8_case(head_dim, 700, {}));
    cases.push_back(fp8_case(head_dim, 1500, {.causal = true}));
  }
  expect_all_repeatable(cases);
}

/// Absorbed latent attention: a cache in one piece, or pages of which one size is copied by TMA and the other gathered.
Case mla_case(std::int64_t heads, std::int64_t page_size, int splits) {
  constexpr std::int64_t kBatch = 70, kCapacity = 320, kTokens = 2;
  std::vector<std::int32_t> lengths(kBatch);
  std::mt19937_64 random = random_engine();
  for (std::int32_t& length : lengths) length = static_cast<std::int32_t>(random() % (kCapacity + 1));
  const std::int64_t pages = page_size > 0 ? kCapacity / page_size : 1;
  std::vector<std::int32_t> table(static_cast<std::size_t>(kBatch * pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  const Shape cache = page_size > 0 ? Shape{kBatch * pages, page_size, kMlaKeyDim} : Shape{kBatch, kCapacity, kMlaKeyDim};
  const SharedInputs in = std::make_shared<Inputs>(std::vector{
      Tensor::random({kBatch, kTokens, heads, kMlaKeyDim}, DType::bf16, seed()), Tensor::random(cache, DType::bf16, seed() + 1),
      Tensor::from(std::span<const std::int32_t>(lengths), {kBatch}), Tensor::from(std::span<const std::int32_t>(table), {kBatch, pages})});
  return {tw::format("mla: {} heads, pages of {}, {} splits", heads, page_size, splits),
          {kBatch, kTokens, heads, kMlaLatentDim},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            mla_decode(t[0], t[1], out,
                       {.seqlens = &t[2], .block_table = page_size > 0 ? &t[3] : nullptr, .num_splits = splits, .stream = stream});
          }};
}

/// The same of a cache of 8 bits, in one piece or in pages.
Case mla_fp8_case(std::int64_t page_size) {
  constexpr std::int64_t kBatch = 140, kHeads = 64, kCapacity = 192;
  const Tensor cache = Tensor::zeros({kBatch, kCapacity, kMlaFp8Bytes}, DType::u8);
  mla_append(Tensor::random({kBatch, kCapacity, kMlaLatentDim}, DType::bf16, seed()),
             Tensor::random({kBatch, kCapacity, kMlaRotaryDim}, DType::bf16, seed() + 1), cache);
  const std::int64_t pages = page_size > 0 ? kCapacity / page_size : 1;
  std::vector<std::int32_t> table(static_cast<std::size_t>(kBatch * pages));
  std::iota(table.begin(), table.end(), 0);
  const SharedInputs in =
      std::make_shared<Inputs>(std::vector{Tensor::random({kBatch, 1, kHeads, kMlaKeyDim}, DType::bf16, seed() + 2),
                                           page_size > 0 ? cache.reshape({kBatch * pages, page_size, kMlaFp8Bytes}) : cache,
                                           Tensor::from(std::span<const std::int32_t>(table), {kBatch, pages})});
  return {tw::format("mla: cache of 8 bits, pages of {}", page_size),
          {kBatch, 1, kHeads, kMlaLatentDim},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            mla_decode(t[0], t[1], out, {.block_table = page_size > 0 ? &t[2] : nullptr, .stream = stream});
          }};
}

/// Attention over lists of keys, some of which name none, in a cache of 16 or 8 bits.
Case mla_sparse_case(std::int64_t tokens, int splits, bool fp8) {
  constexpr std::int64_t kHeads = 128, kTopk = 200, kCached = 640;
  std::vector<std::int32_t> indices(static_cast<std::size_t>(tokens * kTopk));
  std::mt19937_64 random = random_engine();
  for (std::int32_t& i : indices) i = static_cast<std::int32_t>(random() % (kCached + 100)) - 50;
  Tensor cache = Tensor::random({kCached, kMlaKeyDim}, DType::bf16, seed());
  if (fp8) {
    cache = Tensor::zeros({1, kCached, kMlaFp8Bytes}, DType::u8);
    mla_append(Tensor::random({1, kCached, kMlaLatentDim}, DType::bf16, seed()),
               Tensor::random({1, kCached, kMlaRotaryDim}, DType::bf16, seed() + 1), cache);
  }
  const SharedInputs in = std::make_shared<Inputs>(std::vector{Tensor::random({tokens, kHeads, kMlaKeyDim}, DType::bf16, seed() + 2), cache,
                                                               Tensor::from(std::span<const std::int32_t>(indices), {tokens, kTopk})});
  return {tw::format("mla: {} tokens with lists, {} splits, {} bits", tokens, splits, fp8 ? 8 : 16),
          {tokens, kHeads, kMlaLatentDim},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            mla_sparse(t[0], t[1], t[2], out, {.num_splits = splits, .stream = stream});
          }};
}

/// Each row of the cache is on one list, so that the order of additions does not matter.
Case mla_sparse_backward_case(std::int64_t tokens, std::int64_t topk) {
  constexpr std::int64_t kHeads = 64;
  const std::int64_t cached = tokens * topk;
  std::vector<std::int32_t> indices(static_cast<std::size_t>(cached));
  std::iota(indices.begin(), indices.end(), 0);
  std::shuffle(indices.begin(), indices.end(), random_engine());
  const Tensor lists = Tensor::from(std::span<const std::int32_t>(indices), {tokens, topk});
  const Shape of_q{tokens, kHeads, kMlaKeyDim}, of_o{tokens, kHeads, kMlaLatentDim}, of_kv{cached, kMlaKeyDim};
  const Tensor q = Tensor::random(of_q, DType::bf16, seed());
  const Tensor kv = Tensor::random(of_kv, DType::bf16, seed() + 1);
  const Tensor d_o = Tensor::random(of_o, DType::bf16, seed() + 2);
  const Tensor o = Tensor::zeros(of_o, DType::bf16);
  const Tensor lse = Tensor::zeros({tokens, kHeads}, DType::f32);
  mla_sparse(q, kv, lists, o, {.lse = &lse});
  const SharedInputs in = std::make_shared<Inputs>(std::vector{q, kv, lists, o, lse, d_o});
  return {tw::format("mla: gradients of {} tokens with lists of {}", tokens, topk),
          {tokens * kHeads + cached, kMlaKeyDim},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const Tensor dq = out.slice(0, 0, tokens * kHeads).reshape(of_q), dkv = out.slice(0, tokens * kHeads, out.shape(0));
            mla_sparse_backward(t[0], t[1], t[2], t[3], t[4], t[5], dq, dkv, {.stream = stream});
          },
          0.06f};  // sums of 64 heads and of hundreds of entries
}

/// Weights of one sign: scores then are as large as what is added up, and their errors are relative to them.
Tensor indexer_weights(Shape shape) {
  Tensor weights = Tensor::random(std::move(shape), DType::f32, seed() + 2);
  for (std::int64_t i = 0; i < weights.numel(); ++i) weights.data<float>()[i] = std::abs(weights.data<float>()[i]);
  return weights;
}

/// Scores of the indexer: many short tiles, with a range of keys for each query.
Case indexer_case(std::int64_t heads, DType dtype, int splits) {
  constexpr std::int64_t kQueries = 1024, kIndexed = 640;
  std::vector<std::int32_t> starts(kQueries), ends(kQueries);
  std::mt19937_64 random = random_engine();
  for (std::size_t i = 0; i < starts.size(); ++i) {
    starts[i] = static_cast<std::int32_t>(random() % kIndexed);
    ends[i] = static_cast<std::int32_t>(random() % (kIndexed + 50));
  }
  const SharedInputs in = std::make_shared<Inputs>(
      std::vector{Tensor::random({kQueries, heads, kIndexerDim}, DType::f32, seed()).to(dtype),
                  Tensor::random({kIndexed, kIndexerDim}, DType::f32, seed() + 1).to(dtype), indexer_weights({kQueries, heads}),
                  Tensor::random({kIndexed}, DType::f32, seed() + 3), Tensor::from(std::span<const std::int32_t>(starts), {kQueries}),
                  Tensor::from(std::span<const std::int32_t>(ends), {kQueries})});
  return {tw::format("indexer: {} heads, {}, {} splits", heads, name_of(dtype), splits),
          {kQueries, kIndexed},
          DType::f32,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            indexer_scores(t[0], t[1], t[2], out,
                           {.k_scale = dtype == DType::fp8_e4m3 ? &t[3] : nullptr,
                            .starts = &t[4],
                            .ends = &t[5],
                            .num_splits = splits,
                            .stream = stream});
          }};
}

/// The same for decoding, of pages in random order.
Case indexer_paged_case(std::int64_t seqlen_q) {
  constexpr std::int64_t kBatch = 70, kHeads = 64, kPages = 8, kColumns = kPages * kIndexerPage;
  std::vector<std::int32_t> lengths(kBatch), table(kBatch * kPages);
  std::mt19937_64 random = random_engine();
  for (std::int32_t& length : lengths) length = static_cast<std::int32_t>(random() % (kColumns + 1));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  const Tensor keys = Tensor::random({kBatch * kPages, kIndexerPage, kIndexerKeyBytes}, DType::f32, seed()).to(DType::fp8_e4m3);
  for (std::int64_t page = 0; page < kBatch * kPages; ++page) {
    auto* const scales =
        reinterpret_cast<float*>(static_cast<char*>(keys.data()) + page * kIndexerPage * kIndexerKeyBytes + kIndexerPage * kIndexerDim);
    std::fill_n(scales, kIndexerPage, 1.0f);
  }
  const SharedInputs in = std::make_shared<Inputs>(
      std::vector{Tensor::random({kBatch, seqlen_q, kHeads, kIndexerDim}, DType::f32, seed() + 1).to(DType::fp8_e4m3), keys,
                  indexer_weights({kBatch, seqlen_q, kHeads}), Tensor::from(std::span<const std::int32_t>(table), {kBatch, kPages}),
                  Tensor::from(std::span<const std::int32_t>(lengths), {kBatch})});
  return {tw::format("indexer: pages, {} queries", seqlen_q),
          {kBatch, seqlen_q, kColumns},
          DType::f32,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            indexer_scores_paged(t[0], t[1], t[2], t[3], out, {.seqlens = &t[4], .stream = stream});
          }};
}

TEST(Repetition, cuda_Indexer) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t heads : {16, 64, 128})
    for (const int splits : {1, 3}) cases.push_back(indexer_case(heads, DType::fp8_e4m3, splits));
  cases.push_back(indexer_case(64, DType::bf16, 1));
  for (const std::int64_t seqlen_q : {1, 2, 4}) cases.push_back(indexer_paged_case(seqlen_q));
  expect_all_repeatable(cases);
}

/// The bits of the values, and after them the columns.
Case topk_case(std::int64_t rows, std::int64_t columns, bool sorted) {
  constexpr int k = 1024;
  const SharedInputs in = inputs({{rows, columns}}, DType::f32);
  return {tw::format("topk: {} x {}{}", rows, columns, sorted ? "" : ", by column"),
          {2, rows, k},
          DType::i32,
          [=](const Tensor& out, const Stream& stream) {
            const Tensor values = Tensor::borrow(out.data(), {rows, k}, DType::f32, out.device());
            topk(in->on(stream.device())[0], k, values, out.slice(0, 1, 2).reshape({rows, k}), {.sorted = sorted, .stream = stream});
          },
          0};
}

TEST(Repetition, cuda_Topk) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const bool sorted : {false, true}) cases.push_back(topk_case(600, 20000, sorted));
  cases.push_back(topk_case(150, 20000, false));
  cases.push_back(topk_case(2, 100000, false));  // in parts
  cases.push_back(topk_case(600, 3000, true));
  expect_all_repeatable(cases);
}

/// Blocks that tokens select at random, with entries that name none.
Tensor nsa_lists(std::int64_t tokens, std::int64_t heads, std::int64_t slots, std::int64_t block_size) {
  std::vector<std::int32_t> lists(static_cast<std::size_t>(tokens * heads * slots));
  std::mt19937_64 random = random_engine();
  for (std::int64_t n = 0; n < std::ssize(lists); ++n)
    lists[static_cast<std::size_t>(n)] =
        static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(n / (heads * slots) / block_size + 2)) - 1;
  return Tensor::from(std::span<const std::int32_t>(lists), {1, tokens, heads, slots});
}

/// Native sparse attention: tiles of unequal lists.
Case nsa_case(std::int64_t group, std::int64_t block_size, std::int64_t batch) {
  constexpr std::int64_t kTokens = 1024, kHeads = 2, kSlots = 5, kDim = 128;
  const std::int64_t tokens = batch == 1 ? kTokens : 1;  // a batch decodes
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(batch), static_cast<std::int32_t>(kTokens));
  const SharedInputs in =
      std::make_shared<Inputs>(std::vector{Tensor::random({batch, tokens, kHeads * group, kDim}, DType::bf16, seed()),
                                           Tensor::random({batch, kTokens, kHeads, kDim}, DType::bf16, seed() + 1),
                                           Tensor::random({batch, kTokens, kHeads, kDim}, DType::bf16, seed() + 2),
                                           batch == 1 ? nsa_lists(kTokens, kHeads, kSlots, block_size)
                                                      : nsa_lists(batch, kHeads, kSlots, block_size).reshape({batch, 1, kHeads, kSlots}),
                                           Tensor::from(std::span<const std::int32_t>(lengths), {batch})});
  return {tw::format("nsa: groups of {}, blocks of {}, {} sequences", group, block_size, batch),
          {batch, tokens, kHeads * group, kDim},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            nsa_selected(t[0], t[1], t[2], t[3], out,
                         {.block_size = static_cast<int>(block_size), .seqlens = batch > 1 ? &t[4] : nullptr, .stream = stream});
          }};
}

/// Its gradients, one after the other: parts of lists are added up in order.
Case nsa_backward_case(std::int64_t group, std::int64_t dim) {
  constexpr std::int64_t kTokens = 2048, kSlots = 5;
  constexpr int kBlock = 64;
  const Shape of_q{1, kTokens, group, dim}, of_k{1, kTokens, 1, dim};
  const std::vector<Tensor> inputs{Tensor::random(of_q, DType::bf16, seed()), Tensor::random(of_k, DType::bf16, seed() + 1),
                                   Tensor::random(of_k, DType::bf16, seed() + 2), nsa_lists(kTokens, 1, kSlots, kBlock),
                                   Tensor::random(of_q, DType::bf16, seed() + 3)};
  const Tensor o = Tensor::zeros(of_q, DType::bf16), lse = Tensor::zeros({1, kTokens, group}, DType::f32);
  nsa_selected(inputs[0], inputs[1], inputs[2], inputs[3], o, {.block_size = kBlock, .lse = &lse});
  std::vector<Tensor> all = inputs;
  all.push_back(o);
  all.push_back(lse);
  const SharedInputs in = std::make_shared<Inputs>(all);
  return {tw::format("nsa: gradients, groups of {}, {} columns", group, dim),
          {kTokens * (group + 2), dim},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const auto part = [&](std::int64_t first, std::int64_t rows, const Shape& shape) {
              return out.slice(0, first, first + rows).reshape(shape);
            };
            nsa_selected_backward(t[0], t[1], t[2], t[3], t[5], t[6], t[4], part(0, kTokens * group, of_q),
                                  part(kTokens * group, kTokens, of_k), part(kTokens * (group + 1), kTokens, of_k),
                                  {.block_size = kBlock, .stream = stream});
          },
          0.06f};  // sums of hundreds of tokens
}

/// Vertical-slash sparse attention: lists of unequal lengths, then columns.
Case vertical_slash_case(int query_block, std::int64_t dim, bool seqlens) {
  constexpr std::int64_t kTokens = 2048, kHeads = 4, kKvHeads = 2, kNumbers = 200;
  std::mt19937_64 random = random_engine();
  const auto numbers = [&] {
    std::vector<std::int32_t> x(static_cast<std::size_t>(2 * kHeads * kNumbers));
    for (std::int32_t& n : x) n = static_cast<std::int32_t>(random() % kTokens);
    return Tensor::from(std::span<const std::int32_t>(x), {2, kHeads, kNumbers});
  };
  const std::vector<std::int32_t> lengths{1500, static_cast<std::int32_t>(kTokens)};
  const SharedInputs in = std::make_shared<Inputs>(std::vector{
      Tensor::random({2, kTokens, kHeads, dim}, DType::bf16, seed()), Tensor::random({2, kTokens, kKvHeads, dim}, DType::bf16, seed() + 1),
      Tensor::random({2, kTokens, kKvHeads, dim}, DType::bf16, seed() + 2), numbers(), numbers(),
      Tensor::from(std::span<const std::int32_t>(lengths), {2})});
  return {tw::format("vertical-slash attention: blocks of {}, {} columns, seqlens {}", query_block, dim, seqlens),
          {2, kTokens, kHeads, dim},
          DType::bf16,
          [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            vertical_slash_attention(t[0], t[1], t[2], t[3], t[4], out,
                                     {.query_block = query_block, .seqlens = seqlens ? &t[5] : nullptr, .stream = stream});
          }};
}

TEST(Repetition, cuda_VerticalSlashAttention) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const int query_block : {64, 128})
    for (const std::int64_t dim : {64, 128}) cases.push_back(vertical_slash_case(query_block, dim, query_block == 64));
  expect_all_repeatable(cases);
}

TEST(Repetition, cuda_NativeSparseAttention) {
  skip_without_cuda();
  std::vector<Case> cases{nsa_case(16, 64, 1), nsa_case(16, 32, 1), nsa_case(64, 64, 1), nsa_case(16, 64, 96)};
  for (const std::int64_t dim : {64, 128}) cases.push_back(nsa_backward_case(16, dim));
  expect_all_repeatable(cases);
}

TEST(Repetition, cuda_LatentAttention) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t page_size : {0, 64, 16, 1})
    for (const int splits : {1, 3}) cases.push_back(mla_case(page_size == 1 ? 16 : 128, page_size, splits));
  for (const std::int64_t page_size : {0, 64, 1}) cases.push_back(mla_fp8_case(page_size));
  for (const bool fp8 : {false, true}) {
    cases.push_back(mla_sparse_case(140, 1, fp8));
    cases.push_back(mla_sparse_case(20, 3, fp8));
  }
  cases.push_back(mla_sparse_backward_case(300, 70));
  cases.push_back(mla_sparse_backward_case(150, 200));
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
    for (const int splits : {1, 4}) {
      const std::int64_t batch = 256, heads = 8, kv_heads = 2, capacity = 512;
      const Shape cache{batch, capacity, kv_heads, head_dim};
      const SharedInputs in = std::make_shared<Inputs>(
          std::vector{Tensor::random({batch, 2, heads, head_dim}, DType::bf16, seed()), Tensor::random(cache, DType::bf16, seed() + 1),
                      Tensor::random(cache, DType::bf16, seed() + 2), some_blocks({batch, kv_heads, 1, capacity / 64})});
      cases.push_back({tw::format("decode of blocks: head dimension {}, {} splits", head_dim, splits),
                       {batch, 2, heads, head_dim},
                       DType::bf16,
                       [in, splits](const Tensor& out, const Stream& stream) {
                         const std::vector<Tensor>& t = in->on(stream.device());
                         const AttentionBlocks blocks{.mask = &t[3], .key_block = 64};
                         attention_decode(t[0], t[1], t[2], out, {.num_splits = splits},
                                          {.causal = true, .blocks = &blocks, .stream = stream});
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

// The tile language's own kernels

/// Inputs of one test, from one generator.
class RandomTensors {
 public:
  /// Sums of few enough products of integers are exact, in any order.
  Tensor integers(Shape shape, DType dtype, int low, int high) {
    std::uniform_int_distribution<int> pick(low, high);
    return filled(std::move(shape), [&] { return static_cast<float>(pick(engine)); }).to(dtype);
  }
  Tensor normal(Shape shape, DType dtype, float sigma = 1) {
    std::normal_distribution<float> pick(0, sigma);
    return filled(std::move(shape), [&] { return pick(engine); }).to(dtype);
  }
  Tensor uniform(Shape shape, float low, float high) {
    std::uniform_real_distribution<float> pick(low, high);
    return filled(std::move(shape), [&] { return pick(engine); });
  }
  std::mt19937_64 engine = random_engine();

 private:
  template <class F>
  static Tensor filled(Shape shape, F f) {
    const Tensor t = Tensor::empty(std::move(shape), DType::f32);
    std::generate_n(t.data<float>(), t.numel(), f);
    return t;
  }
};
Tensor tensor_of(const std::vector<std::int32_t>& values) {
  return Tensor::from(std::span<const std::int32_t>(values), {static_cast<std::int64_t>(values.size())});
}

/// One of attention's gradients: dQ, dK or dV. Up to two tiles of keys add to an element of dQ, so that every order gives the same bits.
Case gradient_case(std::int64_t head_dim, int which, bool deterministic) {
  constexpr std::int64_t kBatch = 64, kHeads = 16, kQueries = 192, kKeys = 200;
  const Shape queries{kBatch, kQueries, kHeads, head_dim}, keys{kBatch, kKeys, kHeads, head_dim};
  const SharedInputs in = inputs({queries, keys, keys, queries}, DType::bf16);
  const Shape shapes[] = {queries, keys, keys};
  constexpr const char* kNames[] = {"dQ", "dK", "dV"};
  return {.name = tw::format("attention, D {}: {}{}", head_dim, kNames[which], deterministic ? ", deterministic" : ""),
          .shape = shapes[which],
          .dtype = DType::bf16,
          .run = [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const auto poisoned = [&](const Shape& shape) { return Tensor::poisoned(shape, DType::bf16, stream); };
            const Tensor o = poisoned(queries), lse = Tensor::poisoned({kBatch, kHeads, kQueries}, DType::f32, stream);
            const AttentionOptions options{.causal = true, .lse = &lse, .stream = stream};
            attention(t[0], t[1], t[2], o, options);
            const Tensor gradients[] = {which == 0 ? out : poisoned(queries), which == 1 ? out : poisoned(keys),
                                        which == 2 ? out : poisoned(keys)};
            attention_backward(t[0], t[1], t[2], o, lse, t[3], gradients[0], gradients[1], gradients[2],
                               {.forward = options, .deterministic = deterministic});
          }};
}

/// The same of packed sequences of up to two tiles of keys, whose last tiles end inside a block.
Case packed_gradient_case(std::int64_t head_dim, int which, bool deterministic) {
  constexpr std::int64_t kHeads = 16, kSequences = 96;
  std::vector<std::int32_t> offsets{0};
  for (std::int64_t b = 0; b < kSequences; ++b) offsets.push_back(offsets.back() + 17 + static_cast<std::int32_t>(b * 37 % 183));
  const std::int64_t total = (offsets.back() + 7) / 8 * 8;  // the last rows belong to no sequence
  const Shape shape{total, kHeads, head_dim};
  std::vector<Tensor> tensors;
  for (std::uint64_t i = 0; i < 4; ++i) tensors.push_back(Tensor::random(shape, DType::bf16, seed() + i));
  tensors.push_back(tensor_of(offsets));
  const SharedInputs in = std::make_shared<Inputs>(std::move(tensors));
  constexpr const char* kNames[] = {"dQ", "dK", "dV"};
  return {.name = tw::format("packed attention, D {}: {}{}", head_dim, kNames[which], deterministic ? ", deterministic" : ""),
          .shape = shape,
          .dtype = DType::bf16,
          .run = [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const auto poisoned = [&] { return Tensor::poisoned(shape, DType::bf16, stream); };
            const Tensor o = poisoned(), lse = Tensor::poisoned({kHeads, total}, DType::f32, stream);
            const PackedSequences sequences{t[4], t[4]};
            const AttentionOptions options{.causal = true, .lse = &lse, .stream = stream};
            attention_varlen(t[0], t[1], t[2], o, sequences, options);
            const Tensor gradients[] = {which == 0 ? out : poisoned(), which == 1 ? out : poisoned(), which == 2 ? out : poisoned()};
            attention_varlen_backward(t[0], t[1], t[2], o, lse, t[3], gradients[0], gradients[1], gradients[2], sequences,
                                      {.forward = options, .deterministic = deterministic});
          }};
}

/// The same of blocks of keys, deterministic.
Case blocks_gradient_case(std::int64_t head_dim, int which, int block) {
  constexpr std::int64_t kBatch = 16, kHeads = 16, kKvHeads = 8, kQueries = 512, kKeys = 640;
  const Shape queries{kBatch, kQueries, kHeads, head_dim}, keys{kBatch, kKeys, kKvHeads, head_dim};
  std::vector<Tensor> tensors;
  for (const Shape& shape : {queries, keys, keys, queries}) tensors.push_back(Tensor::random(shape, DType::bf16, seed() + tensors.size()));
  tensors.push_back(some_blocks({kBatch, kHeads, kQueries / block, kKeys / block}));
  const SharedInputs in = std::make_shared<Inputs>(std::move(tensors));
  const Shape shapes[] = {queries, keys, keys};
  constexpr const char* kNames[] = {"dQ", "dK", "dV"};
  return {.name = tw::format("attention of blocks of {}, D {}: {}", block, head_dim, kNames[which]),
          .shape = shapes[which],
          .dtype = DType::bf16,
          .run = [=](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const auto poisoned = [&](const Shape& shape) { return Tensor::poisoned(shape, DType::bf16, stream); };
            const Tensor o = poisoned(queries), lse = Tensor::poisoned({kBatch, kHeads, kQueries}, DType::f32, stream);
            const AttentionBlocks blocks{.mask = &t[4], .query_block = block, .key_block = block};
            const AttentionOptions options{.causal = true, .blocks = &blocks, .lse = &lse, .stream = stream};
            attention(t[0], t[1], t[2], o, options);
            const Tensor gradients[] = {which == 0 ? out : poisoned(queries), which == 1 ? out : poisoned(keys),
                                        which == 2 ? out : poisoned(keys)};
            attention_backward(t[0], t[1], t[2], o, lse, t[3], gradients[0], gradients[1], gradients[2],
                               {.forward = options, .deterministic = true});
          }};
}

TEST(Repetition, cuda_AttentionOfBlocksBackward) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t head_dim : {64, 128, 256})
    for (const int block : {64, 128})
      for (int which = 0; which < 3; ++which) cases.push_back(blocks_gradient_case(head_dim, which, block));
  expect_all_repeatable(cases);
}

TEST(Repetition, cuda_AttentionBackward) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t head_dim : {64, 128, 256})
    for (const bool deterministic : {false, true})
      for (int which = 0; which < 3; ++which)
        if (head_dim <= 128 || deterministic) {
          cases.push_back(gradient_case(head_dim, which, deterministic));
          cases.push_back(packed_gradient_case(head_dim, which, deterministic));
        }
  expect_all_repeatable(cases);
}

Case hadamard_case(std::int64_t columns, DType dtype) {
  const SharedInputs in = inputs({{(1 << 24) / columns, columns}}, dtype);
  return {
      tw::format("hadamard of {} columns", columns), {(1 << 24) / columns, columns}, dtype, [in](const Tensor& out, const Stream& stream) {
        hadamard(in->on(stream.device())[0], out, {.scale = 1.0f / 16, .stream = stream});
      }};
}

TEST(Repetition, cuda_Hadamard) {
  skip_without_cuda();
  std::vector<Case> cases;
  for (const std::int64_t columns : {64, 1024, 8192, 32768})
    for (const DType dtype : {DType::f32, DType::bf16}) cases.push_back(hadamard_case(columns, dtype));
  expect_all_repeatable(cases);
}

/// Sums that leave a Buffer by reduce-add, and a Fragment of all warpgroups.
std::vector<Case> backward_cases() {
  constexpr int kBatch = 300, kQueries = 150, kKeys = 200, kDim = 128;
  RandomTensors random;
  const SharedInputs in = std::make_shared<Inputs>(
      std::vector{random.integers({kBatch, kQueries, kDim}, DType::bf16, -1, 1), random.integers({kBatch, kKeys, kDim}, DType::bf16, -1, 1),
                  random.integers({kBatch, 152}, DType::f32, -8, 8), random.integers({kBatch, 152}, DType::f32, 1, 3)});
  const auto run = [in](const Tensor& dq, const Tensor& dk, const Stream& stream) {
    const std::vector<Tensor>& t = in->on(stream.device());
    const Tensor lse = t[2].slice(1, 0, kQueries), delta = t[3].slice(1, 0, kQueries);
    launch_backward_products<bf16, 64, 128, kDim>(stream, {.q = t[0], .k = t[1], .lse = lse, .delta = delta, .dq = dq, .dk = dk});
  };
  const Shape dq_shape{kBatch, kQueries, kDim}, dk_shape{kBatch, kKeys, kDim};
  return {{.name = "chained products: dQ",
           .shape = dq_shape,
           .dtype = DType::f32,
           .run = [=](const Tensor& out, const Stream& stream) { run(out, Tensor::poisoned(dk_shape, DType::f32, stream), stream); },
           .tolerance = 0,
           .adds = true},
          {.name = "chained products: dK",
           .shape = dk_shape,
           .dtype = DType::f32,
           .run = [=](const Tensor& out, const Stream& stream) { run(Tensor::zeros(dq_shape, DType::f32, stream), out, stream); },
           .tolerance = 0}};
}

Case latent_attention_case() {
  constexpr int kBatch = 140, kHeads = 100, kKeys = 150, kDim = 576, kValueDim = 512;
  const SharedInputs in = inputs({{kBatch, kHeads, kDim}, {kBatch, kKeys, kDim}}, DType::bf16);
  return {"64 x 512 output on two warpgroups", {kBatch, kHeads, kValueDim}, DType::f32, [in](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            launch_latent_attention<bf16, 64, 64, kDim, kValueDim>(stream, {.q = t[0], .k = t[1], .out = out, .scale = 0.125f});
          }};
}

/// The outputs of the tokens, and after them the state after the last one.
Case recurrence_case() {
  constexpr int kBatch = 300, kTokens = 200, kDim = 64;
  RandomTensors random;
  const Shape tokens{kBatch, kTokens, kDim};
  const SharedInputs in = std::make_shared<Inputs>(
      std::vector{random.normal(tokens, DType::f16, 0.125f), random.normal(tokens, DType::f16, 0.125f), random.normal(tokens, DType::f16),
                  random.uniform({kBatch, kTokens}, -0.1f, 0), random.uniform({kBatch, kTokens}, 0, 1)});
  return {"chunked recurrence", {kBatch, kTokens + kDim, kDim}, DType::f32, [in](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            const Tensor of_tokens = out.slice(1, 0, kTokens), last = out.slice(1, kTokens, kTokens + kDim);
            launch_gated_delta_rule<f16, 64, kDim>(
                stream, {.q = t[0], .k = t[1], .v = t[2], .gates = t[3], .betas = t[4], .out = of_tokens, .last = last});
          }};
}

TEST(Repetition, cuda_BuffersAndStates) {
  skip_without_cuda();
  std::vector<Case> cases = backward_cases();
  cases.push_back(latent_attention_case());
  cases.push_back(recurrence_case());
  expect_all_repeatable(cases);
}

/// Integers, so that a sum of rows does not depend on their order.
template <class T, class Out, bool Reduce, int BM, int BN>
Case expert_case(int tokens, int n, int k) {
  constexpr int kExperts = 3, kTopK = 2;
  RandomTensors random;
  const int choices = tokens * kTopK, blocks = ceil_div(choices, BM) + 2;
  const SharedInputs in = std::make_shared<Inputs>(
      std::vector{random.integers({tokens, k}, dtype_of<T>, -4, 4), random.integers({kExperts, n, k}, dtype_of<T>, -4, 4),
                  tensor_of(random_list(random.engine, blocks, BM, choices)), random.integers({blocks}, DType::i32, 0, kExperts - 1),
                  random.integers({choices}, DType::f32, -4, 4)});
  return {.name = tw::format("experts' rows {}: {} tokens, {} columns, depth {}", Reduce ? "added up" : "scattered", tokens, n, k),
          .shape = {Reduce ? tokens : choices, n},
          .dtype = dtype_of<Out>,
          .run =
              [in](const Tensor& out, const Stream& stream) {
                const std::vector<Tensor>& t = in->on(stream.device());
                launch_expert_product<T, Out, Reduce, BM, BN>(
                    stream, {.x = t[0], .w = t[1], .ids = t[2], .experts = t[3], .weights = t[4], .out = out, .top_k = kTopK});
              },
          .tolerance = 0,
          .adds = Reduce};
}

TEST(Repetition, cuda_GatherAndScatter) {
  skip_without_cuda();
  expect_all_repeatable({expert_case<bf16, bf16, false, 128, 64>(5120, 520, 64), expert_case<bf16, float, true, 64, 64>(5120, 520, 64),
                         // Rows that TMA cannot copy.
                         expert_case<bf16, bf16, false, 128, 64>(5120, 67, 65), expert_case<bf16, float, true, 64, 64>(5120, 67, 65)});
}

template <class T, class Sum, class Codes, class Scaling, class Decode, int BM, int BN>
Case packed_product_case(const char* what, int m, int n, int k) {
  using On = typename PackedProduct<T, Sum, Codes, Scaling, Decode, BM, BN>::template On<cpu::Target>;
  constexpr bool exact = std::is_same_v<Sum, i32>;
  RandomTensors random;
  Shape scales{1, 1};
  DType scale_type = DType::f32;
  if constexpr (On::by_group) {
    const std::int64_t groups = ceil_div(k, Scaling::group);
    scales = Scaling::order == Contract::rows ? Shape{groups, m} : Shape{m, ceil_div(static_cast<int>(groups), 16) * 16};
    scale_type = dtype_of<typename Scaling::Scale>;
  }
  // Codes are any bytes; 1 byte of e8m0 between 120 and 134 is a power of two between 2^-7 and 2^7.
  const Tensor codes = random.integers({m, k / codes_in<Codes>}, DType::u8, 0, 255);
  const Tensor group_scales =
      scale_type == DType::u8 ? random.integers(scales, DType::u8, 120, 134) : random.uniform(scales, 0.125f, 1.5f).to(scale_type);
  const SharedInputs in = std::make_shared<Inputs>(
      std::vector{codes, exact ? random.integers({n, k}, dtype_of<T>, -128, 127) : random.normal({n, k}, dtype_of<T>), group_scales,
                  random.uniform({m, 1}, 0.125f, 1.5f)});
  return {.name = tw::format("{}: {} x {} x {}", what, m, n, k),
          .shape = {m, n},
          .dtype = dtype_of<Sum>,
          .run =
              [in, k](const Tensor& out, const Stream& stream) {
                const std::vector<Tensor>& t = in->on(stream.device());
                launch_packed_product<T, Sum, Codes, Scaling, Decode, BM, BN>(
                    stream, {.w = t[0], .x = t[1], .scales = t[2], .row_scales = t[3], .out = out, .depth = k});
              },
          .tolerance = exact ? 0 : 0.03f};
}

template <class T, class Sum, int M, int N, int D>
Case narrow_chain_case(int m, int n, float factor) {
  RandomTensors random;
  const SharedInputs in =
      std::make_shared<Inputs>(std::vector{random.integers({m, D}, dtype_of<T>, -127, 127), random.integers({n, D}, dtype_of<T>, -127, 127),
                                           random.integers({D, n}, dtype_of<T>, -127, 127)});
  return {.name = tw::format("8-bit operands in registers: {} x {}, depth {}", m, n, D),
          .shape = {m, D},
          .dtype = dtype_of<Sum>,
          .run =
              [in, factor](const Tensor& out, const Stream& stream) {
                const std::vector<Tensor>& t = in->on(stream.device());
                launch_narrow_chain<T, Sum, M, N, D>(stream, {.a = t[0], .b = t[1], .c = t[2], .out = out, .factor = factor});
              },
          .tolerance = 0};
}

TEST(Repetition, cuda_OperandsInRegisters) {
  skip_without_cuda();
  using Transposed = ByGroup<bf16, 64, Contract::rows>;
  using Mxfp4 = ByGroup<e8m0, 32, Contract::columns>;
  expect_all_repeatable({
      packed_product_case<bf16, float, i4x2, Transposed, TimesScale, 128, 64>("int4 in groups of 64", 8192, 512, 64),
      packed_product_case<bf16, float, i4x2, Transposed, TimesScale, 128, 64>("int4 in groups of 64", 4096, 256, 384),
      packed_product_case<bf16, float, fp4x2, Mxfp4, TimesScale, 64, 64>("mxfp4", 8192, 256, 160),
      packed_product_case<f16, float, u2x4, ByRow, Affine<1>, 64, 64>("2-bit codes with scales of rows", 8192, 256, 128),
      packed_product_case<i8, i32, i4x2, WithoutScales, TimesScale, 64, 64>("int4 times int8", 8192, 256, 128),
      narrow_chain_case<i8, i32, 64, 64, 64>(100000, 16, 1.0f / 1024),
      narrow_chain_case<i8, i32, 128, 32, 128>(65536, 80, 1.0f / 4096),
  });
}

/// Sizes whose sum is a multiple of 64.
std::vector<int> padded_sizes(std::mt19937_64& random, int count, int limit) {
  std::vector<int> sizes = random_sizes(random, count, limit);
  const int rows = std::accumulate(sizes.begin(), sizes.end(), 0);
  sizes.back() += ceil_div(rows, 64) * 64 - rows;
  return sizes;
}

/// The last 64 rows are in no segment.
template <class T, int BM, int BN, int Cluster>
Case grouped_case(int segments, int limit, int n, int k) {
  RandomTensors random;
  const std::vector<std::int32_t> offsets = offsets_of(padded_sizes(random.engine, segments, limit));
  const int rows = offsets.back() + 64;
  const SharedInputs in = std::make_shared<Inputs>(
      std::vector{random.normal({rows, k}, dtype_of<T>), random.normal({segments, n, k}, dtype_of<T>), tensor_of(offsets)});
  return {.name = tw::format("{} products of {} rows in clusters of {}, {} columns, depth {}", segments, rows, Cluster, n, k),
          .shape = {rows, n},
          .dtype = dtype_of<T>,
          .run = [in](const Tensor& out, const Stream& stream) {
            const std::vector<Tensor>& t = in->on(stream.device());
            launch_grouped_product<T, BM, BN, Cluster>(stream, {.x = t[0], .w = t[1], .offsets = t[2], .out = out});
          }};
}

/// NaN in one of the segments must stay there.
Case ragged_depth_case() {
  constexpr int kSegments = 640, kM = 70, kN = 40;
  RandomTensors random;
  const std::vector<std::int32_t> offsets = offsets_of(random_sizes(random.engine, kSegments, 130));
  const int rows = offsets.back();
  const auto nan_in_one_segment = [&](const Tensor& t) {
    const std::size_t segment = 300;
    for (std::int64_t i = offsets[segment] * t.shape(1); i < offsets[segment + 1] * t.shape(1); ++i) t.data<bf16>()[i] = bf16(kNaN);
    return t;
  };
  const SharedInputs in =
      std::make_shared<Inputs>(std::vector{nan_in_one_segment(random.integers({rows, 72}, DType::bf16, -4, 4)),
                                           nan_in_one_segment(random.integers({rows, kN}, DType::bf16, -4, 4)), tensor_of(offsets)});
  return {.name = tw::format("sums over {} segments", kSegments),
          .shape = {kSegments, kM, kN},
          .dtype = DType::f32,
          .run =
              [in](const Tensor& out, const Stream& stream) {
                const std::vector<Tensor>& t = in->on(stream.device());
                const Tensor y = t[0].slice(1, 0, kM);
                launch_ragged_depth<bf16, 64, 32>(stream, {.y = y, .x = t[1], .offsets = t[2], .out = out});
              },
          .tolerance = 0};
}

TEST(Repetition, cuda_Segments) {
  skip_without_cuda();
  expect_all_repeatable({grouped_case<bf16, 64, 64, 2>(40, 1000, 512, 64), grouped_case<bf16, 64, 64, 2>(40, 1000, 72, 136),
                         grouped_case<bf16, 64, 32, 1>(40, 1000, 256, 64), ragged_depth_case()});
}

}  // namespace
}  // namespace tw::test
