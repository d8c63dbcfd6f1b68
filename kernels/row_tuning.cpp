#include "kernels/row_tuning.hpp"

#include <map>
#include <utility>

namespace tw::kernels {

FamilyProblem row_problem(const RowProblem& problem, Device device, const std::function<Analysis(RowConfig)>& analyze) {
  const auto [family, name, rows, cols, max_share, longest] = problem;
  require(device.is_cuda(), "{} has nothing to tune on the CPU: the length of its rows decides; only a GPU has a choice", family);
  require(cols <= longest, "shape: cols is {}; rows of over {} are not held in registers, and there is no choice", cols, longest);
  DeviceModel model = *find_device_model("H200");  // what is compared are the candidates
  model.units = units_of(device);
  std::vector<std::vector<int>> points;
  std::map<std::vector<int>, double> seconds;
  for (const RowConfig& config : row_configs(cols, max_share)) {
    points.push_back(values_of(config));
    seconds[points.back()] = roofline(analyze(config), model).seconds;
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
