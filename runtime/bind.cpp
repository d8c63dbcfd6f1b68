#include <map>
#include <mutex>
#include <tuple>

#include "runtime/format.hpp"
#include "tilewave/launch.hpp"

namespace tw {

KernelSpec make_spec(const KernelInfo& info, bool tma_load, bool tma_store, std::string name) {
  KernelSpec spec;
  spec.type = info.type;
  spec.name = name.empty() ? spec.type : std::move(name);
  spec.target = tw::format("tw::sm_90a::Target<{}, {}>", tma_load, tma_store);
  spec.source = info.source;
  spec.threads = info.threads;
  spec.shared_bytes = info.shared_bytes;
  spec.cluster = tma_load ? info.cluster : 1;  // sm_90a::cluster_size
  spec.persistent = info.persistent;
  spec.params_bytes = info.params_bytes;
  spec.tensor_core = info.tensor_core;
  spec.record_tiles = info.record_tiles;
  return spec;
}

namespace detail {

BoundTensor bind_tensor(const Tensor& tensor, DType dtype, Device device) {
  const auto refuse = [&](std::string_view what) {
    throw InvalidArgument(tw::format("a kernel's tensor {}; given {}, the kernel takes 1 to 4 dimensions of {} on {}", what,
                                     tensor.describe(), name_of(dtype), device.name()));
  };
  if (tensor.dtype() != dtype) refuse("has another dtype");
  if (!(tensor.device() == device)) refuse("is on another device");
  if (tensor.rank() < 1 || tensor.rank() > 4) refuse("has too many or too few dimensions");
  BoundTensor bound;
  for (int dim = 0; dim < 4; ++dim) {
    const int from = dim - (4 - tensor.rank());
    bound.sizes[dim] = from < 0 ? 1 : tensor.shape(from);
    bound.strides[dim] = from < 0 ? 0 : tensor.stride(from);
    if (bound.sizes[dim] > std::numeric_limits<int>::max()) refuse("has an extent over 2^31 - 1");
  }
  return bound;
}

void launch_variant(const KernelInfo& info, bool tma_load, bool tma_store, const void* params, TileGrid grid, const Stream& stream) {
  // Specs are made once and then known by their address, which launch_on_gpu looks up without hashing strings.
  static std::mutex mutex;
  static std::map<std::tuple<const KernelInfo*, bool, bool>, KernelSpec> specs;
  const KernelSpec* spec;
  {
    const std::lock_guard lock(mutex);
    auto [entry, added] = specs.try_emplace({&info, tma_load, tma_store});
    if (added) entry->second = make_spec(info, tma_load, tma_store);
    spec = &entry->second;
  }
  grid.m = ceil_div(grid.m, spec->cluster) * spec->cluster;
  launch_on_gpu(*spec, params, grid, stream);
}

}  // namespace detail
}  // namespace tw
