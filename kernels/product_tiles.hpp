#pragma once

#include <algorithm>
#include <iterator>

// What a block of a product's kernel takes on an SM of sm_90a, as arithmetic on its tile sizes: the families whose kernels multiply tiles
// from a ring prune with it, before anything is compiled.

namespace tw::kernels {

/// BM x BN sums; slots of 128 bytes of K of both operands; blocks of a cluster share B's.
struct ProductTile {
  int bm, bn, stages, cluster;
};

inline constexpr int kStepBytes = 128;               ///< of K, in each row of a slot
inline constexpr int kSharedBytesPerBlock = 232448;  ///< CUDA C++ Programming Guide, compute capability 9.0

/// Of the ring and of what results leave through: two slots of 64 x 128 bytes for each warpgroup. Results of 4 bytes leave from registers.
constexpr int product_shared_bytes(const ProductTile& t, int element_bytes) {
  const int staging = element_bytes == 4 ? 0 : t.bm / 64 * 2 * 64 * kStepBytes;
  return t.stages * (t.bm + t.bn) * kStepBytes + staging;
}

/// BN that the tensor cores' products have here: tilewave/tile/sm_90a/wgmma.tile.hpp.
inline constexpr int kProductColumns[] = {16, 32, 64, 80, 96, 128, 160, 176, 192, 256};

/// Whether the sums fit the registers of up to four warpgroups, and slots and barriers the shared memory.
constexpr bool product_fits(const ProductTile& t, int element_bytes) {
  constexpr int barriers = 1024, registers = 65536, loader = 128 * 40, overhead = 48;
  const int warpgroups = t.bm / 64;
  if (t.bm % 64 != 0 || warpgroups < 1 || warpgroups > 4) return false;
  if (std::find(std::begin(kProductColumns), std::end(kProductColumns), t.bn) == std::end(kProductColumns)) return false;
  if (t.stages < 2 || t.cluster < 1 || t.cluster > 2) return false;
  if (t.bn / 2 + overhead > std::min((registers - loader) / (warpgroups * 128), 232)) return false;
  return barriers + product_shared_bytes(t, element_bytes) <= kSharedBytesPerBlock;
}

/// The predicted time of a step, in steps of 128 x 256: the tensor cores take bm bn, and longer the less each byte of the operands is used.
constexpr double product_step_cost(const ProductTile& t) {
  constexpr double full = 128 * 256, reuse = 1.0 / 128 + 1.0 / 256;
  const double bytes = 1.0 / t.bm + 1.0 / t.bn / t.cluster;
  return t.bm * t.bn / full * (1 + 16 * std::max(bytes - reuse, 0.0));
}

/// How much longer than predicted a tile takes because of its stages alone, to rank points that are alike otherwise: none where the ring
/// takes all of a block's shared memory, and little where it takes half of it, so that an SM has two blocks. Other numbers of stages are
/// rarely best: they come last, so that candidates differ in their tiles.
constexpr double stages_cost(const ProductTile& t, int element_bytes) {
  constexpr int half = kSharedBytesPerBlock / 2 - 2048;
  ProductTile deeper = t;
  ++deeper.stages;
  if (!product_fits(deeper, element_bytes) || deeper.stages > 10) return 1;
  const bool two_blocks = product_shared_bytes(t, element_bytes) <= half;
  if (two_blocks && product_shared_bytes(deeper, element_bytes) > half) return 1.03;
  return 1.5;
}

}  // namespace tw::kernels
