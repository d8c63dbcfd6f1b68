#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "models/tokenizer/budget.hpp"
#include "models/tokenizer/fields.hpp"
#include "models/tokenizer/pieces.hpp"
#include "models/tokenizer/regex.hpp"

namespace tw::models {

/// GPT-2's characters for bytes: printable ones stand for themselves, the others for U+0100 and on.
const std::array<char32_t, 256>& byte_characters();

/// Splits a text into words for the model.
class PreTokenizer {
 public:
  /// Does not split.
  PreTokenizer() = default;
  explicit PreTokenizer(const Fields& description) { add(description); }

  Pieces cut(std::string_view text, Budget& budget) const;

 private:
  enum class Behavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };
  struct Split {
    Regex regex;
    Behavior behavior;
    bool is_inverted;
  };
  struct ByteLevel {
    bool adds_space;
    std::optional<Regex> regex;
  };
  struct Digits {
    bool are_individual;
  };
  struct Part {
    std::size_t begin, end;
    bool is_match;
  };

  void add(const Fields& description);
  void add_split(const Fields& description);
  static void add_parts(std::string_view text, const std::vector<Part>& parts, Behavior behavior, Pieces& pieces);
  static void split(std::string_view text, const std::vector<Match>& matches, Behavior behavior, bool is_inverted, Pieces& pieces);
  static Pieces apply(const Split& step, const Pieces& pieces, Budget& budget);
  static Pieces apply(const ByteLevel& step, const Pieces& pieces, Budget& budget);
  static Pieces apply(const Digits& step, const Pieces& pieces, Budget& budget);

  std::vector<std::variant<Split, ByteLevel, Digits>> steps_;
};

}  // namespace tw::models
