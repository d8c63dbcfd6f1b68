#include "models/tokenizer.hpp"

#include <algorithm>

#include "models/json.hpp"
#include "models/one_line.hpp"
#include "models/tokenizer/added_tokens.hpp"
#include "models/tokenizer/bpe.hpp"
#include "models/tokenizer/decoder.hpp"
#include "models/tokenizer/fields.hpp"
#include "models/tokenizer/normalizer.hpp"
#include "models/tokenizer/pre_tokenizer.hpp"
#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

/// The tokens that TemplateProcessing adds around a text.
struct SurroundingTokens {
  std::vector<int> before, after;
};

namespace {

constexpr std::size_t kMostSpecialTokens = 1024;  // around a text

void read_template(const Fields& description, std::optional<SurroundingTokens>& result) {
  if (result) description.fail("a second TemplateProcessing is not supported");
  const Fields tokens = description.object("special_tokens");
  SurroundingTokens found;
  bool has_text = false;
  description.for_each("single", [&](const Fields& piece) {
    if (piece.has("Sequence")) {
      const std::string id = piece.object("Sequence").string("id");
      if (has_text || id != "A") piece.fail(tw::format("Sequence {} is not supported; allowed: \"A\", once", in_quotes(id)));
      has_text = true;
      return;
    }
    const std::string name = piece.object("SpecialToken").string("id");
    if (!tokens.has(name.c_str())) piece.fail(tw::format("{} is not in special_tokens", in_quotes(name)));
    const Fields token = tokens.object(name.c_str());
    for (const auto& id : token.array("ids")) {
      if (!id.is_number_unsigned() || id.get<std::uint64_t>() > static_cast<std::uint64_t>(kLargestTokenId)) token.fail("ids: no id");
      (has_text ? found.after : found.before).push_back(id.get<int>());
      if (found.before.size() + found.after.size() > kMostSpecialTokens)
        description.fail(tw::format("single has more than {} special tokens", kMostSpecialTokens));
    }
  });
  if (!has_text) description.fail("single has no Sequence \"A\"");
  result = std::move(found);
}

void read_post_processor(const Fields& description, std::optional<SurroundingTokens>& result) {
  const std::string type = description.type();
  if (type == "Sequence") {
    description.for_each("processors", [&](const Fields& each) { read_post_processor(each, result); });
  } else if (type == "TemplateProcessing") {
    read_template(description, result);
  } else if (type != "ByteLevel") {  // which concerns offsets only
    description.unsupported(type, "Sequence, ByteLevel, TemplateProcessing");
  }
}

template <class T>
T part_of(const Fields& file, const char* name) {
  return file.has(name) ? T(file.object(name)) : T();
}

}  // namespace

struct Tokenizer::Parts {
  explicit Parts(const Fields& file)
      : name(file.file()),
        model(file.object("model")),
        normalizer(part_of<Normalizer>(file, "normalizer")),
        pre_tokenizer(part_of<PreTokenizer>(file, "pre_tokenizer")),
        decoder(part_of<Decoder>(file, "decoder")),
        added(file, model, normalizer) {
    if (file.has("post_processor")) read_post_processor(file.object("post_processor"), special_tokens);
    for (const auto& ids : special_tokens ? std::vector{special_tokens->before, special_tokens->after} : std::vector<std::vector<int>>()) {
      for (const int id : ids) {
        if (!token(id)) file.fail(tw::format("post_processor: the id {} belongs to no token", id));
      }
    }
  }

  std::optional<std::string_view> token(int id) const {
    if (const AddedToken* found = added.token(id)) return found->content;
    return model.token(id);
  }

  std::string name;
  Bpe model;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder;
  AddedTokens added;
  std::optional<SurroundingTokens> special_tokens;
};

Tokenizer Tokenizer::load(const std::filesystem::path& file) {
  const nlohmann::json document = load_json(file);
  const std::string name = file.string();
  return Tokenizer(std::make_shared<const Parts>(Fields(document, name, "tokenizer")));
}

Tokenizer Tokenizer::parse(std::string_view json, const std::string& name) {
  const nlohmann::json document = parse_json(json, name);
  return Tokenizer(std::make_shared<const Parts>(Fields(document, name, "tokenizer")));
}

Tokenizer Tokenizer::from(const TokenLists& lists, const std::string& name) {
  using nlohmann::json;
  json vocabulary = json::object(), added = json::array();
  for (std::size_t id = 0; id < lists.tokens.size(); ++id) {
    const auto& [text, kind] = lists.tokens[id];
    if (kind == TokenLists::Kind::unused) continue;
    std::string repaired;
    append_repaired(repaired, text);
    if (repaired != text) throw FileError(tw::format("{}: token {} is not valid UTF-8: {}", name, id, in_quotes(repaired)));
    if (kind == TokenLists::Kind::normal) {
      const auto [other, is_new] = vocabulary.emplace(text, id);
      if (!is_new) throw FileError(tw::format("{}: {} is both token {} and token {}", name, in_quotes(text), other->dump(), id));
    } else {
      added.push_back({{"id", id}, {"content", text}, {"normalized", false}, {"special", kind == TokenLists::Kind::special}});
    }
  }
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const json split = {{"type", "Split"}, {"pattern", {{"Regex", lists.words}}}, {"behavior", "Isolated"}, {"invert", false}};
  const json document = {
      {"added_tokens", std::move(added)},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}}},
      {"decoder", byte_level},
      {"model", {{"type", "BPE"}, {"vocab", std::move(vocabulary)}, {"merges", lists.merges}}},
  };
  return Tokenizer(std::make_shared<const Parts>(Fields(document, name, "tokenizer")));
}

std::vector<int> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::string repaired;
  append_repaired(repaired, text);
  Budget budget(parts_->name, repaired.size());
  std::vector<int> ids;
  const auto add_all = [&](const std::vector<int>& more) { ids.insert(ids.end(), more.begin(), more.end()); };
  const bool has_template = options.add_special_tokens && parts_->special_tokens;
  if (has_template) add_all(parts_->special_tokens->before);
  parts_->added.cut(
      repaired, parts_->normalizer, budget, options.parse_special_tokens, [&](int id) { ids.push_back(id); },
      [&](std::string_view part) {
        parts_->pre_tokenizer.cut(part, budget).for_each([&](std::string_view word) { parts_->model.encode(word, ids); });
      });
  if (has_template) add_all(parts_->special_tokens->after);
  return ids;
}

std::string Tokenizer::decode(std::span<const int> ids, const DecodeOptions& options) const {
  StreamDecoder decoder(*this, options);
  std::string text;
  for (const int id : ids) text += decoder.push(id);
  return text + decoder.finish();
}

std::optional<int> Tokenizer::token_id(std::string_view token) const {
  if (const auto id = parts_->added.id(token)) return id;
  return parts_->model.id(token);
}

std::optional<std::string> Tokenizer::token(int id) const {
  const auto found = parts_->token(id);
  if (!found) return {};
  return std::string(*found);
}

int Tokenizer::vocab_size() const { return std::max(parts_->model.size(), parts_->added.largest_id() + 1); }

struct StreamDecoder::State {
  Tokenizer tokenizer;
  DecodeOptions options;
  Decoder::State decoder;
};

StreamDecoder::StreamDecoder(Tokenizer tokenizer, const DecodeOptions& options) {
  auto state = tokenizer.parts_->decoder.begin();
  state_ = std::make_unique<State>(State{std::move(tokenizer), options, std::move(state)});
}
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder&&) noexcept = default;
StreamDecoder::~StreamDecoder() = default;

std::string StreamDecoder::push(int id) {
  const Tokenizer::Parts& parts = *state_->tokenizer.parts_;
  std::string text;
  if (const AddedToken* added = parts.added.token(id)) {
    if (!added->special || !state_->options.skip_special_tokens) parts.decoder.push(state_->decoder, added->decoded, text);
  } else if (const auto token = parts.model.token(id)) {
    parts.decoder.push(state_->decoder, *token, text);
  }
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  state_->tokenizer.parts_->decoder.finish(state_->decoder, text);
  return text;
}

}  // namespace tw::models
