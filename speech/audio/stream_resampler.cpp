#include "speech/audio/stream_resampler.hpp"

#include <soxr.h>

#include "runtime/format.hpp"
#include "speech/audio/audio.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {

namespace {

void check_soxr(soxr_error_t error) {
  if (error) throw Error(tw::format("soxr: {}", soxr_strerror(error)));
}

}  // namespace

struct StreamResampler::State {
  explicit State(int given) : rate(given) {
    constexpr int kLowest = 1000, kHighest = 768000;  // as of files
    if (rate < kLowest || rate > kHighest)
      throw InvalidArgument(tw::format("sampling_rate is {} Hz; {} to {} are allowed", rate, kLowest, kHighest));
    if (rate == kSamplingRate) return;
    const soxr_io_spec_t io = soxr_io_spec(SOXR_FLOAT32_I, SOXR_FLOAT32_I);
    const soxr_quality_spec_t quality = soxr_quality_spec(SOXR_HQ, 0);
    soxr_runtime_spec_t runtime = soxr_runtime_spec(1);
    runtime.log2_min_dft_size = 8;  // the least: larger ones lag more
    soxr_error_t error = nullptr;
    soxr = soxr_create(rate, kSamplingRate, 1, &error, &io, &quality, &runtime);
    check_soxr(error);
  }
  ~State() { soxr_delete(soxr); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // `samples` null: the end.
  void process(const float* samples, std::size_t count, std::vector<float>& out) {
    do {
      const std::size_t before = out.size(), room = static_cast<std::size_t>(static_cast<double>(count) * kSamplingRate / rate) + 4096;
      out.resize(before + room);
      std::size_t used = 0, made = 0;
      check_soxr(soxr_process(soxr, samples, count, &used, out.data() + before, room, &made));
      out.resize(before + made);
      if (samples) samples += used;
      count -= used;
      if (count == 0 && made < room) return;
    } while (true);
  }

  int rate;
  soxr_t soxr = nullptr;  // null: nothing to do
  bool fed = false;
};

StreamResampler::StreamResampler(int rate) : state_(std::make_unique<State>(rate)) {}
StreamResampler::~StreamResampler() = default;
StreamResampler::StreamResampler(StreamResampler&&) noexcept = default;
StreamResampler& StreamResampler::operator=(StreamResampler&&) noexcept = default;

std::vector<float> StreamResampler::feed(std::span<const float> samples) {
  if (samples.empty()) return {};
  if (!state_->soxr) return {samples.begin(), samples.end()};
  std::vector<float> out;
  state_->process(samples.data(), samples.size(), out);
  state_->fed = true;
  return out;
}

std::vector<float> StreamResampler::finish() {
  std::vector<float> out;
  if (!state_->fed) return out;
  state_->process(nullptr, 0, out);
  check_soxr(soxr_clear(state_->soxr));
  state_->fed = false;
  return out;
}

}  // namespace tw::speech
