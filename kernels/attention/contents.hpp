#pragma once

#include "tilewave/attention.hpp"

namespace tw {

/// Waits for `stream` where the tensors are on a GPU, and throws InvalidArgument where offsets decrease or leave the tensors, or lengths in
/// use are longer than the sequences.
void check_packed_contents(const PackedSequences& sequences, std::int64_t total_q, std::int64_t total_k, const Stream& stream);

}  // namespace tw
