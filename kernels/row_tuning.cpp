#include "kernels/row_tuning.hpp"

#include <map>
#include <utility>

namespace tw::kernels {

namespace {

/// Scales the counts that a roofline needs from a kernel with tiles `of` to one with other tiles. Work is proportional to whole tiles,
/// including the parts outside the tensor.
Analysis with_tiles(Analysis counts, const RowTile& of, const RowTile& tile, std::int64_t rows) {
  counts.tiles = (rows + tile.rows - 1) / tile.rows;
  const auto scale = [&](std::uint64_t& one, std::uint64_t& all) {
    one = one * static_cast<std::uint64_t>(tile.rows * tile.cols) / static_cast<std::uint64_t>(of.rows * of.cols);
    all = one * static_cast<std::uint64_t>(counts.tiles);
  };
  scale(counts.largest_tile.f32, counts.operations.f32);
  scale(counts.largest_tile.special, counts.operations.special);
  return counts;
}

}  // namespace

FamilyProblem row_problem(const RowProblem& problem, Device device, const Analysis& counts, const RowTile& counted) {
  const auto [family, name, rows, cols, max_share, longest] = problem;
  require(device.is_cuda(), "{} has nothing to tune on the CPU, where there is only one configuration for each row length", family);
  require(cols <= longest, "shape: cols is {}; rows of more than {} columns are not held in registers and have only one configuration",
          cols, longest);
  DeviceModel model = *find_device_model("H200");  // good enough to compare candidates
  model.units = units_of(device);
  std::vector<std::vector<int>> points;
  std::map<std::vector<int>, double> seconds;
  for (const RowConfig& config : row_configs(cols, max_share)) {
    points.push_back(values_of(config));
    seconds[points.back()] = roofline(with_tiles(counts, counted, row_tile(config), rows), model).seconds;
  }
  TuneSpace space = space_of({"row_warps", "share"}, points);
  TunePoint standard = point_of(space, values_of(choose_rows(rows, cols, model.units, max_share)));
  return {name,
          std::move(space),
          std::move(standard),
          [seconds = std::move(seconds)](const TunePoint& p) { return seconds.at(p.values()); },
          {}};
}

}  // namespace tw::kernels
