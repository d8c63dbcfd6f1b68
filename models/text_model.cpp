#include "models/text_model.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "models/config_reader.hpp"
#include "models/json.hpp"
#include "models/safetensors.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

namespace {

/// The name without what transformers puts in front of the decoder's.
std::string without_prefix(const std::string& name) { return name.starts_with("model.") ? name.substr(6) : name; }

/// The tokens that end a text, of both configurations.
std::set<int> end_tokens(const std::filesystem::path& directory, const ConfigReader& config) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  std::vector<int> all = config.integers("eos_token_id", 0, kMost);
  if (const std::filesystem::path file = directory / "generation_config.json"; std::filesystem::exists(file)) {
    const std::vector<int> more = ConfigReader(file.string(), load_json(file)).integers("eos_token_id", 0, kMost);
    all.insert(all.end(), more.begin(), more.end());
  }
  return {all.begin(), all.end()};
}

/// The next token: the likeliest, or a random one.
int next_token(const Tensor& scores, const SamplingOptions& options, std::uint64_t step) {
  const Tensor host = scores.to(Device::cpu()).to(DType::f32);
  const std::span<const float> all(host.data<float>(), static_cast<std::size_t>(host.numel()));
  if (options.temperature > 0) return sample(all, options, 0, step);
  std::size_t best = 0;
  for (std::size_t i = 1; i < all.size(); ++i)
    if (all[i] > all[best]) best = i;
  return static_cast<int>(best);
}

/// -log(probability) of a token.
double surprise(std::span<const float> scores, int id) {
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const float score : scores) sum += std::exp(score - largest);
  return largest + std::log(sum) - scores[static_cast<std::size_t>(id)];
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

TextModel TextModel::load(const std::filesystem::path& directory, Device device, std::optional<DType> dtype,
                          const QuantizedMatrix::Layout& weights) {
  const std::filesystem::path file = directory / "config.json";
  const ConfigReader reader(file.string(), load_json(file));
  const LlamaConfig config = LlamaConfig::read(reader);
  Tokenizer tokenizer = Tokenizer::load(directory / "tokenizer.json");
  if (tokenizer.vocab_size() > config.vocabulary)
    throw FileError(tw::format("{} has {} tokens, but vocab_size of {} is {}", (directory / "tokenizer.json").string(),
                               tokenizer.vocab_size(), file.string(), config.vocabulary));
  if (config.bitnet && weights.format != WeightFormat::plain)
    throw InvalidArgument(
        tw::format("{}: weights are {}; those of BitNet are ternary and stay plain", directory.string(), text_of(weights)));
  Weights files(directory.string(), SafeTensors::open_directory(directory), without_prefix);
  files.set_layouts({.format = WeightFormat::plain}, weights);
  files.check([&](Weights& from) { Llama(config, from); });
  const Stream stream = Stream::standard(device);
  std::optional<Llama> decoder;
  files.load([&](Weights& from) { decoder.emplace(config, from); }, dtype.value_or(device.is_cuda() ? DType::bf16 : DType::f32), stream,
             {});
  return {*std::move(decoder), std::move(tokenizer), end_tokens(directory, reader), stream};
}

Generated TextModel::generate(std::string_view prompt, const GenerateOptions& options,
                              const std::function<void(std::string_view)>& on_text) const {
  return generate(tokenizer_.encode(prompt, {.add_special_tokens = true}), options, on_text);
}

Generated TextModel::generate(std::span<const int> ids, const GenerateOptions& options,
                              const std::function<void(std::string_view)>& on_text) const {
  check(options.sampling);
  if (options.max_tokens < 1) throw InvalidArgument(tw::format("max_tokens is {}; it must be at least 1", options.max_tokens));
  const int context = decoder_.config().max_positions;
  if (ids.empty()) throw InvalidArgument("the prompt has no tokens; it must have at least one");
  if (std::ssize(ids) >= context)
    throw InvalidArgument(
        tw::format("the prompt has {} tokens; with one more they must fit the model's context of {}", ids.size(), context));

  Generated result{.prompt_tokens = static_cast<int>(ids.size())};
  const int capacity = static_cast<int>(std::min<std::int64_t>(context, std::ssize(ids) + options.max_tokens));
  KvCache cache = decoder_.make_cache(capacity, stream_);
  DecodeGraphs graphs(cache.pool());
  StreamDecoder text(tokenizer_, {.skip_special_tokens = true});
  auto begin = std::chrono::steady_clock::now();
  Tensor scores = decoder_.prefill(decoder_.embed(ids, stream_), cache, stream_);
  while (true) {
    const int id = next_token(scores, options.sampling, static_cast<std::uint64_t>(result.tokens));
    if (result.tokens == 0) {
      result.prompt_seconds = seconds_since(begin);
      begin = std::chrono::steady_clock::now();
    }
    result.ended = ends_.contains(id) && !options.ignore_end;
    if (result.ended) break;
    ++result.tokens;
    if (const std::string piece = text.push(id); !piece.empty()) on_text(piece);
    if (result.tokens == options.max_tokens || cache.length == capacity) break;
    KvCache* const caches[] = {&cache};
    const int last[] = {id};
    scores = decoder_.decode(last, caches, stream_, &graphs);
  }
  result.seconds = seconds_since(begin);
  if (const std::string rest = text.finish(); !rest.empty()) on_text(rest);
  return result;
}

Perplexity TextModel::perplexity(std::string_view text, const PerplexityOptions& options) const {
  const int context = decoder_.config().max_positions;
  if (options.window < 2 || options.window > context)
    throw InvalidArgument(tw::format("window is {}; it must be from 2 to {}, the model's context", options.window, context));
  if (options.batch < 1) throw InvalidArgument(tw::format("batch is {}; it must be at least 1", options.batch));
  const std::vector<int> ids = tokenizer_.encode(text), around = tokenizer_.encode(text, {.add_special_tokens = true});
  const std::span<const int> front =
      std::span(around).first(static_cast<std::size_t>(std::search(around.begin(), around.end(), ids.begin(), ids.end()) - around.begin()));
  if (std::ssize(front) >= options.window)
    throw InvalidArgument(tw::format("window is {}; the tokenizer puts {} tokens in front of a text", options.window, front.size()));

  std::vector<std::vector<int>> windows;
  const std::size_t part = static_cast<std::size_t>(options.window) - front.size();
  for (std::size_t first = 0; first < ids.size(); first += part) {
    std::vector<int>& window = windows.emplace_back(front.begin(), front.end());
    const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(first);
    window.insert(window.end(), begin, begin + static_cast<std::ptrdiff_t>(std::min(part, ids.size() - first)));
  }
  const std::size_t unpredicted = std::max<std::size_t>(1, front.size());  // of each window
  double sum = 0;
  Perplexity result;
  for (std::size_t first = 0; first < windows.size();) {
    const std::size_t length = windows[first].size();  // the last window may be shorter
    std::size_t end = first + 1;
    while (end < windows.size() && end - first < static_cast<std::size_t>(options.batch) && windows[end].size() == length) ++end;
    std::vector<KvCache> caches = decoder_.make_caches(static_cast<int>(end - first), static_cast<int>(length), stream_);
    std::vector<KvCache*> pointers;
    for (KvCache& cache : caches) pointers.push_back(&cache);
    DecodeGraphs graphs(caches.front().pool());
    std::vector<int> now(caches.size());
    for (std::size_t i = 0; i + 1 < length; ++i) {
      for (std::size_t n = 0; n < now.size(); ++n) now[n] = windows[first + n][i];
      const Tensor scores = decoder_.decode(now, pointers, stream_, &graphs);
      if (i + 1 < unpredicted) continue;
      const Tensor host = scores.to(Device::cpu()).to(DType::f32);
      const auto vocabulary = static_cast<std::size_t>(host.shape(1));
      for (std::size_t n = 0; n < now.size(); ++n)
        sum += surprise({host.data<float>() + n * vocabulary, vocabulary}, windows[first + n][i + 1]);
      result.tokens += std::ssize(now);
    }
    first = end;
  }
  if (result.tokens == 0) throw InvalidArgument("the text has no token to predict");
  result.value = std::exp(sum / static_cast<double>(result.tokens));
  return result;
}

}  // namespace tw::models
