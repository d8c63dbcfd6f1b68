#include "kernels/row_tuning.hpp"

namespace tw::kernels {

std::vector<TuneCandidate> row_candidates(const char* family, Device device, const ShapeValues& shape, int max_share, std::int64_t longest,
                                          const std::function<Analysis(RowConfig)>& analyze) {
  const std::int64_t rows = shape["rows"], cols = shape["cols"];
  require(device.is_cuda(), "{} has nothing to tune on the CPU: the length of its rows decides; only a GPU has a choice", family);
  require(rows > 0 && cols > 0, "shape: rows and cols must be positive");
  require(cols <= longest, "shape: cols is {}; rows of over {} are not held in registers, and there is no choice", cols, longest);
  std::vector<TuneCandidate> candidates;
  for (const RowConfig& config : row_configs(cols, max_share)) {
    const Analysis analysis = analyze(config);
    std::string name = tw::format("{} warp{}, {} columns", config.row_warps, config.row_warps > 1 ? "s" : "", config.share);
    candidates.push_back({{std::move(name), values_of(config)}, analysis, analysis.shared_bytes});
  }
  return candidates;
}

}  // namespace tw::kernels
