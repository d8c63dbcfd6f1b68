// A decoding step in one launch against a decoder in double, on the CPU target and, where there is one, on a GPU.

#include "kernels/decode_step/decode_step.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/decode_step/launch.hpp"
#include "runtime/format.hpp"
#include "runtime/stream.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::decode_step {
namespace {

using namespace tw::test;
using Vector = std::vector<double>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Case {
  std::vector<int> lengths;  ///< of the sequences
  int head_dim = 64, kv_heads = 2, group = 2;
  int hidden = 256, intermediate = 128, vocabulary = 104, layers = 2;
  WeightFormat format = WeightFormat::plain;
  int code_group = 0;
  bool zeros = false;
  bool has_head = true;

  int heads() const { return kv_heads * group; }
  int sequences() const { return static_cast<int>(lengths.size()); }
  int pages() const {
    return std::accumulate(lengths.begin(), lengths.end(), 1, [](int n, int length) { return n + length / 64 + 1; });
  }
  std::string describe() const {
    return tw::format(
        "{} sequences, the first of {}, head_dim {} group {} hidden {} intermediate {} vocabulary {} layers {}, weights {}, scales of {}{}",
        sequences(), lengths.front(), head_dim, group, hidden, intermediate, vocabulary, layers, name_of(format), code_group,
        zeros ? " with zero points" : "");
  }
};

/// A row of a matrix times a vector.
double dot(const Vector& weight, std::int64_t row, const Vector& x) {
  return std::inner_product(x.begin(), x.end(), weight.begin() + row * std::ssize(x), 0.0);
}

/// The decoder, the cache and the tokens of a case as numbers.
struct Numbers {
  Vector qkv, out, gate_up, down, head, norms, cosines, sines, x, keys, values;
  std::vector<int> table;  ///< [sequences, page_count]
  int page_count = 0;
};

/// What a step leaves: scores, or without a head the last layer's results, and the new keys and values of all layers.
struct Outcome {
  Vector scores, keys, values;
};

/// The step, whose results are rounded by `round` after each operation.
Outcome decode(const Case& c, const Numbers& n, const std::function<double(double)>& round) {
  constexpr double kEpsilon = 1e-5;
  const int d = c.head_dim, heads = c.heads(), width = c.kv_heads * d;
  Outcome outcome;
  for (int sequence = 0; sequence < c.sequences(); ++sequence) {
    const int length = c.lengths[at(sequence)];
    Vector x(n.x.begin() + std::int64_t{sequence} * c.hidden, n.x.begin() + (std::int64_t{sequence} + 1) * c.hidden);
    const auto normed = [&](int norm) {
      const double mean = std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / c.hidden;
      Vector y(x.size());
      for (std::size_t i = 0; i < y.size(); ++i) y[i] = round(round(x[i] / std::sqrt(mean + kEpsilon)) * n.norms[at(norm * c.hidden) + i]);
      return y;
    };
    const auto product = [&](const Vector& weight, std::int64_t row0, int rows, const Vector& by) {
      Vector y(at(rows));
      for (int row = 0; row < rows; ++row) y[at(row)] = round(dot(weight, row0 + row, by));
      return y;
    };
    const auto add = [&](const Vector& y) {
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = round(x[i] + y[i]);
    };
    for (int layer = 0; layer < c.layers; ++layer) {
      const int rows = (heads + 2 * c.kv_heads) * d;
      Vector qkv = product(n.qkv, std::int64_t{layer} * rows, rows, normed(2 * layer));
      for (int head = 0; head < heads + c.kv_heads; ++head) {
        for (int i = 0; i < d / 2; ++i) {
          double &low = qkv[at(head * d + i)], &high = qkv[at(head * d + i + d / 2)];
          const double cosine = n.cosines[at(length * (d / 2) + i)], sine = n.sines[at(length * (d / 2) + i)], a = low, b = high;
          low = round(a * cosine - b * sine);
          high = round(b * cosine + a * sine);
        }
      }
      outcome.keys.insert(outcome.keys.end(), qkv.begin() + heads * d, qkv.begin() + heads * d + width);
      outcome.values.insert(outcome.values.end(), qkv.begin() + heads * d + width, qkv.end());
      Vector attended;
      for (int head = 0; head < heads; ++head) {
        const int column = head / c.group * d;
        const auto element = [&](const Vector& cache, int first, int key, int i) {
          if (key == length) return qkv[at(first + column + i)];
          const std::int64_t page = n.table[at(sequence * n.page_count + key / 64)];
          return cache[at(((layer * c.pages() + page) * 64 + key % 64) * width + column + i)];
        };
        Vector weights, o(at(d));
        double total = 0;
        for (int key = 0; key <= length; ++key) {
          double score = 0;
          for (int i = 0; i < d; ++i) score += qkv[at(head * d + i)] * element(n.keys, heads * d, key, i);
          weights.push_back(std::exp(score / std::sqrt(d)));
          total += weights.back();
        }
        for (int key = 0; key <= length; ++key)
          for (int i = 0; i < d; ++i) o[at(i)] += weights[at(key)] / total * element(n.values, heads * d + width, key, i);
        for (const double y : o) attended.push_back(round(y));
      }
      add(product(n.out, std::int64_t{layer} * c.hidden, c.hidden, attended));
      const Vector gate_up = product(n.gate_up, std::int64_t{layer} * 2 * c.intermediate, 2 * c.intermediate, normed(2 * layer + 1));
      Vector gated(at(c.intermediate));
      for (int i = 0; i < c.intermediate; ++i) {
        const double gate = gate_up[at(i)];
        gated[at(i)] = round(round(gate / (1 + std::exp(-gate))) * gate_up[at(c.intermediate + i)]);
      }
      add(product(n.down, std::int64_t{layer} * c.hidden, c.hidden, gated));
    }
    const Vector scores = n.head.empty() ? x : product(n.head, 0, c.vocabulary, normed(2 * c.layers));
    outcome.scores.insert(outcome.scores.end(), scores.begin(), scores.end());
  }
  return outcome;
}

template <class Values>
Vector doubles(const Values& values) {
  return {values.begin(), values.end()};
}

class DecodeStepOn : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }
  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  Stream stream() const { return Stream::standard(device); }
  std::mt19937_64 random = random_engine();

  template <int head_dim, int group, int room = 8, WeightFormat format = WeightFormat::plain, int code_group = 0, bool zeros = false>
  void check(Case c) {
    c.head_dim = head_dim;
    c.group = group;
    c.format = format;
    c.code_group = code_group;
    c.zeros = zeros;
    constexpr bool plain = format == WeightFormat::plain;
    SCOPED_TRACE(c.describe());
    const int width = c.kv_heads * c.head_dim, heads = c.heads();
    Numbers n;
    std::vector<PlacedTensor> tensors;
    tensors.reserve(16);
    const auto make = [&](Shape shape, double scale, Vector& values, DType type) -> PlacedTensor& {
      PlacedTensor& t = tensors.emplace_back(std::move(shape), type, device);
      values = doubles(t.fill_random(random, static_cast<float>(scale)));
      return t;
    };
    const auto weight = [&](std::int64_t rows, std::int64_t columns, Vector& values) -> Weight {
      const double scale = 1 / std::sqrt(static_cast<double>(columns));
      if (plain) return {.plain = make({rows, columns}, scale, values, dtype).tensor()};
      PlacedTensor exact({rows, columns}, DType::f32, Device::cpu());
      exact.fill_random(random, static_cast<float>(scale));
      const QuantizedMatrix quantized = quantize(exact.tensor(), {.format = format, .group = code_group, .zero_points = zeros});
      const Tensor numbers = Tensor::empty({rows, columns}, DType::f32);
      dequantize(quantized, numbers);
      values.assign(numbers.data<float>(), numbers.data<float>() + numbers.numel());
      return {.quantized = quantized.to(device)};
    };
    Vector embedding;
    Decoder decoder{.qkv = weight(c.layers * (heads + 2 * c.kv_heads) * c.head_dim, c.hidden, n.qkv),
                    .out = weight(c.layers * c.hidden, heads * c.head_dim, n.out),
                    .gate_up = weight(c.layers * 2 * c.intermediate, c.hidden, n.gate_up),
                    .down = weight(c.layers * c.hidden, c.intermediate, n.down),
                    .embedding = make({c.vocabulary, c.hidden}, 1, embedding, dtype).tensor(),
                    .norms = make({2 * c.layers + 1, c.hidden}, 1, n.norms, dtype).tensor(),
                    .head = c.has_head ? weight(c.vocabulary, c.hidden, n.head) : Weight(),
                    .layers = c.layers,
                    .heads = heads,
                    .kv_heads = c.kv_heads,
                    .head_dim = c.head_dim,
                    .epsilon = 1e-5f};
    const int positions = *std::max_element(c.lengths.begin(), c.lengths.end()) + 1;
    decoder.cosines = make({positions, c.head_dim / 2}, 1, n.cosines, DType::f32).tensor();
    decoder.sines = make({positions, c.head_dim / 2}, 1, n.sines, DType::f32).tensor();

    // Pages in no order; what lies behind a sequence's tokens is NaN.
    std::vector<int> shuffled(at(c.pages()));
    std::iota(shuffled.begin(), shuffled.end(), 0);
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    n.page_count = positions / 64 + 1;
    n.table.assign(at(c.sequences() * n.page_count), shuffled.back());
    const Shape cache_shape{c.layers, c.pages(), 64, c.kv_heads, c.head_dim};
    std::vector<float> key_values(at(cache_shape[0] * cache_shape[1] * 64 * width), kNaN), value_values = key_values;
    std::normal_distribution<float> normal;
    int next = 0;
    for (int sequence = 0; sequence < c.sequences(); ++sequence) {
      for (int page = 0; page <= c.lengths[at(sequence)] / 64; ++page) n.table[at(sequence * n.page_count + page)] = shuffled[at(next++)];
      for (int layer = 0; layer < c.layers; ++layer) {
        for (int key = 0; key < c.lengths[at(sequence)]; ++key) {
          const std::int64_t page = n.table[at(sequence * n.page_count + key / 64)];
          for (int i = 0; i < width; ++i) {
            const std::size_t to = at(((layer * c.pages() + page) * 64 + key % 64) * width + i);
            key_values[to] = round_to(dtype, normal(random));
            value_values[to] = round_to(dtype, normal(random));
          }
        }
      }
    }
    n.keys = doubles(key_values);
    n.values = doubles(value_values);
    PlacedTensor keys(cache_shape, dtype, device), values(cache_shape, dtype, device);
    keys.fill(key_values);
    values.fill(value_values);
    std::vector<int> ids;
    for (int sequence = 0; sequence < c.sequences(); ++sequence) {
      ids.push_back(static_cast<int>(random() % static_cast<unsigned>(c.vocabulary)));
      n.x.insert(n.x.end(), embedding.begin() + ids.back() * c.hidden, embedding.begin() + (ids.back() + 1) * c.hidden);
    }
    PlacedTensor scores({c.sequences(), c.has_head ? c.vocabulary : c.hidden}, dtype, device);
    const auto numbers = [&](std::span<const int> from, Shape shape) { return Tensor::from(from, std::move(shape)).to(device); };
    const Step step{.ids = numbers(ids, {c.sequences()}),
                    .keys = keys,
                    .values = values,
                    .lengths = numbers(c.lengths, {c.sequences()}),
                    .pages = numbers(n.table, {c.sequences(), n.page_count}),
                    .scores = c.has_head ? scores.tensor() : Tensor(),
                    .x = c.has_head ? Tensor() : scores.tensor()};
    if (device.is_cuda()) {
      EXPECT_EQ(supports(decoder, c.sequences(), stream()), stream().target() == GpuTarget::sm_90a);
      run_on_gpu(decoder, step, scores.tensor());
    } else if (dtype == DType::bf16) {
      run_on_cpu<{format, DType::bf16, head_dim, group, room, 3, code_group, zeros}>(decoder, step);
    } else {
      run_on_cpu<{format, DType::f16, head_dim, group, room, 2, code_group, zeros}>(decoder, step);
    }

    const Outcome reference = decode(c, n, [](double y) { return y; });
    const Outcome naive = decode(c, n, [&](double y) { return static_cast<double>(round_to(dtype, static_cast<float>(y))); });
    scores_.add(doubles(scores.values()), reference.scores, naive.scores);
    // The cache has the new keys and values, and is what it was elsewhere.
    const auto check_cache = [&](const PlacedTensor& cache, std::vector<float>& before, const Vector& exact, const Vector& rounded) {
      std::vector<double> found, after = doubles(cache.values());
      for (int sequence = 0; sequence < c.sequences(); ++sequence) {
        const int length = c.lengths[at(sequence)];
        const std::int64_t page = n.table[at(sequence * n.page_count + length / 64)];
        for (int layer = 0; layer < c.layers; ++layer) {
          for (int i = 0; i < width; ++i) {
            const std::size_t place = at(((layer * c.pages() + page) * 64 + length % 64) * width + i);
            found.push_back(after[place]);
            after[place] = before[place];
          }
        }
      }
      cache_.add(found, exact, rounded);
      for (std::size_t i = 0; i < after.size(); ++i) {
        if (std::isnan(before[i]) ? !std::isnan(after[i]) : after[i] != static_cast<double>(before[i])) {
          ADD_FAILURE() << "element " << i << " of the cache was changed";
          break;
        }
      }
    };
    check_cache(keys, key_values, reference.keys, naive.keys);
    check_cache(values, value_values, reference.values, naive.values);
    EXPECT_TRUE(scores.gaps_intact());
  }

  /// Holds the results of all checks of a test together against the accuracy rule. The errors of one sequence's results all have the same
  /// few causes, so that their size is a matter of luck.
  void TearDown() override {
    if (IsSkipped()) return;
    for (const Collected* all : {&scores_, &cache_})
      EXPECT_TRUE(accurate({all->found, all->exact, all->rounded, arithmetic_of(dtype, device), 192}));
  }

 private:
  struct Collected {
    Vector found, exact, rounded;
    void add(const Vector& f, const Vector& e, const Vector& r) {
      found.insert(found.end(), f.begin(), f.end());
      exact.insert(exact.end(), e.begin(), e.end());
      rounded.insert(rounded.end(), r.begin(), r.end());
    }
  };
  Collected scores_, cache_;

  /// Again and again, beside copies on another stream: what tiles wait for must be there every time.
  void run_on_gpu(const Decoder& decoder, const Step& step, const Tensor& result) {
    constexpr int kRepetitions = 200;
    const Stream other(device);
    const Tensor from = Tensor::poisoned({8 << 20}, DType::u8, other), to = Tensor::poisoned(from.shape(), DType::u8, other);
    std::vector<std::uint16_t> first;
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
      to.copy_from(from, other);
      fill_bytes(result.data(), static_cast<std::size_t>(result.numel()) * size_of(dtype), 0xff, stream());
      run(decoder, step, stream());
      const Tensor scores = result.to(Device::cpu());
      const auto* const bits = static_cast<const std::uint16_t*>(scores.data());
      if (repetition == 0) first.assign(bits, bits + scores.numel());
      ASSERT_TRUE(std::equal(first.begin(), first.end(), bits)) << "repetition " << repetition << " differs from the first";
    }
  }
  template <Kernel k>
  void run_on_cpu(const Decoder& decoder, const Step& step) {
    const Launch launch(decoder, step, 12, stream());
    launch_cpu<HostKernel<k>>(launch.grid(), [&](auto& bind, auto& p) { launch.bind_to(bind, p); });
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, DecodeStepOn, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::bf16, DType::f16)),
                         [](const auto& test) {
                           return tw::format("{}_{}", std::get<0>(test.param).is_cuda() ? "cuda" : "cpu", name_of(std::get<1>(test.param)));
                         });

TEST_P(DecodeStepOn, OneSequenceIsCorrect) {
  for (const int length : {0, 1, 31, 32, 64, 127, 128, 200}) check<64, 2, 1>({.lengths = {length}});
  check<64, 2>({.lengths = {33}, .hidden = 2304, .intermediate = 256});
  check<64, 2, 1>({.lengths = {33}, .hidden = 2304, .intermediate = 2176});
}
TEST_P(DecodeStepOn, ManySplitsAreCorrect) {
  for (const int length : {1500, 1151, 1024, 1055, 1056}) check<128, 4, 1>({.lengths = {length}, .kv_heads = 1, .hidden = 384});
}
TEST_P(DecodeStepOn, SequencesOfUnequalLengthsAreCorrect) {
  check<64, 2>({.lengths = {5, 0, 130, 64, 63}, .kv_heads = 3, .hidden = 640, .intermediate = 128, .layers = 3});
  check<128, 4>({.lengths = {40, 7, 1, 2, 3, 90, 0, 64}, .intermediate = 2304});
  check<64, 2, 16>({.lengths = {40, 7, 1, 2, 3, 90, 0, 64, 130, 5, 63, 32, 31, 200}, .hidden = 640});
}

TEST_P(DecodeStepOn, WithoutAHeadTheLastLayersResultsAreCorrect) {
  check<64, 2>({.lengths = {40, 7, 100}, .has_head = false});
  check<64, 2, 8, WeightFormat::int8>({.lengths = {40, 7, 100}, .intermediate = 256, .has_head = false});
}
TEST_P(DecodeStepOn, WeightsInEightBitsAreCorrect) {
  const Case long_rows{.lengths = {40, 7, 1, 2, 3, 90, 0, 64}, .intermediate = 4352};
  const Case many{.lengths = {5, 0, 130, 64, 63, 31, 32, 1, 200}, .intermediate = 256};
  for (const int length : {0, 31, 64, 200}) {
    check<64, 2, 1, WeightFormat::int8>({.lengths = {length}, .intermediate = 256});
    check<64, 2, 1, WeightFormat::fp8>({.lengths = {length}, .hidden = 1280, .intermediate = 256, .layers = 3});
  }
  check<64, 2, 1, WeightFormat::int8>({.lengths = {63}, .hidden = 2304, .intermediate = 4352});
  check<128, 4, 8, WeightFormat::int8>(long_rows);
  check<128, 4, 8, WeightFormat::fp8>(long_rows);
  check<64, 2, 16, WeightFormat::int8>(many);
  check<64, 2, 16, WeightFormat::fp8>(many);
}
TEST_P(DecodeStepOn, WeightsInFourBitsAreCorrect) {
  constexpr WeightFormat int4 = WeightFormat::int4;
  const Case many{.lengths = {5, 0, 130, 64, 63, 31, 32, 1, 200}, .intermediate = 256};
  for (const int length : {0, 64, 200}) {
    check<64, 2, 1, int4, 32>({.lengths = {length}, .intermediate = 256});
    check<64, 2, 1, int4, 128, true>({.lengths = {length}, .hidden = 1280, .intermediate = 256, .layers = 3});
  }
  check<128, 4, 8, int4, 32, true>({.lengths = {40, 7, 1, 2, 3, 90, 0, 64}, .intermediate = 4352});
  check<64, 2, 16, int4, 128>(many);
}

}  // namespace
}  // namespace tw::kernels::decode_step
