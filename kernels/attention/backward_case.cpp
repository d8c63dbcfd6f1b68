#include "kernels/attention/backward_case.hpp"

#include <algorithm>

#include "kernels/attention/key_blocks.hpp"
#include "kernels/rows.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

/// With the tiles of Hopper GPUs.
template <class T, int kDim, int kQueries>
void launch_all_gradients(const BackwardCall& call) {
  constexpr AttentionConfig kConfig{
      .head_dim = kDim, .value_dim = kDim, .rows = kQueries, .keys = 128, .stages = 2, .form = kRagged, .dropout = Use::runtime};
  using List =
      Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::runtime>, Optional<MaskTensor, Use::runtime>, Band<true, true, true>>;
  const auto launch = [&]<Additions kAdditions>() {
    launch_cpu<AllGradients<T, kConfig, List, kAdditions>>(key_gradients_grid(call, kConfig.keys),
                                                           [&](auto& bind, auto& p) { fill_all_gradients<List>(bind, p, call); });
  };
  call.deterministic ? launch.template operator()<Additions::in_turn>() : launch.template operator()<Additions::in_any_order>();
}

/// With lists of blocks, which all blocks are multiples of.
template <class T>
void launch_listed_gradients(const BackwardCall& call) {
  static constexpr AttentionConfig kConfig{
      .head_dim = 128, .value_dim = 128, .rows = 64, .keys = 64, .stages = 2, .form = kRagged | kListed, .dropout = Use::runtime};
  using List =
      Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::runtime>, Optional<MaskTensor, Use::runtime>, Band<true, true, true>>;
  with_query_lists(call, kConfig.rows, kConfig.keys, {}, [](const BackwardCall& some) {
    launch_cpu<AllGradients<T, kConfig, List, Additions::in_any_order>>(
        key_gradients_grid(some, kConfig.keys), [&](auto& bind, auto& p) { fill_all_gradients<List>(bind, p, some); });
  });
}

}  // namespace

void run_adding_up(BackwardCall& call) {
  if (call.packed()) {
    run_checked_sequences(call);
    run_zero_unused(call);
  }
  run_delta(call, true);
  if (has_keys(call)) {
    const bool narrow = std::max(call.dk.shape(3), call.dv.shape(3)) <= 64;
    with_float_type(call.dk.dtype(), [&]<class T>(std::type_identity<T>) {
      if (call.forward.blocks) return launch_listed_gradients<T>(call);
      narrow ? launch_all_gradients<T, 64, 128>(call) : launch_all_gradients<T, 128, 64>(call);
    });
  }
  if (has_queries(call)) run_scaled_sum(call);
}

}  // namespace tw::kernels::attention
