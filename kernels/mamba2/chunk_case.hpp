#pragma once

#include "kernels/mamba2/case.hpp"
#include "kernels/mamba2/chunk_reference.hpp"
#include "tilewave/mamba2_chunks.hpp"

// Random calls of the scan's five steps.

namespace tw::kernels::mamba2 {

using test::PlacedTensor;

inline std::vector<double> widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }
inline std::vector<float> narrowed(const std::vector<double>& values, DType dtype) {
  std::vector<float> out;
  for (const double x : values) out.push_back(test::round_to(dtype, static_cast<float>(x)));
  return out;
}

inline std::vector<double> absolute(std::vector<double> values) {
  for (double& x : values) x = std::abs(x);
  return values;
}

/// A call of the five steps, with what lies between them.
class Steps {
 public:
  Steps(const Case& given, std::int64_t chunk_size, DType type, Device on, std::mt19937_64& random)
      : c(given),
        of(given, type, on, random),
        exact{static_cast<std::size_t>(c.batch),   static_cast<std::size_t>(c.seqlen), static_cast<std::size_t>(c.groups),
              static_cast<std::size_t>(c.shared),  static_cast<std::size_t>(c.dim),    static_cast<std::size_t>(c.state),
              static_cast<std::size_t>(chunk_size)},
        naive(exact),
        sums(of_steps(), DType::f32, on),
        sizes(of_steps(), DType::f32, on),
        added(of_states(), DType::f32, on),
        states(of_states(), type, on),
        cb(of_products(), DType::f32, on),
        ungated({c.batch, c.seqlen, c.heads(), c.dim}, type, on) {
    naive.dtype = type;
  }

  void cumsum() {
    tw::mamba2_chunk_cumsum(of.dt, of.rate, sums, sizes,
                            {.dt_bias = c.bias ? &of.bias.tensor() : nullptr,
                             .dt_softplus = c.softplus,
                             .dt_min = c.dt_min,
                             .dt_max = c.dt_max,
                             .seq_idx = c.numbered ? &of.numbers : nullptr});
  }
  void state() { tw::mamba2_chunk_state(of.b, of.x, sizes, sums, added); }
  void passing() {
    const Tensor decays = sums.tensor().select(3, sums.tensor().shape(3) - 1);
    tw::mamba2_state_passing(added, decays, states,
                             {.initial_states = c.initial ? &of.initial.tensor() : nullptr, .final_states = &of.final.tensor()});
  }
  void products(bool causal) { tw::mamba2_bmm_chunk(of.c_matrix, of.b, cb, {.causal = causal}); }
  void scan() {
    tw::mamba2_chunk_scan(
        cb, of.x, sizes, sums, of.c_matrix, states, of.y,
        {.d = c.skip > 0 ? &of.skip.tensor() : nullptr, .z = c.gate ? &of.z.tensor() : nullptr, .ungated = &ungated.tensor()});
  }

  PlainHead limits() const {
    PlainHead limits;
    limits.softplus = c.softplus, limits.dt_min = c.dt_min, limits.dt_max = c.dt_max;
    return limits;
  }
  /// Whether each step begins a sequence, or nothing.
  std::vector<bool> begins() const {
    std::vector<bool> begins(c.numbered ? of.of_numbers.size() : 0);
    for (std::size_t i = 0; i < begins.size(); ++i) begins[i] = i % exact.seqlen > 0 && of.of_numbers[i] != of.of_numbers[i - 1];
    return begins;
  }
  std::pair<std::vector<double>, std::vector<double>> expected_cumsum(const PlainChunks& plain) const {
    return plain.cumsum(widened(of.of_dt), widened(of.of_rate), c.bias ? widened(of.of_bias) : std::vector<double>{}, limits(), begins());
  }
  /// D as [head, dim], or nothing.
  std::vector<double> skip() const {
    std::vector<double> out(c.skip > 0 ? exact.heads() * exact.dim : 0);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = of.of_d[c.skip == 1 ? i / exact.dim : i];
    return out;
  }

  const Case c;
  Operands of;
  PlainChunks exact, naive;
  PlacedTensor sums, sizes, added, states, cb, ungated;

 private:
  std::int64_t chunks() const { return static_cast<std::int64_t>(exact.chunks()); }
  std::int64_t chunk() const { return static_cast<std::int64_t>(exact.chunk); }
  Shape of_steps() const { return {c.batch, c.heads(), chunks(), chunk()}; }
  Shape of_states() const { return {c.batch, chunks(), c.heads(), c.dim, c.state}; }
  Shape of_products() const { return {c.batch, chunks(), c.groups, chunk(), chunk()}; }
};

}  // namespace tw::kernels::mamba2
