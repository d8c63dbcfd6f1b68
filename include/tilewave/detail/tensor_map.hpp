#pragma once

#include <cstdint>

#include "tilewave/tile/grid.tile.hpp"

namespace tw::detail {

/// Bytes of one element.
int size_of(MapElement element);

/// A four-dimensional tensor in global memory, as TMA sees it. Dimensions are innermost first; dimensions that a tensor lacks have extent
/// 1, box 1 and any valid stride.
struct TensorMapRequest {
  const void* address = nullptr;
  MapElement element = MapElement::f32;
  std::uint64_t extents[4] = {1, 1, 1, 1};
  std::uint64_t strides[3] = {16, 16, 16};  ///< bytes, of dimensions 1 to 3; dimension 0 is dense
  std::uint32_t box[4] = {1, 1, 1, 1};      ///< elements that one copy spans
  std::uint32_t steps[4] = {1, 1, 1, 1};    ///< it copies every steps[d]-th of them; in dimension 0 all
  int swizzle_bytes = 0;                    ///< 0, 32, 64 or 128: the span in shared memory within which 16-byte chunks are permuted

  bool operator==(const TensorMapRequest&) const = default;
};

/// False if TMA cannot copy this, so that the kernel's other copy variant is needed:
/// - the address is null or not 16-byte aligned;
/// - an extent is 0 or more than 2^32;
/// - a stride is 0, not a multiple of 16 or at least 2^40;
/// - a box is 0 or more than 256 elements;
/// - a step is 0, more than 8, or not 1 in dimension 0;
/// - the box's inner row is not a multiple of 16 bytes, or longer than the swizzle span.
/// Pure arithmetic: needs no driver.
bool tensor_map_possible(const TensorMapRequest& request);

/// Writes the 128 bytes of the CUtensorMap for `request` to `out`. Reads beyond the tensor give zeros, writes there are dropped. Throws
/// InvalidArgument when it is not possible, DeviceError without a CUDA driver or with the driver's text.
void encode_tensor_map(void* out, const TensorMapRequest& request);

}  // namespace tw::detail
