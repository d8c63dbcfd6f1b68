// `tilewave transcribe` with folders and patterns.

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "runtime/format.hpp"
#include "transcribe_fixture.hpp"

namespace {

namespace fs = std::filesystem;
using tw::test::expect_message;
using tw::test::kRoot;
using tw::test::kWords;
using tw::test::lines;
using tw::test::Outcome;
using tw::test::read;

/// Recordings in folders, and with them what is none.
class TranscribeFolders : public tw::test::Transcribe {
 protected:
  void SetUp() override {
    Transcribe::SetUp();
    if (IsSkipped()) return;
    for (const char* name : {"mon/talk.wav", "tue/talk.WAV", "tue/\xC3\xA9t\xC3\xA9 [1]/a b.wav"}) put(name, ++recordings_);
    for (const char* name : {".hidden.wav", ".hidden/a.wav", "mon/.b.wav"}) put(name, 1);
    write("in/notes.txt", "no audio");
    fs::create_directory(in() / "empty");
    fs::create_directory_symlink("..", in() / "mon/loop");
  }

  fs::path in() const { return folder() / "in"; }
  void put(const std::string& name, int number) const {
    fs::create_directories((in() / name).parent_path());
    fs::copy_file(tw::format("{}/assets/samples/digits-{}.wav", kRoot, number), in() / name);
  }
  /// The line of the n-th recording, found through `path`.
  static std::string line(const fs::path& path, int number) { return tw::format("{}: {}\n", path.string(), kWords[number]); }
  std::string all_lines(const fs::path& path) const {
    return line(path / "mon/talk.wav", 1) + line(path / "tue/talk.WAV", 2) + line(path / "tue/\xC3\xA9t\xC3\xA9 [1]/a b.wav", 3);
  }
  std::string quoted_in(const std::string& pattern) const { return quoted(in() / pattern); }

 private:
  int recordings_ = 0;
};

TEST_F(TranscribeFolders, AFolderIsSearched) {
  const Outcome outcome = transcribe(quoted(in()));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, all_lines(in()));
  EXPECT_EQ(outcome.err, "");
  // One recording in it has its name, too: it must not depend on their number.
  EXPECT_EQ(transcribe(quoted_in("mon/")).out, line(in() / "mon/talk.wav", 1));
  EXPECT_EQ(transcribe(quoted_in("mon/talk.wav")).out, kWords[1] + "\n");
}

TEST_F(TranscribeFolders, PatternsThatNoShellExpanded) {
  const fs::path odd = "tue/\xC3\xA9t\xC3\xA9 [1]/a b.wav";
  for (const fs::path& each : {fs::path("mon/talk.wav"), fs::path("tue/talk.WAV"), odd})  // without speech, which is quick
    std::ofstream(in() / each, std::ios::binary) << tw::test::wav(std::vector<std::int16_t>(1600));
  const auto line = [&](const fs::path& name) { return (in() / name).string() + ":\n"; };
  const std::string first = line("mon/talk.wav"), second = line("tue/talk.WAV"), third = line(odd);
  const struct {
    std::string pattern, expected;
  } cases[] = {
      {"*/*.wav", first},
      {"**/*.wav", first + third},
      {"**/*.{WAV,wav}", first + second + third},
      {"{tue,mon}/talk.???", first + second},
      {"m*", first},
      {"[n-z]ue/*", second + third},
      {"tue/**/a b.wav", third},
      {"tue/\xC3\xA9t\xC3\xA9 [1]/*.wav", ""},  // the folder's name is part of a pattern here
      {odd.string(), "\n"},                     // and the name of a file is none
  };
  for (const auto& [pattern, expected] : cases) {
    const Outcome outcome = transcribe(quoted_in(pattern));
    EXPECT_EQ(outcome.out, expected) << pattern << ": " << outcome.err;
    EXPECT_EQ(outcome.code, expected.empty() ? 1 : 0) << pattern;
  }
  expect_message(transcribe(quoted_in("*.mp3")), 1, (in() / "*.mp3").string() + ": no file matches this pattern");
  // As a shell expands it, also to what is no recording; the others are transcribed.
  const Outcome outcome = transcribe(quoted_in("*"));
  EXPECT_EQ(outcome.out, first + second + third);
  expect_message(outcome, 1, "notes.txt: ");
}

TEST_F(TranscribeFolders, FoldersWithoutRecordings) {
  const Outcome outcome = transcribe(quoted_in("empty") + " " + quoted_in("mon"));
  expect_message(outcome, 1, (in() / "empty").string() + ": no recordings in this folder; looked for names with the suffixes wav, flac");
  EXPECT_EQ(outcome.out, line(in() / "mon/talk.wav", 1));
  // No model is loaded for nothing.
  expect_message(run("transcribe --model /nowhere " + quoted_in("empty")), 1, "no recordings in this folder");
  put("broken.wav", 1);
  fs::resize_file(in() / "broken.wav", 1000);
  fs::create_symlink("nowhere", in() / "dangling.wav");
  const Outcome bad = transcribe(quoted(in()));
  EXPECT_EQ(bad.code, 1);
  EXPECT_EQ(bad.out, all_lines(in()));
  ASSERT_EQ(lines(bad.err).size(), 2u) << bad.err;
  EXPECT_NE(bad.err.find("broken.wav: "), std::string::npos) << bad.err;
  EXPECT_NE(bad.err.find("dangling.wav: No such file"), std::string::npos) << bad.err;
}

TEST_F(TranscribeFolders, OutputKeepsTheFolders) {
  const fs::path out = folder() / "texts";
  EXPECT_EQ(transcribe(tw::format("--output {} {}", quoted(out), quoted(in()))).code, 0);
  EXPECT_EQ(read(out / "mon/talk.txt"), kWords[1] + "\n");
  EXPECT_EQ(read(out / "tue/talk.txt"), kWords[2] + "\n");
  EXPECT_EQ(read(out / "tue/\xC3\xA9t\xC3\xA9 [1]/a b.txt"), kWords[3] + "\n");
  EXPECT_EQ(names(out), (std::vector<std::string>{"mon", "tue"}));  // no folders without transcripts
  EXPECT_EQ(transcribe(tw::format("--format srt --output {} {}", quoted(in()), quoted_in("**/talk.*"))).code, 0);
  EXPECT_EQ(lines(read(in() / "tue/talk.srt")).at(2), kWords[2]);
  expect_message(transcribe(tw::format("--output {} {}", quoted_in("notes.txt"), quoted_in("mon"))), 2, "must be a directory");
  EXPECT_EQ(read(in() / "notes.txt"), "no audio");
}

TEST_F(TranscribeFolders, NamesThatDifferInTheSuffixKeepIt) {
  put("mon/talk.mp3", 3);  // formats are detected by content
  const fs::path out = folder() / "texts";
  EXPECT_EQ(transcribe(tw::format("--output {} {}", quoted(out), quoted(in()))).code, 0);
  EXPECT_EQ(names(out / "mon"), (std::vector<std::string>{"talk.mp3.txt", "talk.wav.txt"}));
  EXPECT_EQ(read(out / "mon/talk.mp3.txt"), kWords[3] + "\n");
  EXPECT_EQ(names(out / "tue"), (std::vector<std::string>{"talk.txt", "\xC3\xA9t\xC3\xA9 [1]"}));
  // Folders of recordings that are given are not kept.
  put("wed/talk.wav", 1);
  expect_message(transcribe(tw::format("--output {} {} {}", quoted(out), quoted_in("mon/talk.wav"), quoted_in("wed/talk.wav"))), 2,
                 "talk.wav.txt; give the folder that both are in");
}

}  // namespace
