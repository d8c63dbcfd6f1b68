#pragma once

#include <functional>

#include "kernels/attention/call.hpp"
#include "kernels/attention/vertical_slash.tile.hpp"
#include "tilewave/vertical_slash.hpp"

// Vertical-slash sparse attention: from columns and slashes to the lists that attention's tiles read.

namespace tw::kernels::attention {

/// Checked columns and slashes of `batch` times `heads` heads.
struct VerticalSlash {
  const Tensor *vertical, *slash;  ///< i32 [batch, heads, any], contiguous
  const std::int32_t* seqlens;     ///< [batch], or null
  int batch, heads, seqlen, query_block;
  Stream stream;

  int all_heads() const { return batch * heads; }
  int columns() const { return static_cast<int>(vertical->shape(2)); }
};

/// A checked call of vertical_slash_attention(), and the columns and slashes that it attends to.
struct VerticalSlashCall {
  AttentionCall attention;
  VerticalSlash selected;
};
VerticalSlashCall check_vertical_slash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& vertical, const Tensor& slash,
                                       const Tensor& o, const VerticalSlashOptions& options);

/// Enqueues what sets the results of queries after their sequence's end, which attention does not write.
void clear_unused(const VerticalSlashCall& call);

/// Makes the lists for tiles of `tile_rows` queries and blocks of `tile_keys` keys, which divide query_block, and calls `launch` with a
/// call that has them: once, or if they would take more than KeyBlocks::most_list_bytes for some of the heads at a time.
void with_slash_lists(const VerticalSlashCall& call, int tile_rows, int tile_keys, const std::function<void(const AttentionCall&)>& launch);

/// The kernel's configuration on a GPU.
AttentionConfig vertical_slash_config(const VerticalSlashCall& call);

void run_vertical_slash_on_cpu(const VerticalSlashCall& call);

}  // namespace tw::kernels::attention
