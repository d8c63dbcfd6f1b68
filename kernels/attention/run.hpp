#pragma once

#include "kernels/generic_tiles.hpp"
#include "tilewave/detail/attention_call.hpp"

namespace tw::kernels::attention {

/// Enqueues a checked call, or runs it.
void run(const detail::AttentionCall& call);

// Its parts, each a file of instantiations.
void run_cpu(const detail::AttentionCall& call);
void run_gpu_bf16(const detail::AttentionCall& call);
void run_gpu_f16(const detail::AttentionCall& call);

/// No rule of a user's.
inline constexpr auto kNoUserRule = [](auto&) {};

/// f.template operator()<D, DV>() for the smallest head dimensions that are at least `head_dim` and `value_dim`.
template <class F>
auto with_head_dims(std::int64_t head_dim, std::int64_t value_dim, F f) {
  const std::int64_t larger = head_dim > value_dim ? head_dim : value_dim;
  if (larger <= 64) return f.template operator()<64, 64>();
  if (larger <= 96) return f.template operator()<96, 96>();
  if (larger <= 128) return f.template operator()<128, 128>();
  if (larger <= 192 && value_dim <= 128) return f.template operator()<192, 128>();
  if (larger <= 192) return f.template operator()<192, 192>();
  return f.template operator()<256, 256>();
}

/// Which tiles serve a call best whose keys are not divided: narrow ones, unless head dimensions are up to 96.
detail::TileUse tile_use(const detail::AttentionCall& call);

/// Tiles of the generic target: 32 rows of scores and output for each warp while they fit its registers, in blocks of at most `shared`
/// bytes.
detail::AttentionTiles generic_tiles(std::int64_t head_dim, std::int64_t value_dim, bool split, std::int64_t shared);

/// The kernel for T with these tiles, for all rules of CallRules<>. Lives until the process ends.
const KernelInfo& attention_info(DType dtype, int head_dim, int value_dim, const detail::AttentionTiles& tiles, int form);

/// Rows of the tiles that run_gpu() takes for sequences that follow each other.
inline int packed_tile_rows(const detail::AttentionCall& call) {
  return with_head_dims(call.q.shape(3), call.v.shape(3), [&]<int D, int DV>() {
    if (const std::int64_t shared = generic_shared_bytes(call.stream)) return generic_tiles(D, DV, false, shared).bm;
    return detail::attention_tiles<D, DV>(tile_use(call)).bm;
  });
}

/// On the generic target.
template <class T, int D, int DV>
void run_generic(const detail::AttentionCall& call, std::int64_t shared) {
  const int form = call.split ? kRagged | kSplit | kPaged : call.pages ? kRagged | kPaged : call.ragged() ? kRagged : kEqualLengths;
  const detail::AttentionTiles tiles = generic_tiles(D, DV, call.split, shared);
  const KernelInfo& info = detail::attention_variant(attention_info(dtype_of<T>, D, DV, tiles, form), call);
  using List = detail::CallRules<>;
  using Params = typename Attention<T, D, DV, 64, 64, 2, kEqualLengths, List>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<Params>(detail::named_kernel(info.type, info.source), call.stream, detail::attention_grid(call, tiles.bm),
                               [&](auto& bind, auto& p) { detail::fill_attention<List>(bind, p, call, tiles.bn, kNoUserRule); });
}

/// On a GPU, where T is bf16 or f16.
template <class T>
void run_gpu(const detail::AttentionCall& call) {
  with_head_dims(call.q.shape(3), call.v.shape(3), [&]<int D, int DV>() {
    if (const std::int64_t shared = generic_shared_bytes(call.stream)) return run_generic<T, D, DV>(call, shared);
    const auto launch = [&]<int kBM, int kBN, int kStages, int kForm>() {
      detail::run_attention_gpu<T, D, DV, kBM, kBN, kStages, kForm>(call, kNoUserRule);
    };
    using detail::TileUse;
    constexpr detail::AttentionTiles tiles = detail::attention_tiles<D, DV>(TileUse::narrow),
                                     few = detail::attention_tiles<D, DV>(TileUse::split);
    constexpr detail::AttentionTiles wide = detail::attention_tiles<D, DV>(TileUse::wide),
                                     widest = detail::attention_tiles<D, DV>(TileUse::widest),
                                     paired = detail::attention_tiles<D, DV>(TileUse::paired);
    if (call.split) return launch.template operator()<few.bm, few.bn, few.stages, kRagged | kSplit | kPaged>();
    if (call.pages) return launch.template operator()<tiles.bm, tiles.bn, tiles.stages, kRagged | kPaged>();
    const auto launch_form = [&]<int kForm>() {
      [[maybe_unused]] const TileUse use = tile_use(call);
      if constexpr (widest.bm != wide.bm) {
        if (use == TileUse::widest) return launch.template operator()<widest.bm, widest.bn, widest.stages, kForm>();
      }
      if constexpr (wide.bm != tiles.bm) {
        if (use == TileUse::wide) return launch.template operator()<wide.bm, wide.bn, wide.stages, kForm>();
      }
      if constexpr (paired.bn != tiles.bn) {
        if (use == TileUse::paired) return launch.template operator()<paired.bm, paired.bn, paired.stages, kForm>();
      }
      launch.template operator()<tiles.bm, tiles.bn, tiles.stages, kForm>();
    };
    call.ragged() ? launch_form.template operator()<kRagged>() : launch_form.template operator()<kEqualLengths>();
  });
}

}  // namespace tw::kernels::attention
