#include "kernels/attention/cache_contents.hpp"

#include <algorithm>

#include "kernels/attention/contents.hpp"
#include "kernels/check.hpp"

namespace tw::kernels::attention {

namespace {

/// Row-major and on the host; no elements for null.
Tensor on_host(const Tensor* t) { return t ? t->to(Device::cpu()) : Tensor(); }

std::int64_t value(const Tensor& t, std::int64_t at) { return t.data<std::int32_t>()[at]; }

}  // namespace

void check_cache_contents(const char* op, const CacheOptions& cache, const CacheExtents& extents, const Stream& stream) {
  stream.synchronize();
  const Tensor seqlens = on_host(cache.seqlens), batch_idx = on_host(cache.batch_idx), leftpad = on_host(cache.leftpad);
  const Tensor block_table = on_host(cache.block_table), cu_new = on_host(cache.cu_seqlens_new);
  if (cache.cu_seqlens_q) check_offsets(op, "cu_seqlens_q", *cache.cu_seqlens_q, extents.seqlen_q, "queries");
  if (cache.cu_seqlens_new) check_offsets(op, "cu_seqlens_new", *cache.cu_seqlens_new, extents.seqlen_new, "new keys");
  for (std::int64_t b = 0; b < extents.batch; ++b) {
    const std::int64_t added = cache.cu_seqlens_new ? value(cu_new, b + 1) - value(cu_new, b) : extents.seqlen_new;
    const std::int64_t seqlen = cache.seqlens ? value(seqlens, b) : extents.capacity, all = seqlen + added;
    require(seqlen >= 0 && all <= extents.capacity,
            "{}: seqlens[{}] is {}; with {} new tokens it must be 0 to {}, so that the cache holds all", op, b, seqlen, added,
            extents.capacity - added);
    const std::int64_t row = cache.batch_idx ? value(batch_idx, b) : b, rows = cache.block_table ? extents.tables : extents.entries;
    require(row >= 0 && row < rows, "{}: batch_idx[{}] is {}; it must be 0 to {}, one of {}", op, b, row, rows - 1,
            cache.block_table ? "the block table's rows" : "the cache's sequences");
    const std::int64_t pad = cache.leftpad ? value(leftpad, b) : 0;
    require(pad >= 0 && pad <= seqlen, "{}: leftpad[{}] is {}; it must be 0 to {}, the sequence's length", op, b, pad, seqlen);
    if (cache.rotary_cos) {
      const std::int64_t turned = std::max(extents.seqlen_new, extents.queries_advance ? extents.seqlen_q : 1);
      require(seqlen - pad + turned <= cache.rotary_cos->shape(0),
              "{}: rotary_cos has {} positions; sequence {} needs {}, with seqlens {} and leftpad {}", op, cache.rotary_cos->shape(0), b,
              seqlen - pad + turned, seqlen, pad);
    }
    if (!cache.block_table) continue;
    for (std::int64_t page = 0; page * extents.page_size < all; ++page) {
      const std::int64_t number = value(block_table, row * block_table.shape(1) + page);
      require(number >= 0 && number < extents.entries, "{}: block_table[{}, {}] is {}; it must be 0 to {}, one of the cache's pages", op,
              row, page, number, extents.entries - 1);
    }
  }
}

}  // namespace tw::kernels::attention
