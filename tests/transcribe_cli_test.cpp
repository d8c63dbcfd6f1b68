// `tilewave transcribe` and `tilewave bench transcribe` as their users meet them, with the bundled checkpoint.

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "gguf_digits.hpp"
#include "runtime/format.hpp"
#include "transcribe_fixture.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tw::test::digits_gguf;
using tw::test::expect_message;
using tw::test::kRoot;
using tw::test::kWords;
using tw::test::lines;
using tw::test::Outcome;
using tw::test::read;
using tw::test::sample;
using tw::test::Transcribe;
using tw::test::wav;

/// The line of a recording among several.
std::string labelled(int number) { return tw::format("{}/assets/samples/digits-{}.wav: {}\n", kRoot, number, kWords[number]); }

TEST_F(Transcribe, TextsInTheOrderOfArguments) {
  const Outcome outcome = transcribe(tw::format("{} {} {}", sample(3), sample(1), sample(2)));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");  // no terminal, no progress
  EXPECT_EQ(outcome.out, labelled(3) + labelled(1) + labelled(2));
}

TEST_F(Transcribe, OneTextHasNoName) {
  EXPECT_EQ(transcribe(sample(1)).out, kWords[1] + "\n");
  // Two that are given have, though one fails: it must not depend on what the other is.
  EXPECT_EQ(transcribe("/nowhere.wav " + sample(1)).out, labelled(1));
}

TEST_F(Transcribe, WithoutAModelANoteSaysWhatTheBundledOneKnows) {
  const Outcome outcome = run("transcribe --device cpu --json " + sample(1));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(json::parse(outcome.out).at("text"), kWords[1]);
  ASSERT_EQ(lines(outcome.err).size(), 1u) << outcome.err;
  for (const char* part : {"tilewave: no --model: ", "spoken English digits only", "hf download zai-org/GLM-ASR-Nano-2512"})
    EXPECT_NE(outcome.err.find(part), std::string::npos) << outcome.err;
  EXPECT_EQ(run(tw::format("transcribe --device cpu --model '{}/assets/digits' {}", kRoot, sample(1))).err, "");
  EXPECT_EQ(run("transcribe --device cpu -q " + sample(1)).err, "");
}

TEST_F(Transcribe, OneBadFileAmongMany) {
  const Outcome outcome = transcribe(tw::format("{} /nowhere/talk.wav {}", sample(1), sample(2)));
  expect_message(outcome, 1, "/nowhere/talk.wav: No such file or directory");
  EXPECT_EQ(outcome.out, labelled(1) + labelled(2));
  EXPECT_EQ(lines(outcome.err).size(), 1u);
}

TEST_F(Transcribe, FilesThatAreNoRecordings) {
  const std::string whole = read(kRoot + "/assets/samples/digits-2.wav");
  write("empty.wav", "");
  write("text.wav", "Dear Sir or Madam");
  write("header.wav", whole.substr(0, 30));
  write("half.wav", whole.substr(0, whole.size() / 2));
  fs::create_directory(folder() / "empty");
  const std::string in = "'" + folder().string() + "/";
  const Outcome outcome = transcribe(tw::format("{0}empty.wav' {0}text.wav' {0}header.wav' {0}half.wav' {0}empty/' {1}", in, sample(2)));
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.out, labelled(2));
  const std::vector<std::string> messages = lines(outcome.err);
  ASSERT_EQ(messages.size(), 5u) << outcome.err;
  const char* const parts[][2] = {{"empty/: ", "no recordings in this folder"},
                                  {"empty.wav: ", "empty"},
                                  {"text.wav: ", "ffmpeg -i"},
                                  {"header.wav: ", "cannot be read as WAV"},
                                  {"half.wav: ", "truncated"}};
  for (std::size_t i = 0; i < messages.size(); ++i) {
    EXPECT_EQ(messages[i].rfind("tilewave: " + folder().string() + "/" + parts[i][0], 0), 0u) << messages[i];
    EXPECT_NE(messages[i].find(parts[i][1]), std::string::npos) << messages[i];
  }
}

TEST_F(Transcribe, SilenceHasNoText) {
  const std::string silence = write("silence.wav", wav(std::vector<std::int16_t>(48000))), none = write("none.wav", wav({}));
  const Outcome outcome = transcribe(tw::format("{} {} {}", silence, sample(2), silence));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string name = (folder() / "silence.wav").string() + ":\n";
  EXPECT_EQ(outcome.out, name + labelled(2) + name);
  EXPECT_EQ(transcribe(silence).out, "\n");
  EXPECT_EQ(run_json("transcribe --device cpu --format json " + silence).at("segments"), json::array());
  EXPECT_EQ(transcribe("--format vtt " + silence).out, "WEBVTT\n\n");
  expect_message(transcribe(none), 1, "none.wav: it holds no audio: 0 samples");
}

TEST_F(Transcribe, StandardInput) {
  // What run() adds, an empty standard input among it, becomes a comment.
  const std::string command = tw::format("- <{0} >'{1}/text' 2>'{1}/message' #", sample(2), folder().string());
  EXPECT_EQ(transcribe(command).code, 0) << read(folder() / "message");
  EXPECT_EQ(read(folder() / "text"), kWords[2] + "\n");
  expect_message(transcribe("-"), 1, "standard input: empty");
}

TEST_F(Transcribe, WeightsInFewerBits) {
  const Outcome outcome = transcribe("--json --weights int4:32:zeros " + sample(1));
  EXPECT_EQ(json::parse(outcome.out).at("text"), kWords[1]);
  EXPECT_EQ(json::parse(outcome.out).at("weights"), "int4:32:zeros");
  expect_message(transcribe("--weights int3 " + sample(1)), 2, "weights are \"int3\"; allowed: plain, int8, fp8, int4:32");
  const std::string converted = (folder() / "int8").string(), model = tw::format("'{}/assets/digits'", kRoot);
  const Outcome made = run(tw::format("convert {} '{}' --weights int8", model, converted));
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_EQ(transcribe(tw::format("--model '{}' {}", converted, sample(2))).out, kWords[2] + "\n");
  expect_message(run(tw::format("convert {} '{}' --weights int8", model, converted)), 1, "exists");
  expect_message(run(tw::format("convert {} '{}x' --weights plain", model, converted)), 2, "int8, fp8 and int4 are supported");
}

TEST_F(Transcribe, Json) {
  const Outcome outcome = transcribe(tw::format("--format json --dtype bf16 {} {}", sample(1), sample(3)));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<std::string> rows = lines(outcome.out);
  ASSERT_EQ(rows.size(), 2u) << outcome.out;
  for (const int i : {0, 1}) {
    const json row = json::parse(rows[static_cast<std::size_t>(i)]);
    const int number = i == 0 ? 1 : 3;
    EXPECT_EQ(row.at("file"), tw::format("{}/assets/samples/digits-{}.wav", kRoot, number));
    EXPECT_EQ(row.at("text"), kWords[number]);
    EXPECT_EQ(row.at("truncated"), false);
    EXPECT_EQ(row.at("device"), "cpu");
    EXPECT_EQ(row.at("dtype"), "bf16");
    EXPECT_EQ(row.at("weights"), "plain");
    EXPECT_TRUE(fs::exists(row.at("model").get<std::string>() + "/config.json"));
    for (const char* stage : {"load", "features", "encoder", "prefill", "decode"}) EXPECT_GE(row.at("seconds").at(stage).get<double>(), 0);
    double end = 0;
    std::string text;
    ASSERT_FALSE(row.at("segments").empty());
    for (const json& segment : row.at("segments")) {
      EXPECT_GE(segment.at("begin").get<double>(), end);
      EXPECT_GT(segment.at("end").get<double>(), segment.at("begin").get<double>());
      end = segment.at("end").get<double>();
      EXPECT_FALSE(segment.at("tokens").empty());
      EXPECT_EQ(segment.at("truncated"), false);
      EXPECT_EQ(segment.at("repetition"), false);
      text += (text.empty() ? "" : " ") + segment.at("text").get<std::string>();
    }
    EXPECT_EQ(text, kWords[number]);
    EXPECT_LE(end, row.at("duration").get<double>());
  }
}

TEST_F(Transcribe, Subtitles) {
  const std::vector<std::string> srt = lines(transcribe("--format srt " + sample(1)).out);
  ASSERT_EQ(srt.size(), 4u);
  EXPECT_EQ(srt[0], "1");
  EXPECT_TRUE(std::regex_match(srt[1], std::regex(R"(00:00:\d\d,\d{3} --> 00:00:\d\d,\d{3})"))) << srt[1];
  EXPECT_LT(srt[1].substr(0, 12), srt[1].substr(17));
  EXPECT_EQ(srt[2], kWords[1]);
  EXPECT_EQ(srt[3], "");
  const std::vector<std::string> vtt = lines(transcribe("--format vtt " + sample(1)).out);
  ASSERT_EQ(vtt.size(), 5u);
  EXPECT_EQ(vtt[0], "WEBVTT");
  EXPECT_EQ(vtt[1], "");
  EXPECT_TRUE(std::regex_match(vtt[2], std::regex(R"(00:00:\d\d\.\d{3} --> 00:00:\d\d\.\d{3})"))) << vtt[2];
  EXPECT_EQ(vtt[3], kWords[1]);
  const std::vector<std::string> lrc = lines(transcribe("--format lrc " + sample(1)).out);
  ASSERT_EQ(lrc.size(), 2u);
  EXPECT_TRUE(std::regex_match(lrc[1], std::regex(R"(\[00:\d\d\.\d\d\] )" + kWords[1]))) << lrc[1];
  for (const char* format : {"srt", "vtt", "lrc"})
    expect_message(transcribe(tw::format("--format {} {} {}", format, sample(1), sample(2))), 2,
                   tw::format("--format {} with several recordings needs --output DIR", format));
}

TEST_F(Transcribe, Csv) {
  const std::vector<std::string> one = lines(transcribe("--format csv " + sample(1)).out);
  ASSERT_EQ(one.size(), 2u);
  EXPECT_EQ(one[0], "start,end,text");
  EXPECT_TRUE(std::regex_match(one[1], std::regex(tw::format("\\d+,\\d+,\"{}\"", kWords[1])))) << one[1];
  // Several are one table. A name is quoted.
  fs::copy_file(kRoot + "/assets/samples/digits-2.wav", folder() / "a \"b\".wav");
  const std::vector<std::string> two = lines(transcribe(tw::format("--format csv {} {}", quoted(folder() / "a \"b\".wav"), sample(1))).out);
  ASSERT_EQ(two.size(), 3u);
  EXPECT_EQ(two[0], "file,start,end,text");
  EXPECT_EQ(two[1].rfind(tw::format("\"{}/a \"\"b\"\".wav\",", folder().string()), 0), 0u) << two[1];
  EXPECT_TRUE(two[1].ends_with(kWords[2] + "\"")) << two[1];
  EXPECT_EQ(two[2], tw::format("\"{}/assets/samples/digits-1.wav\",", kRoot) + one[1]);
}

TEST_F(Transcribe, VerboseJson) {
  const json one = json::parse(transcribe("--format verbose_json --temperature 0.5 --top-p 1e-9 " + sample(1)).out);
  EXPECT_EQ(one.at("task"), "transcribe");
  EXPECT_EQ(one.at("text"), kWords[1]);
  EXPECT_EQ(one.at("segments").at(0).at("text"), kWords[1]);
  EXPECT_EQ(one.at("segments").at(0).at("temperature"), 0.5);
  EXPECT_LT(one.at("segments").at(0).at("avg_logprob").get<double>(), 0);  // also without --logprobs
  EXPECT_FALSE(one.contains("file"));
  EXPECT_FALSE(one.contains("logprobs"));
  const std::vector<std::string> rows = lines(transcribe(tw::format("--format verbose_json {} {}", sample(1), sample(2))).out);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(json::parse(rows[1]).at("file"), tw::format("{}/assets/samples/digits-2.wav", kRoot));
  EXPECT_EQ(json::parse(rows[1]).at("text"), kWords[2]);
  const fs::path out = folder() / "texts";
  EXPECT_EQ(transcribe(tw::format("--format verbose_json --output {} {}", quoted(out / ""), sample(2))).code, 0);
  EXPECT_EQ(json::parse(read(out / "digits-2.json")).at("text"), kWords[2]);
}

TEST_F(Transcribe, Logprobs) {
  const auto expect_tokens = [](const json& tokens, int number, std::size_t count) {
    std::string text;
    ASSERT_EQ(tokens.size(), count);
    for (const json& token : tokens) {
      EXPECT_LE(token.at("logprob").get<double>(), 0);
      EXPECT_GT(token.at("logprob").get<double>(), -1);  // it is sure of its digits
      text += token.at("token").get<std::string>();
    }
    EXPECT_EQ(text.substr(text.find_first_not_of(' ')), kWords[number]);
  };
  const json row = json::parse(transcribe("--json --logprobs " + sample(1)).out);
  const json& segment = row.at("segments").at(0);
  expect_tokens(segment.at("logprobs"), 1, segment.at("tokens").size());
  EXPECT_FALSE(json::parse(transcribe("--json " + sample(1)).out).at("segments").at(0).contains("logprobs"));
  const json verbose = json::parse(transcribe("--format verbose_json --logprobs " + sample(2)).out);
  expect_tokens(verbose.at("logprobs"), 2, verbose.at("segments").at(0).at("tokens").size());
  for (const char* options : {"", "--format srt", "--output a.csv"})
    expect_message(transcribe(tw::format("--logprobs {} {}", options, sample(1))), 2,
                   "--logprobs needs --format json or verbose_json, or text");
}

// A random checkpoint at a high temperature says any byte.
TEST_F(Transcribe, SubtitlesStayWellFormedWhateverTheTextIs) {
  const auto spoken = [&](const char* format, const char* seed) {
    return lines(
        transcribe(tw::format("--model '{}/tests/data/glm_asr/gqa' --temperature 100 --max-new-tokens 300 --format {} --seed {} {}", kRoot,
                              format, seed, sample(1)))
            .out);
  };
  for (const char* seed : {"2", "3"}) {  // with 1 the text is an ESC alone: no entry
    const std::vector<std::string> srt = spoken("srt", seed), vtt = spoken("vtt", seed);
    ASSERT_EQ(srt.size(), 4u);
    ASSERT_EQ(vtt.size(), 5u);
    EXPECT_EQ(vtt[3].find_first_of("<>\r"), std::string::npos);
    std::string plain = vtt[3];
    plain = std::regex_replace(std::regex_replace(plain, std::regex("&lt;"), "<"), std::regex("&gt;"), ">");
    plain = std::regex_replace(plain, std::regex("&amp;"), "&");
    EXPECT_EQ(plain, srt[2]);
  }
}

TEST_F(Transcribe, OutputFile) {
  const fs::path out = folder() / "texts";
  fs::create_directory(out);
  const fs::path file = out / "a.txt";
  const Outcome outcome = transcribe(tw::format("--output {} {}", quoted(file), sample(2)));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(read(file), kWords[2] + "\n");
  EXPECT_EQ(names(out), std::vector<std::string>{"a.txt"});
  // What fails leaves what was there, and nothing else.
  expect_message(transcribe(tw::format("--output {} /nowhere.wav", quoted(file))), 1, "/nowhere.wav");
  EXPECT_EQ(read(file), kWords[2] + "\n");
  EXPECT_EQ(names(out), std::vector<std::string>{"a.txt"});
  expect_message(transcribe(tw::format("--output {} /nowhere.wav", quoted(out / "b.txt"))), 1, "/nowhere.wav");
  EXPECT_EQ(names(out), std::vector<std::string>{"a.txt"});
  expect_message(transcribe(tw::format("--output {} {} {}", quoted(file), sample(1), sample(2))), 2, "must be a directory");
}

TEST_F(Transcribe, OutputDirectory) {
  const fs::path out = folder() / "new/texts";
  const Outcome outcome = transcribe(tw::format("--format srt --output {} {} /nowhere.wav {}", quoted(out), sample(1), sample(3)));
  expect_message(outcome, 1, "/nowhere.wav");
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(names(out), (std::vector<std::string>{"digits-1.srt", "digits-3.srt"}));
  EXPECT_EQ(lines(read(out / "digits-3.srt")).at(2), kWords[3]);
  EXPECT_EQ(transcribe(tw::format("--format json --output '{}/' {}", out.string(), sample(2))).code, 0);
  EXPECT_EQ(json::parse(read(out / "digits-2.json")).at("text"), kWords[2]);
  const fs::path other = folder() / "other";
  expect_message(transcribe(tw::format("--output {} {} {}", quoted(other), sample(1), sample(1))), 2,
                 "two recordings would be written to " + (other / "digits-1.wav.txt").string());
  EXPECT_FALSE(fs::exists(other));
}

TEST_F(Transcribe, TheSuffixOfOutputImpliesTheFormat) {
  const auto written = [&](const std::string& name, const char* options = "") {
    const Outcome outcome = transcribe(tw::format("{} --output {} {}", options, quoted(folder() / name), sample(2)));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return read(folder() / name);
  };
  EXPECT_EQ(written("a.srt").rfind("1\n00:00:", 0), 0u);
  EXPECT_EQ(written("a.VTT").rfind("WEBVTT\n", 0), 0u);
  EXPECT_EQ(written("a.csv").rfind("start,end,text\n", 0), 0u);
  EXPECT_EQ(written("a.LRC").rfind("[", 0), 0u);
  EXPECT_EQ(json::parse(written("a.json")).at("text"), kWords[2]);
  for (const char* name : {"a.md", ".srt"}) EXPECT_EQ(written(name), kWords[2] + "\n") << name;
  EXPECT_EQ(written("b.srt", "--format text"), kWords[2] + "\n");
  EXPECT_EQ(json::parse(written("c.srt", "--json")).at("text"), kWords[2]);
  fs::create_directory(folder() / "d.srt");
  EXPECT_EQ(transcribe(tw::format("--output {} {}", quoted(folder() / "d.srt"), sample(2))).code, 0);
  EXPECT_EQ(names(folder() / "d.srt"), std::vector<std::string>{"digits-2.txt"});
}

TEST_F(Transcribe, OutputKeepsModesAndFollowsLinks) {
  const auto mode = [](const fs::path& path) { return static_cast<int>(fs::status(path).permissions() & fs::perms::mask); };
  const fs::path kept = folder() / "texts/kept.txt", link = folder() / "link.txt", chain = folder() / "chain.txt";
  fs::create_directory(folder() / "texts");
  std::ofstream(kept) << "before";
  fs::permissions(kept, fs::perms(0600));
  fs::create_symlink("texts/kept.txt", link);
  fs::create_symlink("link.txt", chain);
  EXPECT_EQ(transcribe(tw::format("--output {} {}", quoted(chain), sample(2))).code, 0);
  EXPECT_EQ(read(kept), kWords[2] + "\n");
  EXPECT_EQ(mode(kept), 0600);
  EXPECT_TRUE(fs::is_symlink(link) && fs::is_symlink(chain));
  EXPECT_EQ(names(folder() / "texts"), std::vector<std::string>{"kept.txt"});

  // Of a link that leads to nothing yet, what it names is made; a new file is as others may read it.
  fs::create_symlink("texts/new.txt", folder() / "dangling.txt");
  EXPECT_EQ(run(tw::format("transcribe -q --device cpu --output {} {}", quoted(folder() / "dangling.txt"), sample(1)), "umask 027;").code,
            0);
  EXPECT_EQ(read(folder() / "texts/new.txt"), kWords[1] + "\n");
  EXPECT_EQ(mode(folder() / "texts/new.txt"), 0640);

  fs::create_symlink("loop.txt", folder() / "loop.txt");
  expect_message(transcribe(tw::format("--output {} {}", quoted(folder() / "loop.txt"), sample(2))), 1, "loop.txt: Too many levels");
}

TEST_F(Transcribe, OutputThatIsNoFileIsWrittenInPlace) {
  // Copies and links: a program that does it wrong must not change /dev, where tests run as root.
  const fs::path full = folder() / "full", fifo = folder() / "fifo.json", text = folder() / "text";
  if (mknod(full.c_str(), S_IFCHR | 0666, makedev(1, 7)) == 0 && std::ofstream(full).is_open()) {
    expect_message(transcribe(tw::format("--output {} {}", quoted(full), sample(2))), 1, "full: No space left on device");
    EXPECT_TRUE(fs::is_character_file(full));
  }
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(std::system(tw::format("cat {} > {} &", quoted(fifo), quoted(text)).c_str()), 0);
  EXPECT_EQ(transcribe(tw::format("--output {} {}", quoted(fifo), sample(2))).code, 0);
  EXPECT_TRUE(fs::is_fifo(fifo));
  for (int i = 0; i < 500 && read(text).empty(); ++i) usleep(10000);  // until cat has written it
  EXPECT_EQ(json::parse(read(text)).at("text"), kWords[2]);

  // /dev/stdout and /dev/fd/3 are links like these.
  const fs::path out = folder() / "stdout", three = folder() / "three";
  fs::create_symlink("/proc/self/fd/1", out);
  fs::create_symlink("/proc/self/fd/3", three);
  EXPECT_EQ(transcribe(tw::format("--output {} {}", quoted(out), sample(2))).out, kWords[2] + "\n");
  // What a shell has opened is written to as it was opened: here, at the end.
  std::ofstream(text) << "before\n";
  EXPECT_EQ(transcribe(tw::format("--output {} {} >>{} #", quoted(out), sample(2), quoted(text))).code, 0);
  EXPECT_EQ(transcribe(tw::format("--output {} {} 3>>{} #", quoted(three), sample(1), quoted(text))).code, 0);
  EXPECT_EQ(read(text), "before\n" + kWords[2] + "\n" + kWords[1] + "\n");
  EXPECT_TRUE(fs::is_symlink(out) && fs::is_symlink(three));
}

TEST_F(Transcribe, OutputOverARecordingIsRefused) {
  const std::string recording = read(kRoot + "/assets/samples/digits-1.wav");
  write("a.wav", recording);
  write("b.wav", recording);
  fs::create_symlink("a.wav", folder() / "link");
  fs::create_hard_link(folder() / "a.wav", folder() / "hard");
  fs::create_directory(folder() / "texts");
  fs::create_hard_link(folder() / "a.wav", folder() / "texts/b.txt");
  const std::string a = quoted(folder() / "a.wav"), b = quoted(folder() / "b.wav"), link = quoted(folder() / "link"),
                    hard = quoted(folder() / "hard"), texts = quoted(folder() / "texts");
  for (const std::string& arguments :
       {"--output " + a + " " + a, "--output " + link + " " + a, "--output " + hard + " " + a, "--output " + a + " " + link,
        "--output " + texts + " " + b + " " + a, a + " >>" + a + " #", "--output " + a + " - <" + a + " >/dev/null #"}) {
    SCOPED_TRACE(arguments);
    EXPECT_EQ(transcribe("2>/dev/null " + arguments).code, 2);
    EXPECT_EQ(read(folder() / "a.wav"), recording);
  }
  expect_message(transcribe("--output " + link + " " + a), 2, "would overwrite the recording " + (folder() / "a.wav").string());
}

// Tests may run as root, who may write everywhere: nothing can be created below a regular file.
TEST_F(Transcribe, OutputThatCannotBeWritten) {
  write("file", "text");
  const fs::path below = folder() / "file/below";
  expect_message(transcribe(tw::format("--output {} {}", quoted(below), sample(2))), 1, below.string() + ": ");
  expect_message(transcribe(tw::format("--output {} {} {}", quoted(below), sample(1), sample(2))), 1, below.string() + ": ");
  EXPECT_EQ(read(folder() / "file"), "text");
}

TEST_F(Transcribe, OnePrompt) {
  const Outcome outcome = transcribe(tw::format("--segment none --format json {}", sample(1)));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const json row = json::parse(outcome.out);
  EXPECT_EQ(row.at("text"), kWords[1]);
  ASSERT_EQ(row.at("segments").size(), 1u);
  EXPECT_EQ(row.at("segments").at(0).at("begin"), 0.0);
  EXPECT_EQ(row.at("segments").at(0).at("end"), row.at("duration"));
}

TEST_F(Transcribe, ARecordingThatIsTooLongForOnePromptFailsAlone) {
  // The checkpoint's context is 2048 tokens: about 163 s.
  const std::string long_one = write("long.wav", wav(std::vector<std::int16_t>(170 * 16000)));
  const Outcome outcome = transcribe(tw::format("--segment none {} {}", long_one, sample(2)));
  EXPECT_EQ(outcome.out, labelled(2));
  ASSERT_EQ(lines(outcome.err).size(), 1u) << outcome.err;
  expect_message(outcome, 1, "long.wav: 170.0 s of audio make a prompt of ");
}

TEST_F(Transcribe, TheTokenLimitWarns) {
  const Outcome outcome = transcribe(tw::format("--max-new-tokens 1 --format json {}", sample(2)));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err.rfind("tilewave: warning: ", 0), 0u) << outcome.err;
  EXPECT_NE(outcome.err.find("--max-new-tokens"), std::string::npos) << outcome.err;
  const json row = json::parse(outcome.out);
  EXPECT_EQ(row.at("truncated"), true);
  EXPECT_EQ(row.at("segments").at(0).at("truncated"), true);
  EXPECT_EQ(row.at("segments").at(0).at("tokens").size(), 1u);
  EXPECT_EQ(row.at("text"), "eight");
}

TEST_F(Transcribe, ModelsThatAreNone) {
  expect_message(transcribe(tw::format("--model {} {}", quoted(folder()), sample(2))), 1,
                 (folder() / "config.json").string() + ": No such file");
  expect_message(transcribe(tw::format("--model /nowhere {}", sample(2))), 1, "/nowhere: no such directory");
  write("config.json", "{\"model_type\": \"whisper\"}");
  expect_message(transcribe(tw::format("--model {} {}", quoted(folder()), sample(2))), 1, "model_type is \"whisper\"");
}

TEST_F(Transcribe, GgufFiles) {
  const auto paths = digits_gguf("Q8_0").write(folder());
  const std::string both = tw::format("--model {} --mmproj {} ", quoted(paths.model), quoted(paths.mmproj));
  const json result = json::parse(transcribe(both + "--json " + sample(2)).out);
  EXPECT_EQ(result.at("text"), kWords[2]);
  EXPECT_EQ(result.at("model"), paths.model.string());
  const Outcome bench =
      run(tw::format("bench transcribe --device cpu --runs 1 --warmup 0 {} --audio {} --reference 'eight zero seven'", both, sample(2)));
  EXPECT_EQ(bench.code, 0) << bench.err;
  expect_message(transcribe(tw::format("--model {} {}", quoted(paths.model), sample(2))), 2,
                 "model.gguf needs --mmproj with the GGUF file");
  expect_message(transcribe(tw::format("--mmproj {} {}", quoted(paths.mmproj), sample(2))), 2,
                 "--mmproj needs --model with a GGUF file, not the bundled checkpoint");
  expect_message(transcribe(tw::format("--model {} --mmproj {} {}", quoted(folder()), quoted(paths.mmproj), sample(2))), 2,
                 "--mmproj needs --model with a GGUF file, not " + folder().string());
  expect_message(transcribe(tw::format("--model {0} --mmproj {0} {1}", quoted(paths.model), sample(2))), 1, "allowed for mmproj: \"clip\"");
  write("model.gguf", read(paths.model).substr(0, 1000));
  expect_message(transcribe(both + sample(2)), 1, "model.gguf: ");
}

TEST_F(Transcribe, WrongUsage) {
  struct {
    const char* arguments;
    const char* part;
  } const cases[] = {
      {"", "AUDIO"},
      {"--batch 17 a.wav", "17 not in range 1 to 16"},
      {"--temperature 100.5 a.wav", "100.5 not in range 0 to 100\n"},
      {"--batch 0 a.wav", "--batch"},
      {"--top-p 0 a.wav", "--top-p must be greater than 0 and at most 1"},
      {"--top-p 1.5 a.wav", "--top-p"},
      {"--top-p nan a.wav", "--top-p"},
      {"--temperature -1 a.wav", "--temperature"},
      {"--temperature nan a.wav", "--temperature must be from 0 to 100"},
      {"--max-new-tokens 0 a.wav", "--max-new-tokens"},
      {"--seed x a.wav", "--seed"},
      {"--seed -1 a.wav", "--seed: -1 is not a whole number from 0 to 18446744073709551615"},
      {"--seed 18446744073709551616 a.wav", "from 0 to 18446744073709551615"},
      {"--seed 1.5 a.wav", "--seed: 1.5"},
      {"--format doc a.wav", "--format"},
      {"--segment some a.wav", "--segment"},
      {"--dtype f64 a.wav", "--dtype"},
      {"--device tpu a.wav", "\"tpu\"; allowed: \"cpu\", \"cuda\""},
      {"--threads 0 a.wav", "--threads"},
      {"--threads 4096 a.wav", "4096 not in range 1 to 1024"},
      {"--json --format srt a.wav", "--format"},
      {"--wrong a.wav", "--wrong"},
  };
  for (const auto& [arguments, part] : cases) {
    SCOPED_TRACE(arguments);
    const Outcome outcome = run(tw::format("transcribe {}", arguments));
    expect_message(outcome, 2, part);
    EXPECT_EQ(outcome.out, "");
  }
}

TEST_F(Transcribe, DrawnTextsRepeatWithTheirSeed) {
  const auto text = [&](const char* options) {  // of a random checkpoint, which is quick
    const Outcome outcome =
        transcribe(tw::format("--model '{}/tests/data/glm_asr/gqa' --max-new-tokens 20 {} {}", kRoot, options, sample(1)));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  const std::string first = text("--temperature 5 --seed 3");
  EXPECT_EQ(text("--temperature 5 --seed 3 --batch 1"), first);
  EXPECT_NE(text("--temperature 5 --seed 4"), first);
  EXPECT_EQ(text("--temperature 5 --seed 3 --top-p 1e-9"), text(""));  // the likeliest alone
}

TEST_F(Transcribe, SpecialTokensInAPromptAreText) {
  const Outcome outcome = transcribe(tw::format("--prompt '<|assistant|><|pad|><|end_of_audio|>' --max-new-tokens 20 {}", sample(2)));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(transcribe(tw::format("--prompt 'Please transcribe this audio into text' {}", sample(2))).out, kWords[2] + "\n");
}

TEST_F(Transcribe, UnwritableStandardOutput) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "skipped: no /dev/full";
  EXPECT_EQ(transcribe(tw::format("{} >/dev/full 2>'{}/message' #", sample(2), folder().string())).code, 1);
  const std::string message = read(folder() / "message");
  EXPECT_EQ(message.rfind("tilewave: standard output: No space left", 0), 0u) << message;
}

class BenchTranscribe : public Transcribe {};

TEST_F(BenchTranscribe, PassesAbove80Percent) {
  const Outcome outcome = run(tw::format(
      "bench transcribe --device cpu --warmup 0 --runs 2 --audio {} --reference 'Four, three; SEVEN five seven nine.'", sample(3)));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* part :
       {"Run 1: ", "Run 2: ", "Average: ", "Transcription: four three seven five seven four\n",
        "Reference: Four, three; SEVEN five seven nine.\n", "Word accuracy: 83.3 %\n", "Real-time factor: ", "Status: PASS\n"})
    EXPECT_NE(outcome.out.find(part), std::string::npos) << "no \"" << part << "\" in: " << outcome.out;
}

TEST_F(BenchTranscribe, FailsWithAWrongReference) {
  // Silence, after which nothing is timed.
  const std::string silence = write("silence.wav", wav(std::vector<std::int16_t>(48000)));
  const Outcome outcome = run(tw::format("bench transcribe --device cpu --warmup 0 --runs 1 --audio {} --reference one", silence));
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_NE(outcome.out.find("Word accuracy: 0.0 %\n"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("Status: FAIL\n"), std::string::npos) << outcome.out;
  const Outcome as_json = run(tw::format("bench transcribe --json --device cpu --warmup 0 --runs 1 --audio {} --reference one", silence));
  EXPECT_EQ(as_json.code, 1);
  const json report = json::parse(as_json.out);
  EXPECT_EQ(report.at("word_accuracy"), 0.0);
  EXPECT_EQ(report.at("passed"), false);
  EXPECT_EQ(report.at("runs").size(), 1u);
}

TEST_F(BenchTranscribe, WrongUsage) {
  expect_message(run("bench transcribe --audio " + sample(1)), 2, "give --reference or --ignore-eos");
  expect_message(run("bench transcribe --reference one"), 2, "--audio");
  expect_message(run("bench transcribe --runs 0 --reference one --audio " + sample(1)), 2, "--runs");
  expect_message(run("bench transcribe --device cpu --reference one --audio /nowhere.wav"), 1, "/nowhere.wav: No such file");
}

}  // namespace
