// tilewave bench generate: times a language model, and measures how well it predicts a text.

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>

#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "command.hpp"
#include "models/text_model.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

struct BenchGenerateArguments {
  std::string model, text, device = "auto", dtype = "auto", weights = "plain";
  int prompt_tokens = 128, tokens = 64, warmup = 1, runs = 3;
  models::PerplexityOptions perplexity = {};
  bool json = false;
};

std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || !text) throw FileError(tw::format("{} cannot be read", path));
  return text.str();
}

void run(const BenchGenerateArguments& a) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  std::FILE* const report = a.json ? stderr : stdout;  // for people
  Device device = Device::cpu();
  QuantizedMatrix::Layout weights;
  try {
    device = Device::parse(a.device);
    weights = parse_weight_layout(a.weights);
  } catch (const InvalidArgument& error) {
    throw UsageError(tw::format("bench generate: {}", error.what()));
  }
  const DeviceInfo& info = device_info(device);
  if (!info.usable) throw DeviceError(tw::format("{}: {}", info.device.name(), info.problem));
  std::optional<DType> dtype;
  if (a.dtype != "auto") dtype = parse_dtype(a.dtype);
  const std::string text = a.text.empty() ? "" : file_text(a.text);

  const auto begin = Clock::now();
  const models::TextModel model = models::TextModel::load(a.model, device, dtype, weights);
  const double load_seconds = since(begin);
  const models::LlamaConfig& config = model.decoder().config();
  const std::string_view type = name_of(model.decoder().dtype());
  tw::print(report, "Model: {} on {} in {}, weights {}, loaded in {:.3f} s\n", shown_line(report, a.model), device.name(), type,
            text_of(weights), load_seconds);
  if (a.prompt_tokens + a.tokens > config.max_positions)
    throw UsageError(tw::format("bench generate: --prompt-tokens and --tokens are {} in all; the model's context has {}",
                                a.prompt_tokens + a.tokens, config.max_positions));

  std::vector<int> prompt;  // what it says does not matter for the time
  for (int i = 0; i < a.prompt_tokens; ++i) prompt.push_back(static_cast<int>(i * 7919LL % config.vocabulary));
  const models::GenerateOptions options{.max_tokens = a.tokens, .ignore_end = true};
  std::vector<double> prompts, steps;
  for (int i = 0; i < a.warmup + a.runs; ++i) {
    const models::Generated done = model.generate(prompt, options, [](std::string_view) {});
    if (i < a.warmup) continue;
    prompts.push_back(done.prompt_seconds);
    steps.push_back(done.tokens > 1 ? done.seconds / (done.tokens - 1) : 0);
  }
  const auto median = [](std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
    return values[values.size() / 2];
  };
  const double prompt_seconds = median(prompts), step = median(steps);
  const auto step_bytes = static_cast<double>(model.decoder().bytes_per_step());
  const std::int64_t pages = models::KvPool::pages_for(a.prompt_tokens + a.tokens);
  const std::int64_t cache_bytes = pages * models::KvPool::kPageTokens * 2 * config.layers * config.kv_heads * config.head_dim *
                                   static_cast<std::int64_t>(size_of(model.decoder().dtype()));
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto peak_bytes = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
  const double read = read_bandwidth(device);
  tw::print(report, "Prompt: {} tokens, {:.4f} s, {:.1f} tokens/s\n", a.prompt_tokens, prompt_seconds, a.prompt_tokens / prompt_seconds);
  if (step > 0)
    tw::print(
        report,
        "Text: {:.3f} ms a token, {:.1f} tokens/s, {:.1f} GB/s of weights; {:.1f} GB/s is the memory's read bandwidth: {:.2f} of it\n",
        step * 1e3, 1 / step, step_bytes / step * 1e-9, read * 1e-9, step_bytes / step / read);
  tw::print(report, "Memory: weights of a step {}, keys and values of {} tokens {}; peak of the process on the host {}\n",
            bytes_text(static_cast<std::size_t>(step_bytes)), a.prompt_tokens + a.tokens, bytes_text(static_cast<std::size_t>(cache_bytes)),
            bytes_text(static_cast<std::size_t>(peak_bytes)));
  nlohmann::ordered_json perplexity = nullptr;
  if (!a.text.empty()) {
    models::PerplexityOptions windows = a.perplexity;
    windows.window = std::min(windows.window, config.max_positions);
    const models::Perplexity found = model.perplexity(text, windows);
    tw::print(report, "Perplexity: {:.6g} of {} tokens of {}, in windows of {}\n", found.value, found.tokens, shown_line(report, a.text),
              windows.window);
    perplexity = {{"value", found.value}, {"tokens", found.tokens}, {"window", windows.window}, {"file", a.text}};
  }
  if (!a.json) return;
  print_json({{"model", a.model},
              {"device", device.name()},
              {"dtype", type},
              {"weights", text_of(weights)},
              {"prompt_tokens", a.prompt_tokens},
              {"tokens", a.tokens},
              {"seconds", {{"load", load_seconds}, {"prompt", prompt_seconds}, {"token", step}}},
              {"bytes", {{"step", model.decoder().bytes_per_step()}, {"cache", cache_bytes}, {"peak", peak_bytes}}},
              {"read_bandwidth", read},
              {"perplexity", perplexity}});
}

}  // namespace

void add_bench_generate(CLI::App& bench, int& exit_code) {
  CLI::App* command = bench.add_subcommand("generate", "Time a language model's prompt and tokens; with --text also its perplexity");
  static BenchGenerateArguments a;
  command->add_option("--model", a.model, "A folder with config.json, tokenizer.json and safetensors")->required()->type_name("DIR");
  command->add_option("--text", a.text, "A text whose perplexity is measured")->type_name("FILE");
  command->add_option("--window", a.perplexity.window, "Tokens of the text that are predicted from each other; at most the model's context")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command->add_option("--batch", a.perplexity.batch, "Windows of the text that are processed side by side")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--prompt-tokens", a.prompt_tokens, "Tokens of the prompt that is timed")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--tokens", a.tokens, "Tokens that follow it; at least 2, because the first is the prompt's")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command->add_option("--warmup", a.warmup, "Runs before the measured ones")->check(CLI::Range(0, 1000))->capture_default_str();
  command->add_option("--runs", a.runs, "Measured runs, of which the median counts")->check(CLI::Range(1, 1000))->capture_default_str();
  add_device_option(*command, a.device);
  command->add_option("--dtype", a.dtype, "Of activations and unpacked weights; auto: f32 on the CPU, bf16 on a GPU")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "f16"}))
      ->capture_default_str();
  add_weights_option(*command, a.weights);
  command->add_flag("--json", a.json, "Print JSON; messages go to standard error");
  command->footer("Every token is timed as `tilewave generate` makes it, the choice of the likeliest included.");
  command->callback([&exit_code] {
    run(a);
    exit_code = kOk;
  });
}

}  // namespace tw::cli
