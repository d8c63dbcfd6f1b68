// tilewave profile transcribe: where the time of a transcription goes.

#include "apps/tilewave/profile.hpp"

#include <algorithm>
#include <chrono>

#include "apps/tilewave/output.hpp"
#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "benchmarks/harness.hpp"
#include "command.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/speech.hpp"

namespace tw::cli {

// --- OperatorTimer

void OperatorTimer::stage_begin(std::string_view name, const Stream&) { stage_ = name; }

std::size_t OperatorTimer::row_of(const models::Operator& op, Device device) {
  const auto [found, added] = rows_.try_emplace({stage_, std::string(op.name)}, times_.size());
  if (added) times_.push_back({.stage = stage_, .name = std::string(op.name), .kind = op.kind, .device = device});
  return found->second;
}

void OperatorTimer::operator_begin(std::string_view, int, const Stream& stream) {
  constexpr double kReadBytes = 64 << 20;  // more than an L2 cache; takes a GPU longer than the host takes to enqueue an operator
  begin_.emplace(stream.device());
  end_.emplace(stream.device());
  if (stream.device().is_cuda()) {
    if (!read_) read_.emplace(kReadBytes, stream);
    read_->contender().launch();
  }
  begin_->record(stream);
}

void OperatorTimer::operator_end(const models::Operator& op, const Tensor* output, const Stream& stream) {
  if (output == nullptr) return;
  end_->record(stream);
  const std::size_t row = row_of(op, stream.device());
  ++times_[row].calls;
  times_[row].bytes += op.bytes;
  times_[row].flops += op.flops;
  calls_.push_back({row, *begin_, *end_});
}

void OperatorTimer::stage_end(std::string_view, const Stream&) {
  try {
    for (const Call& call : calls_) times_[call.row].seconds += Event::milliseconds(call.begin, call.end) * 1e-3;
  } catch (...) {
    problem_ = std::current_exception();
  }
  calls_.clear();
}

const std::vector<OperatorTimes>& OperatorTimer::times() const {
  if (problem_) std::rethrow_exception(problem_);
  return times_;
}

void OperatorTimer::clear() {
  times_.clear();
  rows_.clear();
}

// --- Trace

Trace::Trace() {
  const Stream host = Stream::standard(Device::cpu());
  began_.record(host);
  origins_.emplace(host.device().name(), Origin{began_, 0});
}

const Trace::Origin& Trace::origin(const Stream& stream) {
  const auto found = origins_.find(stream.device().name());
  if (found != origins_.end()) return found->second;
  stream.synchronize();
  Origin now{Event(stream.device()), 0};
  now.event.record(stream);
  now.event.synchronize();
  Event clock(Device::cpu());
  clock.record(Stream::standard(Device::cpu()));
  now.us = Event::milliseconds(began_, clock) * 1e3;
  return origins_.emplace(stream.device().name(), now).first->second;
}

Trace::Span Trace::start(Row row, std::string_view name, const Stream& stream) {
  origin(stream);
  Span span{row, std::string(name), Event(stream.device()), Event(stream.device())};
  span.begin.record(stream);
  return span;
}

void Trace::finish(Span& span, const Stream& stream) {
  span.end.record(stream);
  spans_.push_back(std::move(span));
}

void Trace::stage_begin(std::string_view name, const Stream& stream) {
  spans_.clear();
  stage_ = start(stages, name, stream);
}

void Trace::stage_end(std::string_view, const Stream& stream) {
  if (!stage_) return;  // it did not begin
  try {
    finish(*stage_, stream);
    // Times within a stage are relative to its begin: single precision does not hold the microseconds of a long recording.
    const Event begin = spans_.back().begin;
    const Origin& from = origin(stream);
    const double begin_us = from.us + Event::milliseconds(from.event, begin) * 1e3;
    for (const Span& span : spans_)
      finished_.push_back({span.row, span.name, begin_us + Event::milliseconds(begin, span.begin) * 1e3,
                           Event::milliseconds(span.begin, span.end) * 1e3, span.layer, span.bytes, span.flops});
  } catch (...) {
    problem_ = std::current_exception();
  }
  stage_.reset();
  spans_.clear();
}

void Trace::operator_begin(std::string_view name, int layer, const Stream& stream) {
  operator_ = start(operators, name, stream);
  operator_->layer = layer;
}

void Trace::operator_end(const models::Operator& op, const Tensor* output, const Stream& stream) {
  if (output == nullptr) return;
  operator_->bytes = op.bytes;
  operator_->flops = op.flops;
  finish(*operator_, stream);
}

void Trace::launch_begin(const KernelSpec& kernel, const Stream& stream) {
  if (stage_) kernel_ = start(kernels, kernel.name, stream);
}

void Trace::launch_end(const KernelSpec&, const Stream& stream) {
  if (stage_) finish(*kernel_, stream);
}

std::string Trace::json() const {
  if (problem_) std::rethrow_exception(problem_);
  auto events = nlohmann::ordered_json::array();
  const std::pair<Row, const char*> names[] = {{stages, "stages"}, {operators, "operators"}, {kernels, "kernels"}};
  for (const auto& [row, name] : names)
    events.push_back({{"name", "thread_name"}, {"ph", "M"}, {"pid", 1}, {"tid", static_cast<int>(row)}, {"args", {{"name", name}}}});
  for (const Finished& span : finished_) {
    nlohmann::ordered_json arguments = nlohmann::ordered_json::object();
    if (span.layer >= 0) arguments["layer"] = span.layer;
    if (span.row == operators) {
      arguments["bytes"] = span.bytes;
      arguments["flops"] = span.flops;
    }
    const char* category = span.row == stages ? "stage" : span.row == operators ? "operator" : "kernel";
    events.push_back({{"name", span.name},
                      {"cat", category},
                      {"ph", "X"},
                      {"ts", span.begin_us},
                      {"dur", span.us},
                      {"pid", 1},
                      {"tid", static_cast<int>(span.row)},
                      {"args", std::move(arguments)}});
  }
  return json_line(events) + "\n";
}

// --- The command

namespace {

struct ProfileArguments {
  ModelArguments model;
  std::string audio, reference, trace, output;
  bool json = false, attention_only = false, linear_only = false;
  int warmup = 1, runs = 3;
  double bandwidth = 0, tflops = 0;
  speech::TranscribeOptions options;
};

/// What the device can do at most.
struct Limits {
  double bytes_per_second = 0, flops = 0;
  std::string source;
};

}  // namespace

double peak_flops(Device device, DType dtype, std::string& source) {
  if (!device.is_cuda()) {
    source = "multiply-adds in registers";
    return bench::measure_fma_peak() * 1e9 * cpu_threads();
  }
  if (const auto known = bench::gpu_limits(device_info(device).name)) {
    source = "data sheet";
    return (dtype == DType::f32 ? known->tf32_tflops : known->bf16_tflops) * 1e12;
  }
  source = "product of 4096";
  constexpr std::int64_t n = 4096;
  const Stream stream = Stream::standard(device);
  const Tensor a = bench::random_normal({n, n}, dtype, device, 1), b = bench::random_normal({n, n}, dtype, device, 2),
               d = Tensor::empty({n, n}, dtype, stream);
  return 2.0 * n * n * n / (milliseconds(stream, [&] { gemm(a, b.transpose(0, 1), d, {.stream = stream}); }) * 1e-3);
}

namespace {

Limits find_limits(const ProfileArguments& a, Device device, DType dtype) {
  std::string flops_source = "--tflops";
  Limits limits;
  limits.bytes_per_second = a.bandwidth > 0 ? a.bandwidth * 1e9 : read_bandwidth(device);
  limits.flops = a.tflops > 0 ? a.tflops * 1e12 : peak_flops(device, dtype, flops_source);
  limits.source = tw::format("{:.1f} GB/s ({}), {:.2f} TFLOP/s ({})", limits.bytes_per_second * 1e-9,
                             a.bandwidth > 0 ? "--bandwidth" : "a large read", limits.flops * 1e-12, flops_source);
  return limits;
}

std::string_view name_of(models::OperatorKind kind) {
  switch (kind) {
    case models::OperatorKind::linear:
      return "linear";
    case models::OperatorKind::attention:
      return "attention";
    case models::OperatorKind::other:
      break;
  }
  return "other";
}

/// An operator held against the limits.
struct Share {
  double limit_seconds = 0;  ///< of all calls
  bool arithmetic = false;   ///< what sets the limit
};

Share share_of(const OperatorTimes& row, const Limits& limits) {
  const double memory = row.bytes / limits.bytes_per_second, arithmetic = row.flops / limits.flops;
  return {std::max(memory, arithmetic), arithmetic > memory};
}

/// Times of whole stages, from a run in which operators were not timed.
void print_components(std::FILE* report, const speech::Timings& t) {
  const double all = t.features + t.encoder + t.prefill + t.decode;
  const auto line = [&](const char* name, double seconds, const std::string& more) {
    tw::print(report, "{:<18} {:>10.3f} ms {:>5.1f} %  {}\n", name, seconds * 1e3, all > 0 ? 100 * seconds / all : 0, more);
  };
  tw::print(report, "\nComponents (fastest run, operators not timed)\n");
  line("features", t.features, "");
  line("encoder, projector", t.encoder, "");
  line("prefill", t.prefill, tw::format("{} tokens", t.prompt_tokens));
  line("decode", t.decode,
       t.decode_steps == 0 ? std::string("no steps")
                           : tw::format("{} steps, {:.3f} ms each", t.decode_steps, t.decode / static_cast<double>(t.decode_steps) * 1e3));
}

void print_operators(std::FILE* report, const std::vector<OperatorTimes>& rows, const Limits& limits, Device device) {
  tw::print(report, "\nOperators (one run; limits: {})\n", limits.source);
  tw::print(report, "{:<9} {:<12} {:>7} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9} {:>6}  {}\n", "stage", "operator", "calls", "total ms",
            "mean us", "MB", "GFLOP", "GB/s", "GFLOP/s", "/limit", "bound by");
  for (const OperatorTimes& row : rows) {
    const double calls = static_cast<double>(row.calls);
    const auto number = [](double value, bool known) { return known ? tw::format("{:.4g}", value) : std::string("-"); };
    const Share share = share_of(row, limits);
    const bool comparable = row.device == device && row.seconds > 0;
    tw::print(report, "{:<9} {:<12} {:>7} {:>10.3f} {:>10.2f} {:>9} {:>9} {:>9} {:>9} {:>6}  {}\n", row.stage, row.name, row.calls,
              row.seconds * 1e3, row.seconds / calls * 1e6, number(row.bytes / calls * 1e-6, true),
              number(row.flops / calls * 1e-9, row.flops > 0), number(row.bytes / row.seconds * 1e-9, row.seconds > 0),
              number(row.flops / row.seconds * 1e-9, row.flops > 0 && row.seconds > 0),
              comparable ? tw::format("{:.2f}", share.limit_seconds / row.seconds) : std::string("-"),
              !comparable        ? "-"
              : share.arithmetic ? "arithmetic"
                                 : "memory");
  }
}

nlohmann::ordered_json operators_json(const std::vector<OperatorTimes>& rows, const Limits& limits, Device device) {
  auto list = nlohmann::ordered_json::array();
  for (const OperatorTimes& row : rows) {
    const Share share = share_of(row, limits);
    nlohmann::ordered_json json{{"stage", row.stage},
                                {"operator", row.name},
                                {"kind", name_of(row.kind)},
                                {"device", row.device.name()},
                                {"calls", row.calls},
                                {"seconds", row.seconds},
                                {"mean_us", row.seconds / static_cast<double>(row.calls) * 1e6},
                                {"bytes", row.bytes},
                                {"flops", row.flops}};
    const bool comparable = row.device == device && row.seconds > 0;
    json["limit_seconds"] = comparable ? nlohmann::ordered_json(share.limit_seconds) : nlohmann::ordered_json(nullptr);
    json["share"] = comparable ? nlohmann::ordered_json(share.limit_seconds / row.seconds) : nlohmann::ordered_json(nullptr);
    json["bound"] = comparable ? nlohmann::ordered_json(share.arithmetic ? "arithmetic" : "memory") : nlohmann::ordered_json(nullptr);
    list.push_back(std::move(json));
  }
  return list;
}

int run(ProfileArguments& a) {
  std::optional<Output> trace_file, output;
  if (!a.trace.empty()) trace_file.emplace(a.trace);
  if (!a.output.empty()) output.emplace(a.output);
  using Clock = std::chrono::steady_clock;
  std::FILE* report = a.json ? stderr : stdout;
  const std::vector<float> samples = speech::read_audio(a.audio);
  const std::string model = a.model.model.empty() ? default_model() : a.model.model;
  const speech::Transcriber transcriber(model, load_options(a.model));
  const Device device = transcriber.options().device;
  const DType dtype = *transcriber.options().dtype;
  tw::print(report, "Model: {} on {} ({}) in {}\n", shown_line(report, model), device.name(), device_info(device).name, tw::name_of(dtype));
  const std::span<const float> files[] = {samples};

  for (int i = 0; i < a.warmup; ++i) transcriber.transcribe(files, a.options);
  std::vector<double> seconds;
  speech::Transcripts fastest;
  for (int i = 0; i < a.runs; ++i) {
    const auto begin = Clock::now();
    speech::Transcripts result = transcriber.transcribe(files, a.options);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    tw::print(report, "Run {}: {:.4f} s\n", i + 1, seconds.back());
    if (seconds.back() <= *std::min_element(seconds.begin(), seconds.end())) fastest = std::move(result);
  }
  double average = 0;
  for (const double each : seconds) average += each / static_cast<double>(seconds.size());
  const std::string text = fastest.files[0].text;
  tw::print(report, "Average: {:.4f} s\nTranscription: {}\n", average, shown_line(report, text));
  const bool judged = !a.reference.empty();
  const double accuracy = judged ? word_accuracy(text, a.reference) : 0;
  const bool passed = !judged || accuracy > 0.8;
  if (judged)
    tw::print(report, "Reference: {}\nWord accuracy: {:.1f} %\nStatus: {}\n", shown_line(report, a.reference), accuracy * 100,
              passed ? "PASS" : "FAIL");
  print_components(report, fastest.timings);

  const Limits limits = find_limits(a, device, dtype);
  OperatorTimer timer;
  {
    const models::Observing observing(&timer);
    // Operators that run one at a time may need kernels that the runs before did not.
    for (int i = 0; i < std::min(a.warmup, 1); ++i) transcriber.transcribe(files, a.options);
    timer.clear();
    transcriber.transcribe(files, a.options);
  }
  std::vector<OperatorTimes> rows = timer.times();
  std::erase_if(rows, [&](const OperatorTimes& row) {
    return (a.attention_only && row.kind != models::OperatorKind::attention) || (a.linear_only && row.kind != models::OperatorKind::linear);
  });
  print_operators(report, rows, limits, device);

  if (trace_file) {
    Trace trace;
    {
      const models::Observing observing(&trace);
      const ObserveLaunches launches(&trace);
      transcriber.transcribe(files, a.options);
    }
    trace_file->write(trace.json());
    tw::print(report, "\nTrace: {}: open it in ui.perfetto.dev or chrome://tracing\n", shown_line(report, a.trace));
  }
  const speech::Timings& t = fastest.timings;
  const nlohmann::ordered_json json{
      {"file", a.audio},
      {"model", model},
      {"device", device.name()},
      {"device_name", device_info(device).name},
      {"dtype", tw::name_of(dtype)},
      {"text", text},
      {"reference", judged ? nlohmann::ordered_json(a.reference) : nlohmann::ordered_json(nullptr)},
      {"word_accuracy", judged ? nlohmann::ordered_json(accuracy) : nlohmann::ordered_json(nullptr)},
      {"passed", judged ? nlohmann::ordered_json(passed) : nlohmann::ordered_json(nullptr)},
      {"runs", seconds},
      {"average", average},
      {"seconds", {{"features", t.features}, {"encoder", t.encoder}, {"prefill", t.prefill}, {"decode", t.decode}}},
      {"prompt_tokens", t.prompt_tokens},
      {"decode_steps", t.decode_steps},
      {"limits", {{"bytes_per_second", limits.bytes_per_second}, {"flops", limits.flops}}},
      {"operators", operators_json(rows, limits, device)}};
  if (output) output->write(json_text(json));
  if (a.json) print_json(json);
  return passed ? kOk : kFailure;
}

}  // namespace

void add_profile(CLI::App& app, int& exit_code) {
  CLI::App* profile = app.add_subcommand("profile", "Show where a model's time goes, operator by operator");
  profile->require_subcommand(1);
  CLI::App* command = profile->add_subcommand(
      "transcribe", "Transcribe a recording, time its stages and every operator, and compare the operators with the device's limits");
  static ProfileArguments a;
  completes_with_files(command->add_option("AUDIO", a.audio, "A recording, as in `tilewave transcribe`")->required());
  add_model_options(*command, a.model);
  command->add_option("--reference", a.reference, "The recording's text: also print the word accuracy and PASS above 80 %")
      ->type_name("TEXT");
  CLI::Option* attention = command->add_flag("--attention-only", a.attention_only, "List only attention");
  command->add_flag("--linear-only", a.linear_only, "List only products with weights: linear layers and convolutions")->excludes(attention);
  command
      ->add_option("--trace", a.trace,
                   "Write a trace of stages, operators and (on a GPU) kernels, for ui.perfetto.dev and chrome://tracing")
      ->type_name("FILE");
  command->add_flag("--json", a.json, "Print JSON; the tables go to standard error");
  command->add_option("--output", a.output, "Also write the JSON to this file")->type_name("FILE");
  command->add_option("--warmup", a.warmup, "Runs before the measured ones")->check(CLI::Range(0, 1000))->capture_default_str();
  command->add_option("--runs", a.runs, "Measured runs of the whole, before the one in which operators are timed")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--bandwidth", a.bandwidth, "The memory's bandwidth in GB/s; default: measured")->check(CLI::PositiveNumber);
  command->add_option("--tflops", a.tflops, "The device's TFLOP/s; default: the GPU's data sheet, or measured")->check(CLI::PositiveNumber);
  command->add_option("--batch", a.options.batch, "Segments per batch")->check(CLI::Range(1, 16))->capture_default_str();
  command->add_option("--max-new-tokens", a.options.max_new_tokens, "Maximum number of tokens per segment")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_flag("--ignore-eos", a.options.ignore_end, "Always generate --max-new-tokens tokens (for random weights)");
  command->footer(
      "/limit is the time that the bytes take at the memory's bandwidth, or the FLOPs at the peak rate, whichever is longer, divided by "
      "the\ntime taken. Operators are timed one at a time; docs/profile.md says how.");
  command->callback([&exit_code] { exit_code = run(a); });
}

}  // namespace tw::cli
