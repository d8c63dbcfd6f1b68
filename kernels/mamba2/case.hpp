#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/mamba2/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/mamba2.hpp"

// Random calls of Mamba-2, and what their results are held against.

namespace tw::kernels::mamba2 {

/// Decay rates: from 0 to -1; from -0.5 to -1, with which all heads remember about as many steps; so that a step decays by exp(-20) and
/// more; 0; and -infinity for every second head.
enum class Rate { weak, even, strong, zero, infinite };

struct Case {
  std::int64_t batch = 1, seqlen = 65, groups = 1, shared = 1, dim = 64, state = 64;  ///< `shared`: heads for each group
  Rate rate = Rate::weak;
  bool softplus = true, bias = true, gate = true, initial = true;
  int skip = 2;  ///< dimensions of D; 0: none
  float dt_min = 0, dt_max = std::numeric_limits<float>::infinity();
  bool f32_dt = false, numbered = false;
  std::vector<std::int32_t> cu_seqlens = {};
  std::int64_t gap = 0;
  std::vector<int> order = {}, state_order = {};
  int config = -1;

  std::int64_t heads() const { return groups * shared; }
  std::int64_t sequences() const { return cu_seqlens.empty() ? batch : static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
  std::string text(DType dtype) const {
    return tw::format(
        "{} batch {} seqlen {} groups {} x {} dim {} state {} rate {} softplus {} gate {} D {} initial {} sequences {} config {}",
        name_of(dtype), batch, seqlen, groups, shared, dim, state, static_cast<int>(rate), softplus, gate, skip, initial, sequences(),
        config);
  }
};

/// What is expected, in the order of the tensors' elements.
struct Expected {
  std::vector<double> reference = {}, naive = {}, cancelled = {};
};

/// Operands and gradients on a device, with memory between them.
class Operands {
 public:
  Operands(const Case& given, DType type, Device on, std::mt19937_64& random, DType of_states = DType::f32)
      : c(given),
        dtype(type),
        device(on),
        x(inputs(), dtype, device, placement()),
        z(inputs(), dtype, device, placement()),
        y(inputs(), dtype, device, placement()),
        b(keys(), dtype, device, placement()),
        c_matrix(keys(), dtype, device, placement()),
        dt(steps(), c.f32_dt ? DType::f32 : dtype, device, {.gap = c.gap}),
        rate({c.heads()}, DType::f32, device),
        bias({c.heads()}, DType::f32, device),
        skip(of_skip(), DType::f32, device, {.gap = c.gap}),
        initial(states(), of_states, device, {.order = c.state_order}),
        final(states(), of_states, device, {.order = c.state_order}),
        dy(inputs(), dtype, device, placement()),
        d_final(states(), DType::f32, device, {.order = c.state_order}),
        dx(inputs(), dtype, device, placement()),
        dz(inputs(), dtype, device, placement()),
        db(keys(), dtype, device, placement()),
        dc(keys(), dtype, device, placement()),
        d_dt(steps(), c.f32_dt ? DType::f32 : dtype, device, {.gap = c.gap}),
        da({c.heads()}, DType::f32, device),
        d_bias({c.heads()}, DType::f32, device),
        dd(of_skip(), DType::f32, device),
        d_initial(states(), DType::f32, device, {.order = c.state_order}) {
    of_x = x.fill_random(random);
    of_z = z.fill_random(random);
    of_b = b.fill_random(random, 1.0f / std::sqrt(static_cast<float>(c.state)));
    of_c = c_matrix.fill_random(random);
    of_d = skip.fill_random(random);
    of_initial = initial.fill_random(random);
    of_dy = dy.fill_random(random);
    of_d_final = d_final.fill_random(random);
    of_bias = bias.fill_random(random);
    // Step sizes of about 0.3; without softplus some are negative, and become dt_min.
    of_dt = dt.fill_random(random);
    for (float& value : of_dt) value = test::round_to(dt.tensor().dtype(), c.softplus ? value - 1 : 0.3f + 0.2f * value);
    dt.fill(of_dt);
    std::uniform_real_distribution<float> unit(0, 1);
    for (std::int64_t head = 0; head < c.heads(); ++head) {
      const bool infinite = c.rate == Rate::infinite && head % 2 == 0;
      const float rate = c.rate == Rate::strong ? -60 : c.rate == Rate::zero ? 0 : -1;
      of_rate.push_back(infinite ? -test::kInf : rate * (c.rate == Rate::even ? 0.5f + 0.5f * unit(random) : unit(random)));
    }
    rate.fill(of_rate);
    if (!c.cu_seqlens.empty()) cu = to_device(c.cu_seqlens, {static_cast<std::int64_t>(c.cu_seqlens.size())});
    if (c.numbered) {
      std::int32_t number = 0;
      for (std::int64_t i = 0; i < c.batch * c.seqlen; ++i) of_numbers.push_back(number += unit(random) < 0.05f ? 1 : 0);
      numbers = to_device(of_numbers, {c.batch, c.seqlen});
    }
  }

  template <class Options>
  Options options() const {
    Options o;
    o.d = c.skip > 0 ? &skip.tensor() : nullptr;
    o.z = c.gate ? &z.tensor() : nullptr;
    o.dt_bias = c.bias ? &bias.tensor() : nullptr;
    o.dt_softplus = c.softplus;
    o.dt_min = c.dt_min;
    o.dt_max = c.dt_max;
    if constexpr (requires { o.seq_idx; }) {
      o.initial_states = c.initial ? &initial.tensor() : nullptr;
      o.cu_seqlens = c.cu_seqlens.empty() ? nullptr : &cu;
      o.seq_idx = c.numbered ? &numbers : nullptr;
      o.config = c.config;
    }
    return o;
  }
  Mamba2Options forward() const {
    Mamba2Options o = options<Mamba2Options>();
    o.final_states = c.initial ? &final.tensor() : nullptr;
    return o;
  }
  Mamba2BackwardOptions backward() const {
    Mamba2BackwardOptions o = options<Mamba2BackwardOptions>();
    o.d_final_states = c.initial ? &d_final.tensor() : nullptr;
    o.da = &da.tensor();
    o.dd = c.skip > 0 ? &dd.tensor() : nullptr;
    o.dz = c.gate ? &dz.tensor() : nullptr;
    o.d_dt_bias = c.bias ? &d_bias.tensor() : nullptr;
    o.d_initial_states = c.initial ? &d_initial.tensor() : nullptr;
    return o;
  }

  struct Results {
    Expected y, final, dx, dz, db, dc, d_dt, da, d_bias, dd, d_initial;
  };
  Results expected(bool gradients) const {
    Results all;
    const auto sized = [](Expected& e, const test::PlacedTensor& t, bool cancelled = false) {
      const auto n = static_cast<std::size_t>(t.tensor().numel());
      e.reference.resize(n), e.naive.resize(n);
      if (cancelled) e.cancelled.resize(n);
    };
    sized(all.y, y), sized(all.final, final), sized(all.dx, dx), sized(all.dz, dz), sized(all.db, db), sized(all.dc, dc);
    sized(all.d_dt, d_dt, true), sized(all.da, da, true), sized(all.d_bias, d_bias, true), sized(all.dd, dd, true),
        sized(all.d_initial, d_initial);
    for (std::int64_t s = 0; s < c.sequences(); ++s)
      for (std::int64_t head = 0; head < c.heads(); ++head) add(all, s, head, gradients);
    for (Expected* const e : {&all.db, &all.dc})
      for (double& value : e->naive) value = test::round_to(dtype, static_cast<float>(value));
    return all;
  }
  /// Whether no sequence has the step of an element of x's shape.
  bool of_no_sequence(std::size_t i, std::int64_t elements_of_step) const {
    const auto t = static_cast<std::int64_t>(i) / elements_of_step;
    return !c.cu_seqlens.empty() && (t < c.cu_seqlens.front() || t >= c.cu_seqlens.back());
  }

  Case c;
  DType dtype;
  Device device;
  test::PlacedTensor x, z, y, b, c_matrix, dt, rate, bias, skip, initial, final, dy, d_final, dx, dz, db, dc, d_dt, da, d_bias, dd,
      d_initial;
  Tensor cu, numbers;
  std::vector<float> of_x, of_z, of_b, of_c, of_dt, of_rate, of_bias, of_d, of_initial, of_dy, of_d_final;
  std::vector<std::int32_t> of_numbers;

 private:
  Shape inputs() const { return {c.batch, c.seqlen, c.heads(), c.dim}; }
  Shape keys() const { return {c.batch, c.seqlen, c.groups, c.state}; }
  Shape steps() const { return {c.batch, c.seqlen, c.heads()}; }
  Shape states() const { return {c.sequences(), c.heads(), c.dim, c.state}; }
  Shape of_skip() const { return c.skip == 1 ? Shape{c.heads()} : Shape{c.heads(), c.dim}; }
  test::Placement placement() const { return {.order = c.order, .gap = c.gap}; }
  Tensor to_device(const std::vector<std::int32_t>& values, Shape shape) const {
    return Tensor::from<std::int32_t>(values, std::move(shape)).to(device);
  }

  void add(Results& all, std::int64_t sequence, std::int64_t head, bool gradients) const {
    const auto n = static_cast<std::size_t>(sequence), of_head = static_cast<std::size_t>(head);
    const std::int64_t batch = c.cu_seqlens.empty() ? sequence : 0;
    const std::int64_t begin = c.cu_seqlens.empty() ? 0 : c.cu_seqlens[n], end = c.cu_seqlens.empty() ? c.seqlen : c.cu_seqlens[n + 1];
    PlainHead h;
    h.steps = static_cast<std::size_t>(end - begin), h.dim = static_cast<std::size_t>(c.dim), h.state = static_cast<std::size_t>(c.state);
    h.rate = of_rate[of_head];
    h.bias = c.bias ? of_bias[of_head] : 0;
    h.softplus = c.softplus, h.dt_min = c.dt_min, h.dt_max = c.dt_max, h.gradients = gradients;
    // Calls f(index in a tensor, index in the head).
    const auto each = [&](std::int64_t count, std::int64_t which, std::int64_t columns, auto f) {
      for (std::int64_t t = begin; t < end; ++t)
        for (std::int64_t i = 0; i < columns; ++i)
          f(static_cast<std::size_t>(((batch * c.seqlen + t) * count + which) * columns + i),
            static_cast<std::size_t>((t - begin) * columns + i));
    };
    const auto get = [&](const std::vector<float>& from, std::int64_t count, std::int64_t which, std::int64_t columns) {
      std::vector<double> to(h.steps * static_cast<std::size_t>(columns));
      each(count, which, columns, [&](std::size_t i, std::size_t at) { to[at] = from[i]; });
      return to;
    };
    const std::size_t area = h.dim * h.state, first = (n * static_cast<std::size_t>(c.heads()) + of_head) * area;
    const auto state = [&](const std::vector<float>& from) {
      return std::vector<double>(from.begin() + static_cast<std::ptrdiff_t>(first),
                                 from.begin() + static_cast<std::ptrdiff_t>(first + area));
    };
    const std::int64_t group = head / c.shared;
    h.x = get(of_x, c.heads(), head, c.dim), h.dt = get(of_dt, c.heads(), head, 1);
    h.b = get(of_b, c.groups, group, c.state), h.c = get(of_c, c.groups, group, c.state);
    if (c.gate) h.z = get(of_z, c.heads(), head, c.dim);
    for (std::size_t p = 0; p < h.dim && c.skip > 0; ++p) h.skip.push_back(of_d[c.skip == 1 ? of_head : of_head * h.dim + p]);
    if (c.initial) h.initial = state(of_initial);
    if (c.numbered) {
      h.begins.resize(h.steps);
      const std::size_t at = static_cast<std::size_t>(batch * c.seqlen);
      for (std::size_t t = 1; t < h.steps; ++t) h.begins[t] = of_numbers[at + t] != of_numbers[at + t - 1];
    }
    if (gradients) h.dy = get(of_dy, c.heads(), head, c.dim);
    if (gradients && c.initial) h.d_final = state(of_d_final);
    const PlainResult exact = plain_mamba2(h), naive = naive_mamba2(h, dtype);
    const auto put = [&](Expected& e, std::int64_t count, std::int64_t which, std::int64_t columns, const auto& reference,
                         const auto& in_dtype) {
      each(count, which, columns, [&](std::size_t i, std::size_t at) {
        e.reference[i] += reference[at];
        e.naive[i] += in_dtype[at];
      });
    };
    const auto put_state = [&](Expected& e, const auto& reference, const auto& in_dtype) {
      for (std::size_t i = 0; i < area; ++i) e.reference[first + i] = reference[i], e.naive[first + i] = in_dtype[i];
    };
    const auto put_one = [](Expected& e, std::size_t at, double reference, double in_dtype, double terms) {
      e.reference[at] += reference, e.naive[at] += in_dtype;
      if (!e.cancelled.empty()) e.cancelled[at] += terms;
    };
    put(all.y, c.heads(), head, c.dim, exact.y, naive.y);
    put_state(all.final, exact.final, naive.final);
    if (!gradients) return;
    put(all.dx, c.heads(), head, c.dim, exact.dx, naive.dx);
    put(all.dz, c.heads(), head, c.dim, exact.dz, naive.dz);
    put(all.db, c.groups, group, c.state, exact.db, naive.db);
    put(all.dc, c.groups, group, c.state, exact.dc, naive.dc);
    put(all.d_dt, c.heads(), head, 1, exact.d_dt, naive.d_dt);
    each(c.heads(), head, 1, [&](std::size_t i, std::size_t at) { all.d_dt.cancelled[i] = naive.d_dt_terms[at]; });
    put_state(all.d_initial, exact.d_initial, naive.d_initial);
    put_one(all.da, of_head, exact.d_rate, naive.d_rate, naive.d_rate_terms);
    put_one(all.d_bias, of_head, exact.d_bias, naive.d_bias, naive.d_bias_terms);
    for (std::size_t p = 0; p < h.dim; ++p)
      put_one(all.dd, c.skip == 1 ? of_head : of_head * h.dim + p, exact.d_skip[p], naive.d_skip[p], naive.d_skip_terms[p]);
  }
};

/// Expects a tensor to differ from the exact result by no more than the accuracy rule allows (tests/accuracy.hpp). Elements for which
/// `skip(index)` is true must still be NaN. `rounded_to`: what the operation rounds its operands to.
inline void expect_accurate(const char* name, const test::PlacedTensor& t, const Expected& e, DType rounded_to, double factor,
                            std::int64_t products, const std::function<bool(std::size_t)>& skip = {}) {
  SCOPED_TRACE(name);
  std::vector<double> out = t.values(), reference, naive, kept, cancelled;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (skip && skip(i)) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
      continue;
    }
    kept.push_back(out[i]), reference.push_back(e.reference[i]), naive.push_back(e.naive[i]);
    if (!e.cancelled.empty()) cancelled.push_back(e.cancelled[i]);
  }
  // f32 is computed step by step, in f32, on every device.
  EXPECT_TRUE(test::accurate({.out = kept,
                              .reference = reference,
                              .naive = naive,
                              .arithmetic = test::arithmetic_of(rounded_to, Device::cpu()),
                              .factor = factor,
                              .cancelled = cancelled,
                              .cancelled_products = products}));
  EXPECT_TRUE(t.gaps_intact());
}

}  // namespace tw::kernels::mamba2
