// `tilewave bench embedding`: rows of GLM-ASR's table, against a copy of the same bytes.

#include <random>
#include <vector>

#include "benchmarks/memory_bound.hpp"
#include "tilewave/embedding.hpp"

namespace tw::kernels::embedding {
namespace {

using namespace tw::bench;

constexpr std::int64_t kVocabulary = 59264;

Tensor random_ids(std::int64_t count, Device device) {
  std::mt19937_64 random(1);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % kVocabulary);
  return Tensor::from<std::int32_t>(ids, {count}).to(device);
}

MemoryOp embedding_op() {
  const auto prepare = [](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor table = random_normal({kVocabulary, cols}, dtype, stream.device(), 1), ids = random_ids(rows, stream.device());
    const Tensor y = Tensor::poisoned({rows, cols}, dtype, stream);
    return {2 * bytes_of({y}) + bytes_of({ids}), [=] { tw::embedding(table, ids, y, {.stream = stream}); }};
  };
  return {.name = "embedding", .dtypes = {DType::bf16}, .prepare = prepare};
}

const Family family{"embedding", "random rows of a table of 59264: a copy of the same bytes",
                    [](Run& run) { run_memory_ops(run, "embedding", {embedding_op()}); }};

}  // namespace
}  // namespace tw::kernels::embedding
