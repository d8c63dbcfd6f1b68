#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/nsa/binding.hpp"
#include "kernels/nsa/call.hpp"
#include "kernels/nsa/scores.tile.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/topk.hpp"

namespace tw {

namespace kernels::nsa {

namespace {

constexpr const char* kSource = "kernels/nsa/scores.tile.hpp";
/// Scores of as many heads of keys as fit are computed together.
constexpr std::int64_t kMostScores = std::int64_t{512} << 20;

/// Scores of the blocks for some heads of keys.
struct ScoresCall {
  const Call& call;
  const float* lse;
  Tensor scores, ends;
  int first_head, columns, initial_blocks, local_blocks;

  int heads() const { return static_cast<int>(scores.shape(1)); }
};

template <ScoresKernel k>
using HostScores = BlockScores<ElementOf<k.dtype>, k.head_dim, k.group, k.stages>;

template <class Params>
void bind_scores(auto& bind, Params& p, const ScoresCall& s, const ScoresKernel& kernel) {
  bind(p.q, s.call.q, CopiedRows{kernel.group});
  bind(p.k, s.call.k);
  p.lse = s.lse;
  bind_sequences(p.sequences, s.call.layout);
  p.scores = s.scores.template data<float>();
  p.ends = s.ends.template data<std::int32_t>();
  p.first_head = s.first_head;
  p.launch_heads = s.heads();
  p.group = s.call.group();
  p.heads = s.call.group() * s.call.kv_heads();
  p.columns = s.columns;
  p.initial_blocks = s.initial_blocks;
  p.local_blocks = s.local_blocks;
  p.scale_log2 = s.call.scale * kLog2E;
}

TileGrid grid_of(const ScoresCall& s, const ScoresKernel& k) {
  return {.m = s.call.layout.tiles(kScoredColumns / k.group), .n = s.heads()};
}

template <DType dtype>
void run_scores(const ScoresCall& s) {
  const bool on_gpu = s.call.stream.device().is_cuda();
  const ScoresKernel kernel = scores_kernel(s.call, on_gpu ? generic_shared_bytes(s.call.stream) : 0);
  if constexpr (dtype != DType::f32) {
    if (on_gpu) {
      static KernelTable<ScoresKernel> table(type_of, kSource);
      using Params = typename HostScores<ScoresKernel{.dtype = dtype}>::template On<sm_90a::Target<>>::Params;
      return detail::launch_named<Params>(table[kernel], s.call.stream, grid_of(s, kernel),
                                          [&](auto& bind, auto& p) { bind_scores(bind, p, s, kernel); });
    }
  }
  const auto launch_with = [&]<int group>() {
    constexpr ScoresKernel k{.dtype = dtype, .group = group, .stages = 2};
    if (k == kernel) launch_cpu<HostScores<k>>(grid_of(s, k), [&](auto& bind, auto& p) { bind_scores(bind, p, s, k); });
  };
  launch_with.template operator()<16>();
  launch_with.template operator()<64>();
}

void run(const ScoresCall& s) {
  switch (s.call.q.dtype()) {
    case DType::f16:
      return run_scores<DType::f16>(s);
    case DType::f32:
      return run_scores<DType::f32>(s);
    default:
      return run_scores<DType::bf16>(s);
  }
}

/// The blocks of a sequence, at most.
std::int64_t most_blocks(const Layout& layout) {
  if (layout.tokens) return std::int64_t{layout.keys} + 1;  // the last one need not be complete
  return (std::int64_t{layout.queries} + layout.span - 1) / layout.span;
}

}  // namespace

ScoresKernel scores_kernel(const Call& call, std::int64_t generic_shared) {
  ScoresKernel kernel{.dtype = call.q.dtype(), .group = call.group() <= 16 ? 16 : 64};
  if (!call.stream.device().is_cuda()) {
    kernel.stages = 2;
    return kernel;
  }
  if (call.group() > 16 && call.group() <= 32) kernel.group = 32;
  kernel.head_dim = call.q.shape(3) <= 64 ? 64 : 128;
  kernel.stages = scores_stages(kernel, generic_shared);
  return kernel;
}
int scores_stages(const ScoresKernel& kernel, std::int64_t generic_shared) {
  constexpr std::int64_t kHalfOfHopper = 113 * 1024;
  const int row = 2 * kernel.head_dim;
  return generic_stages(generic_shared > 0 ? generic_shared : kHalfOfHopper, kScoredKeys * row, kScoredColumns * row + 2048, 3);
}
std::string type_of(const ScoresKernel& k) {
  return tw::format("tw::kernels::nsa::BlockScores<{}, {}, {}, {}>", element_name(k.dtype), k.head_dim, k.group, k.stages);
}

}  // namespace kernels::nsa

void nsa_select(const Tensor& q, const Tensor& k, const Tensor& lse, const Tensor& block_indices, const NsaSelectOptions& options) {
  using namespace kernels::nsa;
  using kernels::workspace;
  constexpr const char* op = "nsa_select";
  Call call = check_call(op, q, k, k, nullptr,
                         {.block_size = options.block_size,
                          .scale = options.scale,
                          .cu_seqlens = options.cu_seqlens,
                          .cu_seqlens_k = options.cu_seqlens_k,
                          .seqlens = options.seqlens,
                          .stream = options.stream});
  per_head(op, "lse", lse, q);
  check_operand(op, "block_indices", block_indices, DType::i32, q.device());
  const std::int64_t heads = k.shape(2);
  require(block_indices.rank() == 4 && block_indices.shape(0) == q.shape(0) && block_indices.shape(1) == q.shape(1) &&
              block_indices.shape(2) == heads && block_indices.shape(3) <= kNsaSlots && block_indices.is_contiguous(),
          "{}: block_indices is {}; it must be i32[{}, {}, {}, slots], with up to {} slots, contiguous", op, block_indices, q.shape(0),
          q.shape(1), heads, kNsaSlots);
  require(options.initial_blocks >= 0 && options.local_blocks >= 0,
          "{}: initial_blocks is {} and local_blocks {}; they must not be negative", op, options.initial_blocks, options.local_blocks);
  check_disjoint(op, {"block_indices", &block_indices},
                 {{"q", &q},
                  {"k", &k},
                  {"lse", &lse},
                  {"cu_seqlens", options.cu_seqlens},
                  {"cu_seqlens_k", options.cu_seqlens_k},
                  {"seqlens", options.seqlens}});
  if (block_indices.numel() == 0) return;
  fit_operands(call, q, k, k);
  const std::int64_t tokens = q.shape(0) * q.shape(1), columns = std::max<std::int64_t>(1, most_blocks(call.layout)),
                     slots = block_indices.shape(3);
  const std::int64_t together = std::clamp<std::int64_t>(kMostScores / (4 * tokens * columns), 1, heads);
  const Tensor values = workspace({tokens, together, slots}, DType::f32, call.stream);
  const Tensor lists = block_indices.reshape({tokens, heads, slots});
  const Tensor scores = workspace({tokens, together, columns}, DType::f32, call.stream);
  for (std::int64_t head = 0; head < heads; head += together) {
    const std::int64_t count = std::min(together, heads - head);
    const auto first = [&](const Tensor& t) {
      Shape shape = t.shape();
      shape[1] = count;
      return Tensor::borrow(t.data(), shape, t.dtype(), t.device());
    };
    // Tokens of no sequence are in no tile, and select nothing.
    const Tensor of_scores = first(scores), of_ends = options.cu_seqlens ? zeros({tokens, count}, DType::i32, call.stream)
                                                                         : workspace({tokens, count}, DType::i32, call.stream);
    run({.call = call,
         .lse = lse.data<float>(),
         .scores = of_scores,
         .ends = of_ends,
         .first_head = static_cast<int>(head),
         .columns = static_cast<int>(columns),
         .initial_blocks = options.initial_blocks,
         .local_blocks = options.local_blocks});
    topk(of_scores, static_cast<int>(slots), first(values), lists.slice(1, head, head + count), {.ends = &of_ends, .stream = call.stream});
  }
}

}  // namespace tw
