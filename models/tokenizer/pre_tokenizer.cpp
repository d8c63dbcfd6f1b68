#include "models/tokenizer/pre_tokenizer.hpp"

#include <algorithm>

#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::models {

const std::array<char32_t, 256>& byte_characters() {
  static const std::array<char32_t, 256> table = [] {
    std::array<char32_t, 256> characters{};
    char32_t other = 0x100;
    for (char32_t byte = 0; byte < 256; ++byte) {
      const bool is_printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      characters[byte] = is_printable ? byte : other++;
    }
    return characters;
  }();
  return table;
}

void PreTokenizer::add(const Fields& description) {
  const std::string type = description.type();
  if (type == "Sequence") {
    description.for_each("pretokenizers", [this](const Fields& each) { add(each); });
    return;
  }
  if (steps_.size() == kMostSteps) description.fail(tw::format("the pre-tokenizer has more than {} steps", kMostSteps));
  if (type == "Split") {
    add_split(description);
  } else if (type == "ByteLevel") {
    ByteLevel step{description.boolean("add_prefix_space", true), {}};
    // From GPT-2: https://github.com/openai/gpt-2/blob/master/src/encoder.py
    if (description.boolean("use_regex", true))
      step.regex = Regex(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", description.file());
    steps_.emplace_back(std::move(step));
  } else if (type == "Digits") {
    steps_.emplace_back(Digits{description.boolean("individual_digits", false)});
  } else {
    description.unsupported(type, "Sequence, Split, ByteLevel, Digits");
  }
}

void PreTokenizer::add_split(const Fields& description) {
  constexpr std::array<std::pair<std::string_view, Behavior>, 5> kBehaviors = {{{"Removed", Behavior::removed},
                                                                                {"Isolated", Behavior::isolated},
                                                                                {"MergedWithPrevious", Behavior::merged_with_previous},
                                                                                {"MergedWithNext", Behavior::merged_with_next},
                                                                                {"Contiguous", Behavior::contiguous}}};
  const std::string name = description.string("behavior");
  const auto* behavior = std::find_if(kBehaviors.begin(), kBehaviors.end(), [&](const auto& b) { return b.first == name; });
  if (behavior == kBehaviors.end())
    description.unsupported(name, "behavior Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous");
  steps_.emplace_back(Split{pattern_of(description.object("pattern")), behavior->second, description.boolean("invert", false)});
}

void PreTokenizer::add_parts(std::string_view text, const std::vector<Part>& parts, Behavior behavior, Pieces& pieces) {
  const auto add = [&](std::size_t begin, std::size_t end) { pieces.add(text.substr(begin, end - begin)); };
  if (behavior == Behavior::removed || behavior == Behavior::isolated) {
    for (const Part& part : parts) {
      if (behavior == Behavior::isolated || !part.is_match) add(part.begin, part.end);
    }
    return;
  }
  // Whether a part forms one piece with the part before it. A match takes a neighbour that is none; of two matches in a row each is a
  // piece.
  std::vector<bool> joins(parts.size(), false);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const bool before = parts[i - 1].is_match, now = parts[i].is_match;
    if (behavior == Behavior::contiguous) joins[i] = before == now;
    if (behavior == Behavior::merged_with_previous) joins[i] = now && !before;
    if (behavior == Behavior::merged_with_next) joins[i] = before && !now;
  }
  for (std::size_t i = 0; i < parts.size();) {
    const std::size_t begin = parts[i].begin;
    std::size_t last = i;
    while (last + 1 < parts.size() && joins[last + 1]) ++last;
    add(begin, parts[last].end);
    i = last + 1;
  }
}

void PreTokenizer::split(std::string_view text, const std::vector<Match>& matches, Behavior behavior, bool is_inverted, Pieces& pieces) {
  std::vector<Part> parts;
  std::size_t at = 0;
  for (const Match& match : matches) {
    if (match.begin > at) parts.push_back({at, match.begin, is_inverted});
    parts.push_back({match.begin, match.end, !is_inverted});
    at = match.end;
  }
  if (at < text.size()) parts.push_back({at, text.size(), is_inverted});
  add_parts(text, parts, behavior, pieces);
}

Pieces PreTokenizer::apply(const Split& step, const Pieces& pieces, Budget& budget) {
  Pieces result;
  std::vector<Match> matches;
  pieces.for_each([&](std::string_view piece) {
    step.regex.find_all(piece, matches, budget);
    split(piece, matches, step.behavior, step.is_inverted, result);
  });
  return result;
}

Pieces PreTokenizer::apply(const ByteLevel& step, const Pieces& pieces, Budget& budget) {
  static const std::array<std::string, 256> characters = [] {
    std::array<std::string, 256> texts;
    for (std::size_t byte = 0; byte < texts.size(); ++byte) append_utf8(texts[byte], byte_characters()[byte]);
    return texts;
  }();
  Pieces words;
  std::vector<Match> matches;
  std::string spaced;
  pieces.for_each([&](std::string_view piece) {
    if (step.adds_space && !piece.starts_with(' ')) {
      spaced.assign(" ").append(piece);
      piece = spaced;
    }
    if (!step.regex) return words.add(piece);
    step.regex->find_all(piece, matches, budget);
    split(piece, matches, Behavior::isolated, false, words);
  });
  Pieces result;
  std::string mapped;
  words.for_each([&](std::string_view word) {
    mapped.clear();
    for (const char byte : word) mapped += characters[static_cast<unsigned char>(byte)];
    result.add(mapped);
  });
  return result;
}

Pieces PreTokenizer::apply(const Digits& step, const Pieces& pieces, Budget&) {
  Pieces result;
  std::vector<Match> matches;
  pieces.for_each([&](std::string_view piece) {
    matches.clear();
    for (std::size_t at = 0; at < piece.size();) {
      const std::size_t begin = at;
      if (is_numeric(next_character(piece, at))) matches.push_back({begin, at});
    }
    split(piece, matches, step.are_individual ? Behavior::isolated : Behavior::contiguous, false, result);
  });
  return result;
}

Pieces PreTokenizer::cut(std::string_view text, Budget& budget) const {
  Pieces pieces(text);
  for (const auto& step : steps_) {
    const std::size_t before = pieces.bytes();
    pieces = std::visit([&](const auto& s) { return apply(s, pieces, budget); }, step);
    budget.grow(before, pieces.bytes(), "pre-tokenizer");
  }
  return pieces;
}

}  // namespace tw::models
