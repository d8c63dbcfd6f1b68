#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "tilewave/kernel.hpp"

namespace tw::test {

/// Compiles kernels for `arch` on all cores and calls `check(spec, kernel)` for each, never concurrently. A kernel takes seconds, and
/// families launch hundreds: unless TILEWAVE_EVERY_KERNEL is set, as `make kernels-test` does, only the first, the middle and the last one
/// are compiled, and a line says how many were left out.
void compile_and_check(const std::vector<KernelSpec>& specs, std::string_view arch,
                       const std::function<void(const KernelSpec& spec, const CompiledKernel& kernel)>& check);

/// Expects that a kernel keeps its values in registers and that the compiler reports no loss of performance. A check for the above.
void expect_fast(const KernelSpec& spec, const CompiledKernel& kernel);

}  // namespace tw::test
