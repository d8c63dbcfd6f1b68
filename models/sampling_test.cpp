#include "models/sampling.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/expect_error.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using test::expect_error;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint64_t kDraws = 4000;

/// How often each token is drawn, over steps of one sequence.
std::vector<double> histogram(const std::vector<float>& scores, const SamplingOptions& options) {
  std::vector<double> counts(scores.size());
  for (std::uint64_t step = 0; step < kDraws; ++step) ++counts.at(static_cast<std::size_t>(sample(scores, options, 0, step)));
  return counts;
}

/// Expects counts of these probabilities: Pearson's chi-square against its mean plus 5 deviations. Seeds are fixed, so it holds always or
/// never.
void expect_distribution(const std::vector<double>& counts, const std::vector<double>& probabilities) {
  double chi_square = 0, freedom = -1;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (probabilities[i] == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i;
      continue;
    }
    const double expected = probabilities[i] * static_cast<double>(kDraws);
    chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    ++freedom;
  }
  EXPECT_LE(chi_square, freedom + 5 * std::sqrt(2 * freedom));
}

/// softmax(scores / temperature) over the tokens in `kept`, 0 elsewhere.
std::vector<double> softmax(const std::vector<float>& scores, double temperature, const std::vector<std::size_t>& kept) {
  std::vector<double> p(scores.size());
  double sum = 0;
  for (const std::size_t i : kept) sum += p[i] = std::exp(scores[i] / temperature);
  for (double& x : p) x /= sum;
  return p;
}

const std::vector<float> kScores = {0.5f, -1.0f, 2.0f, 0.0f, 1.5f, -0.5f};

TEST(Sampling, TemperatureDividesScores) {
  for (const double temperature : {0.5, 1.0, 3.0}) {
    SCOPED_TRACE(temperature);
    expect_distribution(histogram(kScores, {.temperature = temperature, .seed = 7}), softmax(kScores, temperature, {0, 1, 2, 3, 4, 5}));
  }
  // Near 0 it is greedy, far above the scores' range uniform.
  EXPECT_EQ(histogram(kScores, {.temperature = 1e-3, .seed = 7})[2], static_cast<double>(kDraws));
  expect_distribution(histogram(kScores, {.temperature = 100, .seed = 7}), softmax(kScores, 100, {0, 1, 2, 3, 4, 5}));
}

TEST(Sampling, LargeScoresDoNotOverflow) {
  const std::vector<float> scores = {3e38f, 3e38f, -3e38f};
  for (const double temperature : {1e-3, 1.0, 100.0}) {
    expect_distribution(histogram(scores, {.temperature = temperature, .seed = 1}), {0.5, 0.5, 0});
  }
}

TEST(Sampling, TopPKeepsTheFewestThatTogetherHaveIt) {
  // Probabilities: token 2 0.459, 4 0.278, 0 0.102, 3 0.062, 5 0.038, 1 0.023.
  const std::vector<double> p = softmax(kScores, 1, {0, 1, 2, 3, 4, 5});
  const std::vector<std::size_t> order = {2, 4, 0, 3, 5, 1};
  double sum = 0;
  std::vector<std::size_t> kept;
  for (const std::size_t token : order) {
    // Just more than those before have: this one is in. Just as much as with it: the next is not.
    kept.push_back(token);
    for (const double top_p : {sum + 1e-6, sum + p[token] - 1e-6}) {
      SCOPED_TRACE(top_p);
      expect_distribution(histogram(kScores, {.temperature = 1, .top_p = top_p, .seed = 3}), softmax(kScores, 1, kept));
    }
    sum += p[token];
  }
  expect_distribution(histogram(kScores, {.temperature = 1, .top_p = 1e-12, .seed = 3}), {0, 0, 1, 0, 0, 0});
}

TEST(Sampling, TopPIsOfProbabilitiesWithTheTemperature) {
  // With temperature 4 tokens are nearly alike, and 0.5 of their probability takes three instead of two.
  const std::vector<double> p = softmax(kScores, 4, {0, 1, 2, 3, 4, 5});
  ASSERT_LT(p[2] + p[4], 0.5);
  ASSERT_GT(p[2] + p[4] + p[0], 0.5);
  expect_distribution(histogram(kScores, {.temperature = 4, .top_p = 0.5, .seed = 5}), softmax(kScores, 4, {2, 4, 0}));
}

TEST(Sampling, TiesAreKeptInTheOrderOfTokens) {
  const std::vector<float> scores = {1, 1, 1, 1};  // weights of exactly 1: sums are exact
  expect_distribution(histogram(scores, {.temperature = 1, .top_p = 0.25, .seed = 1}), {1, 0, 0, 0});
  expect_distribution(histogram(scores, {.temperature = 1, .top_p = 0.5, .seed = 1}), {0.5, 0.5, 0, 0});
  expect_distribution(histogram(scores, {.temperature = 1, .top_p = 0.51, .seed = 1}), {1. / 3, 1. / 3, 1. / 3, 0});
  expect_distribution(histogram({0, 1, 0, 1}, {.temperature = 1e-2, .top_p = 0.5, .seed = 1}), {0, 1, 0, 0});
}

TEST(Sampling, NaNIsNeverTaken) {
  const std::vector<float> scores = {kNaN, 1, kNaN, 0, kNaN};
  for (const double top_p : {1.0, 0.9999}) {
    expect_distribution(histogram(scores, {.temperature = 1, .top_p = top_p, .seed = 2}), softmax(scores, 1, {1, 3}));
  }
  EXPECT_EQ(sample(std::vector<float>{kNaN, kNaN, kNaN}, {.temperature = 1}, 0, 0), 0);
  EXPECT_EQ(sample(std::vector<float>{kNaN, kNaN, -5}, {.temperature = 1}, 0, 0), 2);
}

TEST(Sampling, Infinities) {
  expect_distribution(histogram({-kInfinity, 0, -kInfinity, 0}, {.temperature = 1, .seed = 2}), {0, 0.5, 0, 0.5});
  for (std::uint64_t step = 0; step < 100; ++step) {
    EXPECT_EQ(sample(std::vector<float>{0, kInfinity, 1, kInfinity}, {.temperature = 1}, 0, step), 1);
    EXPECT_EQ(sample(std::vector<float>{kNaN, -kInfinity, -kInfinity}, {.temperature = 1}, 0, step), 1);
  }
}

TEST(Sampling, ADrawDependsOnSeedSequenceAndStepAlone) {
  const std::vector<float> scores(1000, 0.0f);  // 1000 tokens alike: two draws are equal once in 1000
  const auto draws = [&](std::uint64_t seed, std::uint64_t sequence) {
    std::vector<int> all;
    for (std::uint64_t step = 0; step < 50; ++step) all.push_back(sample(scores, {.temperature = 1, .seed = seed}, sequence, step));
    return all;
  };
  const auto same = [](const std::vector<int>& a, const std::vector<int>& b) {
    int count = 0;
    for (std::size_t i = 0; i < a.size(); ++i) count += a[i] == b[i];
    return count;
  };
  const std::vector<int> first = draws(1, 0);
  EXPECT_EQ(draws(1, 0), first);
  const std::uint64_t high = std::uint64_t{1} << 32;  // upper halves count, too
  for (const auto& other : {draws(2, 0), draws(1, 1), draws(1 + high, 0), draws(1, high)}) EXPECT_LE(same(first, other), 3);
  std::vector<int> sorted = first;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_GE(std::unique(sorted.begin(), sorted.end()) - sorted.begin(), 45);  // steps differ
  // Over sequences the draws are as random as over steps.
  std::vector<double> counts(kScores.size());
  for (std::uint64_t sequence = 0; sequence < kDraws; ++sequence)
    ++counts[static_cast<std::size_t>(sample(kScores, {.temperature = 1, .seed = 9}, sequence, 4))];
  expect_distribution(counts, softmax(kScores, 1, {0, 1, 2, 3, 4, 5}));
}

TEST(Sampling, OptionsOutOfRange) {
  check({});
  check({.temperature = 100, .top_p = 1});
  check({.temperature = 1e-9, .top_p = 1e-9});
  for (const double temperature : {-0.1, 100.5, HUGE_VAL, std::nan("")})
    expect_error<InvalidArgument>([&] { check({.temperature = temperature}); }, {"temperature is ", "; it must be from 0 to 100"});
  for (const double top_p : {0.0, -1.0, 1.01, std::nan("")})
    expect_error<InvalidArgument>([&] { check({.temperature = 1, .top_p = top_p}); }, {"top_p is ", "; it must be above 0 and at most 1"});
  expect_error<InvalidArgument>([] { check({.temperature = -2}); }, {"temperature is -2;"});
  expect_error<InvalidArgument>([] { check({.top_p = 1.5}); }, {"top_p is 1.5;"});
}

}  // namespace
}  // namespace tw::models
