// `tilewave bench hadamard`: against a copy of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "runtime/format.hpp"
#include "tilewave/hadamard.hpp"

namespace tw::kernels::hadamard {
namespace {

using namespace tw::bench;

/// Rows of `n` elements, as many as make a matrix of 512 MB on a GPU, of 64 MB on the CPU; with random signs or without.
void run_case(Run& run, std::int64_t n, DType dtype, bool signs) {
  const Stream& stream = run.stream();
  const std::int64_t bytes = std::int64_t{stream.device().is_cuda() ? 512 : 64} << 20;
  const std::int64_t rows = bytes / (n * static_cast<std::int64_t>(size_of(dtype)));
  MemoryCase c;
  c.family = "hadamard";
  c.case_name = tw::format("hadamard{}-{}x{}", signs ? "-signs" : "", rows, n);
  c.dtype = dtype;
  if (!run.wants(c.family, c.case_name, dtype)) return;
  const Tensor x = random_normal({rows, n}, dtype, stream.device(), 1), y = Tensor::poisoned({rows, n}, dtype, stream);
  const Tensor factors = random_normal({n}, DType::f32, stream.device(), 2);
  c.bytes = bytes_of({x, y}) + (signs ? bytes_of({factors}) : 0);
  c.launch = [=] { tw::hadamard(x, y, {.factors = signs ? &factors : nullptr, .stream = stream}); };
  run_bandwidth(run, c);
}

void run_all(Run& run) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const std::int64_t n : {128, 256, 1024, 2048, 4096, 8192, 16384, 32768, 5120, 12288, 28672}) run_case(run, n, dtype, false);
    for (const std::int64_t n : {128, 2048, 32768}) run_case(run, n, dtype, true);
  }
}

const Family family{"hadamard", "Hadamard transforms of rows of 128 to 32768: a copy of the same bytes", run_all};

}  // namespace
}  // namespace tw::kernels::hadamard
