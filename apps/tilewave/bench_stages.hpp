#pragma once

#include <string>
#include <vector>

#include "apps/tilewave/transcribe.hpp"

namespace tw::cli {

struct StageBenchArguments {
  ModelArguments model;
  std::vector<int> windows = {1, 8, 32}, batches = {1, 8, 16, 64};
  int samples = 20;
  bool json = false;
  std::string output, commit;
};

/// `tilewave bench transcribe --stages`: times each stage of the model at set sizes.
int bench_stages(const StageBenchArguments& arguments);

}  // namespace tw::cli
