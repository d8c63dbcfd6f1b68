// tilewave kernels warm

#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "runtime/jit.hpp"
#include "speech/glm_asr/kernels.hpp"
#include "tests/support.hpp"
#include "tests/transcribe_fixture.hpp"

namespace tw::test {
namespace {

using nlohmann::json;

const std::string kTiny = kRoot + "/tests/data/glm_asr/gqa";

class CliWarm : public Transcribe {
 protected:
  /// A pack that has all kernels of the tiny checkpoint except the first `missing`: the machine code of one, which takes no time to
  /// compile.
  std::string pack(std::size_t missing) const {
    const std::vector<KernelSpec> specs = speech::kernels_of(kTiny, {}, typical_gpu("sm_90a"));
    for (const KernelSpec& spec : specs)
      if (spec.type.find("Embedding") != std::string::npos)
        for (std::size_t i = missing; i < specs.size(); ++i) write_pack(folder() / "pack", specs[i], compile(spec));
    return tw::format("TILEWAVE_PACK='{}'", (folder() / "pack").string());
  }
};

TEST_F(CliWarm, FindsAndCompilesTheKernelsOfACheckpoint) {
  skip_without_nvrtc();
  const std::string arguments = tw::format("kernels warm --arch sm_90a --model '{}' --output '{}'", kTiny, (folder() / "own").string());
  const std::string environment = pack(1);
  const json kernels = run_json(arguments + " --json", environment);
  EXPECT_EQ(kernels.size(), speech::kernels_of(kTiny, {}, typical_gpu("sm_90a")).size());
  std::set<std::string> names;
  int compiled = 0;
  for (const json& kernel : kernels) {
    EXPECT_TRUE(names.insert(kernel.at("name")).second) << kernel.at("name");
    compiled += kernel.at("from_cache") ? 0 : 1;
  }
  EXPECT_EQ(compiled, 1);
  EXPECT_EQ(this->names(folder() / "own").size(), kernels.size());

  // The one that was compiled is in the cache now, and all are in the new pack.
  const std::string all = tw::format("{0} kernels for sm_90a: 0 compiled, {0} already there, 0 failed", kernels.size());
  EXPECT_EQ(run(arguments, environment).out.find(all), 0u) << run(arguments, environment).out;
  const std::string from_pack = tw::format("TILEWAVE_CACHE=/dev/null/cache TILEWAVE_PACK='{}'", (folder() / "own").string());
  EXPECT_EQ(run(arguments, from_pack).out.find(all), 0u);
}

TEST_F(CliWarm, WrongUsageIsRefused) {
  expect_message(run("kernels warm --device cpu"), 2, "--arch sm_90a");
  expect_message(run("kernels warm --arch sm_75"), 2, "arch is \"sm_75\"; allowed: ");
  expect_message(run("kernels warm --arch sm_90a --device cuda"), 2, "excludes");
  expect_message(run("kernels warm --arch sm_90a --model " + quoted(folder() / "none")), 1, "none");
  expect_message(run("kernels warm --arch sm_90a --output /dev/null/x"), 1, "/dev/null/x");
}

TEST_F(CliWarm, KernelsOfGlmAsrAreRegistered) {
  std::set<std::string> types;
  bool own = false;
  for (const json& kernel : run_json("kernels list --json")) {
    types.insert(kernel.at("type"));
    own = own || kernel.at("family") == "glm_asr";
  }
  EXPECT_TRUE(own);
  for (const KernelSpec& spec : speech::nano_kernels("sm_90a")) EXPECT_TRUE(types.contains(spec.type)) << spec.type;
  const Outcome source = run("kernels source --program glm_asr_gemm_1");
  EXPECT_NE(source.out.find("Gemm<"), std::string::npos) << source.err;
  expect_message(run("kernels layout glm_asr_gemm_1"), 2, "another family");
  expect_message(run("kernels analyze glm_asr_gemm_1 --shape M=1"), 2, "analysis");
}

}  // namespace
}  // namespace tw::test
