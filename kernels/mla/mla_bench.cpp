// `tilewave bench mla`: decoding with absorbed latent attention, against the device's product rate where many heads share the cache, and
// against a read of the cache where few do.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/harness.hpp"
#include "runtime/format.hpp"
#include "tilewave/device.hpp"
#include "tilewave/mla.hpp"

namespace tw::kernels::mla {
namespace {

using namespace tw::bench;

/// One call. Sequences have equal lengths, or `ragged` ones from half of it to one and a half times it.
struct MlaCase {
  std::int64_t batch, heads, seqlen;
  std::int64_t seqlen_q = 1;
  std::int64_t page_size = 0;  ///< 0: not paged
  bool ragged = false;
  bool fp8 = false;  ///< a cache of 8 bits

  std::string name() const {
    std::string text = tw::format("b{}-h{}-{}k", batch, heads, seqlen / 1024);
    if (seqlen_q > 1) text += tw::format("-q{}", seqlen_q);
    if (page_size > 0) text += tw::format("-paged{}", page_size);
    return text + (ragged ? "-ragged" : "") + (fp8 ? "-fp8" : "");
  }
  /// Whether products limit it. With fewer rows than a tile's 64 the bytes of the cache are counted.
  bool counts_operations() const { return heads * seqlen_q >= 64; }
};

const MlaCase kMlaGpuCases[] = {{128, 128, 8192},
                                {128, 128, 8192, 1, 64},
                                {128, 128, 8192, 1, 1},
                                {128, 128, 4096, 2, 64},
                                {64, 128, 4096, 1, 64, true},
                                {1, 128, 32768},
                                {1, 128, 32768, 1, 64},
                                {128, 16, 8192},
                                {128, 16, 8192, 1, 64},
                                {16, 16, 32768, 1, 64},
                                {1, 16, 32768},
                                {128, 128, 8192, 1, 0, false, true},
                                {128, 16, 8192, 1, 64, false, true}};
const MlaCase kMlaCpuCases[] = {{2, 16, 1024}};

Tensor on_device(const std::vector<std::int32_t>& values, const Shape& shape, Device device) {
  const Tensor host = Tensor::empty(shape, DType::i32);
  std::copy(values.begin(), values.end(), host.data<std::int32_t>());
  return host.to(device);
}

/// Adds records of a call of so many operations. What the tensor cores limit is limited by power, too: it is measured hot and cool.
template <class Launch>
void measure_call(Run& run, Record record, double flops, Launch launch) {
  const bool on_gpu = run.stream().device().is_cuda();
  std::vector<Mode> modes{Mode::one_thread};
  if (on_gpu) modes = flops < 3e10 ? std::vector{Mode::graph} : std::vector{Mode::hot, Mode::cool};
  record.family = "mla";
  record.dtype = DType::bf16;
  for (const Mode mode : modes) {
    record.mode = mode;
    record.ours = measure(mode, {{"tilewave", launch}}, run.stream(), run.effort(mode)).front();
    run.add(record);
  }
}

void run_mla_case(Run& run, const MlaCase& c) {
  const DType dtype = DType::bf16;
  if (!run.wants("mla", c.name(), dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  std::mt19937 random(1);
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(c.batch), static_cast<std::int32_t>(c.seqlen));
  for (std::int32_t& length : lengths)
    if (c.ragged) length = static_cast<std::int32_t>(c.seqlen / 2 + static_cast<std::int64_t>(random() % static_cast<unsigned>(c.seqlen)));
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const auto tokens = static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
  const std::int64_t pages = c.page_size > 0 ? (longest + c.page_size - 1) / c.page_size : 1;
  const std::int64_t entries = c.page_size > 0 ? c.batch * pages : c.batch, rows = c.page_size > 0 ? c.page_size : longest;
  const double bytes = tokens * static_cast<double>(c.fp8 ? kMlaFp8Bytes : kMlaKeyDim * 2);
  // So many caches take turns that none is in the L2 cache when its turn comes.
  std::vector<Tensor> caches(static_cast<std::size_t>(device.is_cuda() ? std::max(1.0, std::ceil(512e6 / bytes)) : 1));
  for (Tensor& cache : caches) {
    if (!c.fp8) {
      cache = random_normal({entries, rows, kMlaKeyDim}, dtype, device, 1);
      continue;
    }
    cache = Tensor::empty({entries, rows, kMlaFp8Bytes}, DType::u8, stream);
    mla_append(random_normal({entries, rows, kMlaLatentDim}, dtype, device, 1),
               random_normal({entries, rows, kMlaRotaryDim}, dtype, device, 2), cache, {.stream = stream});
  }
  stream.synchronize();
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(c.batch * pages));
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), random);
  const Tensor table = on_device(numbers, {c.batch, pages}, device), seqlens = on_device(lengths, {c.batch}, device);
  const Tensor q = random_normal({c.batch, c.seqlen_q, c.heads, kMlaKeyDim}, dtype, device, 3);
  const Tensor o = Tensor::poisoned({c.batch, c.seqlen_q, c.heads, kMlaLatentDim}, dtype, stream);
  const MlaOptions options{.seqlens = &seqlens, .block_table = c.page_size > 0 ? &table : nullptr, .stream = stream};
  std::size_t next = 0;
  const auto launch = [&] { mla_decode(q, caches[next++ % caches.size()], o, options); };
  const double flops = 2 * tokens * static_cast<double>(c.heads * c.seqlen_q * (kMlaKeyDim + kMlaLatentDim));
  const bool on_gpu = device.is_cuda();
  Record record;
  record.case_name = c.name();
  record.unit = c.counts_operations() ? on_gpu ? "TFLOP/s" : "GFLOP/s" : "GB/s";
  record.work = c.counts_operations() ? flops * (on_gpu ? 1e-12 : 1e-9) : bytes * 1e-9;
  if (!c.counts_operations()) record.limit = run.read_bandwidth() * 1e-9;
  measure_call(run, record, flops, launch);
}

/// One call of mla_sparse(): lists of different tokens, in random order.
struct SparseCase {
  const char* name;
  std::int64_t sequences, tokens_each, heads, topk, kv_tokens_each;
  bool fp8 = false;
};

const SparseCase kSparseGpuCases[] = {{"sparse-prefill-q4096-h128-top2048-of-8192", 1, 4096, 128, 2048, 8192},
                                      {"sparse-decode-b128-h128-top2048", 128, 1, 128, 2048, 8192},
                                      {"sparse-decode-b128-h128-top2048-fp8", 128, 1, 128, 2048, 8192, true},
                                      {"sparse-decode-b2-h128-top2048", 2, 1, 128, 2048, 32768}};
/// Gradients, of 5 products.
const SparseCase kBackwardGpuCases[] = {{"sparse-backward-q4096-h64-top2048-of-8192", 1, 4096, 64, 2048, 8192},
                                        {"sparse-backward-q4096-h128-top2048-of-8192", 1, 4096, 128, 2048, 8192}};
const SparseCase kBackwardCpuCases[] = {{"sparse-backward-b4-h16-top256", 4, 1, 16, 256, 1024}};
const SparseCase kSparseCpuCases[] = {{"sparse-decode-b4-h16-top256", 4, 1, 16, 256, 1024}};

/// A cache of sequences * kv_tokens_each tokens.
Tensor random_cache(const SparseCase& c, Device device, const Stream& stream) {
  if (!c.fp8) return random_normal({c.sequences * c.kv_tokens_each, kMlaKeyDim}, DType::bf16, device, 1);
  const Tensor cache = Tensor::empty({c.sequences, c.kv_tokens_each, kMlaFp8Bytes}, DType::u8, stream);
  mla_append(random_normal({c.sequences, c.kv_tokens_each, kMlaLatentDim}, DType::bf16, device, 1),
             random_normal({c.sequences, c.kv_tokens_each, kMlaRotaryDim}, DType::bf16, device, 2), cache, {.stream = stream});
  return cache;
}

void run_sparse_case(Run& run, const SparseCase& c, bool backward = false) {
  const DType dtype = DType::bf16;
  if (!run.wants("mla", c.name, dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const Tensor cache = random_cache(c, device, stream);
  const std::int64_t tokens = c.sequences * c.tokens_each;
  std::mt19937 random(1);
  std::vector<std::int32_t> lists(static_cast<std::size_t>(tokens * c.topk)), all(static_cast<std::size_t>(c.kv_tokens_each));
  std::iota(all.begin(), all.end(), 0);
  for (std::int64_t token = 0; token < tokens; ++token) {
    // The first entries of a permutation.
    for (std::int64_t n = 0; n < c.topk; ++n) {
      const auto at = static_cast<std::size_t>(n);
      std::swap(all[at], all[at + random() % (all.size() - at)]);
      lists[static_cast<std::size_t>(token * c.topk + n)] = all[at] + static_cast<std::int32_t>(token / c.tokens_each * c.kv_tokens_each);
    }
  }
  const Tensor indices = on_device(lists, {tokens, c.topk}, device);
  const Tensor q = random_normal({tokens, c.heads, kMlaKeyDim}, dtype, device, 3);
  const Tensor o = Tensor::poisoned({tokens, c.heads, kMlaLatentDim}, dtype, stream);
  const Tensor lse = Tensor::poisoned({tokens, c.heads}, DType::f32, stream), d_o = random_normal(o.shape(), dtype, device, 4),
               dq = Tensor::poisoned(q.shape(), dtype, stream), dkv = Tensor::poisoned(cache.shape(), DType::f32, stream);
  if (backward) mla_sparse(q, cache, indices, o, {.lse = &lse, .stream = stream});
  stream.synchronize();
  const auto launch = [&] {
    if (backward)
      mla_sparse_backward(q, cache, indices, o, lse, d_o, dq, dkv, {.stream = stream});
    else
      mla_sparse(q, cache, indices, o, {.stream = stream});
  };
  const std::int64_t columns = backward ? 3 * kMlaKeyDim + 2 * kMlaLatentDim : kMlaKeyDim + kMlaLatentDim;
  const double flops = 2 * static_cast<double>(tokens * c.topk * c.heads * columns);
  const bool on_gpu = device.is_cuda();
  Record record;
  record.case_name = c.name;
  record.unit = on_gpu ? "TFLOP/s" : "GFLOP/s";
  record.work = flops * (on_gpu ? 1e-12 : 1e-9);
  measure_call(run, record, flops, launch);
}

const Family mla_family{
    "mla", "absorbed latent attention of a decoding step: products of many heads, a read of the cache for few; and of listed keys",
    [](Run& run) {
      if (run.options().device.is_cuda()) {
        for (const MlaCase& c : kMlaGpuCases) run_mla_case(run, c);
        for (const SparseCase& c : kSparseGpuCases) run_sparse_case(run, c);
        for (const SparseCase& c : kBackwardGpuCases) run_sparse_case(run, c, true);
      } else {
        const OneThread one;
        for (const MlaCase& c : kMlaCpuCases) run_mla_case(run, c);
        for (const SparseCase& c : kSparseCpuCases) run_sparse_case(run, c);
        for (const SparseCase& c : kBackwardCpuCases) run_sparse_case(run, c, true);
      }
    }};

}  // namespace
}  // namespace tw::kernels::mla
