#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tilewave/tensor.hpp"

namespace tw::models {

/// Memory for the keys and values of many sequences, in pages (Kwon et al., vLLM, arXiv 2309.06180): a sequence takes pages as it grows.
/// One thread at a time.
class KvPool {
 public:
  static constexpr int kPageTokens = 64;

  KvPool(int layers, int kv_heads, int head_dim, int pages, DType dtype, const Stream& stream);

  int pages() const { return spare_page(); }
  int free_pages() const { return static_cast<int>(free_.size()); }
  static int pages_for(int tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

  /// A page that no sequence has, for rows of a batch that are none.
  int spare_page() const { return static_cast<int>(tokens_.shape(1)) - 1; }

  /// One layer's keys or values: [pages + 1, kPageTokens, kv_heads, head_dim]. A token's keys are followed by its values.
  Tensor keys(int layer) const { return part(layer, 0); }
  Tensor values(int layer) const { return part(layer, 1); }
  /// Those of all layers: [layers, pages + 1, kPageTokens, kv_heads, head_dim].
  Tensor keys() const { return tokens_.select(3, 0); }
  Tensor values() const { return tokens_.select(3, 1); }

 private:
  friend class KvCache;
  Tensor part(int layer, int which) const;

  Tensor tokens_;          ///< [layers, pages + 1, kPageTokens, 2, kv_heads, head_dim]
  std::vector<int> free_;  ///< pages, the one to use next last
};

/// Keys and values of one sequence.
class KvCache {
 public:
  explicit KvCache(std::shared_ptr<KvPool> pool) : pool_(std::move(pool)) {}
  ~KvCache();
  KvCache(KvCache&&) noexcept = default;
  KvCache& operator=(KvCache&&) = delete;

  /// Makes room for `tokens` in all. Returns false, and changes nothing, if the pool has too few free pages.
  bool reserve(int tokens);

  int capacity() const { return capacity_; }  ///< tokens that there is room for
  const std::vector<int>& pages() const { return pages_; }
  KvPool& pool() const { return *pool_; }

  int length = 0;  ///< tokens in it

 private:
  std::shared_ptr<KvPool> pool_;  ///< null after a move
  std::vector<int> pages_;
  int capacity_ = 0;
};

}  // namespace tw::models
