// The command line as its users meet it: the program is run, and its exit code, output and messages are looked at.

#include "cli_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/format.hpp"
#include "support.hpp"
#include "terminal_screen.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tw::test::expect_message;
using tw::test::Outcome;
using tw::test::read;

class Cli : public tw::test::CommandLine {
 protected:
  /// The first registered kernel that uses the tensor cores of plain bf16 products: quick to compile.
  std::string some_kernel() const { return run_json("kernels list --json").at(0).at("name"); }
};

TEST_F(Cli, EverySubcommandHasHelp) {
  for (const char* command : {"", "transcribe", "devices", "kernels", "kernels list", "kernels source", "kernels layout", "kernels compile",
                              "kernels analyze", "bench", "bench transcribe", "tune", "help", "completion"}) {
    for (const char* flag : {"--help", "-h"}) {
      const Outcome outcome = run(tw::format("{} {}", command, flag));
      EXPECT_EQ(outcome.code, 0) << command;
      EXPECT_NE(outcome.out.find("Usage: tilewave"), std::string::npos) << outcome.out;
      EXPECT_EQ(outcome.err, "") << command;
    }
  }
}

TEST_F(Cli, Version) {
  const Outcome outcome = run("--version");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out.rfind("tilewave ", 0), 0u) << outcome.out;
}

TEST_F(Cli, WrongUsageIsExitCode2AndSaysWhatIsAllowed) {
  struct {
    const char* arguments;
    const char* part;
  } const cases[] = {
      {"", "--help"},
      {"frobnicate", "\"frobnicate\"; there are: transcribe, devices, kernels, bench, tune"},
      {"benhc", "did you mean \"bench\""},
      {"frobnicate --help", "\"frobnicate\"; there are: transcribe"},
      {"--help frobnicate", "\"frobnicate\"; there are: transcribe"},
      {"frobnicate --version", "\"frobnicate\"; there are: transcribe"},
      {"kernels frobnicate --help", "\"frobnicate\"; there are: list"},
      {"help frobnicate", "\"frobnicate\"; there are: transcribe"},
      {"help kernels compil", "did you mean \"compile\""},
      {"help devices all", "tilewave devices has no command \"all\""},
      {"completion tcsh", "bash,zsh,fish"},
      {"bench gemm --json gemm.json", "--json prints to standard output; --output gemm.json"},
      {"devices --jsonn", "--jsonn"},
      {"devices extra", "extra"},
      {"kernels", "--help"},
      {"kernels compil", "did you mean \"compile\""},
      {"kernels source", "NAME"},
      {"kernels source nothing_like_it", "there is no kernel \"nothing_like_it\""},
      {"kernels layout", "one of NAME, --shared, --fragment, --rows"},
      {"kernels layout nothing_like_it", "there is no kernel \"nothing_like_it\""},
      {"kernels layout --fragment 64,8 --rows 4,32", "one of NAME"},
      {"kernels layout --shared bf16,128", "--shared"},
      {"kernels layout --shared f64,128,64", "\"f64\"; allowed: bf16, f16, f32"},
      {"kernels layout --shared bf16,many,64", "--shared is many"},
      {"kernels layout --shared bf16,12,64", "12 rows; allowed: 8 to 256 rows, a multiple of 8"},
      {"kernels layout --shared bf16,64,32", "32 columns; allowed: a multiple of 64"},
      {"kernels layout --shared bf16,256,512", "227 KiB"},
      {"kernels layout --shared f32,64,32 --contract rows", "16-bit"},
      {"kernels layout --shared bf16,64,64 --contract sideways", "--contract"},
      {"kernels layout --fragment 64,8 --contract rows", "--shared"},
      {"kernels layout --fragment 32,8", "32 rows; allowed: 64 to 448"},
      {"kernels layout --fragment 64,264", "264 columns; allowed: 8 to 256"},
      {"kernels layout --rows 4,33", "33 columns"},
      {"kernels layout --rows -4,32", "-4 rows; allowed: a multiple or a divisor of the block's 4 warps"},
      {"kernels layout --rows 3,32", "3 rows"},
      {"kernels layout --rows 4,32,12", "12 warps; allowed: 4, 8, 16, 32"},
      {"kernels layout --rows 1,32", "128 (the threads of a row) times 1 to 16"},
      {"kernels layout --rows 64,4096", "255 registers"},
      {"kernels layout --fragment 64,8 --tile 2", "--tile is 2; allowed: 1 to 1"},
      {"kernels compile --arch", "--arch"},
      {"kernels compile --arch sm_80", "supported: sm_90a"},
      {"kernels compile --arch sm_90a nothing_like_it", "there is no kernel \"nothing_like_it\""},
      {"kernels compile --arch sm_90a --threads many", "--threads"},
      {"kernels compile --arch sm_90a --threads -1", "--threads"},
      {"kernels analyze", "NAME"},
      {"kernels analyze nothing_like_it --shape M=1", "there is no kernel \"nothing_like_it\""},
      {"kernels analyze gemm_f16_nt_128x128", "--shape"},
      {"kernels analyze gemm_f16_nt_128x128 --shape M=1,N=1,L=1", "there is no \"L\"; the names are: M, N, K"},
      {"kernels analyze gemm_f16_nt_128x128 --shape M=1,N=1", "K is missing"},
      {"kernels analyze gemm_f16_nt_128x128 --shape M=1,N=1,K=many", "K is \"many\""},
      {"kernels analyze gemm_f16_nt_128x128 --shape M=1,N=1,K=1 --device H300", "allowed: H200, A100, 4090, cpu"},
      {"kernels analyze attention_bf16_d64 --shape seqlen_q=1,seqlen_k=1,heads=3,kv_heads=2", "heads must be a positive multiple"},
      {"bench", "FAMILY"},
      {"bench gem", "did you mean \"gemm\""},
      {"bench gemm --device tpu", "allowed: \"cpu\", \"cuda\""},
      {"bench gemm --device cpu --dtype f31", "allowed: f32"},
      {"bench gemm --device cpu --case nothing-like-it", "--list"},
      {"bench gemm --ladder --device cpu", "gemm has no ladder; these have: attention"},
      {"bench attention gemm --ladder --list", "gemm has no ladder"},
      {"tune", "FAMILY and --shape"},
      {"tune gem --shape M=1,N=1,K=1", "did you mean \"gemm\""},
      {"tune gemm --device cpu", "--shape"},
      {"tune gemm --device cpu --shape M=1,N=1", "K is missing"},
      {"tune gemm --device cpu --shape M=1,N=1,K=0", "must be positive"},
      {"tune gemm --device cpu --shape M=1,N=1,K=1 --dtype f31", "allowed: f32"},
      {"tune gemm --device cpu --shape M=1,N=1,K=1 --dtype i64", "gemm is tuned for: bf16"},
      {"tune gemm --device tpu --shape M=1,N=1,K=1", "allowed: \"cpu\", \"cuda\""},
      {"tune --list --forget", "--forget"},
      {"tune convolution --device cpu --shape W=4,C=4,F=4", "N is missing"},
      {"tune convolution --device cpu --shape N=1,W=4,C=4,F=4,K=5", "must fit into the padded image, 4"},
      {"tune convolution --device cpu --dtype i8 --shape N=1,W=4,C=4,F=4", "convolution is tuned for: bf16, f16, f32"},
      {"tune softmax --device cpu --shape rows=4,cols=4", "softmax has nothing to tune on the CPU"},
      {"tune norm --device cpu --shape rows=4,cols=4", "norm has nothing to tune on the CPU"},
      {"kernels analyze softmax_bf16_1x8 --shape rows=1,cols=257", "rows of up to 256"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.arguments);
    const Outcome outcome = run(c.arguments);
    expect_message(outcome, 2, c.part);
    EXPECT_NE(outcome.err.find("--help"), std::string::npos) << outcome.err;
  }
}

TEST_F(Cli, HelpOfACommandIsWhatTheCommandSays) {
  for (const char* command : {"", "bench", "kernels compile"})
    EXPECT_EQ(run(tw::format("help {}", command)).out, run(tw::format("{} --help", command)).out);
}

// What the sources read and what is listed are the same.
TEST_F(Cli, HelpListsTheEnvironment) {
  if (!fs::exists(TILEWAVE_SOURCE_DIR)) GTEST_SKIP() << "skipped: needs the sources";
  std::set<std::string> read_there, listed;
  const auto after = [](const std::string& text, const std::string& mark, char end, std::set<std::string>& names) {
    for (std::size_t at = text.find(mark); at != text.npos; at = text.find(mark, at + 1)) {
      const std::size_t begin = at + mark.size(), size = text.find(end, begin) - begin;
      const std::string name = text.substr(begin, size);
      if (name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == name.npos && !name.empty()) names.insert(name);
    }
  };
  for (const char* folder : {"runtime", "tile", "kernels", "models", "speech", "apps", "benchmarks"}) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(TILEWAVE_SOURCE_DIR) / folder)) {
      if (entry.path().extension() != ".cpp" || entry.path().string().ends_with("_test.cpp")) continue;
      const std::string text = read(entry.path());
      after(text, "environment(\"", '"', read_there);
      after(text, "getenv(\"", '"', read_there);
    }
  }
  const Outcome outcome = run("help environment");
  EXPECT_EQ(outcome.code, 0);
  after(outcome.out, "\n  ", ' ', listed);
  EXPECT_GE(read_there.size(), 8u);
  EXPECT_EQ(listed, read_there);
}

TEST_F(Cli, CompletionOffersWhatIsThere) {
  const auto offered = [&](const std::string& words) {
    const Outcome outcome = run("__complete " + words);
    EXPECT_EQ(outcome.code, 0);
    std::vector<std::string> all;
    std::istringstream stream(outcome.out);
    for (std::string line; std::getline(stream, line);) all.push_back(line.substr(0, line.find('\t')));
    return all;
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(offered("''"), (Words{"words", "bench", "completion", "devices", "help", "kernels", "transcribe", "tune"}));
  EXPECT_EQ(offered("kernels ''"), (Words{"words", "analyze", "compile", "layout", "list", "source"}));
  EXPECT_EQ(offered("kernels list --"), (Words{"words", "--help", "--json"}));
  EXPECT_EQ(offered("transcribe --format ''"), (Words{"words", "json", "srt", "text", "vtt"}));
  EXPECT_EQ(offered("transcribe --format = s"), (Words{"words", "srt"}));  // as bash cuts it
  EXPECT_EQ(offered("transcribe --format=s"), (Words{"words", "--format=srt"}));
  EXPECT_EQ(offered("transcribe --json ''"), Words{"files"});
  EXPECT_EQ(offered("transcribe a.wav -q b.wa"), Words{"files"});
  EXPECT_EQ(offered("transcribe --output ''"), Words{"files"});
  EXPECT_EQ(offered("transcribe --model ''"), Words{"folders"});
  EXPECT_EQ(offered("transcribe --seed 1"), Words{"words"});
  EXPECT_EQ(offered("bench gem"), (Words{"words", "gemm"}));
  EXPECT_EQ(offered("bench gemm tran"), (Words{"words", "transcribe", "transpose"}));
  EXPECT_EQ(offered("bench --device cu"), (Words{"words", "cuda"}));
  EXPECT_EQ(offered("help env"), (Words{"words", "environment"}));
  EXPECT_EQ(offered("completion ''"), (Words{"words", "bash", "fish", "zsh"}));
  const std::string kernel = some_kernel();
  EXPECT_EQ(offered("kernels compile --no-cache " + kernel), (Words{"words", kernel}));
}

TEST_F(Cli, BashCompletes) {
  if (!fs::exists("/bin/bash")) GTEST_SKIP() << "skipped: no bash";
  const std::string own = program().parent_path().string();
  fs::create_directory(folder() / "a folder");
  std::ofstream(folder() / "talk.wav") << "";
  const tw::test::TerminalRun run = tw::test::run_in_terminal(
      {"/bin/bash", "--norc", "--noprofile", "-i"},
      {.columns = 400,
       .environment = {{"TERM", "xterm"}, {"PS1", "ready> "}, {"PATH", own + ":/usr/bin:/bin"}, {"INPUTRC", "/dev/null"}, {"HISTFILE", ""}},
       .typed = {"bind 'set enable-bracketed-paste off'\n", "source <(tilewave completion bash)\n",
                 tw::format("cd '{}'\n", folder().string()), "tilewave transc\t--form\tjs\tta\t--model a\t --help | head -0\n",
                 "tilewave bench --dtype=f32 transp\t --help | head -0\n", "exit\n"},
       .prompt = "ready> "});
  EXPECT_EQ(run.code, 0);
  EXPECT_NE(run.terminal.find("tilewave transcribe --format json talk.wav --model a\\ folder/ --help"), std::string::npos) << run.terminal;
  EXPECT_NE(run.terminal.find("tilewave bench --dtype=f32 transpose  --help"), std::string::npos) << run.terminal;
}

TEST_F(Cli, ShellsAcceptTheirScripts) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const Outcome script = run(tw::format("completion {}", shell));
    EXPECT_EQ(script.code, 0) << script.err;
    std::ofstream(folder() / shell) << script.out;
    const std::string check = tw::format("! command -v {0} >/dev/null || {0} -n '{1}/{0}'", shell, folder().string());
    EXPECT_EQ(std::system(check.c_str()), 0) << shell;
  }
}

TEST_F(Cli, NearNamesAreSuggested) {
  const std::string name = some_kernel();
  expect_message(run("kernels source " + name.substr(0, name.size() - 1)), 2, tw::format("\"{}\"", name));
}

TEST_F(Cli, Devices) {
  const json report = run_json("devices --json");
  EXPECT_EQ(report.at("devices").at(0).at("device"), "cpu");
  EXPECT_EQ(report.at("devices").at(0).at("usable"), true);
  EXPECT_TRUE(report.at("devices").size() > 1 || report.at("cuda_problem").is_string());
  EXPECT_TRUE(report.at("nvrtc").is_string() != report.at("nvrtc_problem").is_string());
  EXPECT_EQ(report.at("cache"), (folder() / "cache").string());

  const Outcome table = run("devices");
  EXPECT_EQ(table.code, 0);
  for (const char* word : {"cpu", "CUDA", "NVRTC", "cache"}) EXPECT_NE(table.out.find(word), std::string::npos) << table.out;
}

TEST_F(Cli, KernelsList) {
  const json kernels = run_json("kernels list --json");
  ASSERT_GT(kernels.size(), 0u);
  const Outcome table = run("kernels list");
  EXPECT_EQ(table.code, 0);
  for (const json& kernel : kernels) {
    for (const char* field : {"family", "name", "type", "source"}) EXPECT_NE(kernel.at(field), "");
    EXPECT_NE(table.out.find(kernel.at("name").get<std::string>()), std::string::npos);
  }
}

TEST_F(Cli, KernelsSource) {
  const json kernel = run_json("kernels list --json").at(0);
  const std::string name = kernel.at("name");
  const Outcome source = run("kernels source " + name);
  EXPECT_EQ(source.code, 0);
  if (fs::exists(TILEWAVE_SOURCE_DIR)) {
    EXPECT_EQ(source.out, read(fs::path(TILEWAVE_SOURCE_DIR) / kernel.at("source").get<std::string>()));
  }
  const Outcome program = run("kernels source --program " + name);
  EXPECT_EQ(program.code, 0);
  EXPECT_NE(program.out.find(kernel.at("type").get<std::string>()), std::string::npos) << program.out;
}

TEST_F(Cli, KernelsLayoutDrawsAFragment) {
  const Outcome outcome = run("kernels layout --fragment 64,8");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, R"(Fragment f32 64 x 8
128 threads that compute, 4 registers of each.
Drawn: rows 0 to 15 of 64, columns 0 to 7 of 8; --all draws everything.
Cell: 2 columns of a thread: thread:register of the first.

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

TEST_F(Cli, KernelsLayoutDrawsASharedTile) {
  const Outcome outcome = run("kernels layout --shared bf16,8,64");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, R"(Shared bf16 8 x 64
1024 bytes: 1 panel of 8 rows of 128 bytes.
A warp that accesses at once:
  16 bytes of 8 rows (ldmatrix, stmatrix, wgmma)     32 banks, no conflict
  128 bytes of a row                                 32 banks, no conflict
  a Fragment's first elements: 8 rows, 4 columns     32 banks, no conflict
  an element of  8 rows, one column                  8 banks, no conflict
Cell: 8 elements of a row, 16 bytes: their place among the 8 of the panel's row, and its four banks.

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

TEST_F(Cli, KernelsLayoutOfEveryKernel) {
  for (const json& kernel : run_json("kernels list --json")) {
    const std::string name = kernel.at("name");
    const Outcome outcome = run("kernels layout " + name);
    EXPECT_EQ(outcome.code, 0) << name << outcome.err;
    EXPECT_NE(outcome.out, "") << name;
  }
}

TEST_F(Cli, KernelsLayoutWhole) {
  const Outcome outcome = run("kernels layout --all --rows 4,256");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out.find("Drawn"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find(" 127:0\n"), std::string::npos) << outcome.out;  // the last thread has the last row's end
  const Outcome shared = run("kernels layout --all --rows 1,4096,8");
  EXPECT_NE(shared.out.find("256 threads that compute, 16 registers of each."), std::string::npos) << shared.out;
  EXPECT_NE(shared.out.find(" 255:8\n"), std::string::npos) << shared.out;
}

TEST_F(Cli, KernelsLayoutSvg) {
  const fs::path svg = folder() / "layout.svg";
  const Outcome outcome = run(tw::format("kernels layout {} --svg '{}'", some_kernel(), svg.string()));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string text = read(svg);
  // A background of its own, cells, legends, and the tiles' titles, which are printed, too.
  EXPECT_NE(text.find("fill=\"#ffffff\""), std::string::npos);
  EXPECT_NE(text.find(">0:0-3</text>"), std::string::npos);
  EXPECT_NE(text.find(">place 7, banks 28-31</text>"), std::string::npos);
  EXPECT_NE(text.find(">lanes 28-31</text>"), std::string::npos);
  EXPECT_NE(text.find(">column</text>"), std::string::npos);
  std::istringstream titles(outcome.out);
  int count = 0;
  for (std::string title; std::getline(titles, title); ++count) EXPECT_NE(text.find(">" + title + "</text>"), std::string::npos) << title;
  EXPECT_GE(count, 3);
  const std::string parse = tw::format("python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' '{}'", svg.string());
  EXPECT_EQ(std::system(parse.c_str()), 0) << text;
}

TEST_F(Cli, KernelsCompile) {
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

TEST_F(Cli, KernelsCompileTakesAFamily) {
  skip_without_nvrtc();
  std::vector<std::string> expected, compiled;
  for (const json& kernel : run_json("kernels list --json")) {
    if (kernel.at("family") == "transpose") expected.push_back(kernel.at("name"));
  }
  for (const json& kernel : run_json("kernels compile --json transpose")) compiled.push_back(kernel.at("name"));
  ASSERT_GE(expected.size(), 2u);
  EXPECT_EQ(compiled, expected);
}

TEST_F(Cli, KernelsCompileIsForHopperUnlessToldOtherwise) {
  skip_without_nvrtc();
  EXPECT_EQ(run_json("kernels compile --json " + some_kernel()).at(0).at("ok"), true);
}

TEST_F(Cli, KernelsCompileWithoutACache) {
  skip_without_nvrtc();
  const std::string name = some_kernel();
  EXPECT_TRUE(run_json("kernels compile --arch sm_90a --no-cache --json " + name)[0].at("load_ms").is_null());
  EXPECT_FALSE(fs::exists(folder() / "cache"));
  EXPECT_TRUE(run_json("kernels compile --arch sm_90a --json " + name, "TILEWAVE_CACHE=/dev/null/cache")[0].at("load_ms").is_null());
}

TEST_F(Cli, KernelsCompileWritesAPack) {
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
TEST_F(Cli, PackBesideTheProgramIsFound) {
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
TEST_F(Cli, UnwritablePathsAreExitCode1) {
  std::ofstream(folder() / "file") << "text";
  const std::string below = (folder() / "file/below").string();
  expect_message(run(tw::format("bench gemm --device cpu --quick --output '{}'", below)), 1, below);
  expect_message(run(tw::format("kernels compile --arch sm_90a --output '{}' {}", below, some_kernel())), 1, below);
  expect_message(run(tw::format("kernels layout --fragment 64,8 --svg '{}'", below)), 1, below);
}

TEST_F(Cli, UnwritableOutputIsExitCode1) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "skipped: no /dev/full";
  for (const char* command : {"devices", "kernels list", "kernels list --json"}) {
    const Outcome outcome = run(tw::format("{} >/dev/full 2>'{}/message' #", command, folder().string()));
    EXPECT_EQ(outcome.code, 1) << command;
    const std::string message = read(folder() / "message");
    EXPECT_EQ(message.rfind("tilewave: ", 0), 0u) << message;
    EXPECT_NE(message.find("No space left"), std::string::npos) << message;
  }
}

TEST_F(Cli, KernelsAnalyze) {
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

TEST_F(Cli, BenchNeedsItsDevice) {
  if (tw::test::cuda_device() != nullptr) GTEST_SKIP() << "skipped: there is a CUDA device";
  expect_message(run("bench gemm --device cuda"), 1, "");
  EXPECT_EQ(run("bench gemm --device cuda --list").code, 0);
}

TEST_F(Cli, BenchWritesRecords) {
  const std::string path = (folder() / "gemm.json").string();
  const Outcome outcome = run(tw::format("bench gemm --device cpu --quick --case nn-1024 --commit c0ffee --output '{}'", path));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("nn-1024"), std::string::npos) << outcome.out;
  const json records = json::parse(read(path));
  ASSERT_EQ(records.size(), 1u);
  const json& record = records[0];
  EXPECT_EQ(record.at("family"), "gemm");
  EXPECT_EQ(record.at("case"), "nn-1024");
  EXPECT_EQ(record.at("dtype"), "f32");
  EXPECT_EQ(record.at("mode"), "one-thread");
  EXPECT_EQ(record.at("unit"), "GFLOP/s");
  EXPECT_GT(record.at("ours").get<double>(), 0);
  EXPECT_EQ(record.at("commit"), "c0ffee");
  for (const char* field : {"peer", "peer_value", "limit", "ratio", "spread", "date", "versions", "device"})
    EXPECT_TRUE(record.contains(field)) << field;
}

TEST_F(Cli, JsonIsAllOfStandardOutput) {
  const json cases = run_json("bench gemm --list --json --device cpu --dtype f32");
  ASSERT_FALSE(cases.empty());
  EXPECT_EQ(cases.at(0).at("family"), "gemm");
  const Outcome outcome = run("bench gemm --device cpu --quick --json --case nn-1024");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(json::parse(outcome.out).at(0).at("case"), "nn-1024");
  EXPECT_NE(outcome.err.find("nn-1024"), std::string::npos) << outcome.err;  // the table
  EXPECT_EQ(run_json("tune --forget --json --device cpu").at("forgotten"), 0);
}

TEST_F(Cli, BenchHoldsMemoryBoundOpsAgainstACopy) {
  const std::string path = (folder() / "transpose.json").string();
  const Outcome outcome = run(tw::format("bench transpose --device cpu --quick --dtype f32 --output '{}'", path));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json records = json::parse(read(path));
  ASSERT_EQ(records.size(), 1u);
  const json& record = records[0];
  EXPECT_EQ(record.at("unit"), "GB/s");
  EXPECT_EQ(record.at("peer"), "copy");
  EXPECT_EQ(record.at("peer_variant"), "memcpy");
  const double moved = 2.0 * 4096 * 4096 * 4;
  EXPECT_NEAR(record.at("ours").get<double>() * 1e9 * record.at("time_us").get<double>() * 1e-6, moved, 1e-3 * moved);
}

TEST_F(Cli, BenchListsTheExercise) {
  const Outcome outcome = run("bench exercise --list --device cuda");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* name :
       {"silu", "gelu-tanh", "softmax", "rms-norm", "layer-norm", "linear", "attention-scores", "softmax-in-place", "attention-output",
        "rope-cos-sin", "fused-swiglu", "fused-linear-swiglu", "fused-linear-gelu", "fused-attention-encoder", "fused-attention-decoder"})
    EXPECT_NE(outcome.out.find(tw::format(" {} ", name)), std::string::npos) << name << "\n" << outcome.out;
}

TEST_F(Cli, BenchListsTheLadder) {
  const Outcome outcome = run("bench attention --ladder --list --device cuda");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::size_t at = 0;  // in this order
  for (const char* kind : {"full", "causal"}) {
    for (const char* rung : {"1-naive", "2-fa1", "3-fa2", "4-fa3-overlap", "5-fa3-lazy", "6-fa3-order", "7-tilewave"}) {
      at = outcome.out.find(tw::format(" ladder-{}-{} ", rung, kind), at);
      EXPECT_NE(at, std::string::npos) << rung << " " << kind << "\n" << outcome.out;
    }
  }
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 14) << outcome.out;
}

TEST_F(Cli, BenchHoldsARungAgainstTheOneBefore) {
  const std::string path = (folder() / "ladder.json").string();
  const Outcome outcome = run(tw::format("bench attention --ladder --device cpu --quick --dtype f32 --case causal --output '{}'", path));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const json records = json::parse(read(path));
  ASSERT_EQ(records.size(), 7u);
  EXPECT_TRUE(records[0].at("peer").is_null());
  for (std::size_t i = 1; i < records.size(); ++i) {
    const json& record = records[i];
    EXPECT_EQ(record.at("group"), "ladder");
    EXPECT_EQ(record.at("peer"), "rung before");
    EXPECT_EQ(record.at("peer_value"), records[i - 1].at("ours"));
    EXPECT_NEAR(record.at("ratio").get<double>(), record.at("ours").get<double>() / records[i - 1].at("ours").get<double>(), 1e-3);
  }
  EXPECT_EQ(records[2].at("peer_variant"), "fa1");
}

TEST_F(Cli, TuneNeedsItsDevice) {
  if (tw::test::cuda_device() != nullptr) GTEST_SKIP() << "skipped: there is a CUDA device";
  expect_message(run("tune gemm --device cuda --shape M=64,N=64,K=64"), 1, "");
  expect_message(run("tune --list --device cuda"), 1, "");
}

TEST_F(Cli, TuneKeepsTheFastestOnTheCpu) {
  const std::string command = "tune gemm --device cpu --dtype f32 --quick --shape M=64,N=64,K=64";
  const json plan = run_json(command + " --dry-run --json");
  ASSERT_EQ(plan.at("configurations").size(), 2u);
  EXPECT_TRUE(plan.at("winner").is_null());
  for (const json& configuration : plan.at("configurations")) {
    EXPECT_TRUE(configuration.at("us").is_null());
    EXPECT_GT(configuration.at("least_us").get<double>(), 0);
  }
  EXPECT_EQ(run_json("tune --list --device cpu --json").at("choices").size(), 0u);
  EXPECT_NE(run(command + " --dry-run").out.find("configuration"), std::string::npos);

  const json tuned = run_json(command + " --json");
  EXPECT_EQ(tuned.at("seed"), 1);
  double best = 0;
  std::string fastest;
  for (const json& configuration : tuned.at("configurations")) {
    if (configuration.at("us").is_null()) {
      EXPECT_TRUE(configuration.at("dropped").is_string());
    } else if (best == 0 || configuration.at("us").get<double>() < best) {
      best = configuration.at("us");
      fastest = configuration.at("name");
    }
  }
  EXPECT_EQ(tuned.at("winner"), fastest);
  const json list = run_json("tune gemm --list --device cpu --json");
  ASSERT_EQ(list.at("choices").size(), 1u);
  EXPECT_EQ(list.at("choices").at(0).at("problem"), tuned.at("problem"));
  EXPECT_EQ(list.at("choices").at(0).at("name"), fastest);
  EXPECT_TRUE(fs::exists(list.at("file").get<std::string>()));
  EXPECT_NE(run("tune --list --device cpu").out.find(fastest), std::string::npos);

  EXPECT_EQ(run("tune attention --forget --device cpu").out.rfind("0 ", 0), 0u);
  EXPECT_EQ(run("tune gemm --forget --device cpu").out.rfind("1 ", 0), 0u);
  EXPECT_EQ(run_json("tune --list --device cpu --json").at("choices").size(), 0u);

  const Outcome table = run(command);
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_NE(table.out.find("is the fastest; kept in"), std::string::npos) << table.out;
}

TEST_F(Cli, TuneKeepsAConvolution) {
  const std::string command = "tune convolution --device cpu --dtype f32 --quick --shape N=1,W=64,C=16,F=32,padding=1";
  EXPECT_EQ(run_json(command + " --dry-run --json").at("configurations").size(), 2u);
  const json tuned = run_json(command + " --json");
  const json list = run_json("tune convolution --list --device cpu --json");
  ASSERT_EQ(list.at("choices").size(), 1u);
  EXPECT_EQ(list.at("choices").at(0).at("problem"), tuned.at("problem"));
  EXPECT_EQ(list.at("choices").at(0).at("name"), tuned.at("winner"));
  EXPECT_EQ(run_json("tune gemm --list --device cpu --json").at("choices").size(), 0u);
}

TEST_F(Cli, BenchLeavesNoFileWithoutRecords) {
  const fs::path path = folder() / "none.json";
  EXPECT_EQ(run(tw::format("bench gemm --device cpu --case nothing-like-it --output '{}'", path.string())).code, 2);
  EXPECT_FALSE(fs::exists(path));
}

}  // namespace
