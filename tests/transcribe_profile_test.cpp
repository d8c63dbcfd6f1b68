// `tilewave profile transcribe`, `tilewave debug transcribe` and `tilewave bench transcribe --stages` as their users meet them.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "models/observe.hpp"
#include "runtime/format.hpp"
#include "tilewave/speech.hpp"
#include "transcribe_fixture.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tw::test::expect_message;
using tw::test::kRoot;
using tw::test::lines;
using tw::test::Outcome;
using tw::test::read;
using tw::test::sample;

class Profile : public tw::test::Transcribe {
 protected:
  /// Limits are given, so that none is measured.
  Outcome profile(const std::string& arguments) const {
    return run("profile transcribe --device cpu --warmup 0 --runs 1 --bandwidth 10 --tflops 0.1 " + arguments);
  }
};

TEST_F(Profile, TimesEveryOperatorAndWritesATrace) {
  const std::string trace_file = (folder() / "trace.json").string(), output = (folder() / "profile.json").string();
  const Outcome outcome =
      profile(tw::format("--json --output '{}' --trace '{}' --reference 'six seven nine two' {}", output, trace_file, sample(1)));
  EXPECT_EQ(outcome.code, 1);  // three of four words are 75 %
  EXPECT_NE(outcome.err.find("Word accuracy: 75.0 %\nStatus: FAIL\n"), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.out, read(output));
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report.at("text"), tw::test::kWords[1]);
  EXPECT_EQ(report.at("passed"), false);

  std::map<std::string, json> by_name;
  for (const json& row : report.at("operators"))
    by_name[tw::format("{} {}", row.at("stage").get<std::string>(), row.at("operator").get<std::string>())] = row;
  const auto& qkv = by_name.at("encoder qkv");
  EXPECT_EQ(qkv.at("calls"), 2);  // the bundled checkpoint has two layers, 1500 positions, a width of 192
  EXPECT_EQ(qkv.at("kind"), "linear");
  EXPECT_DOUBLE_EQ(qkv.at("flops"), 2.0 * 2 * 1500 * 192 * 3 * 192);
  EXPECT_DOUBLE_EQ(qkv.at("bytes"), 2.0 * 4 * (1500 * 192 + 192 * 576 + 576 + 1500 * 576));
  EXPECT_DOUBLE_EQ(qkv.at("limit_seconds"), std::max(qkv.at("flops").get<double>() / 1e11, qkv.at("bytes").get<double>() / 1e10));
  EXPECT_NEAR(qkv.at("share"), qkv.at("limit_seconds").get<double>() / qkv.at("seconds").get<double>(), 1e-9);
  EXPECT_EQ(by_name.at("encoder attention").at("kind"), "attention");
  for (const char* name :
       {"features mel", "prefill qkv", "prefill attention", "prefill down", "prefill head", "decode gate_up", "sampling argmax"})
    EXPECT_GT(by_name.at(name).at("seconds"), 0) << name;

  // Operators lie inside stages.
  const json trace = json::parse(read(trace_file));
  double begin = 0, end = -1;
  std::set<std::string> stages;
  std::vector<json> operators;
  for (const json& event : trace) {
    if (event.at("ph") == "M") continue;
    EXPECT_EQ(event.at("ph"), "X");
    EXPECT_GE(event.at("dur"), 0);
    if (event.at("cat") == "operator") operators.push_back(event);
    if (event.at("cat") != "stage") continue;
    stages.insert(event.at("name"));
    EXPECT_GE(event.at("ts"), end);
    begin = event.at("ts");
    end = begin + event.at("dur").get<double>();
    for (const json& op : operators) {
      EXPECT_GE(op.at("ts"), begin - 1) << op;
      EXPECT_LE(op.at("ts").get<double>() + op.at("dur").get<double>(), end + 1) << op;
    }
    EXPECT_FALSE(operators.empty()) << event;
    operators.clear();
  }
  EXPECT_EQ(stages, (std::set<std::string>{"features", "encoder", "embed", "prefill", "decode", "sampling"}));
}

TEST_F(Profile, ListsOneKindOfOperator) {
  for (const auto& [option, kind] : {std::pair("--attention-only", "attention"), std::pair("--linear-only", "linear")}) {
    const Outcome outcome = profile(tw::format("--json {} {}", option, sample(2)));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const json operators = json::parse(outcome.out).at("operators");
    EXPECT_GE(operators.size(), 3u);
    for (const json& row : operators) EXPECT_EQ(row.at("kind"), kind);
  }
}

TEST_F(Profile, BadInput) {
  expect_message(profile(""), 2, "AUDIO is required");
  expect_message(profile("--attention-only --linear-only " + sample(1)), 2, "excludes");
  expect_message(profile("/nowhere.wav"), 1, "/nowhere.wav: No such file");
  expect_message(profile("--model /nowhere " + sample(1)), 1, "/nowhere");
  expect_message(profile("--trace /nowhere/trace.json " + sample(1)), 1, "/nowhere/trace.json: No such file or directory");
  expect_message(profile("--output /nowhere/profile.json " + sample(1)), 1, "/nowhere/profile.json: No such file or directory");
  write("trace.json", "kept");
  expect_message(profile(tw::format("--trace '{}/trace.json' --output '{}/new.json' /nowhere.wav", folder().string(), folder().string())),
                 1, "/nowhere.wav");
  EXPECT_EQ(read(folder() / "trace.json"), "kept");
  EXPECT_FALSE(fs::exists(folder() / "new.json"));
  expect_message(run("profile"), 2, "subcommand");
}

class Debug : public tw::test::Transcribe {
 protected:
  /// A copy of a small checkpoint with random weights.
  fs::path checkpoint() const {
    const fs::path copy = folder() / "checkpoint";
    fs::copy(fs::path(kRoot) / "tests/data/glm_asr/gqa", copy);
    return copy;
  }
  Outcome debug(const std::string& arguments, const fs::path& model) const {
    return run(tw::format("debug transcribe --device cpu --max-new-tokens 3 --model '{}' {} {}", model.string(), arguments, sample(2)));
  }
  /// Overwrites elements of a tensor in a safetensors file.
  template <class T>
  static void change(const fs::path& file, const std::string& tensor, std::size_t first, const std::vector<T>& values) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    std::uint64_t size = 0;
    stream.read(reinterpret_cast<char*>(&size), sizeof size);
    std::string header(size, ' ');
    stream.read(header.data(), static_cast<std::streamsize>(size));
    const std::int64_t begin = json::parse(header).at(tensor).at("data_offsets").at(0);
    stream.seekp(8 + static_cast<std::int64_t>(size) + begin + static_cast<std::int64_t>(first * sizeof(T)));
    stream.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
  }
};

TEST_F(Debug, DumpsCompareWithThemselvesAndNameTheFirstDifference) {
  const fs::path model = checkpoint(), dump = folder() / "dump";
  const Outcome dumped = debug(tw::format("--dump '{}'", dump.string()), model);
  EXPECT_EQ(dumped.code, 0) << dumped.err;
  EXPECT_NE(dumped.out.find("operators are finite.\n"), std::string::npos) << dumped.out;
  EXPECT_TRUE(fs::exists(dump / "decode_0.layer_1.down.safetensors"));
  EXPECT_FALSE(fs::exists(dump / "decode_1.layer_1.down.safetensors"));  // one step, unless --dump-steps says otherwise
  const Outcome same = debug(tw::format("--compare '{}' --bound 1e-12", dump.string()), model);
  EXPECT_EQ(same.code, 0) << same.out << same.err;
  EXPECT_NE(same.out.find(tw::format("All {} results are within their bound.\n", names(dump).size())), std::string::npos) << same.out;

  for (const char* name : {"prefill_0.layer_0.out", "encoder_0.layer_1.up"})
    change<float>(dump / (std::string(name) + ".safetensors"), name, 5, {1e6f});
  const Outcome other = debug(tw::format("--compare '{}'", dump.string()), model);
  EXPECT_EQ(other.code, 1);
  EXPECT_NE(other.out.find("The first to leave its bound: encoder_0.layer_1.up\n"), std::string::npos) << other.out;
  std::size_t exceeded = 0;
  for (const std::string& line : lines(other.out)) exceeded += line.ends_with("exceeded");
  EXPECT_EQ(exceeded, 2u) << other.out;
  EXPECT_EQ(debug(tw::format("--compare '{}' --bound 1e9", dump.string()), model).code, 0);
}

TEST_F(Debug, NamesTheFirstOperatorWithNaN) {
  const fs::path model = checkpoint();
  change<std::uint16_t>(model / "model.safetensors", "model.language_model.layers.1.mlp.down_proj.weight", 2, {0x7FC0});
  expect_message(debug("", model), 1, "prefill_0.layer_1.down made the first result that is not finite: ");
  // The encoder comes before.
  change<std::uint16_t>(model / "model.safetensors", "model.audio_tower.layers.1.self_attn.o_proj.bias", 3, {0x7F80});
  expect_message(
      debug("", model), 1,
      "encoder_0.layer_1.out made the first result that is not finite: 0 NaN and 1500 infinities among 96000 elements, the first "
      "at [0, 3] of f32[1500, 64] on cpu");
}

TEST_F(Debug, BadInput) {
  const fs::path model = checkpoint();
  expect_message(debug("--compare /nowhere", model), 1, "--compare /nowhere: there is no such directory");
  expect_message(debug("--dump /dev/null/dump", model), 1, "--dump /dev/null/dump: ");
  expect_message(debug("", "/nowhere"), 1, "/nowhere");
  expect_message(debug("--bound 0 --compare /tmp", model), 2, "--bound");
  expect_message(run("debug transcribe --device cpu /nowhere.wav"), 1, "/nowhere.wav: No such file");
  expect_message(run("debug transcribe"), 2, "AUDIO is required");
  const fs::path foreign = folder() / "foreign";
  fs::create_directory(foreign);
  const std::string compare = tw::format("--compare '{}'", foreign.string());
  expect_message(debug(compare, model), 1, "has no result of this run, such as encoder_0.layer_0.down.safetensors");
  // The results of another checkpoint, another tensor, and no tensor.
  const auto file = foreign / "encoder_0.norm.safetensors";
  const auto store = [&](const std::string& header, std::size_t bytes) {
    const std::uint64_t size = header.size();
    std::ofstream out(file, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&size), sizeof size);
    out << header << std::string(bytes, '\0');
  };
  store(R"({"encoder_0.norm":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24);
  expect_message(debug(compare, model), 1, "is f32[2, 3] on cpu; this run made f32[1, 1500, 64] on cpu: it is of another recording");
  store(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4);
  expect_message(debug(compare, model), 1, "encoder_0.norm.safetensors: has no tensor encoder_0.norm");
  std::ofstream(file) << "Dear Sir or Madam";
  expect_message(debug(compare, model), 1, "encoder_0.norm.safetensors: ");
}

class Stages : public tw::test::Transcribe {};

TEST_F(Stages, RecordsWithWhatDoesNotFit) {
  const std::string output = (folder() / "speech.json").string();
  const Outcome outcome =
      run(tw::format("bench transcribe --stages --device cpu --model '{}/tests/data/glm_asr/gqa' --windows 1 --batch 2 "
                     "--samples 1 --json --output '{}'",
                     kRoot, output));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, read(output));
  std::map<std::string, json> rows;
  for (const json& record : json::parse(outcome.out)) {
    EXPECT_EQ(record.at("family"), "speech");
    EXPECT_EQ(record.at("unit"), "us");
    for (const char* field : {"commit", "date", "versions", "device"}) EXPECT_TRUE(record.contains(field)) << field;
    rows[record.at("case")] = record;
  }
  EXPECT_EQ(rows.at("mel-1").at("mode"), "one-thread");
  for (const char* name : {"mel-1", "encoder-1", "prefill-421", "decode-2, 421 to 621 tokens", "30 s and 200 tokens"})
    EXPECT_GT(rows.at(name).at("ours"), 0) << name;
  EXPECT_GT(rows.at("decode-2, 421 to 621 tokens").at("limit"), 0);
  const json& lost = rows.at("decode-1, 4000 to 4200 tokens");
  EXPECT_TRUE(lost.at("ours").is_null());
  EXPECT_EQ(lost.at("variant"), "does not fit: 4200 tokens; the model's context is 2048");
}

TEST_F(Stages, WrongUsage) {
  expect_message(run("bench transcribe --stages --audio " + sample(1)), 2, "--stages");
  expect_message(run("bench transcribe --samples 3 --reference one --audio " + sample(1)), 2, "--stages");
  expect_message(run("bench transcribe --batch 1 2 --reference one --audio " + sample(1)), 2, "--batch is one number");
  expect_message(run("bench transcribe --stages --device cpu --output /nowhere/speech.json"), 1, "/nowhere/speech.json: No such file");
}

// The library that NVTX_INJECTION64_PATH names gets the stages and operators, one inside the other, and every range ends.
TEST_F(Profile, RangesReachAProfiler) {
  const fs::path receiver = fs::path(TILEWAVE_BINARY_DIR) / "tests/libnvtx_receiver.so";
  if (!fs::exists(receiver)) GTEST_SKIP() << "skipped: needs the build folder";
  const fs::path ranges = folder() / "ranges";
  const Outcome outcome = run("transcribe -q --device cpu " + sample(1),
                              tw::format("NVTX_INJECTION64_PATH='{}' NVTX_RECEIVER_FILE='{}'", receiver.string(), ranges.string()));
  EXPECT_EQ(outcome.out, tw::test::kWords[1] + "\n") << outcome.err;
  const std::string text = read(ranges);
  EXPECT_EQ(text.rfind("features\n  mel\nencoder\n  cast\n", 0), 0u) << text;
  EXPECT_NE(text.find("\n  layer 1: qkv\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\ndecode\n"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("0 open\n")) << text;
  EXPECT_EQ(text.find("pop without push"), std::string::npos) << text;
  // A library that is missing or is no profiler's is ignored.
  for (const char* path : {"/nowhere.so", "/dev/null"})
    EXPECT_EQ(run("transcribe -q --device cpu " + sample(1), tw::format("NVTX_INJECTION64_PATH={}", path)).out, tw::test::kWords[1] + "\n");
}

/// Sums of what operators are said to do.
struct Sums : tw::models::Observer {
  double encoder_flops = 0, decode_bytes = 0;
  int steps = 0;
  std::string stage;
  void stage_begin(std::string_view name, const tw::Stream&) override {
    stage = name;
    steps += name == "decode";
  }
  void operator_end(const tw::models::Operator& op, const tw::Tensor*, const tw::Stream&) override {
    if (stage == "encoder") encoder_flops += op.flops;
    if (stage == "decode" && op.kind == tw::models::OperatorKind::linear) decode_bytes += op.bytes;
  }
};

// FLOPs and bytes that are counted from the model's shapes elsewhere.
TEST(Operators, WorkAddsUpToTheModels) {
  const tw::speech::Transcriber transcriber(kRoot + "/assets/digits");
  const std::vector<float> samples = tw::speech::read_audio(kRoot + "/assets/samples/digits-1.wav");
  Sums sums;
  {
    const tw::models::Observing observing(&sums);
    EXPECT_EQ(transcriber.transcribe(samples).text, tw::test::kWords[1]);
  }
  EXPECT_DOUBLE_EQ(sums.encoder_flops, transcriber.size().encoder_flops);
  ASSERT_GT(sums.steps, 0);
  const double step = sums.decode_bytes / sums.steps, weights = static_cast<double>(transcriber.size().decode_bytes);
  EXPECT_GT(step, 0.99 * weights);
  EXPECT_LT(step, 1.05 * weights);
}

}  // namespace
