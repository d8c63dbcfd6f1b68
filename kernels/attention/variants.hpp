#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::attention {

inline constexpr ShapeKey kShape[] = {{"seqlen_q", "queries per sequence"},
                                      {"seqlen_k", "keys per sequence"},
                                      {"heads", "query heads"},
                                      {"kv_heads", "key and value heads; 0: the same as heads", 0},
                                      {"batch", "sequences", 1},
                                      {"lse", "1: the log-sum-exp is stored", 0},
                                      {"splits", "splits of the keys (decode kernels)", 1}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();
/// The same on the generic target, for blocks that can have so much shared memory.
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);

}  // namespace tw::kernels::attention
