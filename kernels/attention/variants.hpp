#pragma once

#include <vector>

#include "kernels/tuner.hpp"
#include "tilewave/detail/attention_call.hpp"

// The kernels that are compiled ahead of time, and what can be tuned.

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

/// Of them, what transposes e4m3's values.
KernelVariant values_variant();

/// Of them, what sums up attention over parts of the keys: bf16, up to 128 columns.
KernelVariant combine_variant();
/// The same for 512 columns: latent attention's.
KernelVariant wide_combine_variant();

/// Parts of a sequence's keys, at most.
inline constexpr int kMostSplits = 128;

/// The tuned configuration for a call on a GPU, or else choose_config()'s. Calls with a mask, packed or cached keys, or tensors that TMA
/// cannot load are not tuned.
AttentionConfig tuned_config(const detail::AttentionCall& call);

/// The number of splits of a decoding call's keys on a GPU: tuned, or else decode_splits()'s. `rows`: queries of the heads that share keys.
int tuned_splits(const detail::AttentionCall& call, int rows);
/// The same without tuned choices, for `sequences` times heads of keys with `rows` queries each on `units` SMs. `chunk`:
/// AttentionCall::chunk.
int planned_splits(std::int64_t sequences, std::int64_t rows, std::int64_t seqlen_k, int chunk, int units);

inline constexpr ShapeKey kTuneShape[] = {{"batch", "sequences", 1},
                                          {"heads", "query heads"},
                                          {"kv_heads", "key and value heads; 0: the same as heads", 0},
                                          {"seqlen_q", "queries per sequence"},
                                          {"seqlen_k", "keys per sequence; 0: the same as seqlen_q", 0},
                                          {"head_dim", "head dimension of queries and keys"},
                                          {"value_dim", "head dimension of values; 0: the same as head_dim", 0},
                                          {"causal", "1: a causal mask", 0},
                                          {"window", "window_left: how many keys before its own a query sees; 0: all", 0}};
FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device);

/// The same for attention_decode().
inline constexpr ShapeKey kTuneDecodeShape[] = {{"batch", "sequences"},
                                                {"heads", "query heads"},
                                                {"kv_heads", "key and value heads; 0: the same as heads", 0},
                                                {"seqlen_q", "queries per sequence", 1},
                                                {"seqlen_k", "keys per sequence in the cache; all are used"},
                                                {"head_dim", "head dimension of queries, keys and values"}};
FamilyProblem tune_decode_problem(const ShapeValues& shape, DType dtype, Device device);

}  // namespace tw::kernels::attention
