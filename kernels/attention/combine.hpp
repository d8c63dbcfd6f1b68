#pragma once

#include "kernels/variant.hpp"
#include "tilewave/tensor.hpp"

namespace tw::kernels::attention {

/// Results of attention over parts of the keys, all contiguous and f32, and where they go; checked.
struct CombineCall {
  Tensor parts;                  ///< [splits, batch, heads, seqlen_q, value_dim], each divided by its own sum
  Tensor part_lse;               ///< [splits, batch, heads, seqlen_q]: -infinity of a part without keys, whose result may be anything
  Tensor o;                      ///< [batch, seqlen_q, heads, value_dim]
  const Tensor* lse = nullptr;   ///< [batch, heads, seqlen_q], f32
  const Tensor* sink = nullptr;  ///< [heads], f32
};

/// o and lse of all keys together. A row without any has o = 0 and lse = -infinity, or the sink.
void combine(const CombineCall& call, const Stream& stream);

/// The instantiation that is compiled ahead of time: bf16, up to 128 columns.
KernelVariant combine_variant();

}  // namespace tw::kernels::attention
