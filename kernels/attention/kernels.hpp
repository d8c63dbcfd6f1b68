#pragma once

#include <compare>
#include <string>

#include "kernels/attention/heuristics.hpp"
#include "kernels/named.hpp"

// The GPU's kernels by the values that name them: no template is instantiated on the host for a size, a schedule or a list of rules.

namespace tw::kernels::attention {

/// Which of the library's rules a kernel has.
struct RuleSet {
  bool softcap = false, alibi = false, mask = false;
  bool lower = false, upper = false;  ///< bounds of the band
  auto operator<=>(const RuleSet&) const = default;
};
RuleSet rules_of(const detail::AttentionCall& call);

/// Attention<T, config, rules>.
struct Kernel {
  const detail::UserRuleInfo* user = nullptr;  ///< kUserRule of a user-defined rule, or null
  DType dtype;
  RuleSet rules;
  AttentionConfig config;
  std::strong_ordering operator<=>(const Kernel&) const;
};
std::string type_of(const Kernel& kernel);

/// Has the tiles of packed sequences listed before they are taken, on a GPU and where they are so many that it pays. The result must
/// outlive the launch of the call.
Tensor list_packed_tiles(detail::AttentionCall& call);

/// Enqueues what fills in `tiles`, i32[at least as many as there are, PackedTile::numbers], where a tile has `tile_rows` queries.
void packed_tiles(const detail::AttentionCall& call, int tile_rows, const Tensor& tiles);

}  // namespace tw::kernels::attention
