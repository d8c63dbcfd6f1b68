#pragma once

#include "tilewave/attention.hpp"

namespace tw::kernels::attention {

/// Extents that what lies in CacheOptions' tensors must fit.
struct CacheExtents {
  std::int64_t batch = 0;
  std::int64_t entries = 0;      ///< sequences of the cache, or its pages
  std::int64_t tables = 0;       ///< rows of the block table
  std::int64_t capacity = 0;     ///< tokens of a sequence
  std::int64_t page_size = 0;    ///< 0: not paged
  std::int64_t seqlen_q = 0;     ///< of packed queries: all of them
  std::int64_t seqlen_new = 0;   ///< likewise
  bool queries_advance = false;  ///< query i is turned by the position of new key i
};

/// Waits for `stream`, reads lengths, sequence and page numbers, and throws InvalidArgument for the first one that leads outside the cache
/// or the rotary table. Of the block table only the pages that a sequence uses.
void check_cache_contents(const char* op, const CacheOptions& cache, const CacheExtents& extents, const Stream& stream);

}  // namespace tw::kernels::attention
