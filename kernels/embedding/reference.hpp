#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tw::kernels::embedding {

/// scale * table[ids[t], :] for every t; table is dense, [vocabulary, dim].
inline std::vector<double> reference(std::span<const double> table, std::int64_t dim, std::span<const std::int64_t> ids, double scale) {
  std::vector<double> y;
  for (const std::int64_t id : ids)
    for (std::int64_t col = 0; col < dim; ++col) y.push_back(scale * table[static_cast<std::size_t>(id * dim + col)]);
  return y;
}

}  // namespace tw::kernels::embedding
