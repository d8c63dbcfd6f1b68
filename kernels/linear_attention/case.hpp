#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/linear_attention/call.hpp"
#include "kernels/linear_attention/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/linear_attention.hpp"

// Random calls of linear attention, and what their results are held against.

namespace tw::kernels::linear_attention {

enum class Gate { none, of_heads, faint, weak, strong, resets };

struct Case {
  std::int64_t batch = 1, seqlen = 65, heads = 1, shared = 1, dk = 64, dv = 64;  ///< `shared`: heads of v for each head of q and k
  Gate gate = Gate::weak;
  bool initial = true;
  std::vector<std::int32_t> cu_seqlens = {};
  std::int64_t gap = 0;
  std::vector<int> order = {};
  std::vector<int> state_order = {};
  int config = -1;

  std::int64_t heads_of_v() const { return heads * shared; }
  std::int64_t sequences() const { return cu_seqlens.empty() ? batch : static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
  std::string text(DType dtype) const {
    return tw::format("{} batch {} seqlen {} heads {} x {} Dk {} Dv {} gate {} initial {} sequences {} gap {} config {}", name_of(dtype),
                      batch, seqlen, heads, shared, dk, dv, static_cast<int>(gate), initial, sequences(), gap, config);
  }
};

/// The configurations of a call: all of f16 and bf16. `dim`: the largest that a walk would have.
inline std::vector<int> configs_of(DType dtype, std::int64_t dim, Device device) {
  if (dtype == DType::f32) return {-1};
  return dim <= kWalkedDim && walk_fits(Stream::standard(device)) ? std::vector{0, 1} : std::vector{0};
}

/// Operands and gradients on a device, with memory between them.
struct Operands {
  Case c;
  DType dtype;
  Device device;
  test::PlacedTensor q, k, v, o, g, initial, final, d_o, d_final, dq, dk, dv, dg, d_initial;
  Tensor cu;
  std::vector<float> of_q, of_k, of_v, of_g, of_initial, of_d_o, of_d_final;

  Operands(const Case& given, DType type, Device on, std::mt19937_64& random)
      : c(given),
        dtype(type),
        device(on),
        q(keys(), dtype, device, placement()),
        k(keys(), dtype, device, placement()),
        v(values(), dtype, device, placement()),
        o(values(), dtype, device, placement()),
        g(gates(), DType::f32, device, {.gap = c.gate == Gate::of_heads ? 0 : c.gap}),
        initial(states(), DType::f32, device, {.order = c.state_order}),
        final(states(), DType::f32, device, {.order = c.state_order}),
        d_o(values(), dtype, device, placement()),
        d_final(states(), DType::f32, device, {.order = c.state_order}),
        dq(keys(), dtype, device, placement()),
        dk(keys(), dtype, device, placement()),
        dv(values(), dtype, device, placement()),
        dg({c.batch, c.seqlen, c.heads_of_v()}, DType::f32, device),
        d_initial(states(), DType::f32, device, {.order = c.state_order}) {
    // As models have them, keys of length 1: products of queries and keys do not grow with Dk.
    of_q = q.fill_random(random);
    of_k = k.fill_random(random, 1.0f / std::sqrt(static_cast<float>(c.dk)));
    of_v = v.fill_random(random);
    of_d_o = d_o.fill_random(random);
    of_initial = initial.fill_random(random);
    of_d_final = d_final.fill_random(random);
    std::uniform_real_distribution<float> unit(0, 1);
    of_g.resize(static_cast<std::size_t>(g.tensor().numel()));
    for (float& x : of_g) {
      x = -unit(random) * (c.gate == Gate::strong ? 20.0f : c.gate == Gate::faint ? 0.1f : 0.2f);
      if (c.gate == Gate::resets && unit(random) < 0.1f) x = unit(random) < 0.5f ? -test::kInf : -3e38f;
    }
    g.fill(of_g);
    if (!c.cu_seqlens.empty()) cu = Tensor::from<std::int32_t>(c.cu_seqlens, {static_cast<std::int64_t>(c.cu_seqlens.size())}).to(device);
  }

  LinearAttentionOptions forward() const {
    return {.g = c.gate == Gate::none ? nullptr : &g.tensor(),
            .initial_state = c.initial ? &initial.tensor() : nullptr,
            .final_state = c.initial ? &final.tensor() : nullptr,
            .cu_seqlens = c.cu_seqlens.empty() ? nullptr : &cu,
            .config = c.config};
  }
  LinearAttentionBackwardOptions backward() const {
    return {.g = forward().g,
            .initial_state = forward().initial_state,
            .cu_seqlens = forward().cu_seqlens,
            .d_final_state = c.initial ? &d_final.tensor() : nullptr,
            .dg = c.gate == Gate::none ? nullptr : &dg.tensor(),
            .d_initial_state = c.initial ? &d_initial.tensor() : nullptr,
            .config = c.config};
  }

  /// What is expected, in the order of the tensors' elements.
  struct Expected {
    std::vector<double> reference, naive, cancelled;
  };
  struct Results {
    Expected o, final, dq, dk, dv, dg, d_initial;
  };
  Results expected(bool gradients) const {
    Results all;
    const auto sized = [](Expected& e, const test::PlacedTensor& t, bool cancelled = false) {
      const auto n = static_cast<std::size_t>(t.tensor().numel());
      e.reference.resize(n), e.naive.resize(n);
      if (cancelled) e.cancelled.resize(n);
    };
    sized(all.o, o), sized(all.final, final), sized(all.dq, dq), sized(all.dk, dk), sized(all.dv, dv), sized(all.dg, dg, true);
    sized(all.d_initial, d_initial);
    for (std::int64_t s = 0; s < c.sequences(); ++s)
      for (std::int64_t head = 0; head < c.heads_of_v(); ++head) add(all, s, head, gradients);
    for (Expected* const e : {&all.dq, &all.dk})
      for (double& x : e->naive) x = test::round_to(dtype, static_cast<float>(x));
    return all;
  }

 private:
  Shape keys() const { return {c.batch, c.seqlen, c.heads, c.dk}; }
  Shape values() const { return {c.batch, c.seqlen, c.heads_of_v(), c.dv}; }
  Shape gates() const { return c.gate == Gate::of_heads ? Shape{c.heads_of_v()} : Shape{c.batch, c.seqlen, c.heads_of_v()}; }
  Shape states() const { return {c.sequences(), c.heads_of_v(), c.dk, c.dv}; }
  test::Placement placement() const { return {.order = c.order, .gap = c.gap}; }

  void add(Results& all, std::int64_t sequence, std::int64_t head, bool gradients) const {
    const auto n = static_cast<std::size_t>(sequence);
    const std::int64_t batch = c.cu_seqlens.empty() ? sequence : 0;
    const std::int64_t begin = c.cu_seqlens.empty() ? 0 : c.cu_seqlens[n], end = c.cu_seqlens.empty() ? c.seqlen : c.cu_seqlens[n + 1];
    PlainHead h{.steps = static_cast<std::size_t>(end - begin),
                .dk = static_cast<std::size_t>(c.dk),
                .dv = static_cast<std::size_t>(c.dv),
                .scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.dk))),
                .gradients = gradients};
    // Calls f(index in a tensor, index in the head).
    const auto steps = [&](std::int64_t count, std::int64_t of_head, std::int64_t dim, auto f) {
      for (std::int64_t t = begin; t < end; ++t)
        for (std::int64_t i = 0; i < dim; ++i)
          f(static_cast<std::size_t>(((batch * c.seqlen + t) * count + of_head) * dim + i),
            static_cast<std::size_t>((t - begin) * dim + i));
    };
    const auto get = [&](const std::vector<float>& from, std::int64_t count, std::int64_t of_head, std::int64_t dim) {
      std::vector<double> to(h.steps * static_cast<std::size_t>(dim));
      steps(count, of_head, dim, [&](std::size_t i, std::size_t at) { to[at] = from[i]; });
      return to;
    };
    const std::size_t area = h.dk * h.dv, first = (n * static_cast<std::size_t>(c.heads_of_v()) + static_cast<std::size_t>(head)) * area;
    const auto state = [&](const std::vector<float>& from) {
      return std::vector<double>(from.begin() + static_cast<std::ptrdiff_t>(first),
                                 from.begin() + static_cast<std::ptrdiff_t>(first + area));
    };
    h.q = get(of_q, c.heads, head / c.shared, c.dk);
    h.k = get(of_k, c.heads, head / c.shared, c.dk);
    h.v = get(of_v, c.heads_of_v(), head, c.dv);
    if (gradients) h.d_o = get(of_d_o, c.heads_of_v(), head, c.dv);
    if (c.gate == Gate::of_heads)
      h.g.assign(h.steps, of_g[static_cast<std::size_t>(head)]);
    else if (c.gate != Gate::none)
      h.g = get(of_g, c.heads_of_v(), head, 1);
    if (c.initial) h.initial = state(of_initial);
    if (c.initial && gradients) h.d_final = state(of_d_final);
    const PlainResult exact = plain_linear_attention(h), naive = naive_linear_attention(h, dtype);
    const auto put = [&](Expected& e, std::int64_t count, std::int64_t of_head, std::int64_t dim, const auto& reference,
                         const auto& in_dtype) {
      steps(count, of_head, dim, [&](std::size_t i, std::size_t at) {
        e.reference[i] += reference[at];
        e.naive[i] += in_dtype[at];
      });
    };
    put(all.o, c.heads_of_v(), head, c.dv, exact.o, naive.o);
    for (std::size_t i = 0; i < area; ++i) {
      all.final.reference[first + i] = exact.final[i];
      all.final.naive[first + i] = naive.final[i];
    }
    if (!gradients) return;
    put(all.dq, c.heads, head / c.shared, c.dk, exact.dq, naive.dq);
    put(all.dk, c.heads, head / c.shared, c.dk, exact.dk, naive.dk);
    put(all.dv, c.heads_of_v(), head, c.dv, exact.dv, naive.dv);
    put(all.dg, c.heads_of_v(), head, 1, exact.dg, naive.dg);
    steps(c.heads_of_v(), head, 1, [&](std::size_t i, std::size_t at) { all.dg.cancelled[i] = naive.dg_terms[at]; });
    for (std::size_t i = 0; i < area; ++i) {
      all.d_initial.reference[first + i] = exact.d_initial[i];
      all.d_initial.naive[first + i] = naive.d_initial[i];
    }
  }
};

/// Expects a tensor to differ from the exact result by no more than the accuracy rule allows (tests/accuracy.hpp). Elements for which
/// `skip(index)` is true must still be NaN.
inline void expect_accurate(const char* name, const test::PlacedTensor& t, const Operands::Expected& e, const Operands& of, double factor,
                            const std::function<bool(std::size_t)>& skip = {}) {
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
  // Step by step, in f32, on every device.
  EXPECT_TRUE(test::accurate({.out = kept,
                              .reference = reference,
                              .naive = naive,
                              .arithmetic = test::arithmetic_of(of.dtype, Device::cpu()),
                              .factor = factor,
                              .cancelled = cancelled,
                              .cancelled_products = of.c.dk}));
  EXPECT_TRUE(t.gaps_intact());
}

}  // namespace tw::kernels::linear_attention
