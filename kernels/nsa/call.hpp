#pragma once

#include "kernels/nsa/kernels.hpp"
#include "tilewave/nsa.hpp"

// What the family's public functions share: checks, and operands as the kernels want them. Checks throw InvalidArgument.

namespace tw::kernels::nsa {

/// The last dimension is contiguous, and no extent is too large.
void check_columns(const char* op, const char* name, const Tensor& t);

/// Checks what all functions take, for keys that tokens select, or compressed ones if block_indices is null. The call lacks its operands.
Call check_call(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor* block_indices, const NsaOptions& options);

/// Checks an f32 tensor [batch, seqlen, heads] and returns it.
const Tensor* per_head(const char* op, const char* name, const Tensor& t, const Tensor& q);

/// Sets q, k and v. A q whose tokens are not equally far apart is copied.
void fit_operands(Call& call, const Tensor& q, const Tensor& k, const Tensor& v);
/// t [batch, seqlen, heads, dim] as [tokens, kv_heads, group, dim]; copied if tokens are not equally far apart.
Tensor by_group(const Tensor& t, std::int64_t kv_heads, const Stream& stream);
/// t [batch, keys, kv_heads, dim] as [batch, kv_heads, keys, dim].
Tensor by_head(const Tensor& t);

/// Whether the heads of a token and of the next one follow each other, as rows of one matrix.
bool are_rows(const Tensor& t);
/// Such a tensor as [tokens * heads, dim].
Tensor as_rows(const Tensor& t);

}  // namespace tw::kernels::nsa
