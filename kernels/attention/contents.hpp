#pragma once

#include "tilewave/attention.hpp"

namespace tw {

/// Throws InvalidArgument unless cu_seqlens, i32 on any device, does not decrease and stays within 0 and `total`, the number of `what`.
void check_offsets(const char* op, const char* name, const Tensor& cu_seqlens, std::int64_t total, const char* what);

/// Waits for `stream` where the tensors are on a GPU, and throws InvalidArgument where offsets decrease or leave the tensors, or lengths in
/// use are longer than the sequences.
void check_packed_contents(const PackedSequences& sequences, std::int64_t total_q, std::int64_t total_k, const Stream& stream);

}  // namespace tw
