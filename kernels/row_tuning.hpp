#pragma once

#include <string>

#include "kernels/rows.hpp"
#include "kernels/tuner.hpp"

// Tuning of the families that hold rows in registers: the number of warps that share a row.

namespace tw::kernels {

inline std::vector<int> values_of(const RowConfig& config) { return {config.row_warps, config.share}; }

/// The tuned choice for the problem; choose_rows() if there is none.
template <class Key>
RowConfig tuned_rows(Device device, Key key, std::int64_t rows, std::int64_t cols, int max_share) {
  if (const std::vector<int>* const values = tuned_values(device, key)) {
    const std::vector<RowConfig> known = row_configs(cols, max_share);
    const int config = find_config(known, *values, values_of);
    if (config >= 0) return known[static_cast<std::size_t>(config)];
  }
  return choose_rows(rows, cols, device_info(device).units, max_share);
}

/// A problem of a family that holds rows in registers.
struct RowProblem {
  const char* family;
  std::string name;  ///< as FamilyProblem::name
  std::int64_t rows, cols;
  int max_share;
  std::int64_t longest;  ///< maximum number of columns of a row in registers
};

/// The configurations of row_configs(), with predictions from the counts of the analysis target for a kernel with `counted` tiles.
/// `prepare` is left empty. Throws InvalidArgument if there is no choice: on the CPU, and for rows that are too long.
FamilyProblem row_problem(const RowProblem& problem, Device device, const Analysis& counts, const RowTile& counted);

/// The configuration of a point.
inline RowConfig row_config_of(const TunePoint& point) { return {point["row_warps"], point["share"]}; }

}  // namespace tw::kernels
