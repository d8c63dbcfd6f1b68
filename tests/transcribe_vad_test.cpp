// tilewave vad.
#include "tests/cli_fixture.hpp"

namespace tw::test {
namespace {

class VadCommand : public CommandLine {
 protected:
  static std::string sample(int number) { return tw::format("{}/assets/samples/digits-{}.wav", TILEWAVE_SOURCE_DIR, number); }
};

TEST_F(VadCommand, PrintsSpans) {
  const Outcome outcome = run("vad " + sample(1));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  std::istringstream lines(outcome.out);
  double begin = 0, end = 0, last = 0;
  int spans = 0;
  for (; lines >> begin >> end; last = end, ++spans) {
    EXPECT_GE(begin, last);
    EXPECT_GT(end, begin);
  }
  EXPECT_TRUE(lines.eof());
  EXPECT_GT(spans, 0);
  EXPECT_LT(last, 6.1);
}

TEST_F(VadCommand, PrintsJson) {
  const nlohmann::json one = run_json("vad --json --silence 10 " + sample(1));
  EXPECT_EQ(one["file"], sample(1));
  EXPECT_NEAR(one["duration"].get<double>(), 6.066, 1e-3);
  ASSERT_EQ(one["spans"].size(), 1u);
  EXPECT_LT(one["spans"][0]["begin"], one["spans"][0]["end"]);
  EXPECT_EQ(run_json("vad --json --threshold 1 " + sample(1))["spans"], nlohmann::json::array());
  EXPECT_EQ(run_json("vad --json --by level --silence 3 --prefix 0 " + sample(1))["spans"].size(), 1u);
}

TEST_F(VadCommand, ReadsSeveralFilesAndNamesThoseThatItCannot) {
  const Outcome outcome = run("vad /nowhere.wav " + sample(1) + " " + sample(2));
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.err, "tilewave: /nowhere.wav: No such file or directory\n");
  EXPECT_NE(outcome.out.find(sample(1) + ": "), std::string::npos);
  EXPECT_NE(outcome.out.find("\n" + sample(2) + ": "), std::string::npos);
}

TEST_F(VadCommand, RefusesWhatIsOutOfRange) {
  for (const char* arguments : {"--threshold 2", "--threshold x", "--silence 0", "--prefix 9", "--suffix 1 --silence 0.5", "--by ear"}) {
    const Outcome outcome = run(tw::format("vad {} {}", arguments, sample(1)));
    EXPECT_EQ(outcome.code, 2) << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
  }
}

}  // namespace
}  // namespace tw::test
