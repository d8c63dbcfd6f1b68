#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/indexer/indexer.tile.hpp"
#include "kernels/named.hpp"
#include "kernels/variant.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::indexer {

/// A checked call whose scores have elements.
struct Call {
  Tensor q = {};        ///< [batch * queries, heads, 128]
  Tensor k = {};        ///< [keys, 128], or [pages, 64, 128]
  Tensor scales = {};   ///< f32 [1, keys], or [pages, 64]; none for 16-bit keys
  Tensor weights = {};  ///< f32 [batch * queries, heads]
  Tensor scores = {};   ///< f32 [batch * queries, columns]
  const std::int32_t* starts = nullptr;
  const std::int32_t* ends = nullptr;  ///< with pages the lengths
  const std::int32_t* pages = nullptr;
  std::int64_t pages_stride = 0;
  int batch = 1, queries = 0;  ///< of a sequence
  int keys = 0;                ///< of a sequence, at most
  bool by_query = false;       ///< with pages each query has a length
  bool causal = false, clear = true;
  int splits = 0;  ///< of the columns; 0: to be chosen
  Stream stream = Stream::standard(Device::cpu());

  bool paged() const { return k.rank() == 3; }
  int heads() const { return static_cast<int>(q.shape(1)); }
  int columns() const { return static_cast<int>(scores.shape(1)); }
};

/// One of the family's kernels by the values that name it.
struct Kernel {
  DType dtype = DType::fp8_e4m3;
  int heads = 64;   ///< those of a query, rounded up to 16, 32, 64 or 128
  int queries = 4;  ///< of a tile
  int stages = 7;   ///< steps whose keys are in shared memory
  Cache cache = Cache::contiguous;
  auto operator<=>(const Kernel&) const = default;
};

/// The kernel for a call. `generic_shared`: the shared memory of a block where kernels are compiled for the generic target, else 0.
Kernel choose_kernel(const Call& call, std::int64_t generic_shared);
/// Columns of a tile: a multiple of kKeys. Enough tiles for `units` SMs, of at least a few steps each.
int columns_of_tile(const Call& call, const Kernel& kernel, int units);
TileGrid grid_of(const Call& call, const Kernel& kernel, int part);

std::string type_of(const Kernel& kernel);
/// For people: "indexer_fp8_e4m3_64", "indexer_paged_fp8_e4m3_64_1".
std::string name_of(const Kernel& kernel);

void run(const Call& call);

/// The same kernel as a type: for Params, which are those of every kernel of the dtype and cache, and for the CPU and analysis targets.
template <Kernel k>
using HostKernel = Indexer<ElementOf<k.dtype>, k.heads, k.queries, k.stages, k.cache>;

inline constexpr ShapeKey kShape[] = {{"queries", "queries of each sequence"},
                                      {"keys", "keys of each sequence"},
                                      {"heads", "heads of a query; 0: as many as the kernel is for", 0},
                                      {"batch", "sequences (paged)", 1}};
std::vector<KernelVariant> registered();
std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes);

}  // namespace tw::kernels::indexer
