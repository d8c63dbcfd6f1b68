// The scan in five steps: each against plain loops in double, all together against the recurrence, and what they refuse.

#include <gtest/gtest.h>

#include "kernels/mamba2/chunk_case.hpp"
#include "tests/expect_error.hpp"

namespace tw::kernels::mamba2 {
namespace {

using namespace tw::test;

class Mamba2Chunks : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  /// Each step, of operands that the plain loops gave, which are rounded once.
  void check(const Case& c, std::int64_t chunk_size, DType dtype) {
    SCOPED_TRACE(c.text(dtype) + tw::format(" chunk_size {}", chunk_size));
    Steps s(c, chunk_size, dtype, device, random);
    if (!launched([&] { s.cumsum(); })) return;
    const auto cumsum = s.expected_cumsum(s.exact), naive_cumsum = s.expected_cumsum(s.naive);
    expect_accurate("dt", s.sizes, {cumsum.first, naive_cumsum.first}, DType::f32, 2, 1);
    expect_accurate("dA_cumsum", s.sums, {cumsum.second, naive_cumsum.second}, DType::f32, 2, chunk_size);
    const std::vector<float> sizes = narrowed(cumsum.first, DType::f32), sums = narrowed(cumsum.second, DType::f32);
    s.sizes.fill(sizes), s.sums.fill(sums);

    const auto x = widened(s.of.of_x), b = widened(s.of.of_b), keys = widened(s.of.of_c);
    const auto added_by = [&](const PlainChunks& plain) { return plain.added(b, x, widened(sizes), widened(sums)); };
    s.state();
    const std::vector<double> added = added_by(s.exact);
    expect_accurate("added", s.added, {added, added_by(s.naive)}, dtype, 2, chunk_size);

    const std::vector<float> of_chunks = narrowed(added, DType::f32);
    s.added.fill(of_chunks);
    s.passing();
    std::vector<double> decays;
    for (std::size_t i = s.exact.chunk - 1; i < sums.size(); i += s.exact.chunk) decays.push_back(sums[i]);
    const auto initial = c.initial ? widened(s.of.of_initial) : std::vector<double>{};
    const auto passed = s.exact.passed(widened(of_chunks), decays, initial, dtype);
    const auto naive_passed = s.naive.passed(widened(of_chunks), decays, initial, dtype);
    expect_accurate("states", s.states, {passed.first, naive_passed.first}, dtype, 2, 1);
    expect_accurate("final_states", s.of.final, {passed.second, naive_passed.second}, DType::f32, 2, c.seqlen);
    const std::vector<float> states = narrowed(passed.first, dtype);
    s.states.fill(states);

    for (const bool causal : {false, true}) {
      s.products(causal);
      const auto terms = s.exact.products(absolute(keys), absolute(b), causal);
      expect_accurate("CB", s.cb, {s.exact.products(keys, b, causal), s.naive.products(keys, b, causal), terms}, DType::f32, 2, c.state);
    }
    // What is above the diagonal counts for nothing.
    std::vector<float> cb = narrowed(s.exact.products(keys, b, false), DType::f32);
    for (std::size_t i = 0; i < cb.size(); ++i)
      if (i % s.exact.chunk > i / s.exact.chunk % s.exact.chunk) cb[i] = kNaN;
    s.cb.fill(cb);
    s.scan();
    const auto outputs_by = [&](const PlainChunks& plain) {
      const auto z = c.gate ? widened(s.of.of_z) : std::vector<double>{};
      return plain.outputs(widened(cb), x, widened(sizes), widened(sums), keys, widened(states), s.skip(), z);
    };
    const auto outputs = outputs_by(s.exact), naive = outputs_by(s.naive);
    expect_accurate("ungated", s.ungated, {outputs.first, naive.first}, dtype, 2, c.state);
    expect_accurate("y", s.of.y, {outputs.second, naive.second}, dtype, 2, c.state);
  }
  /// All five in a row, against the recurrence.
  void check_row(const Case& c, std::int64_t chunk_size, DType dtype) {
    SCOPED_TRACE(c.text(dtype) + tw::format(" chunk_size {}", chunk_size));
    Steps s(c, chunk_size, dtype, device, random);
    if (!launched([&] { s.cumsum(), s.state(), s.passing(), s.products(true), s.scan(); })) return;
    const auto expected = s.of.expected(false);
    expect_accurate("y", s.of.y, expected.y, dtype, 2, c.state);
    expect_accurate("final_states", s.of.final, expected.final, dtype, 2, c.seqlen);
  }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Devices, Mamba2Chunks, testing::ValuesIn(kDevices), device_name);

TEST_P(Mamba2Chunks, EveryLength) {
  for (const std::int64_t seqlen : {1, 63, 64, 65, 128, 200}) check({.seqlen = seqlen, .shared = 2}, 64, DType::bf16);
  check({.batch = 2, .seqlen = 131}, 128, DType::f16);
}

TEST_P(Mamba2Chunks, EveryChunkSize) {
  for (const std::int64_t size : {16, 48, 80, 128, 256})
    check({.batch = 2, .seqlen = 300, .shared = 2, .dim = 16, .state = 32}, size, DType::bf16);
}

TEST_P(Mamba2Chunks, EveryDimension) {
  check({.seqlen = 70, .dim = 64, .state = 128}, 64, DType::bf16);
  check({.seqlen = 70, .dim = 33, .state = 17}, 64, DType::f16);
  check({.seqlen = 70, .dim = 130, .state = 256}, 64, DType::bf16);
}

TEST_P(Mamba2Chunks, EveryOption) {
  check({.shared = 3, .gate = false, .skip = 0}, 64, DType::bf16);
  check({.groups = 2, .gate = false, .initial = false, .skip = 1}, 64, DType::bf16);
  check({.softplus = false, .bias = false}, 64, DType::f16);
  check({.dt_min = 0.2f, .dt_max = 0.5f, .f32_dt = true}, 64, DType::bf16);
  check({.batch = 2, .seqlen = 150, .numbered = true}, 64, DType::bf16);
}

TEST_P(Mamba2Chunks, EveryRate) {
  for (const Rate rate : {Rate::strong, Rate::zero, Rate::infinite})
    check({.batch = 2, .seqlen = 150, .shared = 2, .rate = rate, .softplus = rate != Rate::infinite}, 64, DType::bf16);
}

TEST_P(Mamba2Chunks, EveryStride) {
  check({.batch = 2, .seqlen = 70, .groups = 2, .gap = 8}, 64, DType::bf16);
  check({.batch = 2, .seqlen = 70, .groups = 2, .gap = 3}, 64, DType::f16);
  check({.batch = 2, .seqlen = 70, .groups = 2, .order = {3, 1, 0, 2}}, 64, DType::bf16);
}

/// With unit vectors as B, each column of what a chunk adds is one step's x times its factor. In a sum over all steps a factor that is off
/// by a few percent would not be seen.
TEST_P(Mamba2Chunks, EveryStepHasItsFactor) {
  for (const std::int64_t size : {64, 128}) {
    Steps s({.seqlen = 2 * size - 5, .shared = 2, .dim = 64, .state = size, .dt_min = 0.01f, .dt_max = 0.05f}, size, DType::bf16, device,
            random);
    const auto cumsum = s.expected_cumsum(s.exact);
    const std::vector<float> sizes = narrowed(cumsum.first, DType::f32), sums = narrowed(cumsum.second, DType::f32);
    s.sizes.fill(sizes), s.sums.fill(sums);
    std::vector<float> units(s.of.of_b.size());
    for (std::int64_t t = 0; t < s.c.seqlen; ++t) units[static_cast<std::size_t>(t * size + t % size)] = 1;
    s.of.b.fill(units);
    if (!launched([&] { s.state(); })) return;
    const auto added_by = [&](const PlainChunks& plain) {
      return plain.added(widened(units), widened(s.of.of_x), widened(sizes), widened(sums));
    };
    const std::vector<double> out = s.added.values(), reference = added_by(s.exact), naive = added_by(s.naive);
    const std::size_t columns = static_cast<std::size_t>(size), area = s.exact.area();
    for (std::size_t state = 0; state < out.size(); state += area) {
      for (std::size_t column = 0; column < columns; ++column) {
        std::vector<double> of_out, of_reference, of_naive;
        for (std::size_t i = state + column; i < state + area; i += columns)
          of_out.push_back(out[i]), of_reference.push_back(reference[i]), of_naive.push_back(naive[i]);
        EXPECT_TRUE(accurate({.out = of_out, .reference = of_reference, .naive = of_naive, .arithmetic = Arithmetic::bf16}))
            << "state " << state / area << " step " << column;
      }
    }
  }
}

TEST_P(Mamba2Chunks, TogetherTheyAreTheScan) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    check_row({.batch = 2, .seqlen = 300, .shared = 2, .state = 128}, 256, dtype);
    check_row({.seqlen = 190, .groups = 2, .rate = Rate::strong}, 64, dtype);
    check_row({.batch = 2, .seqlen = 150, .initial = false, .numbered = true}, 128, dtype);
  }
}

TEST_P(Mamba2Chunks, WithoutChunksTheStatesStay) {
  Steps s({.batch = 2, .seqlen = 0, .groups = 2}, 64, DType::bf16, device, random);
  if (!launched([&] { s.cumsum(), s.state(), s.passing(), s.products(false), s.scan(); })) return;
  EXPECT_EQ(s.of.final.values(), widened(s.of.of_initial));
}

/// The final states may replace the initial ones, and passed states may be f32.
TEST_P(Mamba2Chunks, StatesOfF32InPlace) {
  const PlainChunks exact{.batch = 2, .seqlen = 48, .groups = 3, .dim = 5, .state = 7};
  PlainChunks naive = exact;
  naive.dtype = DType::f32;
  PlacedTensor added({2, 3, 3, 5, 7}, DType::f32, device), passed({2, 3, 3, 5, 7}, DType::f32, device),
      states({2, 3, 5, 7}, DType::f32, device);
  PlacedTensor decays({2, 3, 3}, DType::f32, device, {.order = {2, 0, 1}, .gap = 3});
  const auto of_added = widened(added.fill_random(random)), of_states = widened(states.fill_random(random));
  std::vector<float> logs = decays.fill_random(random);
  for (float& x : logs) x = -std::abs(x);
  decays.fill(logs);
  if (!launched(
          [&] { tw::mamba2_state_passing(added, decays, passed, {.initial_states = &states.tensor(), .final_states = &states.tensor()}); }))
    return;
  const auto expected = exact.passed(of_added, widened(logs), of_states, DType::f32);
  const auto by_naive = naive.passed(of_added, widened(logs), of_states, DType::f32);
  expect_accurate("passed", passed, {expected.first, by_naive.first}, DType::f32, 2, 3);
  expect_accurate("states", states, {expected.second, by_naive.second}, DType::f32, 2, 3);
}

TEST_P(Mamba2Chunks, BadInput) {
  const auto make = [&](Shape shape, DType dtype = DType::f32) { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); };
  const auto fails = [](auto call, std::initializer_list<std::string_view> parts) { expect_error<InvalidArgument>(call, parts); };
  const DType half = DType::bf16;
  const Tensor x = make({2, 40, 4, 8}, half), b = make({2, 40, 2, 16}, half), c = make({2, 40, 2, 16}, half), y = make({2, 40, 4, 8}, half);
  const Tensor dt = make({2, 40, 4}, half), a = make({4}), sums = make({2, 4, 2, 32}), sizes = make({2, 4, 2, 32});
  const Tensor added = make({2, 2, 4, 8, 16}), states = make({2, 2, 4, 8, 16}, half), cb = make({2, 2, 2, 32, 32});
  const Tensor odd = make({2, 4, 2, 20}), large = make({2, 4, 1, 272}), few = make({2, 4, 1, 32}), wide = make({2, 4, 2, 48}),
               matrix = make({2, 4});
  const Tensor with_gaps = make({2, 4, 2, 64}).slice(3, 0, 32), of_half = make({2, 4, 2, 32}, half), bias = make({3});

  fails([&] { mamba2_chunk_cumsum(x, a, sums, sizes); }, {"mamba2_chunk_cumsum", "dt is bf16[2, 40, 4, 8]", "[batch, seqlen, nheads]"});
  fails([&] { mamba2_chunk_cumsum(dt, bias, sums, sizes); }, {"A is f32[3]", "f32[4]"});
  fails([&] { mamba2_chunk_cumsum(dt, a, odd, odd); }, {"dA_cumsum is f32[2, 4, 2, 20]", "multiple of 16 from 16 to 256"});
  fails([&] { mamba2_chunk_cumsum(dt, a, large, large); }, {"dA_cumsum is f32[2, 4, 1, 272]", "to 256"});
  fails([&] { mamba2_chunk_cumsum(dt, a, few, few); }, {"dA_cumsum is f32[2, 4, 1, 32]", "[2, 4, 2, 32]"});
  fails([&] { mamba2_chunk_cumsum(dt, a, matrix, sizes); }, {"dA_cumsum is f32[2, 4]", "[batch, nheads, nchunks, chunk_size]"});
  fails([&] { mamba2_chunk_cumsum(dt, a, sums, with_gaps); }, {"dt_out is f32[2, 4, 2, 32]", "contiguous"});
  fails([&] { mamba2_chunk_cumsum(dt, a, of_half, sizes); }, {"dA_cumsum is bf16[2, 4, 2, 32]", "f32"});
  fails([&] { mamba2_chunk_cumsum(dt, a, sums, sums); }, {"dt_out", "dA_cumsum", "memory"});
  fails([&] { mamba2_chunk_cumsum(dt, a, sums, sizes, {.dt_bias = &bias}); }, {"dt_bias is f32[3]", "f32[4]"});
  fails([&] { mamba2_chunk_cumsum(dt, a, sums, sizes, {.dt_min = 1, .dt_max = 0}); }, {"dt_max is 0", "dt_min, 1"});
  fails([&] { mamba2_chunk_cumsum(dt, a, sums, sizes, {.seq_idx = &a}); }, {"seq_idx is f32[4]", "i32[2, 40]"});

  fails(
      [&] {
        mamba2_chunk_state(b, make({2, 40, 4, 8}), sizes, sums, added);
      },
      {"mamba2_chunk_state", "x is f32[2, 40, 4, 8]", "f16 and bf16"});
  fails(
      [&] {
        mamba2_chunk_state(make({2, 40, 3, 16}, half), x, sizes, sums, added);
      },
      {"B is bf16[2, 40, 3, 16]", "multiple of its groups"});
  fails([&] { mamba2_chunk_state(b, x, wide, sums, added); }, {"dt is f32[2, 4, 2, 48]", "[2, 4, 2, 32]"});
  fails([&] { mamba2_chunk_state(b, x, sizes, sums, states); }, {"states is bf16[2, 2, 4, 8, 16]", "f32"});
  fails([&] { mamba2_chunk_state(b, x, sizes, sums, make({2, 2, 4, 16, 8})); }, {"states is f32[2, 2, 4, 16, 8]", "[2, 2, 4, 8, 16]"});

  const Tensor decays = sums.select(3, 31), initial = make({2, 4, 16, 8});
  fails([&] { mamba2_state_passing(sums, decays, sums); }, {"mamba2_state_passing", "states is f32[2, 4, 2, 32]"});
  fails([&] { mamba2_state_passing(added, sums, states); }, {"dA_chunk_cumsum is f32[2, 4, 2, 32]", "f32[2, 4, 2]"});
  fails([&] { mamba2_state_passing(added, decays, added); }, {"passed", "states", "memory"});
  fails([&] { mamba2_state_passing(added, decays, cb); }, {"passed is f32[2, 2, 2, 32, 32]", "[2, 2, 4, 8, 16]"});
  fails([&] { mamba2_state_passing(added, decays, states, {.initial_states = &initial}); },
        {"initial_states is f32[2, 4, 16, 8]", "[2, 4, 8, 16]"});

  fails([&] { mamba2_bmm_chunk(c, x, cb); }, {"mamba2_bmm_chunk", "B is bf16[2, 40, 4, 8]", "C's shape"});
  fails([&] { mamba2_bmm_chunk(c, b, sums); }, {"CB is f32[2, 4, 2, 32]"});
  fails([&] { mamba2_bmm_chunk(c, b, make({2, 2, 2, 16, 32})); }, {"CB is f32[2, 2, 2, 16, 32]", "[2, 2, 2, 32, 32]"});

  fails([&] { mamba2_chunk_scan(sums, x, sizes, sums, c, states, y); },
        {"mamba2_chunk_scan", "CB is f32[2, 4, 2, 32]", "[2, 2, 2, 32, 32]"});
  fails([&] { mamba2_chunk_scan(cb, x, sizes, sums, c, added, y); }, {"states is f32[2, 2, 4, 8, 16]", "bf16"});
  fails([&] { mamba2_chunk_scan(cb, x, sizes, sums, c, states, x); }, {"y", "x", "memory"});
  fails([&] { mamba2_chunk_scan(cb, x, sizes, sums, c, states, y, {.d = &bias}); }, {"D is f32[3]", "f32[4] or f32[4, 8]"});
  fails([&] { mamba2_chunk_scan(cb, x, sizes, sums, c, states, y, {.z = &b}); }, {"z is bf16[2, 40, 2, 16]", "x's shape"});
  fails([&] { mamba2_chunk_scan(cb, x, sizes, sums, c, states, y, {.ungated = &y}); }, {"ungated", "y", "memory"});
}

}  // namespace
}  // namespace tw::kernels::mamba2
