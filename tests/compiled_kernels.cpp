#include "tests/compiled_kernels.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

namespace tw::test {

void compile_and_check(const std::vector<KernelSpec>& specs, std::string_view arch,
                       const std::function<void(const KernelSpec& spec, const CompiledKernel& kernel)>& check) {
  ASSERT_FALSE(specs.empty());
  std::vector<KernelSpec> compiled = specs;
  if (specs.size() > 3 && std::getenv("TILEWAVE_EVERY_KERNEL") == nullptr) {
    compiled = {specs.front(), specs[specs.size() / 2], specs.back()};
    // scripts/run-tests.sh adds these up.
    std::printf("kernels left out: %zu\n", specs.size() - compiled.size());
  }
  compile_all(
      compiled, 0, [&](std::size_t i, const CompiledKernel& kernel) { check(compiled[i], kernel); }, arch);
}

void expect_fast(const KernelSpec& spec, const CompiledKernel& kernel) {
  SCOPED_TRACE((spec.name.empty() ? spec.type : spec.name) + " on " + spec.target);
  EXPECT_EQ(kernel.spill_bytes, 0);
  EXPECT_EQ(kernel.performance_losses, std::vector<std::string>());
}

}  // namespace tw::test
