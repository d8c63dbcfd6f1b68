#pragma once

#include "kernels/nsa/kernels.hpp"

// Fills in what the family's kernels share of their parameters.

namespace tw::kernels::nsa {

void bind_sequences(auto& p, const Layout& layout) {
  p.cu_q = layout.cu_q;
  p.cu_k = layout.cu_k;
  p.tokens = layout.tokens;
  p.count = layout.count;
  p.queries = layout.queries;
  p.keys = layout.keys;
  p.length = layout.length;
  p.span = layout.span;
}

/// Memory for one call, set to 0.
Tensor zeros(Shape shape, DType dtype, const Stream& stream);

/// `keys`: of a step.
void bind_lists(auto& p, const Lists& lists, const Call& call, int keys) {
  const bool all = lists.capacity == 0;
  p.entries = all ? nullptr : lists.entries.data<std::int32_t>();
  p.sizes = all ? nullptr : lists.sizes.data<std::int32_t>();
  p.capacity = lists.capacity;
  p.heads = call.kv_heads();
  p.parts = call.selection.block_size / keys;
}

}  // namespace tw::kernels::nsa
