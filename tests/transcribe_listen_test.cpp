// `tilewave listen`, with recordings in place of a microphone.

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/format.hpp"
#include "terminal_screen.hpp"
#include "transcribe_fixture.hpp"

namespace {

namespace fs = std::filesystem;
using tw::test::expect_message;
using tw::test::kRoot;
using tw::test::kWords;
using tw::test::lines;
using tw::test::Outcome;
using tw::test::read;
using tw::test::run_in_terminal;
using tw::test::sample;
using tw::test::TerminalOptions;
using tw::test::TerminalRun;
using tw::test::TerminalScreen;

class Listen : public tw::test::Transcribe {
 protected:
  Outcome listen(const std::string& arguments) const { return run("listen --device cpu --quiet " + arguments); }

  TerminalRun listen_in_terminal(std::vector<std::string> arguments, const TerminalOptions& options) const {
    const std::vector<std::string> first{program().string(), "listen", "--device", "cpu", "--model", kRoot + "/assets/digits"};
    arguments.insert(arguments.begin(), first.begin(), first.end());
    return run_in_terminal(arguments, options);
  }

  /// The raw samples of a bundled recording, of seconds [begin, end).
  static std::string pcm16(int number, double begin, double end) {
    const std::string file = read(tw::format("{}/assets/samples/digits-{}.wav", kRoot, number));
    const auto at = [](double seconds) { return 44 + 2 * static_cast<std::size_t>(16000 * seconds); };
    return file.substr(at(begin), at(end) - at(begin));
  }
};

TEST_F(Listen, ARecordingAtOnce) {
  const Outcome outcome = listen("--silence 2 --input " + sample(1));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, kWords[1] + "\n");
  EXPECT_EQ(outcome.err, "");
}

TEST_F(Listen, EachStretchOfSpeechIsALine) {
  const std::string silence(2 * 16000, '\0');
  const std::string file = write("two.raw", pcm16(2, 0, 3.8) + silence + pcm16(1, 0, 6));
  const Outcome outcome = listen("--json --silence 1 --pcm16 16000 --input " + file);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<std::string> rows = lines(outcome.out);
  ASSERT_EQ(rows.size(), 2u) << outcome.out;
  const auto first = nlohmann::json::parse(rows[0]), second = nlohmann::json::parse(rows[1]);
  EXPECT_EQ(first.at("text"), kWords[2]);
  EXPECT_EQ(second.at("text"), kWords[1]);
  EXPECT_NEAR(first.at("begin").get<double>(), 0.7, 0.4);
  EXPECT_NEAR(first.at("end").get<double>(), 3.4, 0.4);
  EXPECT_NEAR(second.at("begin").get<double>(), 4.8 + 1, 0.4);
}

TEST_F(Listen, StandardInput) {
  const std::string raw = write("two.raw", pcm16(2, 0, 3.8) + "x");  // half a sample is nothing
  EXPECT_EQ(listen(tw::format("--silence 2 --input - --pcm16 16000 <{} >{} #", raw, quoted(folder() / "text"))).code, 0);
  EXPECT_EQ(read(folder() / "text"), kWords[2] + "\n");
  EXPECT_EQ(listen(tw::format("--silence 2 --input - <{} >{} #", sample(3), quoted(folder() / "text"))).code, 0);
  EXPECT_EQ(read(folder() / "text"), kWords[3] + "\n");
  EXPECT_EQ(listen("--input - --pcm16 16000").out, "");  // nothing was said
}

/// Speech, and then silence that ends no line of text in less than a minute, in a FIFO. Closed after that.
class Speaker {
 public:
  Speaker(const fs::path& fifo, std::string speech) : writer_(open(fifo.c_str(), O_RDWR)) {
    fcntl(writer_, F_SETPIPE_SZ, 1 << 18);  // so that no write waits
    thread_ = std::jthread([this, speech = std::move(speech)](std::stop_token stop) {
      constexpr std::size_t kPiece = 3200;  // 0.1 s
      for (std::size_t at = 0; at < speech.size(); at += kPiece) say(speech.substr(at, kPiece), 20);
      for (int piece = 0; piece < 90 && !stop.stop_requested(); ++piece) say(std::string(kPiece, '\0'), 500);
      close(writer_);
    });
  }

 private:
  void say(const std::string& piece, int milliseconds) const {
    EXPECT_EQ(::write(writer_, piece.data(), piece.size()), static_cast<ssize_t>(piece.size()));
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  }

  int writer_;
  std::jthread thread_;
};

// Text is shown while it is spoken, and Ctrl-C ends the command with the text so far.
TEST_F(Listen, InATerminalUntilCtrlC) {
  const fs::path fifo = folder() / "microphone";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const Speaker speaker(fifo, pcm16(2, 0.5, 3.8));
  const TerminalRun run = listen_in_terminal({"--input", fifo.string(), "--pcm16", "16000", "--silence", "10"},
                                             {.columns = 12, .typed = {"\x03"}, .prompt = "... seven\033[K"});
  EXPECT_EQ(run.code, 0) << run.terminal;
  EXPECT_NE(run.terminal.find("\r(listening:\033[K"), std::string::npos) << run.terminal;  // as much as fits
  TerminalScreen screen(12);
  screen.write(run.terminal);
  EXPECT_EQ(screen.unknown(), "") << run.terminal;
  EXPECT_EQ(screen.unwrapped(), std::vector<std::string>{kWords[2]}) << run.terminal;
}

TEST_F(Listen, PartialTextIsNotPiped) {
  const std::string file = (folder() / "speech.raw").string();
  write("speech.raw", pcm16(2, 0.6, 3.8));
  const TerminalRun run =
      listen_in_terminal({"--input", file, "--pcm16", "16000", "--silence", "2", "--real-time"}, {.out_is_terminal = false});
  EXPECT_EQ(run.code, 0);
  EXPECT_EQ(run.out, kWords[2] + "\n");
  EXPECT_NE(run.terminal.find("\reight"), std::string::npos) << run.terminal;
  TerminalScreen screen(80);
  screen.write(run.terminal);
  EXPECT_EQ(screen.lines(), std::vector<std::string>{}) << run.terminal;
}

/// ALSA's library reads a file in place of a microphone.
TEST_F(Listen, Microphone) {
  const Outcome missing = listen("--microphone nowhere");
  if (missing.err.find("built without support for microphones") != std::string::npos) {
    expect_message(missing, 1, "install the package libasound2-dev");
    GTEST_SKIP() << "skipped: built without ALSA";
  }
  expect_message(missing, 1, "microphone \"nowhere\": No such file or directory. `arecord -L` lists");
  EXPECT_EQ(lines(missing.err).size(), 1u) << missing.err;  // ALSA's own messages are not shown
  write("speech.raw", pcm16(2, 0, 3.8) + std::string(32000, '\0'));
  write("asound.conf", tw::format("pcm.played {{ type file slave.pcm {{ type null }} file /dev/null infile {}/speech.raw format raw }}",
                                  folder().string()));
  const TerminalRun run = listen_in_terminal({"--microphone", "played", "--silence", "1"},
                                             {.err_is_terminal = false,
                                              .environment = {{"TERM", "xterm"}, {"ALSA_CONFIG_PATH", (folder() / "asound.conf").string()}},
                                              .typed = {"\x03"},
                                              .prompt = "seven\r\n"});
  EXPECT_EQ(run.code, 0) << run.terminal << run.err;
  EXPECT_EQ(run.terminal.rfind(kWords[2] + "\r\n", 0), 0u) << run.terminal;
}

TEST_F(Listen, WrongUsage) {
  expect_message(run("listen --pcm16 16000"), 2, "--pcm16 requires --input");
  expect_message(run("listen --real-time"), 2, "--real-time requires --input");
  expect_message(run("listen --input a.wav --microphone default"), 2, "--microphone excludes --input");
  expect_message(run("listen --input a.raw --pcm16 999"), 2, "--pcm16");
  expect_message(run("listen --threshold 2"), 2, "--threshold");
  expect_message(run("listen --silence 0"), 2, "--silence");
  expect_message(listen("--input /nowhere.wav"), 1, "/nowhere.wav: No such file or directory");
  expect_message(listen("--pcm16 16000 --input /nowhere.raw"), 1, "/nowhere.raw: No such file or directory");
  expect_message(listen("--pcm16 16000 --input " + quoted(folder())), 1, folder().string() + ": Is a directory");
  expect_message(listen("--model /nowhere --input " + sample(1)), 1, "/nowhere: no such directory");
}

}  // namespace
