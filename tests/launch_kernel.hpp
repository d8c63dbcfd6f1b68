#pragma once

#include <vector>

#include "tilewave/kernel.hpp"
#include "tilewave/launch.hpp"

namespace tw::test {

namespace internal {
/// Kernels that launch_kernel() is compiled for.
inline std::vector<KernelSpec>& launched_kernels() {
  static std::vector<KernelSpec> specs;
  return specs;
}
template <class Kernel>
inline const bool launched = (launched_kernels().push_back(make_spec(kernel_info<Kernel>, true, true)), true);
}  // namespace internal

/// launch() on the device's standard stream. On a GPU the first call compiles every kernel that this program uses it for, on all cores.
template <class Kernel, class Bind>
void launch_kernel(Device device, const TileGrid& grid, Bind bind) {
  [[maybe_unused]] const bool known = internal::launched<Kernel>;  // since before main()
  if (device.is_cuda()) {
    static const bool warm = (compile_all(internal::launched_kernels()), true);
    static_cast<void>(warm);
  }
  launch<Kernel>(Stream::standard(device), grid, bind);
}

}  // namespace tw::test
