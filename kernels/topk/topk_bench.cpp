// `tilewave bench topk`: argmax and top-k of a vocabulary's logits, against an empty kernel and the time to read them.

#include <algorithm>

#include "benchmarks/memory_bound.hpp"
#include "runtime/format.hpp"
#include "tilewave/topk.hpp"

namespace tw::kernels::topk {
namespace {

using namespace tw::bench;

constexpr std::int64_t kVocabulary = 151552;

/// `rows` rows of logits; k = 0: argmax.
void run_case(Run& run, std::int64_t rows, int k, DType dtype, std::int64_t columns = kVocabulary, bool sorted = true) {
  MemoryCase c;
  c.family = "topk";
  c.case_name = k == 0 ? tw::format("argmax-{}x{}", rows, columns) : tw::format("top{}-{}x{}", k, rows, columns);
  if (!sorted) c.case_name += "-unsorted";
  c.dtype = dtype;
  if (!run.wants(c.family, c.case_name, dtype)) return;
  const Stream& stream = run.stream();
  const Tensor x = random_normal({rows, columns}, dtype, stream.device(), 1);
  // Given, so that launches can be captured into a graph. Without elements none is needed.
  const std::int64_t elements = k == 0 ? argmax_workspace(x) : topk_workspace(x, k);
  const Tensor workspace = Tensor::poisoned({std::max<std::int64_t>(elements, 1)}, DType::i64, stream);
  if (k == 0) {
    const Tensor indices = Tensor::poisoned({rows}, DType::i32, stream);
    c.bytes = bytes_of({x, indices});
    c.launch = [=] { argmax(x, indices, {.workspace = &workspace, .stream = stream}); };
  } else {
    const Tensor values = Tensor::poisoned({rows, k}, dtype, stream), indices = Tensor::poisoned({rows, k}, DType::i32, stream);
    c.bytes = bytes_of({x, values, indices});
    c.launch = [=] { tw::topk(x, k, values, indices, {.sorted = sorted, .workspace = &workspace, .stream = stream}); };
  }
  run_small(run, c);
}

void run_all(Run& run) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t rows : {1, 64}) {
      for (const int k : {0, 50, 2048}) run_case(run, rows, k, dtype);
    }
  }
  if (!run.stream().device().is_cuda()) return;
  for (const bool sorted : {true, false}) run_case(run, 4096, 2048, DType::f32, 32768, sorted);  // of an indexer's scores
}

const Family family{"topk", "argmax and top-k of a vocabulary: an empty kernel plus the time to read it", run_all};

}  // namespace
}  // namespace tw::kernels::topk
