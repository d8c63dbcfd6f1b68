#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tw::kernels::causal_conv1d {

/// Sequences one after the other: x [tokens, channels], those of sequence n from offsets[n] to offsets[n + 1] - 1. States are
/// [sequence, channels, taps - 1]; empty vectors are absent.
struct PlainCall {
  std::vector<float> x = {}, weight = {}, bias = {}, initial_state = {};
  std::vector<std::int64_t> offsets = {};
  std::int64_t channels = 0, taps = 0;
  bool silu = false;
};

template <class Real>
struct PlainResult {
  std::vector<Real> y, final_state;
};

/// The input of channel `c` at step `time` of a sequence, counted from its first; negative steps are in its initial state.
template <class Real>
Real plain_input(const PlainCall& call, std::int64_t sequence, std::int64_t time, std::int64_t c) {
  const std::int64_t states = call.taps - 1;
  if (time >= 0)
    return static_cast<Real>(
        call.x[static_cast<std::size_t>((call.offsets[static_cast<std::size_t>(sequence)] + time) * call.channels + c)]);
  if (call.initial_state.empty()) return 0;
  return static_cast<Real>(call.initial_state[static_cast<std::size_t>((sequence * call.channels + c) * states + states + time)]);
}

/// The sum before the activation.
template <class Real>
Real plain_sum(const PlainCall& call, std::int64_t sequence, std::int64_t time, std::int64_t c) {
  Real sum = call.bias.empty() ? Real{0} : static_cast<Real>(call.bias[static_cast<std::size_t>(c)]);
  for (std::int64_t k = 0; k < call.taps; ++k)
    sum += static_cast<Real>(call.weight[static_cast<std::size_t>(c * call.taps + k)]) *
           plain_input<Real>(call, sequence, time - call.taps + 1 + k, c);
  return sum;
}

template <class Real>
PlainResult<Real> plain(const PlainCall& call) {
  PlainResult<Real> result;
  const auto sequences = static_cast<std::int64_t>(call.offsets.size()) - 1;
  for (std::int64_t n = 0; n < sequences; ++n) {
    const std::int64_t length = call.offsets[static_cast<std::size_t>(n) + 1] - call.offsets[static_cast<std::size_t>(n)];
    for (std::int64_t t = 0; t < length; ++t) {
      for (std::int64_t c = 0; c < call.channels; ++c) {
        const Real z = plain_sum<Real>(call, n, t, c);
        result.y.push_back(call.silu ? z / (1 + std::exp(-z)) : z);
      }
    }
    for (std::int64_t c = 0; c < call.channels; ++c)
      for (std::int64_t s = 0; s < call.taps - 1; ++s)
        result.final_state.push_back(plain_input<Real>(call, n, length - call.taps + 1 + s, c));
  }
  return result;
}

template <class Real>
struct PlainGradients {
  std::vector<Real> dx, d_weight, d_bias, d_initial_state;
};

/// `dy` [tokens, channels]; `d_final_state` as the initial state, or empty.
template <class Real>
PlainGradients<Real> plain_gradients(const PlainCall& call, const std::vector<float>& dy, const std::vector<float>& d_final_state) {
  const auto sequences = static_cast<std::int64_t>(call.offsets.size()) - 1, states = call.taps - 1;
  PlainGradients<Real> result;
  result.dx.resize(call.x.size());
  result.d_weight.resize(call.weight.size());
  result.d_bias.resize(static_cast<std::size_t>(call.channels));
  result.d_initial_state.resize(static_cast<std::size_t>(sequences * call.channels * states));
  for (std::int64_t n = 0; n < sequences; ++n) {
    const std::int64_t begin = call.offsets[static_cast<std::size_t>(n)], length = call.offsets[static_cast<std::size_t>(n) + 1] - begin;
    const auto add = [&](std::int64_t time, std::int64_t c, Real value) {
      if (time >= 0)
        result.dx[static_cast<std::size_t>((begin + time) * call.channels + c)] += value;
      else
        result.d_initial_state[static_cast<std::size_t>((n * call.channels + c) * states + states + time)] += value;
    };
    for (std::int64_t c = 0; c < call.channels; ++c) {
      for (std::int64_t t = 0; t < length; ++t) {
        Real dz = static_cast<Real>(dy[static_cast<std::size_t>((begin + t) * call.channels + c)]);
        if (call.silu) {
          const Real z = plain_sum<Real>(call, n, t, c), s = 1 / (1 + std::exp(-z));
          dz *= s * (1 + z * (1 - s));
        }
        for (std::int64_t k = 0; k < call.taps; ++k) {
          const auto tap = static_cast<std::size_t>(c * call.taps + k);
          add(t - states + k, c, dz * static_cast<Real>(call.weight[tap]));
          result.d_weight[tap] += dz * plain_input<Real>(call, n, t - states + k, c);
        }
        result.d_bias[static_cast<std::size_t>(c)] += dz;
      }
      for (std::int64_t s = 0; s < states && !d_final_state.empty(); ++s)
        add(length - states + s, c, static_cast<Real>(d_final_state[static_cast<std::size_t>((n * call.channels + c) * states + s)]));
    }
  }
  return result;
}

}  // namespace tw::kernels::causal_conv1d
