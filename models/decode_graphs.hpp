#pragma once

#include <cstddef>
#include <map>

#include "models/kv_cache.hpp"
#include "tilewave/tensor.hpp"

namespace tw::models {

/// The decoding steps of a Llama for one pool, each a graph: a GPU starts the kernels of a graph by itself, while a launch by the host
/// takes longer than a small kernel runs. A graph is for a number of sequences and of pages, and is made when a step first needs it, which
/// takes as long as a few steps. So numbers are rounded up, and the sequences that are missing are rows whose scores nobody reads. One
/// thread at a time.
class DecodeGraphs {
 public:
  /// `pool` must outlive them.
  explicit DecodeGraphs(const KvPool& pool) : pool_(&pool) {}

  struct Step {
    Tensor numbers;  ///< i32: the next tokens, the lengths, the table of pages
    Tensor scores;   ///< [rows, vocabulary]
    Graph graph;
  };
  struct Size {
    int rows = 0;
    int pages = 0;  ///< of each row
    friend auto operator<=>(const Size&, const Size&) = default;
  };
  static Size size_for(int sequences, int pages);

  const KvPool& pool() const { return *pool_; }
  std::size_t count() const { return steps_.size(); }

  /// `make(size)` makes a step that there is not yet.
  template <class Make>
  const Step& find(Size size, Make&& make) {
    auto found = steps_.find(size);
    if (found == steps_.end()) found = steps_.emplace(size, make(size)).first;
    return found->second;
  }

 private:
  const KvPool* pool_;  ///< whose memory is in the graphs
  std::map<Size, Step> steps_;
};

}  // namespace tw::models
