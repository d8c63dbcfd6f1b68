#pragma once

#include <functional>
#include <string>

#include "kernels/rows.hpp"
#include "kernels/tuner.hpp"

// Tuned choices of the families that hold rows in registers: the number of warps that share a row.

namespace tw::kernels {

inline std::vector<int> values_of(const RowConfig& config) { return {config.row_warps, config.share}; }

/// The tuned choice for the problem, or else choose_rows().
template <class Key>
RowConfig tuned_rows(Device device, Key key, std::int64_t rows, std::int64_t cols, int max_share) {
  if (const std::vector<int>* const values = tuned_values(device, key)) {
    const std::vector<RowConfig> known = row_configs(cols, max_share);
    const int config = find_config(known, *values, values_of);
    if (config >= 0) return known[static_cast<std::size_t>(config)];
  }
  return choose_rows(rows, cols, device_info(device).units, max_share);
}

/// Rows of a problem, as TuneProblem::candidates; `analyze` counts one. Throws InvalidArgument where there is no choice: on the CPU, and
/// for rows of over `longest` columns.
std::vector<TuneCandidate> row_candidates(const char* family, Device device, const ShapeValues& shape, int max_share, std::int64_t longest,
                                          const std::function<Analysis(RowConfig)>& analyze);

/// The configuration of a candidate.
inline RowConfig row_config_of(const TuneCandidate& candidate) { return {candidate.choice.values[0], candidate.choice.values[1]}; }

}  // namespace tw::kernels
