// The command `kernels` as its users meet it: exit codes, output, messages and the files it writes.

#include "cli_fixture.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "runtime/format.hpp"
#include "support.hpp"
#include "terminal_screen.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tw::test::expect_message;
using tw::test::Outcome;
using tw::test::read;

class CliKernels : public tw::test::CommandLine {};

TEST_F(CliKernels, KernelsList) {
  const json kernels = run_json("kernels list --json");
  ASSERT_GT(kernels.size(), 0u);
  const Outcome table = run("kernels list");
  EXPECT_EQ(table.code, 0);
  for (const json& kernel : kernels) {
    for (const char* field : {"family", "name", "type", "source"}) EXPECT_NE(kernel.at(field), "");
    EXPECT_NE(table.out.find(kernel.at("name").get<std::string>()), std::string::npos);
  }
}

TEST_F(CliKernels, KernelsSource) {
  const json kernel = run_json("kernels list --json").at(0);
  const std::string name = kernel.at("name");
  const Outcome source = run("kernels source " + name);
  EXPECT_EQ(source.code, 0);
  if (fs::exists(TILEWAVE_SOURCE_DIR)) {
    const std::string file = kernel.at("source");  // as #include finds it
    const fs::path root = TILEWAVE_SOURCE_DIR, there = fs::exists(root / file) ? root / file : root / "include" / file;
    EXPECT_EQ(source.out, read(there));
  }
  const Outcome program = run("kernels source --program " + name);
  EXPECT_EQ(program.code, 0);
  EXPECT_NE(program.out.find(kernel.at("type").get<std::string>()), std::string::npos) << program.out;
}

TEST_F(CliKernels, KernelsLayoutDrawsAFragment) {
  const Outcome outcome = run("kernels layout --fragment 64,8");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, R"(Fragment f32 64 x 8
128 computing threads with 4 registers each.
Drawn: rows 0 to 15 of 64, columns 0 to 7 of 8; --all draws everything.
Cell: 2 columns of one thread: thread:register of the first.

row\col    0    2    4    6
      0  0:0  1:0  2:0  3:0
      1  4:0  5:0  6:0  7:0
      2  8:0  9:0 10:0 11:0
      3 12:0 13:0 14:0 15:0
      4 16:0 17:0 18:0 19:0
      5 20:0 21:0 22:0 23:0
      6 24:0 25:0 26:0 27:0
      7 28:0 29:0 30:0 31:0
      8  0:2  1:2  2:2  3:2
      9  4:2  5:2  6:2  7:2
     10  8:2  9:2 10:2 11:2
     11 12:2 13:2 14:2 15:2
     12 16:2 17:2 18:2 19:2
     13 20:2 21:2 22:2 23:2
     14 24:2 25:2 26:2 27:2
     15 28:2 29:2 30:2 31:2
)");
}

TEST_F(CliKernels, KernelsLayoutDrawsASharedTile) {
  const Outcome outcome = run("kernels layout --shared bf16,8,64");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, R"(Shared bf16 8 x 64
1024 bytes: 1 panel of 8 rows of 128 bytes.
A warp that accesses at once:
  16 bytes of 8 rows (ldmatrix, stmatrix, wgmma)     32 banks, no conflict
  128 bytes of a row                                 32 banks, no conflict
  a Fragment's first elements: 8 rows, 4 columns     32 banks, no conflict
  an element of  8 rows, one column                  8 banks, no conflict
Cell: 8 elements of a row, 16 bytes: their position in the panel's row (0 to 7) and the four banks.

row\col       0       8      16      24      32      40      48      56
      0   0:0-3   1:4-7  2:8-11 3:12-15 4:16-19 5:20-23 6:24-27 7:28-31
      1   1:4-7   0:0-3 3:12-15  2:8-11 5:20-23 4:16-19 7:28-31 6:24-27
      2  2:8-11 3:12-15   0:0-3   1:4-7 6:24-27 7:28-31 4:16-19 5:20-23
      3 3:12-15  2:8-11   1:4-7   0:0-3 7:28-31 6:24-27 5:20-23 4:16-19
      4 4:16-19 5:20-23 6:24-27 7:28-31   0:0-3   1:4-7  2:8-11 3:12-15
      5 5:20-23 4:16-19 7:28-31 6:24-27   1:4-7   0:0-3 3:12-15  2:8-11
      6 6:24-27 7:28-31 4:16-19 5:20-23  2:8-11 3:12-15   0:0-3   1:4-7
      7 7:28-31 6:24-27 5:20-23 4:16-19 3:12-15  2:8-11   1:4-7   0:0-3
)");
}

TEST_F(CliKernels, KernelsLayoutDrawsPartlyFilledPanels) {
  EXPECT_EQ(run("kernels layout --shared bf16,8,32").out, R"(Shared bf16 8 x 32
1024 bytes: 1 panel of 8 rows of 128 bytes, 64 of them used.
A warp that accesses at once:
  16 bytes of 8 rows (ldmatrix, stmatrix, wgmma)     32 banks, no conflict
   64 bytes of a row                                 16 banks, no conflict
  a Fragment's first elements: 8 rows, 4 columns     32 banks, no conflict
  an element of  8 rows, one column                  8 banks, no conflict
Cell: 8 elements of a row, 16 bytes: their position in the panel's row (0 to 7) and the four banks.

row\col       0       8      16      24
      0   0:0-3   1:4-7  2:8-11 3:12-15
      1   1:4-7   0:0-3 3:12-15  2:8-11
      2  2:8-11 3:12-15   0:0-3   1:4-7
      3 3:12-15  2:8-11   1:4-7   0:0-3
      4 4:16-19 5:20-23 6:24-27 7:28-31
      5 5:20-23 4:16-19 7:28-31 6:24-27
      6 6:24-27 7:28-31 4:16-19 5:20-23
      7 7:28-31 6:24-27 5:20-23 4:16-19
)");
  const auto first_lines = [](const std::string& text) { return text.substr(0, text.find('\n', text.find('\n') + 1)); };
  EXPECT_EQ(first_lines(run("kernels layout --shared f16,16,80 --contract rows").out),
            "Shared f16 16 x 80, products sum over rows\n"
            "4096 bytes: 2 panels in sequence, each of 16 rows of 128 bytes, 32 of them used in the last.");
  EXPECT_EQ(first_lines(run("kernels layout --shared fp8_e4m3,64,160").out),
            "Shared fp8_e4m3 64 x 160\n"
            "16384 bytes: 2 panels in sequence, each of 64 rows of 128 bytes, 32 of them used in the last.");
  EXPECT_EQ(first_lines(run("kernels layout --shared f32,256,224").out),
            "Shared f32 256 x 224\n229376 bytes: 7 panels in sequence, each of 256 rows of 128 bytes.");
}

TEST_F(CliKernels, KernelsLayoutOfEveryKernel) {
  for (const json& kernel : run_json("kernels list --json")) {
    if (kernel.at("family") == "glm_asr") continue;  // recorded launches, whose tiles the host does not know
    const std::string name = kernel.at("name");
    const Outcome outcome = run("kernels layout " + name);
    EXPECT_EQ(outcome.code, 0) << name << outcome.err;
    EXPECT_NE(outcome.out, "") << name;
  }
}

TEST_F(CliKernels, KernelsLayoutWhole) {
  const Outcome outcome = run("kernels layout --all --rows 4,256");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out.find("Drawn"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find(" 127:0\n"), std::string::npos) << outcome.out;  // the last thread has the last row's end
  const Outcome shared = run("kernels layout --all --rows 1,4096,8");
  EXPECT_NE(shared.out.find("256 computing threads with 16 registers each."), std::string::npos) << shared.out;
  EXPECT_NE(shared.out.find(" 255:8\n"), std::string::npos) << shared.out;
}

TEST_F(CliKernels, KernelsLayoutSvg) {
  const fs::path svg = folder() / "layout.svg";
  const Outcome outcome = run(tw::format("kernels layout {} --svg '{}'", some_kernel(), svg.string()));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string text = read(svg);
  // A background of its own, cells, legends, and the tiles' titles, which are printed, too.
  EXPECT_NE(text.find("fill=\"#ffffff\""), std::string::npos);
  EXPECT_NE(text.find(">0:0-3</text>"), std::string::npos);
  EXPECT_NE(text.find(">position 7, banks 28-31</text>"), std::string::npos);
  EXPECT_NE(text.find(">lanes 28-31</text>"), std::string::npos);
  EXPECT_NE(text.find(">column</text>"), std::string::npos);
  std::istringstream titles(outcome.out);
  int count = 0;
  for (std::string title; std::getline(titles, title); ++count) EXPECT_NE(text.find(">" + title + "</text>"), std::string::npos) << title;
  EXPECT_GE(count, 3);
  const std::string parse = tw::format("python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' '{}'", svg.string());
  EXPECT_EQ(std::system(parse.c_str()), 0) << text;
}

TEST_F(CliKernels, KernelsCompile) {
  skip_without_nvrtc();
  const std::string name = some_kernel();
  const json kernels = run_json("kernels compile --arch sm_90a --json " + name);
  ASSERT_EQ(kernels.size(), 1u);
  const json& kernel = kernels[0];
  EXPECT_EQ(kernel.at("name"), name);
  EXPECT_GT(kernel.at("registers").get<int>(), 0);
  EXPECT_EQ(kernel.at("spill_bytes").get<int>(), 0);
  EXPECT_GT(kernel.at("shared_bytes").get<int>(), 0);
  EXPECT_GT(kernel.at("threads").get<int>(), 0);
  EXPECT_GT(kernel.at("compile_ms").get<double>(), 0);
  EXPECT_GT(kernel.at("load_ms").get<double>(), 0);
  EXPECT_EQ(kernel.at("from_cache"), false);
  EXPECT_EQ(kernel.at("instruction").get<std::string>().rfind("wgmma.mma_async", 0), 0u);
  EXPECT_TRUE(kernel.at("performance_losses").empty());

  // Again, from the cache: what is reported is as when it was compiled.
  const json again = run_json("kernels compile --arch sm_90a --json " + name);
  EXPECT_EQ(again[0].at("from_cache"), true);
  EXPECT_EQ(again[0].at("compile_ms"), kernel.at("compile_ms"));
  EXPECT_EQ(run("kernels compile --arch sm_90a " + name).code, 0);
}

TEST_F(CliKernels, KernelsCompileForOtherArchitectures) {
  skip_without_nvrtc();
  const json kernel = run_json("kernels compile --arch sm_86 --no-cache --json gemm_bf16_nt_64x64").at(0);
  EXPECT_EQ(kernel.at("ok"), true);
  EXPECT_LE(kernel.at("shared_bytes").get<int>(), 101376);
  EXPECT_EQ(kernel.at("instruction"), "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32");
}

TEST_F(CliKernels, KernelsCompileTakesAFamily) {
  skip_without_nvrtc();
  std::vector<std::string> expected, compiled;
  for (const json& kernel : run_json("kernels list --json")) {
    if (kernel.at("family") == "transpose") expected.push_back(kernel.at("name"));
  }
  for (const json& kernel : run_json("kernels compile --json transpose")) compiled.push_back(kernel.at("name"));
  ASSERT_GE(expected.size(), 2u);
  EXPECT_EQ(compiled, expected);
}

TEST_F(CliKernels, KernelsCompileIsForHopperUnlessToldOtherwise) {
  skip_without_nvrtc();
  EXPECT_EQ(run_json("kernels compile --json " + some_kernel()).at(0).at("ok"), true);
}

TEST_F(CliKernels, KernelsCompileWithoutACache) {
  skip_without_nvrtc();
  const std::string name = some_kernel();
  EXPECT_TRUE(run_json("kernels compile --arch sm_90a --no-cache --json " + name)[0].at("load_ms").is_null());
  EXPECT_FALSE(fs::exists(folder() / "cache"));
  EXPECT_TRUE(run_json("kernels compile --arch sm_90a --json " + name, "TILEWAVE_CACHE=/dev/null/cache")[0].at("load_ms").is_null());
}

TEST_F(CliKernels, KernelsCompileWritesAPack) {
  skip_without_nvrtc();
  const std::string name = some_kernel();
  const std::string pack = (folder() / "a/pack").string();
  EXPECT_EQ(run(tw::format("kernels compile --arch sm_90a --output '{}' {}", pack, name)).code, 0);
  EXPECT_FALSE(fs::is_empty(pack));
  const json kernels =
      run_json("kernels compile --arch sm_90a --json " + name, tw::format("TILEWAVE_CACHE=/dev/null/cache TILEWAVE_PACK='{}'", pack));
  EXPECT_EQ(kernels[0].at("from_cache"), true);
}

// As `make bundle` lays it out: no variable says where the pack is.
TEST_F(CliKernels, PackBesideTheProgramIsFound) {
  skip_without_nvrtc();
  const std::string name = some_kernel();
  const fs::path prefix = folder() / "prefix";
  ASSERT_EQ(run(tw::format("kernels compile --arch sm_90a --output '{}' {}", (prefix / "share/tilewave/kernels").string(), name)).code, 0);
  fs::create_directories(prefix / "bin");
  fs::copy_file(program(), prefix / "bin/tilewave");
  const std::string command = tw::format(
      "cd '{0}' && TILEWAVE_CACHE=/dev/null/cache bin/tilewave kernels compile --arch sm_90a --json {1} >'{0}/out'", prefix.string(), name);
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(json::parse(read(prefix / "out")).at(0).at("from_cache"), true);
}

// Tests may run as root, who may write everywhere: nothing can be created below a regular file.
TEST_F(CliKernels, UnwritablePathsAreExitCode1) {
  std::ofstream(folder() / "file") << "text";
  const std::string below = (folder() / "file/below").string();
  expect_message(run(tw::format("bench gemm --device cpu --quick --output '{}'", below)), 1, below);
  expect_message(run(tw::format("kernels compile --arch sm_90a --output '{}' {}", below, some_kernel())), 1, below);
  expect_message(run(tw::format("kernels layout --fragment 64,8 --svg '{}'", below)), 1, below);
}

TEST_F(CliKernels, UnwritableOutputIsExitCode1) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "skipped: no /dev/full";
  for (const char* command : {"devices", "kernels list", "kernels list --json"}) {
    const Outcome outcome = run(tw::format("{} >/dev/full 2>'{}/message' #", command, folder().string()));
    EXPECT_EQ(outcome.code, 1) << command;
    const std::string message = read(folder() / "message");
    EXPECT_EQ(message.rfind("tilewave: ", 0), 0u) << message;
    EXPECT_NE(message.find("No space left"), std::string::npos) << message;
  }
}

TEST_F(CliKernels, KernelsAnalyze) {
  const std::string command = "kernels analyze gemm_f16_nt_128x128 --shape M=1024,N=1024,K=1024";
  const json report = run_json(command + " --json");
  EXPECT_EQ(report.at("shape"), "M=1024,N=1024,K=1024,batch=1,bias=0,splits=4");
  EXPECT_EQ(report.at("tiles"), 64);
  EXPECT_EQ(report.at("operations").at("products").at("f16").at("inside"), 2147483648);
  EXPECT_EQ(report.at("global_read"), 33554432);
  EXPECT_EQ(report.at("global_written"), 2097152);
  ASSERT_EQ(report.at("devices").size(), 3u);
  EXPECT_EQ(report.at("devices").at(0).at("device"), "NVIDIA H200");
  EXPECT_EQ(report.at("devices").at(0).at("bound"), "products");
  EXPECT_EQ(report.at("devices").at(1).at("fits"), false);  // an A100 has less shared memory
  // 64 tiles on 132 multiprocessors: a tile's time on one.
  EXPECT_NEAR(report.at("devices").at(0).at("seconds").get<double>(), 2147483648.0 / 64 * 132 / 989.5e12, 1e-9);

  const Outcome table = run(command + " --device A100 --device cpu");
  EXPECT_EQ(table.code, 0) << table.err;
  for (const char* word : {"2147483648 of f16", "32 MiB read, 2 MiB written", "NVIDIA A100", "cpu", "bound by"})
    EXPECT_NE(table.out.find(word), std::string::npos) << table.out;
  EXPECT_EQ(table.out.find("H200"), std::string::npos) << table.out;
}

}  // namespace
