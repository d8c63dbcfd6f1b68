#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/named.hpp"
#include "kernels/nsa/key_gradients.tile.hpp"
#include "kernels/nsa/lists.tile.hpp"
#include "kernels/nsa/selected.tile.hpp"
#include "kernels/variant.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::nsa {

/// Where the sequences of a call are: Sequences, on the host.
struct Layout {
  const std::int32_t *cu_q = nullptr, *cu_k = nullptr, *tokens = nullptr;
  int count = 1;              ///< sequences
  int queries = 0, keys = 0;  ///< of a sequence; of all together if they are packed
  int length = 0;
  int span = 1;

  int tiles(int tokens_of_tile) const;
};
/// The blocks that tokens select.
struct Selection {
  bool listed = false;  ///< if false, tokens see all blocks
  const std::int32_t* indices = nullptr;
  std::int64_t token_stride = 0, head_stride = 0, slot_stride = 0;
  const std::int32_t* counts = nullptr;
  int slots = 0;
  int block_size = 64;
};
/// A checked call whose output has elements.
struct Call {
  Tensor q = {};          ///< [tokens, kv_heads, group, head_dim]
  Tensor k = {}, v = {};  ///< [batch, kv_heads, keys, dim]; without keys any memory
  Tensor o = {};          ///< [tokens * heads, value_dim]
  float* lse = nullptr;
  Layout layout = {};
  Selection selection = {};
  float scale = 0;
  Stream stream = Stream::standard(Device::cpu());

  int kv_heads() const { return static_cast<int>(q.shape(1)); }
  int group() const { return static_cast<int>(q.shape(2)); }
};

/// A kernel of attention over blocks by the values that name it.
struct Kernel {
  DType dtype = DType::bf16;
  int head_dim = 128, value_dim = 128;
  int group = 16;  ///< rows of a token
  int rows = 128;  ///< of a tile
  int keys = 64;   ///< of a step
  int stages = 5;  ///< steps whose keys are in shared memory
  auto operator<=>(const Kernel&) const = default;

  int tokens() const { return rows / group; }
};
/// The kernel for a call. `generic_shared`: the shared memory of a block where kernels are compiled for the generic target, else 0.
Kernel choose_kernel(const Call& call, std::int64_t generic_shared);
std::string type_of(const Kernel& kernel);
/// For people: "nsa_selected_bf16_128_16_8".
std::string name_of(const Kernel& kernel);

/// Operands of the gradients of a call, besides those of the call.
struct Gradients {
  Tensor o, d_o;     ///< [tokens, kv_heads, group, value_dim]
  const float* lse;  ///< [tokens, heads]
  Tensor dq;         ///< [tokens * heads, head_dim]
  Tensor dk, dv;     ///< [batch, kv_heads, keys, dim]
};
void run_backward(const Call& call, const Gradients& gradients);

/// The kernel of dq on a GPU, by the values that name Selected, for calls whose forward kernel is `kernel`.
Kernel query_gradient_kernel(Kernel kernel, std::int64_t generic_shared);
std::string query_gradient_type(const Kernel& kernel);
/// A kernel of dk and dv by the values that name it.
struct KeyGradientsKernel {
  DType dtype = DType::bf16;
  int head_dim = 128, value_dim = 128;
  int group = 16;  ///< columns of a token
  int stages = 2;  ///< steps whose queries are in shared memory
  Gradient gradient = Gradient::keys_and_values;
  auto operator<=>(const KeyGradientsKernel&) const = default;
};
KeyGradientsKernel key_gradients_kernel(const Kernel& forward, std::int64_t generic_shared);
std::string type_of(const KeyGradientsKernel& kernel);
/// The kernels of such a backward pass, for tests.
std::vector<KernelSpec> backward_specs(const Kernel& forward, std::int64_t generic_shared);

/// A kernel of the scores of blocks by the values that name it.
struct ScoresKernel {
  DType dtype = DType::bf16;
  int head_dim = 128;
  int group = 16;  ///< columns of a token
  int stages = 3;  ///< steps whose keys are in shared memory
  auto operator<=>(const ScoresKernel&) const = default;
};
ScoresKernel scores_kernel(const Call& call, std::int64_t generic_shared);
/// Steps whose keys fit in blocks with so much shared memory; on Hopper's target two share an SM's.
int scores_stages(const ScoresKernel& kernel, std::int64_t generic_shared);
std::string type_of(const ScoresKernel& kernel);

/// Lists for tiles of so many tokens, in memory for one call. Empty if all blocks are seen.
struct Lists {
  Tensor entries = {}, sizes = {};
  int capacity = 0;
};
Lists make_lists(const Call& call, int tokens_of_tile);

/// Enqueues the call.
void run(const Call& call);

/// The kernels as types: for Params, which are those of every kernel of the dtype, and for the CPU and analysis targets.
template <Kernel k>
using HostKernel = Selected<ElementOf<k.dtype>, k.head_dim, k.value_dim, k.group, k.rows, k.keys, k.stages>;

inline constexpr ShapeKey kShape[] = {{"tokens", "query tokens"},
                                      {"keys", "keys of the sequence"},
                                      {"slots", "blocks that each token selects", 16},
                                      {"kv_heads", "heads of keys", 4},
                                      {"group", "query heads that share a head of keys", 16}};
std::vector<KernelVariant> registered();
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);
/// Others that calls use, for tests. `generic_shared`: as in choose_kernel().
std::vector<KernelSpec> unregistered(std::int64_t generic_shared);

}  // namespace tw::kernels::nsa
