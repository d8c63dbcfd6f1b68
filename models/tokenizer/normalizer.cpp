#include "models/tokenizer/normalizer.hpp"

#include <utf8proc.h>

#include <algorithm>

#include "models/tokenizer/unicode_additions.hpp"
#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::models {
namespace {

constexpr const char* kWhat = "normalizer";

bool is_unknown(utf8proc_int32_t character) {
  const auto c = static_cast<char32_t>(character);
  if (c < kUnknownToNormalization[0].first) return false;
  const auto* range = std::lower_bound(std::begin(kUnknownToNormalization), std::end(kUnknownToNormalization), c,
                                       [](const CharacterRange& r, char32_t x) { return r.last < x; });
  return range != std::end(kUnknownToNormalization) && range->first <= c;
}

int combining_class(utf8proc_int32_t c) { return is_unknown(c) ? 0 : utf8proc_get_property(c)->combining_class; }

}  // namespace

void Normalizer::add(const Fields& description) {
  const std::string type = description.type();
  if (type == "Sequence") {
    description.for_each("normalizers", [this](const Fields& each) { add(each); });
    return;
  }
  if (steps_.size() == kMostSteps) description.fail(tw::format("the normalizer has more than {} steps", kMostSteps));
  if (type == "NFC") {
    steps_.emplace_back(Form::nfc);
  } else if (type == "NFD") {
    steps_.emplace_back(Form::nfd);
  } else if (type == "NFKC") {
    steps_.emplace_back(Form::nfkc);
  } else if (type == "NFKD") {
    steps_.emplace_back(Form::nfkd);
  } else if (type == "Replace") {
    steps_.emplace_back(Replace{pattern_of(description.object("pattern")), description.string("content")});
  } else if (type == "Prepend") {
    steps_.emplace_back(Prepend{description.string("prepend")});
  } else if (type == "Lowercase") {
    steps_.emplace_back(Lowercase{});
  } else if (type == "Strip") {
    steps_.emplace_back(Strip{description.boolean("strip_left", true), description.boolean("strip_right", true)});
  } else {
    description.unsupported(type, "Sequence, NFC, NFD, NFKC, NFKD, Replace, Prepend, Lowercase, Strip");
  }
}

/// Unicode normalization (UAX 15): decomposed, marks in canonical order, composed. Marks are ordered here, because utf8proc takes quadratic
/// time.
std::string Normalizer::apply(Form form, std::string_view text, Budget& budget) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; })) return std::string(text);
  const bool composes = form == Form::nfc || form == Form::nfkc;
  const bool is_compatible = form == Form::nfkc || form == Form::nfkd;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (is_compatible ? UTF8PROC_COMPAT : 0));

  std::vector<utf8proc_int32_t> characters;
  constexpr utf8proc_ssize_t kLongest = 32;  // one character decomposes to at most 18
  utf8proc_int32_t parts[kLongest];
  for (std::size_t at = 0; at < text.size();) {
    const auto c = static_cast<utf8proc_int32_t>(next_character(text, at));
    const utf8proc_ssize_t count = is_unknown(c) ? -1 : utf8proc_decompose_char(c, parts, kLongest, options, nullptr);
    if (count < 0 || count > kLongest) {
      characters.push_back(c);
    } else {
      characters.insert(characters.end(), parts, parts + count);
    }
  }
  for (auto at = characters.begin(); at != characters.end();) {
    const auto begin = std::find_if(at, characters.end(), [&](auto c) { return combining_class(c) != 0; });
    const auto end = std::find_if(begin, characters.end(), [&](auto c) { return combining_class(c) == 0; });
    std::stable_sort(begin, end, [&](auto a, auto b) { return combining_class(a) < combining_class(b); });
    at = end;
  }
  std::string result;
  result.reserve(text.size());
  for (auto at = characters.begin(); at != characters.end();) {  // unknown characters do not compose and separate their neighbours
    const auto end = is_unknown(*at) ? at + 1 : std::find_if(at, characters.end(), is_unknown);
    auto count = static_cast<utf8proc_ssize_t>(end - at);
    if (composes) count = utf8proc_normalize_utf32(&*at, count, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(result, static_cast<char32_t>(at[i]));
    at = end;
  }
  budget.grow(text.size(), result.size(), kWhat);
  return result;
}

std::string replace_all(const Regex& regex, std::string_view text, const std::string& content, Budget& budget, const char* what) {
  std::vector<Match> matches;
  regex.find_all(text, matches, budget);
  std::size_t size = text.size() + matches.size() * content.size();
  for (const Match& match : matches) size -= match.end - match.begin;
  budget.grow(text.size(), size, what);
  std::string result;
  result.reserve(size);
  std::size_t at = 0;
  for (const Match& match : matches) {
    result.append(text.substr(at, match.begin - at)).append(content);
    at = match.end;
  }
  return result.append(text.substr(at));
}

std::string Normalizer::apply(const Replace& step, std::string_view text, Budget& budget) {
  return replace_all(step.regex, text, step.content, budget, kWhat);
}

std::string Normalizer::apply(const Prepend& step, std::string_view text, Budget& budget) {
  if (text.empty()) return "";
  budget.grow(text.size(), text.size() + step.text.size(), kWhat);
  return step.text + std::string(text);
}

namespace {

char32_t lowercase(char32_t c) {
  for (const LowercaseAddition& addition : kLowercaseAdditions) {
    if (c >= addition.first && c <= addition.last) return static_cast<char32_t>(static_cast<std::int32_t>(c) + addition.offset);
  }
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}

}  // namespace

std::string Normalizer::apply(const Lowercase&, std::string_view text, Budget& budget) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const char32_t c = next_character(text, at);
    if (c == 0x130) {  // the only character whose lower case has two characters: i with a dot above
      result += "i\xCC\x87";
    } else {
      append_utf8(result, lowercase(c));
    }
  }
  budget.grow(text.size(), result.size(), kWhat);
  return result;
}

std::string Normalizer::apply(const Strip& step, std::string_view text, Budget&) {
  while (step.left && !text.empty()) {
    std::size_t end = 0;
    if (!is_white_space(next_character(text, end))) break;
    text.remove_prefix(end);
  }
  while (step.right && !text.empty()) {
    const std::size_t begin = previous_character(text, text.size());
    std::size_t at = begin;
    if (!is_white_space(next_character(text, at))) break;
    text = text.substr(0, begin);
  }
  return std::string(text);
}

std::string Normalizer::apply(std::string_view text, Budget& budget) const {
  std::string result(text);
  for (const auto& step : steps_) result = std::visit([&](const auto& s) { return apply(s, result, budget); }, step);
  return result;
}

}  // namespace tw::models
