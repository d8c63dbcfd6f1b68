// `tilewave transcribe` in a terminal: what a person in front of it sees, at the end and on the way.

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <regex>
#include <string>
#include <vector>

#include "runtime/format.hpp"
#include "terminal_screen.hpp"
#include "transcribe_fixture.hpp"

namespace {

namespace fs = std::filesystem;
using tw::test::kRoot;
using tw::test::kWords;
using tw::test::run_in_terminal;
using tw::test::TerminalOptions;
using tw::test::TerminalRun;
using tw::test::TerminalScreen;
using Lines = std::vector<std::string>;

std::string recording(int number) { return tw::format("{}/assets/samples/digits-{}.wav", kRoot, number); }

/// What is on the screen, after a run that used nothing which this terminal does not know.
TerminalScreen screen_of(const TerminalRun& run, int columns) {
  TerminalScreen screen(columns);
  screen.write(run.terminal);
  EXPECT_EQ(screen.unknown(), "") << run.terminal;
  EXPECT_EQ(screen.column(), 0u) << "the prompt would not begin a line: " << run.terminal;
  return screen;
}

/// The texts of progress that were drawn, in their order.
Lines progress_in(const std::string& bytes) {
  Lines all;
  const std::regex drawn("\r([^\r\n\033]+)\033\\[K");
  for (std::sregex_iterator each(bytes.begin(), bytes.end(), drawn), end; each != end; ++each) all.push_back((*each)[1]);
  return all;
}

class TranscribeInTerminal : public tw::test::Transcribe {
 protected:
  /// On the CPU with the bundled checkpoint, which is named so that there is no note about it.
  TerminalRun in_terminal(Lines arguments, const TerminalOptions& options = {}) const {
    const Lines first{program().string(), "transcribe", "--device", "cpu", "--model", kRoot + "/assets/digits"};
    arguments.insert(arguments.begin(), first.begin(), first.end());
    TerminalRun run = run_in_terminal(arguments, options);
    EXPECT_EQ(run.code, 0) << run.terminal << run.err;
    return run;
  }

  /// Ten minutes, of which some seconds hold speech.
  std::string ten_minutes() const {
    std::vector<std::int16_t> samples(600 * 16000);
    for (const auto& [second, number] : {std::pair{5, 1}, {200, 2}, {400, 3}, {590, 2}}) {
      const std::string file = tw::test::read(recording(number));
      const std::size_t header = 44, count = (file.size() - header) / 2;
      std::memcpy(samples.data() + second * 16000, file.data() + header, 2 * count);
    }
    write("long.wav", tw::test::wav(samples));
    return (folder() / "long.wav").string();
  }
};

TEST_F(TranscribeInTerminal, OneRecording) {
  const TerminalRun run = in_terminal({recording(1)});
  EXPECT_EQ(screen_of(run, 80).lines(), Lines{kWords[1]});
  const Lines progress = progress_in(run.terminal);
  ASSERT_FALSE(progress.empty());
  EXPECT_EQ(progress.front(), "[" + std::string(16, ' ') + "] 0 %, 0 of 6 s");
}

TEST_F(TranscribeInTerminal, SeveralRecordingsAndAMessage) {
  const std::string missing = (folder() / "missing.wav").string();
  const TerminalRun run = run_in_terminal({program().string(), "transcribe", "--device", "cpu", recording(1), missing, recording(3)});
  EXPECT_EQ(run.code, 1);
  const Lines seen = screen_of(run, 80).unwrapped();
  ASSERT_EQ(seen.size(), 4u) << run.terminal;
  EXPECT_EQ(seen[0].rfind("tilewave: no --model: the bundled checkpoint knows spoken English digits only.", 0), 0u) << seen[0];
  EXPECT_EQ(seen[1], tw::format("tilewave: {}: No such file or directory", missing));
  EXPECT_EQ(seen[2], tw::format("{}: {}", recording(1), kWords[1]));
  EXPECT_EQ(seen[3], tw::format("{}: {}", recording(3), kWords[3]));
}

// Progress counts the seconds of the recording, of which speech is a small part here.
TEST_F(TranscribeInTerminal, TenMinutes) {
  const std::string file = ten_minutes();
  const TerminalRun piped = in_terminal({file}, {.out_is_terminal = false});
  EXPECT_GT(std::count(piped.out.begin(), piped.out.end(), ' '), 10) << piped.out;  // words of all four
  EXPECT_EQ(screen_of(piped, 80).lines(), Lines{});
  double before = -1;
  Lines progress = progress_in(piped.terminal);
  progress.erase(progress.begin(),
                 std::find_if(progress.begin(), progress.end(), [](const auto& line) { return line.find(" of 600 s") != line.npos; }));
  ASSERT_GE(progress.size(), 3u) << piped.terminal;
  for (const std::string& line : progress) {
    std::smatch match;
    ASSERT_TRUE(
        std::regex_match(line, match, std::regex(R"(\[#* *\] \d+ %, (\d+) of 600 s(, [0-9.]+ times real time)?(, \d+:\d\d left)?)")))
        << line;
    EXPECT_GE(std::stod(match[1]), before) << line;
    before = std::stod(match[1]);
  }
  EXPECT_EQ(before, 600);
  EXPECT_EQ(progress.back().rfind("[" + std::string(16, '#') + "] 100 %, 600 of 600 s, ", 0), 0u) << progress.back();

  const TerminalRun run = in_terminal({file});
  EXPECT_EQ(screen_of(run, 80).unwrapped(), Lines{piped.out.substr(0, piped.out.size() - 1)});
  EXPECT_NE(run.terminal.find(" of 600 s"), std::string::npos) << run.terminal;
}

TEST_F(TranscribeInTerminal, NarrowWindow) {
  for (const int columns : {20, 5}) {
    const TerminalRun run = in_terminal({recording(3)}, {.columns = columns});
    const TerminalScreen screen = screen_of(run, columns);
    EXPECT_EQ(screen.unwrapped(), Lines{kWords[3]}) << columns;
    EXPECT_EQ(screen.lines().size(), (kWords[3].size() + static_cast<std::size_t>(columns) - 1) / static_cast<std::size_t>(columns));
    const Lines progress = progress_in(run.terminal);
    ASSERT_FALSE(progress.empty());
    for (const std::string& line : progress) EXPECT_LT(line.size(), static_cast<std::size_t>(columns)) << line;
  }
}

TEST_F(TranscribeInTerminal, ManyRecordings) {
  for (const int number : {1, 2, 3}) fs::copy_file(recording(number), folder() / tw::format("{}.wav", number));
  // One segment at a time, so that there is progress between them.
  const TerminalRun run = in_terminal({"--batch", "1", "--segment", "none", folder().string()}, {.columns = 90});
  const Lines seen = screen_of(run, 90).lines();
  ASSERT_EQ(seen.size(), 3u) << run.terminal;
  for (const std::size_t i : {0, 1, 2}) EXPECT_EQ(seen[i], tw::format("{}/{}.wav: {}", folder().string(), i + 1, kWords[i + 1]));
  const Lines progress = progress_in(run.terminal);
  ASSERT_GE(progress.size(), 3u) << run.terminal;
  EXPECT_EQ(progress[0], "[" + std::string(26, ' ') + "] 0 %, 0 of 3 recordings");
  for (std::size_t i = 1; i < progress.size(); ++i) {
    EXPECT_TRUE(
        std::regex_match(progress[i], std::regex(R"(\[[# ]{26}\] \d+ %, [012] of 3 recordings, [0-9.]+ times real time(, \d:\d\d left)?)")))
        << progress[i];
    const auto filled = [](const std::string& line) { return std::count(line.begin(), line.end(), '#'); };
    EXPECT_GE(filled(progress[i]), filled(progress[i - 1]));
  }
}

TEST_F(TranscribeInTerminal, WithoutColors) {
  const TerminalRun run = in_terminal({recording(1)}, {.environment = {{"TERM", "xterm"}, {"NO_COLOR", "1"}}});
  EXPECT_EQ(screen_of(run, 80).lines(), Lines{kWords[1]});
  const TerminalRun unable = run_in_terminal({program().string(), "transcribe", "--logprobs", recording(1)},
                                             {.environment = {{"TERM", "xterm"}, {"NO_COLOR", "1"}}});
  EXPECT_EQ(unable.code, 2) << unable.terminal;
}

TEST_F(TranscribeInTerminal, Confidence) {
  const TerminalRun run = in_terminal({"--quiet", "--logprobs", recording(1)});
  EXPECT_EQ(run.terminal, tw::format("\033[32m{}\033[m\r\n", kWords[1]));
  const TerminalRun two = in_terminal({"--quiet", "--logprobs", recording(1), recording(2)});
  EXPECT_EQ(two.terminal, tw::format("{}: \033[32m{}\033[m\r\n{}: \033[32m{}\033[m\r\n", recording(1), kWords[1], recording(2), kWords[2]));
}

TEST_F(TranscribeInTerminal, DumbTerminalsGetTheTextAlone) {
  for (const char* type : {"dumb", ""})
    EXPECT_EQ(in_terminal({recording(1)}, {.environment = {{"TERM", type}}}).terminal, kWords[1] + "\r\n") << type;
}

TEST_F(TranscribeInTerminal, QuietShowsNoProgress) { EXPECT_EQ(in_terminal({"--quiet", recording(1)}).terminal, kWords[1] + "\r\n"); }

TEST_F(TranscribeInTerminal, OutputPiped) {
  const TerminalRun run = in_terminal({recording(1), recording(2)}, {.out_is_terminal = false});
  EXPECT_EQ(run.out, tw::format("{}: {}\n{}: {}\n", recording(1), kWords[1], recording(2), kWords[2]));
  EXPECT_EQ(screen_of(run, 80).lines(), Lines{});
  EXPECT_FALSE(progress_in(run.terminal).empty());
}

TEST_F(TranscribeInTerminal, ErrorPiped) {
  const TerminalRun run = in_terminal({recording(1)}, {.err_is_terminal = false});
  EXPECT_EQ(run.terminal, kWords[1] + "\r\n");
  EXPECT_EQ(run.err, "");
}

TEST_F(TranscribeInTerminal, OutputToTheTerminalItself) {
  const fs::path terminal = folder() / "terminal";  // as /dev/stderr is
  fs::create_symlink("/proc/self/fd/2", terminal);
  const TerminalRun run = in_terminal({"--output", terminal.string(), recording(1)});
  EXPECT_EQ(screen_of(run, 80).lines(), Lines{kWords[1]});
}

// What commands a terminal comes from names of files and from models; a random one at a high temperature says any byte.
TEST_F(TranscribeInTerminal, NothingCommandsTheTerminal) {
  const std::string name = (folder() /
                            "a\033[2J\r\n\xC2\x9B\x9B"
                            "b.wav")
                               .string(),
                    shown = (folder() /
                             "a\\x1B[2J\\x0D\\x0A\\x9B\xEF\xBF\xBD"
                             "b.wav")
                                .string();
  const TerminalRun missing = run_in_terminal({program().string(), "transcribe", "--device", "cpu", "--quiet", name});
  EXPECT_EQ(missing.code, 1);
  EXPECT_EQ(screen_of(missing, 400).unwrapped(), Lines{tw::format("tilewave: {}: No such file or directory", shown)});
  const TerminalRun unknown = run_in_terminal({program().string(), "\033[31m"});
  EXPECT_EQ(unknown.code, 2);
  screen_of(unknown, 400);

  fs::copy_file(recording(1), name);
  const TerminalRun labelled = in_terminal({name, recording(2)});
  EXPECT_EQ(screen_of(labelled, 80).unwrapped().at(0), tw::format("{}: {}", shown, kWords[1]));
  const TerminalRun to_pipe = in_terminal({name, recording(2)}, {.out_is_terminal = false});
  EXPECT_EQ(to_pipe.out.rfind(name + ": " + kWords[1] + "\n", 0), 0u) << to_pipe.out;  // other programs get it as it is

  fs::create_symlink("/proc/self/fd/1", folder() / "terminal");
  const std::string output = (folder() / "terminal").string();
  for (const Lines& options : {Lines{}, {"--output", output}, {"--json"}, {"--format", "srt"}, {"--format", "vtt"}}) {
    Lines command{program().string(), "transcribe", "--device",         "cpu", "--model",   kRoot + "/tests/data/glm_asr/gqa",
                  "--temperature",    "100",        "--max-new-tokens", "200", recording(1)};
    command.insert(command.end(), options.begin(), options.end());
    const TerminalRun random = run_in_terminal(command);
    EXPECT_EQ(random.code, 0);
    TerminalScreen screen(80);
    screen.write(random.terminal);
    EXPECT_EQ(screen.unknown(), "") << testing::PrintToString(options);
    for (std::size_t i = 0; i + 1 < random.terminal.size(); ++i)
      EXPECT_FALSE(random.terminal[i] == '\xC2' && static_cast<unsigned char>(random.terminal[i + 1]) < 0xA0) << "at " << i;
  }
}

}  // namespace
