// Programs for the run-time compiler, their keys, and what is read from its log.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/cache.hpp"
#include "runtime/jit.hpp"
#include "runtime/sha256.hpp"
#include "tests/jit_fixture.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"

namespace tw::test {
namespace {

namespace fs = std::filesystem;

TEST(Sha256Test, KnownAnswers) {
  EXPECT_EQ(hex(Sha256().finish()), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(Sha256().add("abc").finish()), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(Sha256().add("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").finish()),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  const std::string million(1000000, 'a');
  EXPECT_EQ(hex(Sha256().add(million).finish()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // However it is cut.
  for (std::size_t cut : {1u, 55u, 56u, 63u, 64u, 65u, 127u}) {
    const std::string text(200, 'x');
    EXPECT_EQ(hex(Sha256().add(text.substr(0, cut)).add(text.substr(cut)).finish()), hex(Sha256().add(text).finish()));
  }
  EXPECT_NE(hex(Sha256().add_field("ab").add_field("c").finish()), hex(Sha256().add_field("a").add_field("bc").finish()));
}

TEST(Jit, ReadsTheCompilersLog) {
  CompiledKernel kernel;
  read_log(
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in function 'kern'\n"
      "ptxas info    : 292 bytes gmem\n"
      "ptxas info    : Function properties for helper\n"
      "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
      "ptxas info    : Function properties for kern\n"
      "    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 16 barriers, 2048 bytes smem, 400 bytes cmem[0]\n",
      kernel);
  EXPECT_EQ(kernel.registers, 168);
  EXPECT_EQ(kernel.spill_bytes, 24);
  EXPECT_EQ(kernel.static_shared_bytes, 2048);
  ASSERT_EQ(kernel.performance_losses.size(), 1u);
  EXPECT_NE(kernel.performance_losses[0].find("C7510"), std::string::npos);
}

TEST(Jit, FindsTheTensorCoreInstruction) {
  EXPECT_EQ(find_tensor_core_instruction("add.f32 %f1, %f2, %f3;"), "");
  EXPECT_EQ(find_tensor_core_instruction("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%f1}, a;"),
            "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32");
  EXPECT_EQ(find_tensor_core_instruction("  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, a;\n"
                                         "  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16\t{%f1}, a;\n"
                                         "  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, a;\n"),
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16");
}

TEST(Jit, ProgramHoldsWhatIsReached) {
  ASSERT_TRUE(kernels_embedded);
  const ProgramText program = assemble(hits_spec());
  std::vector<std::string> names;
  for (const EmbeddedFile* file : program.headers) names.emplace_back(file->name);
  auto has = [&](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  EXPECT_TRUE(has("tests/jit/hits.tile.hpp"));
  EXPECT_TRUE(has("tests/jit/shared.tile.hpp"));
  EXPECT_TRUE(has("tilewave/tile/types.tile.hpp"));
  EXPECT_FALSE(has("tests/jit/unused.tile.hpp"));
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());

  const std::string text = kernel_source(hits_spec());
  EXPECT_NE(text.find("jit_test::Hits<1>"), std::string::npos);
  EXPECT_NE(text.find("tw::sm_90a::Target<true, true>"), std::string::npos);
}

TEST(Jit, KeyDependsOnAllThatIsCompiledAndNothingElse) {
  const ProgramText program = assemble(hits_spec());
  const std::string key = cache_key(program, "sm_90a", "NVRTC 13.0");
  EXPECT_EQ(key.size(), 64u);
  KernelSpec renamed = hits_spec();
  renamed.name = "another name";
  EXPECT_EQ(cache_key(assemble(renamed), "sm_90a", "NVRTC 13.0"), key);
  EXPECT_NE(cache_key(program, "sm_100a", "NVRTC 13.0"), key);
  EXPECT_NE(cache_key(program, "sm_90a", "NVRTC 12.9"), key);
  EXPECT_NE(cache_key(program, "sm_90a", ""), key);
  EXPECT_NE(cache_key(assemble(hits_spec(2)), "sm_90a", "NVRTC 13.0"), key);
  KernelSpec without_tma = hits_spec();
  without_tma.target = "tw::sm_90a::Target<false, false>";
  EXPECT_NE(cache_key(assemble(without_tma), "sm_90a", "NVRTC 13.0"), key);
  ProgramText changed = program;
  const EmbeddedFile other = {program.headers[0]->name, kUnused, sizeof(kUnused) - 1};
  changed.headers[0] = &other;
  EXPECT_NE(cache_key(changed, "sm_90a", "NVRTC 13.0"), key);
}

TEST(Jit, SpecsThatCannotBeAreRefused) {
  auto refused = [](auto change, const char* argument) {
    KernelSpec spec = hits_spec();
    change(spec);
    try {
      compile(spec);
      ADD_FAILURE() << argument << " was taken";
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(spec.name), std::string::npos) << text;
      EXPECT_NE(text.find(argument), std::string::npos) << text;
    }
  };
  refused([](KernelSpec& s) { s.type = ""; }, "type");
  refused([](KernelSpec& s) { s.target = ""; }, "target");
  refused([](KernelSpec& s) { s.source = ""; }, "source");
  refused([](KernelSpec& s) { s.source = "a\"b"; }, "source");
  refused([](KernelSpec& s) { s.target = "tw::sm_70::Target<>"; }, "target");
  EXPECT_THROW(compile(hits_spec(), "compute_90a"), InvalidArgument);
  EXPECT_THROW(compile(hits_spec(), "sm_90a --foo"), InvalidArgument);
  EXPECT_THROW(compile(hits_spec(), "sm_"), InvalidArgument);
}

TEST(JitFolders, FollowTheEnvironment) {
  const Variable home("HOME", "/home/somebody");
  const Variable xdg("XDG_CACHE_HOME", "/xdg");
  {
    const Variable cache("TILEWAVE_CACHE", "/own");
    EXPECT_EQ(cache_directory(), "/own");
  }
  const Variable none("TILEWAVE_CACHE", "");
  EXPECT_EQ(cache_directory(), "/xdg/tilewave");
  const Variable no_xdg("XDG_CACHE_HOME", "");
  EXPECT_EQ(cache_directory(), "/home/somebody/.cache/tilewave");
  const Variable no_home("HOME", "");
  EXPECT_EQ(cache_directory(), "");
  const Variable pack("TILEWAVE_PACK", "/pack");
  ASSERT_FALSE(pack_directories().empty());
  EXPECT_EQ(pack_directories()[0], "/pack");
  EXPECT_TRUE(pack_directories().back().ends_with("/share/tilewave/kernels"));
}

}  // namespace
}  // namespace tw::test
