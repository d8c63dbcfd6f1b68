// `tilewave bench nsa`: attention over selected blocks, in prefilling against the device's product rate, counting only pairs of queries and
// keys that are selected, and in decoding against a read of the blocks; the gradients, the selection and compressed keys.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/harness.hpp"
#include "runtime/format.hpp"
#include "tilewave/device.hpp"
#include "tilewave/nsa.hpp"

namespace tw::kernels::nsa {
namespace {

using namespace tw::bench;

constexpr std::int64_t kBlock = 64;

/// What neighbouring tokens select. The first block and the last two are in every list.
enum class Choice {
  equal,       ///< 16 neighbours have the same list
  alike,       ///< a token has the list of the one before, with one block replaced in every second token
  independent  ///< of each other
};
constexpr const char* kChoices[] = {"equal", "alike", "independent"};

struct NsaCase {
  const char* what;  ///< "selected", "backward", "select", "compressed" or "decode"
  std::int64_t tokens;
  Choice choice = Choice::alike;
  std::int64_t heads = 64, kv_heads = 4, dim = 128, slots = 16;
  std::int64_t batch = 1;  ///< decode: sequences of `tokens` tokens

  std::string name() const {
    std::string text = tw::format("{}-s{}-h{}-kv{}-d{}", what, tokens, heads, kv_heads, dim);
    if (batch > 1) text += tw::format("-b{}", batch);
    const bool listed = std::string_view(what) == "selected" || std::string_view(what) == "backward";
    return listed ? text + "-" + kChoices[static_cast<std::size_t>(choice)] : text;
  }
};

const NsaCase kGpuCases[] = {{"selected", 8192, Choice::equal},
                             {"selected", 8192, Choice::alike},
                             {"selected", 8192, Choice::independent},
                             {"selected", 65536, Choice::equal},
                             {"selected", 65536, Choice::alike},
                             {"selected", 65536, Choice::independent},
                             {"selected", 8192, Choice::alike, 64, 4, 64},
                             {"backward", 8192, Choice::alike},
                             {"backward", 8192, Choice::independent},
                             {"backward", 65536, Choice::alike},
                             {"compressed", 8192},
                             {"compressed", 65536},
                             {"select", 8192},
                             {"select", 65536},
                             {"decode", 8192, Choice::independent, 64, 4, 128, 16, 128},
                             {"decode", 65536, Choice::independent, 64, 4, 128, 16, 1}};
const NsaCase kCpuCases[] = {{"selected", 512, Choice::alike, 16, 1, 128, 4}, {"backward", 512, Choice::alike, 16, 1, 128, 4}};

/// A token's list: blocks 0, own - 1 and own, and others before these, all different.
class Lists {
 public:
  explicit Lists(std::int64_t slots) : slots_(slots) {}

  const std::vector<std::int32_t>& next(std::int64_t position, Choice choice) {
    const auto own = static_cast<std::int32_t>(position / kBlock);
    const bool fresh = list_.empty() || own != own_ || choice == Choice::independent || (choice == Choice::equal && position % 16 == 0);
    own_ = own;
    if (fresh) {
      // A run of alike tokens goes on across blocks: what was selected stays.
      std::vector<std::int32_t> kept;
      if (choice == Choice::alike) kept = list_;
      list_.clear();
      for (const std::int32_t b : {0, own - 1, own}) add(b);
      for (const std::int32_t b : kept) add(b);
      fill();
    } else if (choice == Choice::alike && position % 2 == 0 && std::ssize(list_) > 3) {
      list_.erase(list_.begin() + 3 + static_cast<std::ptrdiff_t>(random_() % (list_.size() - 3)));
      fill();
    }
    return list_;
  }

 private:
  void add(std::int32_t b) {
    if (b >= 0 && std::ssize(list_) < slots_ && std::ranges::find(list_, b) == list_.end()) list_.push_back(b);
  }
  void fill() {
    while (std::ssize(list_) < std::min<std::int64_t>(slots_, own_ + 1)) add(static_cast<std::int32_t>(random_() % (own_ + 1u)));
  }

  std::int64_t slots_;
  std::int32_t own_ = 0;
  std::vector<std::int32_t> list_;
  std::mt19937 random_{1};
};

/// The lists of a case [batch, tokens, kv_heads, slots], and the keys that all queries of a head see together.
struct Selection {
  Tensor indices;
  double pairs = 0;
};
Selection select(const NsaCase& c, std::int64_t queries, Device device) {
  Selection result;
  const Tensor host = Tensor::empty({c.batch, queries, c.kv_heads, c.slots}, DType::i32);
  auto* const to = host.data<std::int32_t>();
  std::fill_n(to, host.numel(), -1);
  for (std::int64_t head = 0; head < c.batch * c.kv_heads; ++head) {
    Lists lists(c.slots);
    for (std::int64_t i = 0; i < queries; ++i) {
      const std::int64_t position = c.tokens - queries + i;
      const auto& list = lists.next(position, c.choice);
      const std::int64_t row = (head / c.kv_heads * queries + i) * c.kv_heads + head % c.kv_heads;
      std::ranges::copy(list, to + row * c.slots);
      for (const std::int32_t b : list) result.pairs += static_cast<double>(std::min((b + 1) * kBlock, position + 1) - b * kBlock);
    }
  }
  result.indices = host.to(device);
  return result;
}

void add(Run& run, const NsaCase& c, double work, double limit, const char* unit, std::vector<Mode> modes,
         const std::function<void()>& launch) {
  for (const Mode mode : modes) {
    Record record;
    record.family = "nsa";
    record.case_name = c.name();
    record.dtype = DType::bf16;
    record.mode = mode;
    record.unit = unit;
    record.work = work;
    record.limit = limit;
    record.ours = measure(mode, {{"tilewave", launch}}, run.stream(), run.effort(mode)).front();
    run.add(record);
  }
}
void add_products(Run& run, const NsaCase& c, double flops, const std::function<void()>& launch) {
  const bool on_gpu = run.stream().device().is_cuda();
  double limit = 0;
  if (on_gpu && !run.options().list) {
    const std::optional<GpuLimits> limits = gpu_limits(device_info(run.options().device).name);
    if (limits) limit = limits->bf16_tflops;
  }
  if (!on_gpu) return add(run, c, flops * 1e-9, 0, "GFLOP/s", {Mode::one_thread}, launch);
  add(run, c, flops * 1e-12, limit, "TFLOP/s", {Mode::hot, Mode::cool}, launch);
}

void run_prefill(Run& run, const NsaCase& c) {
  const DType dtype = DType::bf16;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const std::string_view what = c.what;
  const std::int64_t group = c.heads / c.kv_heads;
  const bool compressed = what == "compressed" || what == "select";
  const std::int64_t keys = compressed ? c.tokens / kBlock : c.tokens;
  const Tensor q = random_normal({1, c.tokens, c.heads, c.dim}, dtype, device, 1),
               k = random_normal({1, keys, c.kv_heads, c.dim}, dtype, device, 2),
               v = random_normal({1, keys, c.kv_heads, c.dim}, dtype, device, 3);
  const Tensor o = Tensor::poisoned(q.shape(), dtype, stream), lse = Tensor::poisoned({1, c.tokens, c.heads}, DType::f32, stream);
  NsaOptions options{.block_size = kBlock, .lse = &lse, .stream = stream};
  const double of_pair = 4 * static_cast<double>(group * c.dim);
  if (compressed) {
    double pairs = 0;
    for (std::int64_t t = 0; t < c.tokens; ++t) pairs += static_cast<double>((t + 1) / kBlock);
    pairs *= static_cast<double>(c.kv_heads);
    if (what == "compressed") return add_products(run, c, of_pair * pairs, [&] { nsa_compressed(q, k, v, o, options); });
    nsa_compressed(q, k, v, o, options);
    const Tensor lists = Tensor::poisoned({1, c.tokens, c.kv_heads, c.slots}, DType::i32, stream);
    return add_products(run, c, of_pair / 2 * pairs, [&] { nsa_select(q, k, lse, lists, {.block_size = kBlock, .stream = stream}); });
  }
  const Selection selection = select(c, c.tokens, device);
  if (what == "selected")
    return add_products(run, c, of_pair * selection.pairs, [&] { nsa_selected(q, k, v, selection.indices, o, options); });
  nsa_selected(q, k, v, selection.indices, o, options);
  const Tensor d_o = random_normal(q.shape(), dtype, device, 4), dq = Tensor::poisoned(q.shape(), dtype, stream),
               dk = Tensor::poisoned(k.shape(), dtype, stream), dv = Tensor::poisoned(v.shape(), dtype, stream);
  add_products(run, c, 2.5 * of_pair * selection.pairs,
               [&] { nsa_selected_backward(q, k, v, selection.indices, o, lse, d_o, dq, dk, dv, options); });
}

/// One token of each sequence. Only selected blocks are read.
void run_decode(Run& run, const NsaCase& c) {
  const DType dtype = DType::bf16;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const Selection selection = select(c, 1, device);
  const double bytes = selection.pairs * static_cast<double>(2 * c.dim * 2);
  const Tensor q = random_normal({c.batch, 1, c.heads, c.dim}, dtype, device, 1);
  const Tensor o = Tensor::poisoned(q.shape(), dtype, stream);
  // So many caches take turns that none is in the L2 cache when its turn comes.
  std::vector<Tensor> caches(static_cast<std::size_t>(std::min(8.0, std::max(1.0, std::ceil(256e6 / bytes)))) * 2);
  for (Tensor& cache : caches) cache = random_normal({c.batch, c.tokens, c.kv_heads, c.dim}, dtype, device, 2);
  const Tensor seqlens = Tensor::from<std::int32_t>(
                             std::vector<std::int32_t>(static_cast<std::size_t>(c.batch), static_cast<std::int32_t>(c.tokens)), {c.batch})
                             .to(device);
  std::size_t next = 0;
  add(run, c, bytes * 1e-9, run.read_bandwidth() * 1e-9, "GB/s", {Mode::graph}, [&] {
    const std::size_t at = next++ % (caches.size() / 2) * 2;
    nsa_selected(q, caches[at], caches[at + 1], selection.indices, o, {.block_size = kBlock, .seqlens = &seqlens, .stream = stream});
  });
}

void run_case(Run& run, const NsaCase& c) {
  if (!run.wants("nsa", c.name(), DType::bf16)) return;
  std::string_view(c.what) == "decode" ? run_decode(run, c) : run_prefill(run, c);
}

const Family nsa_family{
    "nsa", "native sparse attention: selected pairs of queries and keys in prefilling, a read of the blocks in decoding", [](Run& run) {
      if (run.options().device.is_cuda()) {
        for (const NsaCase& c : kGpuCases) run_case(run, c);
      } else {
        const OneThread one;
        for (const NsaCase& c : kCpuCases) run_case(run, c);
      }
    }};

}  // namespace
}  // namespace tw::kernels::nsa
