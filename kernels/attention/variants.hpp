#pragma once

#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::attention {

inline constexpr ShapeKey kShape[] = {{"seqlen_q", "queries"},
                                      {"seqlen_k", "keys"},
                                      {"heads", "of queries"},
                                      {"kv_heads", "of keys and values; 0: as many as of queries", 0},
                                      {"batch", "sequences", 1},
                                      {"lse", "1: the log-sum-exp is stored", 0},
                                      {"splits", "parts of the keys, in decode", 1}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();
/// The same on the generic target, for blocks that can have so much shared memory.
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);

}  // namespace tw::kernels::attention
