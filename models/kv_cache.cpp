#include "models/kv_cache.hpp"

#include <algorithm>
#include <numeric>

namespace tw::models {

KvPool::KvPool(int layers, int kv_heads, int head_dim, int pages, DType dtype, const Stream& stream)
    : tokens_(Tensor::empty({layers, pages + 1, kPageTokens, 2, kv_heads, head_dim}, dtype, stream)), free_(static_cast<std::size_t>(pages)) {
  std::iota(free_.rbegin(), free_.rend(), 0);
}

Tensor KvPool::part(int layer, int which) const { return tokens_.select(0, layer).select(2, which); }

KvCache::~KvCache() {
  if (pool_ != nullptr) pool_->free_.insert(pool_->free_.end(), pages_.rbegin(), pages_.rend());
}

bool KvCache::reserve(int tokens) {
  const auto needed = static_cast<std::size_t>(KvPool::pages_for(tokens));
  if (needed > pages_.size() && needed - pages_.size() > pool_->free_.size()) return false;
  while (pages_.size() < needed) {
    pages_.push_back(pool_->free_.back());
    pool_->free_.pop_back();
  }
  capacity_ = std::max(capacity_, tokens);
  return true;
}

}  // namespace tw::models
