#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::log_mel {

inline constexpr ShapeKey kShape[] = {{"windows", "recordings", 1},
                                      {"frames", "of a window"},
                                      {"mel_bins", "of a frame", 128},
                                      {"taps", "weights of a filter", 10},
                                      {"hop", "samples from one frame to the next", 160}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::log_mel
