// Gradients of the scan's five steps: each against plain loops in double, all together against the recurrence and mamba2_backward(), and
// what they refuse.

#include <gtest/gtest.h>

#include "kernels/mamba2/chunk_case.hpp"
#include "kernels/mamba2/chunk_gradient_reference.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/elementwise.hpp"

namespace tw::kernels::mamba2 {
namespace {

using namespace tw::test;

Expected expected_of(const PlainSum& exact, const PlainSum& naive) { return {exact.values, naive.values, exact.terms}; }

/// A call of the five steps and their gradients.
class GradientSteps : public Steps {
 public:
  GradientSteps(const Case& given, std::int64_t chunk_size, DType type, Device on, std::mt19937_64& random)
      : Steps(given, chunk_size, type, on, random),
        exact_gradients(exact),
        naive_gradients(naive),
        dx_of_scan(of.x.tensor().shape(), type, on),
        db_of_products(of.b.tensor().shape(), type, on),
        d_sums(sums.tensor().shape(), DType::f32, on),
        d_sizes(sums.tensor().shape(), DType::f32, on),
        d_sums_of_scan(sums.tensor().shape(), DType::f32, on),
        d_sizes_of_scan(sums.tensor().shape(), DType::f32, on),
        d_decays({c.batch, c.heads(), sums.tensor().shape(2)}, DType::f32, on),
        d_added(added.tensor().shape(), DType::f32, on),
        d_states(added.tensor().shape(), DType::f32, on),
        d_cb(cb.tensor().shape(), DType::f32, on) {}

  void cumsum_backward() {
    mamba2_chunk_cumsum_backward(of.dt, of.rate, d_sums, d_sizes, of.d_dt,
                                 {.dt_bias = c.bias ? &of.bias.tensor() : nullptr,
                                  .dt_softplus = c.softplus,
                                  .dt_min = c.dt_min,
                                  .dt_max = c.dt_max,
                                  .seq_idx = c.numbered ? &of.numbers : nullptr,
                                  .da = &of.da.tensor(),
                                  .d_dt_bias = c.bias ? &of.d_bias.tensor() : nullptr});
  }
  void state_backward() { mamba2_chunk_state_backward(of.b, of.x, sizes, sums, d_added, of.db, of.dx, d_sizes, d_sums); }
  void passing_backward() {
    mamba2_state_passing_backward(
        states, sums.tensor().select(3, sums.tensor().shape(3) - 1), d_states, d_added, d_decays,
        {.d_final_states = c.initial ? &of.d_final.tensor() : nullptr, .d_initial_states = c.initial ? &of.d_initial.tensor() : nullptr});
  }
  void products_backward(bool causal) { mamba2_bmm_chunk_backward(of.c_matrix, of.b, d_cb, of.dc, db_of_products, {.causal = causal}); }
  /// dC goes to `dc`.
  void scan_backward(const Tensor& dc) {
    mamba2_chunk_scan_backward(cb, of.x, sizes, sums, of.c_matrix, states, of.dy, d_cb, dx_of_scan, d_sizes_of_scan, d_sums_of_scan, dc,
                               d_states,
                               {.d = c.skip > 0 ? &of.skip.tensor() : nullptr,
                                .z = c.gate ? &of.z.tensor() : nullptr,
                                .ungated = c.gate ? &ungated.tensor() : nullptr,
                                .dd = c.skip > 0 ? &of.dd.tensor() : nullptr,
                                .dz = c.gate ? &of.dz.tensor() : nullptr});
  }
  /// D's gradient as it is given.
  Expected of_skip(const PlainSum& exact_sum, const PlainSum& naive_sum) const {
    Expected e = expected_of(exact_sum, naive_sum);
    if (c.skip == 2) return e;
    Expected of_heads;
    for (auto [from, to] :
         {std::pair{&e.reference, &of_heads.reference}, {&e.naive, &of_heads.naive}, {&e.cancelled, &of_heads.cancelled}}) {
      to->resize(exact.heads());
      for (std::size_t i = 0; i < from->size(); ++i) (*to)[i / exact.dim] += (*from)[i];
    }
    return of_heads;
  }

  PlainChunkGradients exact_gradients, naive_gradients;
  PlacedTensor dx_of_scan, db_of_products, d_sums, d_sizes, d_sums_of_scan, d_sizes_of_scan, d_decays, d_added, d_states, d_cb;
};

class Mamba2ChunkGradients : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  /// Each step's gradients, of operands that the plain loops gave, which are rounded once.
  void check(const Case& c, std::int64_t chunk_size, DType dtype) {
    SCOPED_TRACE(c.text(dtype) + tw::format(" chunk_size {}", chunk_size));
    GradientSteps s(c, chunk_size, dtype, device, random);
    const auto steps = s.expected_cumsum(s.exact);
    const auto fill = [](PlacedTensor& t, const std::vector<double>& values) {
      const std::vector<float> of_t = narrowed(values, t.tensor().dtype());
      t.fill(of_t);
      return widened(of_t);
    };
    const auto x = widened(s.of.of_x), b = widened(s.of.of_b), keys = widened(s.of.of_c);
    const auto sizes = fill(s.sizes, steps.first), sums = fill(s.sums, steps.second);
    const auto passed = fill(s.states, s.exact
                                           .passed(s.exact.added(b, x, sizes, sums), last_of_chunks(s, sums),
                                                   c.initial ? widened(s.of.of_initial) : std::vector<double>{}, dtype)
                                           .first);

    const auto d_sums = widened(s.d_sums.fill_random(random)), d_sizes = widened(s.d_sizes.fill_random(random));
    if (!launched([&] { s.cumsum_backward(); })) return;
    check_cumsum(s, d_sums, d_sizes, dtype);

    // Of the dtype, so that rounding it changes nothing, and sums of products in f32 are held against f32's bounds.
    const auto d_added = fill(s.d_added, widened(narrowed(widened(s.d_added.fill_random(random)), dtype)));
    s.state_backward();
    const auto state = s.exact_gradients.added(b, x, sizes, sums, d_added),
               naive_state = s.naive_gradients.added(b, x, sizes, sums, d_added);
    expect_accurate("dB of chunk_state", s.of.db, {state.b, naive_state.b}, dtype, 3, c.dim);
    expect_accurate("dx of chunk_state", s.of.dx, {state.x, naive_state.x}, dtype, 3, c.state);
    expect_accurate("d_dt of chunk_state", s.d_sizes, expected_of(state.sizes, naive_state.sizes), DType::f32, 3, c.dim * c.state);
    expect_accurate("d_dA_cumsum of chunk_state", s.d_sums, expected_of(state.sums, naive_state.sums), DType::f32, 3, c.dim * c.state);

    const auto d_states = widened(s.d_states.fill_random(random));
    s.passing_backward();
    const auto d_final = c.initial ? widened(s.of.of_d_final) : std::vector<double>{};
    const auto passing = s.exact_gradients.passed(passed, last_of_chunks(s, sums), d_states, d_final);
    const auto naive_passing = s.naive_gradients.passed(passed, last_of_chunks(s, sums), d_states, d_final);
    expect_accurate("d_states of state_passing", s.d_added, {passing.states, naive_passing.states}, DType::f32, 3, 1);
    expect_accurate("d_dA_chunk_cumsum", s.d_decays, expected_of(passing.decays, naive_passing.decays), DType::f32, 3, c.dim * c.state);
    if (c.initial) expect_accurate("d_initial_states", s.of.d_initial, {passing.initial, naive_passing.initial}, DType::f32, 3, 1);

    std::vector<float> of_d_cb = s.d_cb.fill_random(random);
    for (const bool causal : {false, true}) {
      // What has no gradient is not used.
      for (std::size_t i = 0; i < of_d_cb.size() && causal; ++i)
        if (above_diagonal(s, i)) of_d_cb[i] = kNaN;
      s.d_cb.fill(of_d_cb);
      s.products_backward(causal);
      const auto products = s.exact_gradients.products(keys, b, widened(of_d_cb), causal);
      const auto naive_products = s.naive_gradients.products(keys, b, widened(of_d_cb), causal);
      expect_accurate("dC of bmm_chunk", s.of.dc, {products.first, naive_products.first}, dtype, 3, chunk_size);
      expect_accurate("dB of bmm_chunk", s.db_of_products, {products.second, naive_products.second}, dtype, 3, chunk_size);
    }
    check_scan(s, x, sizes, sums, b, keys, passed, dtype);
  }
  void check_cumsum(GradientSteps& s, const std::vector<double>& d_sums, const std::vector<double>& d_sizes, DType dtype) {
    const Case& c = s.c;
    const DType of_dt = c.f32_dt ? DType::f32 : dtype;
    const auto by = [&](const PlainChunkGradients& plain) {
      return plain.cumsum(widened(s.of.of_dt), widened(s.of.of_rate), c.bias ? widened(s.of.of_bias) : std::vector<double>{}, s.limits(),
                          s.begins(), d_sums, d_sizes, of_dt);
    };
    const auto cumsum = by(s.exact_gradients), naive = by(s.naive_gradients);
    const auto chunk_size = static_cast<std::int64_t>(s.exact.chunk);
    expect_accurate("d_dt", s.of.d_dt, expected_of(cumsum.dt, naive.dt), of_dt, 3, chunk_size);
    expect_accurate("dA", s.of.da, expected_of(cumsum.rate, naive.rate), DType::f32, 3, c.batch * c.seqlen);
    if (c.bias) expect_accurate("d_dt_bias", s.of.d_bias, expected_of(cumsum.bias, naive.bias), DType::f32, 3, c.batch * c.seqlen);
  }
  void check_scan(GradientSteps& s, const std::vector<double>& x, const std::vector<double>& sizes, const std::vector<double>& sums,
                  const std::vector<double>& b, const std::vector<double>& keys, const std::vector<double>& states, DType dtype) {
    const Case& c = s.c;
    // CB is not used above the diagonal.
    std::vector<float> cb = narrowed(s.exact.products(keys, b, false), DType::f32);
    for (std::size_t i = 0; i < cb.size(); ++i)
      if (above_diagonal(s, i)) cb[i] = kNaN;
    s.cb.fill(cb);
    const auto z = c.gate ? widened(s.of.of_z) : std::vector<double>{};
    const auto before_gate = narrowed(s.exact.outputs(widened(cb), x, sizes, sums, keys, states, s.skip(), {}).first, dtype);
    s.ungated.fill(before_gate);
    s.scan_backward(s.of.dc);
    const auto by = [&](const PlainChunkGradients& plain) {
      return plain.outputs(widened(cb), x, sizes, sums, keys, states, s.skip(), z, widened(before_gate), widened(s.of.of_dy));
    };
    const auto scan = by(s.exact_gradients), naive = by(s.naive_gradients);
    const DType of_sums = c.gate ? dtype : DType::f32;  // a gate's gradient is rounded
    expect_accurate("d_CB", s.d_cb, {scan.cb, naive.cb}, of_sums, 3, c.dim);
    expect_accurate("dx of chunk_scan", s.dx_of_scan, {scan.x, naive.x}, dtype, 3, c.state);
    expect_accurate("d_dt of chunk_scan", s.d_sizes_of_scan, expected_of(scan.sizes, naive.sizes), of_sums, 3, c.dim);
    expect_accurate("d_dA_cumsum of chunk_scan", s.d_sums_of_scan, expected_of(scan.sums, naive.sums), of_sums, 3, c.dim);
    expect_accurate("dC of chunk_scan", s.of.dc, {scan.c, naive.c}, dtype, 3, c.dim);
    expect_accurate("d_states of chunk_scan", s.d_states, {scan.states, naive.states}, dtype, 3, c.dim);
    if (c.gate) expect_accurate("dz", s.of.dz, {scan.z, naive.z}, dtype, 3, c.dim);
    if (c.skip > 0) expect_accurate("dD", s.of.dd, s.of_skip(scan.skip, naive.skip), dtype, 3, c.seqlen);
  }
  /// All five in a row, against the recurrence's gradients and mamba2_backward().
  void check_row(const Case& c, std::int64_t chunk_size, DType dtype) {
    SCOPED_TRACE(c.text(dtype) + tw::format(" chunk_size {}", chunk_size));
    GradientSteps s(c, chunk_size, dtype, device, random);
    if (!launched([&] { s.cumsum(), s.state(), s.passing(), s.products(true), s.scan(); })) return;
    const PlacedTensor dc(s.of.dc.tensor().shape(), dtype, device);
    s.scan_backward(dc);
    s.products_backward(true);
    s.passing_backward();
    s.state_backward();
    add(dc, s.of.dc, s.of.dc);
    add(s.db_of_products, s.of.db, s.of.db);
    add(s.dx_of_scan, s.of.dx, s.of.dx);
    add(s.d_sizes_of_scan, s.d_sizes, s.d_sizes);
    add(s.d_sums_of_scan, s.d_sums, s.d_sums);
    const Tensor last = s.d_sums.tensor().select(3, chunk_size - 1);
    add(last, s.d_decays, last);
    s.cumsum_backward();

    const auto expected = s.of.expected(true);
    std::vector<std::pair<const PlacedTensor*, const Expected*>> gradients{
        {&s.of.dx, &expected.dx}, {&s.of.db, &expected.db},     {&s.of.dc, &expected.dc},
        {&s.of.da, &expected.da}, {&s.of.d_dt, &expected.d_dt},
    };
    if (c.bias) gradients.push_back({&s.of.d_bias, &expected.d_bias});
    if (c.gate) gradients.push_back({&s.of.dz, &expected.dz});
    if (c.skip > 0) gradients.push_back({&s.of.dd, &expected.dd});
    if (c.initial) gradients.push_back({&s.of.d_initial, &expected.d_initial});
    const char* const names[] = {"dx", "dB", "dC", "dA", "d_dt", "d_dt_bias", "dz", "dD", "d_initial_states"};
    std::vector<std::vector<double>> in_steps;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      expect_accurate(names[i], *gradients[i].first, *gradients[i].second, dtype, 3, c.state);
      in_steps.push_back(gradients[i].first->values());
    }
    mamba2_backward(s.of.x, s.of.dt, s.of.rate, s.of.b, s.of.c_matrix, s.of.dy, s.of.dx, s.of.d_dt, s.of.db, s.of.dc, s.of.backward());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const Expected& of_recurrence = *gradients[i].second;
      const Expected of_steps{in_steps[i], of_recurrence.naive, of_recurrence.cancelled};
      expect_accurate(tw::format("{} of mamba2_backward", names[i]).c_str(), *gradients[i].first, of_steps, dtype, 3, c.state);
    }
  }
  static std::vector<double> last_of_chunks(const Steps& s, const std::vector<double>& sums) {
    std::vector<double> decays;
    for (std::size_t i = s.exact.chunk - 1; i < sums.size(); i += s.exact.chunk) decays.push_back(sums[i]);
    return decays;
  }
  static bool above_diagonal(const Steps& s, std::size_t i) { return i % s.exact.chunk > i / s.exact.chunk % s.exact.chunk; }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Devices, Mamba2ChunkGradients, testing::ValuesIn(kDevices), device_name);

TEST_P(Mamba2ChunkGradients, EveryLength) {
  // One step has one element of CB. Gated, its error would be held against that of a single naive one, which may be small by chance.
  for (const std::int64_t seqlen : {1, 63, 64, 65, 200}) check({.seqlen = seqlen, .shared = 2, .gate = seqlen > 1}, 64, DType::bf16);
  check({.batch = 2, .seqlen = 131}, 128, DType::f16);
}

TEST_P(Mamba2ChunkGradients, EveryChunkSize) {
  for (const std::int64_t size : {16, 48, 80, 256})
    check({.batch = 2, .seqlen = 300, .shared = 2, .dim = 16, .state = 32, .gate = false}, size, DType::bf16);
}

TEST_P(Mamba2ChunkGradients, EveryDimension) {
  check({.seqlen = 70, .dim = 64, .state = 128}, 64, DType::bf16);
  check({.seqlen = 70, .dim = 33, .state = 17}, 64, DType::f16);
  check({.seqlen = 70, .dim = 130, .state = 256}, 64, DType::bf16);
}

TEST_P(Mamba2ChunkGradients, EveryOption) {
  check({.shared = 3, .gate = false, .skip = 0}, 64, DType::bf16);
  check({.groups = 2, .gate = false, .initial = false, .skip = 1}, 64, DType::bf16);
  check({.softplus = false, .bias = false}, 64, DType::f16);
  check({.dt_min = 0.2f, .dt_max = 0.5f, .f32_dt = true}, 64, DType::bf16);
  check({.batch = 2, .seqlen = 150, .numbered = true}, 64, DType::bf16);
}

TEST_P(Mamba2ChunkGradients, EveryRate) {
  for (const Rate rate : {Rate::strong, Rate::zero, Rate::infinite})
    check({.batch = 2, .seqlen = 150, .shared = 2, .rate = rate, .softplus = rate != Rate::infinite}, 64, DType::bf16);
}

TEST_P(Mamba2ChunkGradients, EveryStride) {
  check({.batch = 2, .seqlen = 70, .groups = 2, .gap = 8}, 64, DType::bf16);
  check({.batch = 2, .seqlen = 70, .groups = 2, .gap = 3}, 64, DType::f16);
  check({.batch = 2, .seqlen = 70, .groups = 2, .order = {3, 1, 0, 2}}, 64, DType::bf16);
}

TEST_P(Mamba2ChunkGradients, TogetherTheyAreThoseOfTheScan) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    check_row({.batch = 2, .seqlen = 200, .shared = 2, .state = 128}, 128, dtype);
    check_row({.batch = 2, .seqlen = 150, .initial = false, .skip = 1, .numbered = true}, 128, dtype);
  }
  // In f16, what has decayed to less than 6e-5 loses digits where it is an operand of a product: the initial states' gradient here.
  check_row({.seqlen = 190, .groups = 2, .rate = Rate::strong}, 64, DType::bf16);
  check_row({.seqlen = 190, .groups = 2, .rate = Rate::strong, .initial = false}, 64, DType::f16);
}

TEST_P(Mamba2ChunkGradients, WithoutStepsTheStatesGradientStays) {
  for (const int skip : {1, 2}) {
    GradientSteps s({.batch = 2, .seqlen = 0, .groups = 2, .skip = skip}, 64, DType::bf16, device, random);
    if (!launched(
            [&] { s.cumsum_backward(), s.state_backward(), s.passing_backward(), s.products_backward(true), s.scan_backward(s.of.dc); }))
      return;
    EXPECT_EQ(s.of.d_initial.values(), widened(s.of.of_d_final));
    for (const PlacedTensor* t : {&s.of.da, &s.of.d_bias, &s.of.dd})
      for (const double value : t->values()) EXPECT_EQ(value, 0);
  }
}

TEST_P(Mamba2ChunkGradients, TheSameBitsInEveryRun) {
  GradientSteps s({.batch = 2, .seqlen = 300, .groups = 2, .shared = 2}, 256, DType::bf16, device, random);
  if (!launched([&] { s.cumsum(), s.state(), s.passing(), s.products(true), s.scan(); })) return;
  const auto run = [&] {
    s.scan_backward(s.of.dc), s.products_backward(true), s.passing_backward(), s.state_backward(), s.cumsum_backward();
    std::vector<std::vector<double>> all;
    for (const PlacedTensor* t :
         {&s.of.dx, &s.of.d_dt, &s.of.db, &s.of.dc, &s.of.da, &s.of.dd, &s.of.dz, &s.of.d_bias, &s.of.d_initial, &s.dx_of_scan,
          &s.db_of_products, &s.d_sums, &s.d_sizes, &s.d_sums_of_scan, &s.d_sizes_of_scan, &s.d_decays, &s.d_added, &s.d_states, &s.d_cb})
      all.push_back(t->values());
    return all;
  };
  const auto first = run();
  EXPECT_EQ(run(), first);
}

TEST_P(Mamba2ChunkGradients, BadInput) {
  const auto make = [&](Shape shape, DType dtype = DType::f32) { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); };
  const auto fails = [](auto call, std::initializer_list<std::string_view> parts) { expect_error<InvalidArgument>(call, parts); };
  const DType half = DType::bf16;
  const Tensor x = make({2, 40, 4, 8}, half), dx = make({2, 40, 4, 8}, half), dy = make({2, 40, 4, 8}, half), z = make({2, 40, 4, 8}, half);
  const Tensor b = make({2, 40, 2, 16}, half), c = make({2, 40, 2, 16}, half), db = make({2, 40, 2, 16}, half);
  const Tensor dc = make({2, 40, 2, 16}, half), dt = make({2, 40, 4}, half), d_dt = make({2, 40, 4}, half), a = make({4}), bias = make({4});
  const Tensor three = make({3}), sums = make({2, 4, 2, 32}), sizes = make({2, 4, 2, 32}), d_sums = make({2, 4, 2, 32}),
               d_sizes = make({2, 4, 2, 32}), wide = make({2, 4, 2, 48});
  const Tensor states = make({2, 2, 4, 8, 16}, half), d_states = make({2, 2, 4, 8, 16}), d_added = make({2, 2, 4, 8, 16});
  const Tensor cb = make({2, 2, 2, 32, 32}), d_cb = make({2, 2, 2, 32, 32}), decays = make({2, 4, 2}), d_decays = make({2, 4, 2}),
               initial = make({2, 4, 16, 8});

  fails([&] { mamba2_chunk_cumsum_backward(dt, a, d_sums, wide, d_dt); },
        {"mamba2_chunk_cumsum_backward", "d_dt_out is f32[2, 4, 2, 48]", "[2, 4, 2, 32]"});
  fails([&] { mamba2_chunk_cumsum_backward(dt, a, d_sums, d_sizes, a); }, {"d_dt is f32[4]", "dt's shape"});
  fails([&] { mamba2_chunk_cumsum_backward(dt, a, d_sums, d_sizes, d_dt, {.da = &three}); }, {"dA is f32[3]", "A's shape"});
  fails([&] { mamba2_chunk_cumsum_backward(dt, a, d_sums, d_sizes, d_dt, {.d_dt_bias = &bias}); }, {"d_dt_bias", "dt_bias is not given"});
  fails([&] { mamba2_chunk_cumsum_backward(dt, a, d_sums, d_sizes, dt); }, {"d_dt", "dt", "memory"});
  fails([&] { mamba2_chunk_cumsum_backward(dt, a, d_sums, d_sizes, d_dt, {.dt_min = 1, .dt_max = 0}); }, {"dt_max is 0", "dt_min, 1"});

  fails([&] { mamba2_chunk_state_backward(b, x, sizes, sums, states, db, dx, d_sizes, d_sums); },
        {"mamba2_chunk_state_backward", "d_states is bf16[2, 2, 4, 8, 16]", "f32"});
  fails([&] { mamba2_chunk_state_backward(b, x, sizes, sums, d_states, dx, dx, d_sizes, d_sums); },
        {"dB is bf16[2, 40, 4, 8]", "B's shape"});
  fails([&] { mamba2_chunk_state_backward(b, x, sizes, sums, d_states, db, x, d_sizes, d_sums); }, {"dx", "x", "memory"});
  fails([&] { mamba2_chunk_state_backward(b, x, sizes, sums, d_states, db, dx, wide, d_sums); }, {"d_dt is f32[2, 4, 2, 48]"});
  fails([&] { mamba2_chunk_state_backward(b, x, sizes, sums, d_states, db, dx, d_sizes, d_sizes); }, {"d_dA_cumsum", "d_dt", "memory"});

  fails([&] { mamba2_state_passing_backward(sums, decays, sums, sums, decays); },
        {"mamba2_state_passing_backward", "passed is f32[2, 4, 2, 32]"});
  fails([&] { mamba2_state_passing_backward(states, decays, states, d_added, d_decays); }, {"d_passed is bf16[2, 2, 4, 8, 16]", "f32"});
  fails([&] { mamba2_state_passing_backward(states, decays, d_states, cb, d_decays); }, {"d_states is f32[2, 2, 2, 32, 32]"});
  fails([&] { mamba2_state_passing_backward(states, decays, d_states, d_states, d_decays); }, {"d_states", "d_passed", "memory"});
  fails([&] { mamba2_state_passing_backward(states, decays, d_states, d_added, sums); }, {"d_dA_chunk_cumsum is f32[2, 4, 2, 32]"});
  fails([&] { mamba2_state_passing_backward(states, decays, d_states, d_added, d_decays, {.d_final_states = &initial}); },
        {"d_final_states is f32[2, 4, 16, 8]", "[2, 4, 8, 16]"});

  fails([&] { mamba2_bmm_chunk_backward(c, b, sums, dc, db); }, {"mamba2_bmm_chunk_backward", "d_CB is f32[2, 4, 2, 32]"});
  fails([&] { mamba2_bmm_chunk_backward(c, b, d_cb, x, db); }, {"dC is bf16[2, 40, 4, 8]", "C's shape"});
  fails([&] { mamba2_bmm_chunk_backward(c, b, d_cb, dc, dc); }, {"dB", "dC", "memory"});

  const auto scan = [&](const Tensor& of_cb, const Tensor& of_x, const Tensor& of_states, Mamba2ChunkScanBackwardOptions options) {
    mamba2_chunk_scan_backward(cb, x, sizes, sums, c, states, dy, of_cb, of_x, d_sizes, d_sums, dc, of_states, options);
  };
  fails([&] { scan(sums, dx, d_states, {}); }, {"mamba2_chunk_scan_backward", "d_CB is f32[2, 4, 2, 32]"});
  fails([&] { scan(d_cb, b, d_states, {}); }, {"dx is bf16[2, 40, 2, 16]", "x's shape"});
  fails([&] { scan(d_cb, dx, states, {}); }, {"d_states is bf16[2, 2, 4, 8, 16]", "f32"});
  fails([&] { scan(d_cb, dy, d_states, {}); }, {"dx", "dy", "memory"});
  fails([&] { scan(d_cb, dx, d_states, {.dz = &z}); }, {"dz", "z is not given"});
  fails([&] { scan(d_cb, dx, d_states, {.z = &z}); }, {"z is given, but dz is not"});
  fails([&] { scan(d_cb, dx, d_states, {.z = &z, .dz = &dx}); }, {"z is given, but ungated is not"});
  fails([&] { scan(d_cb, dx, d_states, {.dd = &a}); }, {"dD", "D is not given"});
  fails([&] { scan(d_cb, dx, d_states, {.d = &a, .dd = &three}); }, {"dD is f32[3]", "D's shape"});
}

}  // namespace
}  // namespace tw::kernels::mamba2
