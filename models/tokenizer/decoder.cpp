#include "models/tokenizer/decoder.hpp"

#include <array>
#include <cctype>
#include <limits>

#include "models/one_line.hpp"
#include "models/tokenizer/normalizer.hpp"
#include "models/tokenizer/pre_tokenizer.hpp"
#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::models {
namespace {

/// The bytes of a token in GPT-2's characters; the token itself if it contains others.
std::string bytes_of(std::string_view token) {
  static const std::array<int, 0x200> byte_of = [] {
    std::array<int, 0x200> table{};
    table.fill(-1);
    for (std::size_t byte = 0; byte < 256; ++byte) table[byte_characters()[byte]] = static_cast<int>(byte);
    return table;
  }();
  std::string bytes;
  for (std::size_t at = 0; at < token.size();) {
    const char32_t c = next_character(token, at);
    if (c >= byte_of.size() || byte_of[c] < 0) return std::string(token);
    bytes += static_cast<char>(byte_of[c]);
  }
  return bytes;
}

/// The byte of "<0x2A>".
std::optional<char> fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return {};
  if (std::isxdigit(static_cast<unsigned char>(token[3])) == 0 || std::isxdigit(static_cast<unsigned char>(token[4])) == 0) return {};
  return static_cast<char>(std::stoi(std::string(token.substr(3, 2)), nullptr, 16));
}

std::size_t characters_in(std::string_view text) {
  std::size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return count;
}

}  // namespace

void Decoder::add(const Fields& description) {
  constexpr int kMost = std::numeric_limits<int>::max();
  const std::string type = description.type();
  if (type == "Sequence") {
    description.for_each("decoders", [this](const Fields& each) { add(each); });
    return;
  }
  if (steps_.size() == kMostSteps) description.fail(tw::format("the decoder has more than {} steps", kMostSteps));
  if (type == "Fuse") {
    is_joined_ = true;
    return;
  }
  if (type == "Strip") {
    Strip strip{description.string("content"), description.number("start", kMost), description.number("stop", kMost)};
    if (characters_in(strip.character) != 1)
      description.fail(tw::format("content is {}; allowed: one character", in_quotes(strip.character)));
    if (!is_joined_) {
      steps_.emplace_back(std::move(strip));
    } else if (front_ || strip.stop > 0) {
      description.fail("after the tokens are joined one Strip is supported, with start alone");
    } else {
      front_ = std::move(strip);
    }
    return;
  }
  if (type != "ByteLevel" && type != "Replace" && type != "ByteFallback")
    description.unsupported(type, "Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip");
  if (is_joined_) description.fail(tw::format("{} after the tokens are joined is not supported", type));
  if (type == "ByteLevel") {
    is_joined_ = true;
    joins_with_ = Join::bytes;
  } else if (type == "Replace") {
    steps_.emplace_back(Replace{pattern_of(description.object("pattern")), description.string("content")});
  } else {
    steps_.emplace_back(ByteFallback{byte_fallbacks_++});
  }
}

Decoder::State Decoder::begin() const {
  State state;
  state.budget = Budget(file_);
  state.bytes.resize(byte_fallbacks_);
  return state;
}

void Decoder::push(State& state, std::string_view token, std::string& text) const {
  state.budget.add(token.size());
  run(state, 0, std::string(token), text);
}

void Decoder::finish(State& state, std::string& text) const {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const auto* fallback = std::get_if<ByteFallback>(&steps_[i]);
    if (fallback != nullptr && !state.bytes[fallback->index].empty()) run(state, i + 1, take_bytes(state.bytes[fallback->index]), text);
  }
  std::string rest;
  append_repaired(rest, state.held);
  strip_front(state, rest, text);
  state = begin();
}

/// Runs the steps from `index` on for a token. Pending bytes of a ByteFallback become a token before it.
void Decoder::run(State& state, std::size_t index, std::string token, std::string& text) const {
  struct Waiting {
    std::size_t index;
    std::string token;
  };
  std::vector<Waiting> waiting;  // for the tokens before them; the last is the next
  waiting.push_back({index, std::move(token)});
  while (!waiting.empty()) {
    auto [at, current] = std::move(waiting.back());
    waiting.pop_back();
    bool is_held = false;
    for (; at < steps_.size() && !is_held; ++at) {
      if (const auto* replace = std::get_if<Replace>(&steps_[at])) {
        current = replace_all(replace->regex, current, replace->content, state.budget, "decoder");
      } else if (const auto* fallback = std::get_if<ByteFallback>(&steps_[at])) {
        std::string& bytes = state.bytes[fallback->index];
        if (const auto byte = fallback_byte(current)) {
          bytes += *byte;
          is_held = true;
        } else if (!bytes.empty()) {
          waiting.push_back({at + 1, std::move(current)});
          current = take_bytes(bytes);
        }
      } else {
        const auto& strip = std::get<Strip>(steps_[at]);
        std::string_view rest = current;
        for (int i = 0; i < strip.start && rest.starts_with(strip.character); ++i) rest.remove_prefix(strip.character.size());
        for (int i = 0; i < strip.stop && rest.ends_with(strip.character); ++i) rest.remove_suffix(strip.character.size());
        current = std::string(rest);
      }
    }
    if (!is_held) join(state, current, text);
  }
}

/// Like `tokenizers`: if the bytes as a whole are not UTF-8, each of them becomes U+FFFD.
std::string Decoder::take_bytes(std::string& bytes) {
  std::string token;
  append_repaired(token, bytes);
  if (token != bytes) {
    token.clear();
    for (std::size_t i = 0; i < bytes.size(); ++i) token += "\xEF\xBF\xBD";
  }
  bytes.clear();
  return token;
}

void Decoder::join(State& state, std::string_view token, std::string& text) const {
  if (joins_with_ == Join::bytes) {
    state.held += bytes_of(token);
    std::string complete;
    const std::size_t used = append_repaired(complete, state.held, Utf8End::open);
    state.held.erase(0, used);
    return strip_front(state, complete, text);
  }
  if (joins_with_ == Join::space && !state.is_first) text += ' ';
  state.is_first = false;
  strip_front(state, token, text);
}

void Decoder::strip_front(State& state, std::string_view piece, std::string& text) const {
  if (front_ && !piece.empty() && state.stripped < static_cast<std::size_t>(front_->start)) {
    while (state.stripped < static_cast<std::size_t>(front_->start) && piece.starts_with(front_->character)) {
      piece.remove_prefix(front_->character.size());
      ++state.stripped;
    }
    if (!piece.empty()) state.stripped = static_cast<std::size_t>(front_->start);
  }
  text += piece;
}

}  // namespace tw::models
