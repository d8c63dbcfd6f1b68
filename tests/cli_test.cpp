// The command line as its users meet it: the program is run, and its exit code, output and messages are looked at.

#include "cli_fixture.hpp"

#include <gtest/gtest.h>

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

class Cli : public tw::test::CommandLine {};

TEST_F(Cli, EverySubcommandHasHelp) {
  for (const char* command : {"",
                              "transcribe",
                              "listen",
                              "serve",
                              "vad",
                              "generate",
                              "convert",
                              "devices",
                              "kernels",
                              "kernels list",
                              "kernels source",
                              "kernels layout",
                              "kernels compile",
                              "kernels analyze",
                              "bench",
                              "bench transcribe",
                              "tune",
                              "profile",
                              "profile transcribe",
                              "debug",
                              "debug transcribe",
                              "help",
                              "completion"}) {
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
      {"frobnicate", "\"frobnicate\"; there are: transcribe, listen, serve, convert, vad, generate, devices, kernels, bench, tune"},
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
      {"kernels layout --shared f64,128,64", "\"f64\"; allowed: bf16, f16, f32, fp8_e4m3, fp8_e5m2, i8"},
      {"kernels layout --shared bf16,many,64", "--shared is many"},
      {"kernels layout --shared bf16,12,64", "12 rows; allowed: 8 to 256 rows, a multiple of 8"},
      {"kernels layout --shared bf16,64,24", "24 columns; allowed: a multiple of 16 columns of bf16, 32 bytes"},
      {"kernels layout --shared f32,64,12", "12 columns; allowed: a multiple of 8 columns of f32, 32 bytes"},
      {"kernels layout --shared i8,64,16", "16 columns; allowed: a multiple of 32 columns of i8, 32 bytes"},
      {"kernels layout --shared bf16,64,0", "0 columns; allowed: a multiple of 16"},
      {"kernels layout --shared bf16,248,464", "248 x 464; allowed: what fits a block's 227 KiB"},  // only without rounding
      {"kernels layout --shared i8,64,64 --contract rows", "rows with i8; allowed: columns"},
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
      {"kernels compile --arch sm_75", "arch is \"sm_75\"; allowed: sm_80"},
      {"kernels compile --arch sm_80 --target sm_90a", "needs --arch sm_90a"},
      {"kernels compile --target sm_80", "target is \"sm_80\"; allowed: \"auto\""},
      {"bench gemm --target sm_80", "target is \"sm_80\"; allowed: \"auto\""},
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
      {"bench gemm --ladder --device cpu", "gemm has no ladder; families with one: attention"},
      {"bench attention gemm --ladder --list", "gemm has no ladder"},
      {"convert a b", "--weights is required"},
      {"convert a b --weights int5", "allowed: plain, int8"},
      {"tune", "FAMILY and --shape"},
      {"tune gem --shape M=1,N=1,K=1", "did you mean \"gemm\""},
      {"tune gemm --device cpu", "--shape"},
      {"tune gemm --device cpu --shape M=1,N=1", "K is missing"},
      {"tune gemm --device cpu --shape M=1,N=1,K=0", "must be positive"},
      {"tune gemm --device cpu --shape M=1,N=1,K=1 --dtype f31", "allowed: f32"},
      {"tune gemm --device cpu --shape M=1,N=1,K=1 --dtype i64", "gemm can be tuned for: bf16"},
      {"tune gemm --device tpu --shape M=1,N=1,K=1", "allowed: \"cpu\", \"cuda\""},
      {"tune gemm --device cpu --shape M=16,N=1,K=1", "no choice up to 16 rows"},
      {"tune gemm --device cpu --shape M=64,N=1,K=1 --candidates 0", "at least 1"},
      {"tune gemm --device cpu --shape M=16,N=1,K=1", "no choice up to 16 rows"},
      {"tune gemm --device cpu --shape M=64,N=1,K=1 --candidates 0", "at least 1"},
      {"tune --list --forget", "--forget"},
      {"tune convolution --device cpu --shape W=4,C=4,F=4", "N is missing"},
      {"tune convolution --device cpu --shape N=1,W=4,C=4,F=4,K=5", "must fit into the padded image, 4"},
      {"tune convolution --device cpu --dtype i8 --shape N=1,W=4,C=4,F=4", "convolution can be tuned for: bf16, f16, f32"},
      {"tune softmax --device cpu --shape rows=4,cols=4", "softmax has nothing to tune on the CPU"},
      {"tune norm --device cpu --shape rows=4,cols=4", "norm has nothing to tune on the CPU"},
      {"kernels analyze softmax_bf16_1x8 --shape rows=1,cols=257", "supports up to 256"},
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
  for (const char* folder : {"runtime", "microkernels", "kernels", "models", "speech", "capi", "apps", "benchmarks"}) {
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

TEST_F(Cli, GeneratesText) {
  const std::string model = (fs::path(TILEWAVE_SOURCE_DIR) / "tests/data/bitnet/offline").string();
  const std::string command = tw::format("generate --model {} --prompt Hello --device cpu --max-tokens 7", model);
  const Outcome greedy = run(command + " --timing");
  EXPECT_EQ(greedy.code, 0) << greedy.err;
  EXPECT_EQ(greedy.out.size(), 8u) << greedy.out;  // a character for each token, and the line's end
  EXPECT_NE(greedy.err.find("prompt: 6 tokens"), std::string::npos) << greedy.err;
  EXPECT_NE(greedy.err.find("text: 7 tokens"), std::string::npos) << greedy.err;
  const Outcome random = run(command + " --temperature 9 --seed 3");
  EXPECT_EQ(random.code, 0) << random.err;
  EXPECT_NE(random.out, greedy.out);
  EXPECT_EQ(run(command + " --temperature 9 --seed 3").out, random.out);
  const Outcome missing = run("generate --model none --prompt x");
  EXPECT_EQ(missing.code, 1);
  EXPECT_NE(missing.err.find("none/config.json"), std::string::npos) << missing.err;
  const Outcome wrong = run(command + " --temperature -1");
  EXPECT_EQ(wrong.code, 2);
  EXPECT_NE(wrong.err.find("temperature is -1"), std::string::npos) << wrong.err;
}

TEST_F(Cli, BenchesALanguageModel) {
  const std::string model = (fs::path(TILEWAVE_SOURCE_DIR) / "tests/data/bitnet/offline").string();
  const std::string text = (folder() / "text.txt").string();
  std::ofstream(text) << "A text of many characters, each of which is a token of this model.\n";
  const std::string command =
      tw::format("bench generate --model {} --device cpu --prompt-tokens 20 --tokens 8 --runs 1 --text '{}'", model, text);
  const Outcome shown = run(command);
  EXPECT_EQ(shown.code, 0) << shown.err;
  for (const char* part : {"Prompt: 20 tokens, ", "Text: ", " tokens/s", "Memory: weights of a step ", "Perplexity: ", " of 67 tokens"})
    EXPECT_NE(shown.out.find(part), std::string::npos) << part << " is not in " << shown.out;
  const nlohmann::json record = run_json(command + " --json");
  EXPECT_GT(record.at("seconds").at("token").get<double>(), 0);
  EXPECT_EQ(record.at("perplexity").at("tokens"), 67);
  EXPECT_EQ(record.at("perplexity").at("window"), 64);  // the model's context
  EXPECT_GT(record.at("perplexity").at("value").get<double>(), 1);

  expect_message(run(tw::format("bench generate --model {} --device cpu --prompt-tokens 60 --tokens 8", model)), 2,
                 "68 in all; the model's context has 64");
  expect_message(run(command + "x"), 1, "cannot be read");
  expect_message(run("bench generate --model none"), 1, "none/config.json");
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
  EXPECT_EQ(offered("''"), (Words{"words", "bench", "completion", "convert", "debug", "devices", "generate", "help", "kernels", "listen",
                                  "profile", "serve", "transcribe", "tune", "vad"}));
  EXPECT_EQ(offered("kernels ''"), (Words{"words", "analyze", "compile", "layout", "list", "source", "warm"}));
  EXPECT_EQ(offered("kernels list --"), (Words{"words", "--help", "--json"}));
  EXPECT_EQ(offered("transcribe --format ''"), (Words{"words", "csv", "json", "lrc", "srt", "text", "verbose_json", "vtt"}));
  EXPECT_EQ(offered("transcribe --format = s"), (Words{"words", "srt"}));  // as bash cuts it
  EXPECT_EQ(offered("transcribe --format=s"), (Words{"words", "--format=srt"}));
  EXPECT_EQ(offered("transcribe --json ''"), Words{"files"});
  EXPECT_EQ(offered("transcribe a.wav -q b.wa"), Words{"files"});
  EXPECT_EQ(offered("transcribe --output ''"), Words{"files"});
  EXPECT_EQ(offered("transcribe --model ''"), Words{"files"});
  EXPECT_EQ(offered("convert a b --weights i"), (Words{"words", "int4", "int4:128", "int4:128:zeros", "int4:32:zeros", "int8"}));
  EXPECT_EQ(offered("transcribe --seed 1"), Words{"words"});
  EXPECT_EQ(offered("transcribe --log"), (Words{"words", "--logprobs"}));
  EXPECT_EQ(offered("listen --input ''"), Words{"files"});
  EXPECT_EQ(offered("listen --p"), (Words{"words", "--pcm16", "--prompt"}));
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

// It is made of what --help shows.
TEST_F(Cli, ManualPage) {
  const Outcome page = run("__man");
  EXPECT_EQ(page.code, 0) << page.err;
  EXPECT_EQ(page.out.find("\n\n"), std::string::npos);  // an empty line is a mistake in roff
  const auto escaped = [](std::string text) {
    for (std::size_t at = 0; (at = text.find('-', at)) != text.npos; at += 2) text.insert(at, 1, '\\');
    return text;
  };
  for (const char* command : {"transcribe", "listen", "serve", "kernels compile", "bench transcribe"}) {
    const std::size_t begin = page.out.find(tw::format("\n.SS tilewave {}", command)), end = page.out.find("\n.S", begin + 1);
    ASSERT_NE(begin, std::string::npos) << command;
    const std::string section = page.out.substr(begin, end - begin);
    std::istringstream options(run(tw::format("__complete {} --", command)).out);
    int count = 0;
    for (std::string line; std::getline(options, line);) {
      if (!line.starts_with("--") || line.starts_with("--help")) continue;
      EXPECT_NE(section.find(escaped(line.substr(0, line.find('\t')))), std::string::npos) << line;
      ++count;
    }
    EXPECT_GT(count, 3) << command;
  }
  EXPECT_NE(page.out.find("\\fB\\-\\-batch\\fR \\fIINT\\fR\nSegments per batch; does not change the text. Allowed: 1 to 16. Default: 8.\n"),
            std::string::npos);
  EXPECT_NE(page.out.find("\n.B TILEWAVE_CACHE\n"), std::string::npos);
  std::ofstream(folder() / "page") << page.out;
  const std::string check =
      tw::format("! command -v groff >/dev/null || test -z \"$(groff -man -Tutf8 -ww -z '{}/page' 2>&1)\"", folder().string());
  EXPECT_EQ(std::system(check.c_str()), 0);
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

}  // namespace
