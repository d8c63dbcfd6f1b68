// tilewave bench transcribe: times the transcription of a recording.

#include <sys/resource.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <sstream>
#include <thread>

#include "apps/tilewave/bench_stages.hpp"
#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "benchmarks/peers/openblas.hpp"
#include "benchmarks/yardsticks.hpp"
#include "command.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"

namespace tw::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct BenchTranscribeArguments {
  ModelArguments model;
  std::string audio, reference;
  int warmup = 1, runs = 3;
  std::vector<int> batch;
  speech::TranscribeOptions options;
  bool json = false, stages = false;
  StageBenchArguments stage_bench;
};

/// Words in lower case without punctuation.
std::vector<std::string> folded_words(const std::string& text) {
  std::string folded;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80 || std::isalnum(byte) || c == '\'') {
      folded += static_cast<char>(std::tolower(byte));
    } else {
      folded += ' ';
    }
  }
  std::istringstream stream(folded);
  return {std::istream_iterator<std::string>(stream), {}};
}

}  // namespace

double word_accuracy(const std::string& text, const std::string& reference) {
  const std::vector<std::string> a = folded_words(text), b = folded_words(reference);
  if (b.empty()) return a.empty() ? 1 : 0;
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t best = std::min({diagonal + (a[i - 1] != b[j - 1] ? 1u : 0u), row[j] + 1, row[j - 1] + 1});
      diagonal = std::exchange(row[j], best);
    }
  }
  return std::max(0.0, 1 - static_cast<double>(row.back()) / static_cast<double>(b.size()));
}

double read_bandwidth(Device device) {
  constexpr double kBytes = 1 << 28;
  const Stream stream = Stream::standard(device);
  if (device.is_cuda()) {
    const bench::ReadYardstick read(4 * kBytes, stream);
    return read.bytes() / (milliseconds(stream, read.contender().launch) * 1e-3);
  }
  const int threads = cpu_threads();
  std::vector<bench::ReadYardstick> reads;
  for (int i = 0; i < threads; ++i) reads.emplace_back(kBytes, stream);
  std::vector<std::function<void()>> work;
  for (const bench::ReadYardstick& read : reads) work.push_back(read.contender().launch);
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto begin = Clock::now();
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work[static_cast<std::size_t>(i)]);
    work[0]();
    for (std::thread& thread : others) thread.join();
    best = std::max(best, threads * reads[0].bytes() / seconds_since(begin));
  }
  return best;
}

namespace {

/// FLOP/s of OpenBLAS's sgemm with as many threads as kernels use, at the size of the encoder's products; 0 without OpenBLAS.
double sgemm_rate(std::string& problem) {
  bench::OpenBlas blas;
  if (!blas.open(problem, cpu_threads())) return 0;
  constexpr std::int64_t m = 1500, n = 5120, k = 1280;
  const Tensor a = Tensor::random({m, k}, DType::f32, 1), b = Tensor::random({n, k}, DType::f32, 2), d = Tensor::empty({m, n}, DType::f32);
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto begin = Clock::now();
    blas.sgemm(a, b.transpose(0, 1), d);
    best = std::max(best, 2.0 * m * n * k / seconds_since(begin));
  }
  return best;
}

/// Compares the stages with their limits.
void print_stages(std::FILE* report, const speech::Transcriber& transcriber, const speech::Timings& timings, std::int64_t windows,
                  std::int64_t longest_context, double peak_bytes) {
  const speech::ModelSize size = transcriber.size();
  const Device device = transcriber.options().device;
  tw::print(report, "Stages: features {:.3f} s, encoder {:.3f} s, prefill {:.3f} s ({} tokens), decode {:.3f} s ({} steps)\n",
            timings.features, timings.encoder, timings.prefill, timings.prompt_tokens, timings.decode, timings.decode_steps);
  if (timings.decode_steps > 0) {
    const double step = timings.decode / static_cast<double>(timings.decode_steps);
    const double rate = static_cast<double>(size.decode_bytes) / step, read = read_bandwidth(device);
    tw::print(report, "Decode: {:.2f} ms per step, {:.1f} GB/s of weights; {:.1f} GB/s is the memory's read bandwidth: {:.2f} of it\n",
              step * 1e3, rate * 1e-9, read * 1e-9, rate / read);
  }
  if (windows > 0 && !device.is_cuda()) {
    const double window = timings.encoder / static_cast<double>(windows);
    std::string problem;
    const double rate = sgemm_rate(problem);
    tw::print(report, "Encoder: {:.3f} s per window, {:.1f} GFLOP/s", window, size.encoder_flops / window * 1e-9);
    if (rate > 0)
      tw::print(report, "; OpenBLAS sgemm would take {:.3f} s ({:.1f} GFLOP/s): {:.2f} times that\n", size.encoder_flops / rate,
                rate * 1e-9, window * rate / size.encoder_flops);
    else
      tw::print(report, "; no OpenBLAS to compare with: {}\n", problem);
  }
  if (!device.is_cuda()) {
    const double cache = static_cast<double>(size.cache_bytes * longest_context);
    tw::print(report, "Memory: peak {:.3f} GB; weights {:.3f} GB, keys and values {:.3f} GB; everything else: {:.3f} of the weights\n",
              peak_bytes * 1e-9, static_cast<double>(size.weight_bytes) * 1e-9, cache * 1e-9,
              (peak_bytes - cache) / static_cast<double>(size.weight_bytes) - 1);
  }
}

int run(BenchTranscribeArguments& a) {
  std::FILE* report = a.json ? stderr : stdout;  // for people
  const std::vector<float> samples = speech::read_audio(a.audio);
  const double duration = static_cast<double>(samples.size()) / 16000;
  const std::string model = a.model.model.empty() ? default_model() : a.model.model;
  const auto begin = Clock::now();
  const speech::Transcriber transcriber(model, load_options(a.model));
  const double load_seconds = seconds_since(begin);
  const speech::LoadOptions& loaded = transcriber.options();
  const bool plain = loaded.weights.format == WeightFormat::plain;
  tw::print(report, "Model: {} on {} in {}{}, loaded in {:.3f} s\n", shown_line(report, model), loaded.device.name(),
            name_of(*loaded.dtype), plain ? "" : " with weights in " + text_of(loaded.weights), load_seconds);
  const std::span<const float> files[] = {samples};
  for (int i = 0; i < a.warmup; ++i) transcriber.transcribe(files, a.options);
  double sum = 0, best = 1e300;
  auto seconds_of_runs = nlohmann::ordered_json::array();
  speech::Transcripts result, fastest;
  for (int i = 0; i < a.runs; ++i) {
    const auto start = Clock::now();
    result = transcriber.transcribe(files, a.options);
    const double seconds = seconds_since(start);
    tw::print(report, "Run {}: {:.4f} s\n", i + 1, seconds);
    seconds_of_runs.push_back(seconds);
    sum += seconds;
    if (seconds < best) {
      best = seconds;
      fastest = result;
    }
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const speech::Transcript& transcript = fastest.files[0];
  const double average = sum / a.runs, accuracy = word_accuracy(transcript.text, a.reference);
  std::int64_t windows = 0;
  for (const speech::TranscriptSegment& segment : transcript.segments)
    windows += static_cast<std::int64_t>((segment.end - segment.begin) / 30 - 1e-9) + 1;
  tw::print(report, "Average: {:.4f} s\n", average);
  tw::print(report, "Transcription: {}\n", shown_line(report, transcript.text));
  tw::print(report, "Reference: {}\n", shown_line(report, a.reference));
  tw::print(report, "Word accuracy: {:.1f} %\n", accuracy * 100);
  tw::print(report, "Real-time factor: {:.4f} ({:.1f} times real time)\n", average / duration, duration / average);
  print_stages(report, transcriber, fastest.timings, windows, fastest.timings.prompt_tokens + fastest.timings.decode_steps + 1,
               static_cast<double>(usage.ru_maxrss) * 1024);
  const bool judged = !a.options.ignore_end, passed = !judged || accuracy > 0.8;
  if (judged) tw::print(report, "Status: {}\n", passed ? "PASS" : "FAIL");
  if (a.json) {
    const speech::Timings& t = fastest.timings;
    print_json({{"file", a.audio},
                {"text", transcript.text},
                {"reference", a.reference},
                {"duration", duration},
                {"word_accuracy", judged ? nlohmann::ordered_json(accuracy) : nlohmann::ordered_json(nullptr)},
                {"passed", judged ? nlohmann::ordered_json(passed) : nlohmann::ordered_json(nullptr)},
                {"runs", seconds_of_runs},
                {"average", average},
                {"seconds",
                 {{"load", load_seconds}, {"features", t.features}, {"encoder", t.encoder}, {"prefill", t.prefill}, {"decode", t.decode}}},
                {"prompt_tokens", t.prompt_tokens},
                {"decode_steps", t.decode_steps},
                {"model", model},
                {"device", transcriber.options().device.name()},
                {"dtype", name_of(*transcriber.options().dtype)},
                {"weights", text_of(transcriber.options().weights)}});
  }
  return passed ? kOk : kFailure;
}

}  // namespace

void add_bench_transcribe(CLI::App& bench, int& exit_code) {
  CLI::App* command = bench.add_subcommand(
      "transcribe", "Time the transcription of a recording; compare its text with a reference and its stages with their limits");
  static BenchTranscribeArguments a;
  CLI::Option* audio = command->add_option("--audio", a.audio, "The recording")->type_name("FILE");
  command->add_option("--reference", a.reference, "The recording's text; case and punctuation are ignored")->type_name("TEXT");
  add_model_options(*command, a.model);
  command->add_option("--warmup", a.warmup, "Runs before the measured ones")->check(CLI::Range(0, 1000))->capture_default_str();
  command->add_option("--runs", a.runs, "Measured runs")->check(CLI::Range(1, 1000))->capture_default_str();
  command->add_option("--batch", a.batch, "Segments per batch, 1 to 16, default 8; with --stages the decoder's batches, default 1 8 16 64")
      ->check(CLI::Range(1, 1024));
  command->add_option("--max-new-tokens", a.options.max_new_tokens, "Maximum number of tokens per segment")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_flag("--ignore-eos", a.options.ignore_end,
                    "Always generate --max-new-tokens tokens and do not check the text (for random weights)");
  command->add_flag("--json", a.json, "Print JSON; messages go to standard error");
  CLI::Option* stages = command->add_flag(
      "--stages", a.stages,
      "Instead of a recording, time each stage at set sizes: log-mel, encoder, prefill, decoding steps, 30 s of audio and 200 tokens");
  stages->excludes(audio);
  command->add_option("--windows", a.stage_bench.windows, "With --stages: windows per call of the encoder")
      ->check(CLI::Range(1, 1024))
      ->needs(stages)
      ->capture_default_str();
  command->add_option("--samples", a.stage_bench.samples, "With --stages: measurements of each row, of which the median counts")
      ->check(CLI::Range(1, 1000))
      ->needs(stages)
      ->capture_default_str();
  command->add_option("--output", a.stage_bench.output, "With --stages: also write the records to this file, as JSON")
      ->type_name("FILE")
      ->needs(stages);
  command
      ->add_option("--commit", a.stage_bench.commit,
                   "With --stages: the commit to record; default: the one that this program was built from")
      ->type_name("TEXT")
      ->needs(stages);
  command->footer("The status is PASS if the word accuracy is above 80 %, otherwise FAIL with exit code 1.");
  command->callback([&exit_code, audio] {
    if (a.stages) {
      a.stage_bench.model = a.model;
      a.stage_bench.json = a.json;
      if (!a.batch.empty()) a.stage_bench.batches = a.batch;
      exit_code = bench_stages(a.stage_bench);
      return;
    }
    if (audio->count() == 0) throw CLI::RequiredError("--audio");
    if (a.batch.size() > 1 || (a.batch.size() == 1 && a.batch[0] > 16))
      throw UsageError("bench transcribe: --batch is one number from 1 to 16, except with --stages");
    if (a.batch.size() == 1) a.options.batch = a.batch[0];
    if (!a.options.ignore_end && a.reference.empty()) throw UsageError("bench transcribe: give --reference or --ignore-eos");
    exit_code = run(a);
  });
}

}  // namespace tw::cli
