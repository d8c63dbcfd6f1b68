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

/// Compiles them for `target`, on all cores, at the first call.
inline void compile_launched_kernels(GpuTarget target) {
  static const bool done = [target] {
    std::vector<KernelSpec> specs = launched_kernels();
    for (KernelSpec& spec : specs) spec = for_target(std::move(spec), target);
    compile_all(specs);
    return true;
  }();
  static_cast<void>(done);
}
}  // namespace internal

/// launch(). On a GPU the first call compiles every kernel that this program uses it for.
template <class Kernel, class Bind>
void launch_kernel(const Stream& stream, const TileGrid& grid, Bind bind) {
  [[maybe_unused]] const bool known = internal::launched<Kernel>;  // since before main()
  if (stream.device().is_cuda()) internal::compile_launched_kernels(stream.target());
  launch<Kernel>(stream, grid, bind);
}
/// The same on the device's standard stream.
template <class Kernel, class Bind>
void launch_kernel(Device device, const TileGrid& grid, Bind bind) {
  launch_kernel<Kernel>(Stream::standard(device), grid, bind);
}

}  // namespace tw::test
