// tilewave generate

#include <cstdio>

#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "command.hpp"
#include "models/text_model.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

struct GenerateArguments {
  std::string model, prompt, device = "auto", dtype = "auto", weights = "plain";
  models::GenerateOptions options = {};
  bool timing = false;
};

void generate_text(const GenerateArguments& a) {
  Device device = Device::cpu();
  QuantizedMatrix::Layout weights;
  try {
    check(a.options.sampling);
    device = Device::parse(a.device);
    weights = parse_weight_layout(a.weights);
  } catch (const InvalidArgument& error) {
    throw UsageError(tw::format("generate: {}", error.what()));
  }
  const DeviceInfo& info = device_info(device);
  if (!info.usable) throw DeviceError(tw::format("{}: {}", info.device.name(), info.problem));
  std::optional<DType> dtype;
  if (a.dtype != "auto") dtype = parse_dtype(a.dtype);
  const models::TextModel model = models::TextModel::load(a.model, device, dtype, weights);
  const models::Generated done = model.generate(a.prompt, a.options, [](std::string_view text) {
    tw::print("{}", shown(stdout, text));
    std::fflush(stdout);
  });
  tw::print("\n");
  if (!a.timing) return;
  const int later = done.tokens > 1 ? done.tokens - 1 : 0;
  tw::print(stderr, "prompt: {} tokens, {:.3f} s; text: {} tokens, {:.1f} tokens/s; weights of a step: {}\n", done.prompt_tokens,
            done.prompt_seconds, done.tokens, done.seconds > 0 ? later / done.seconds : 0.0,
            bytes_text(static_cast<std::size_t>(model.decoder().bytes_per_step())));
}

}  // namespace

void add_generate(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a language model: BitNet b1.58 or Llama");
  static GenerateArguments a;
  command->add_option("--model", a.model, "A folder with config.json, tokenizer.json and safetensors")->required()->type_name("DIR");
  command->add_option("--prompt", a.prompt, "The text to continue, as it is: without a chat template")->required();
  command->add_option("--max-tokens", a.options.max_tokens, "The most tokens of the text")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--temperature", a.options.sampling.temperature, "0: the likeliest token every time; otherwise random, at most 100")
      ->capture_default_str();
  command->add_option("--top-p", a.options.sampling.top_p, "Only the likeliest tokens that together have this probability")
      ->capture_default_str();
  command->add_option("--seed", a.options.sampling.seed, "Of --temperature above 0")->check(unsigned_number())->capture_default_str();
  add_device_option(*command, a.device);
  command->add_option("--dtype", a.dtype, "Of activations and unpacked weights; auto: f32 on the CPU, bf16 on a GPU")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "f16"}))
      ->capture_default_str();
  add_weights_option(*command, a.weights);
  command->add_flag("--timing", a.timing, "Print tokens per second to standard error");
  command->footer("The text appears as it is made. It ends with a token that config.json or generation_config.json names as its end.");
  command->callback([&exit_code] {
    generate_text(a);
    exit_code = kOk;
  });
}

}  // namespace tw::cli
