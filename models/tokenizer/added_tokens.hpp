#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/tokenizer/bpe.hpp"
#include "models/tokenizer/fields.hpp"
#include "models/tokenizer/normalizer.hpp"

namespace tw::models {

/// A member of "added_tokens": found in a text before any other processing. The flags are the file's.
struct AddedToken {
  int id;
  std::string content;
  bool single_word, lstrip, rstrip, normalized, special;
  std::string decoded = {};  // the decoder's input: `content`, normalized if the token is searched in normalized text
};

/// A part of a text: a token, or text between tokens.
struct Segment {
  std::optional<int> id;
  std::string_view text;
};

class AddedTokens {
 public:
  AddedTokens(const Fields& file, const Bpe& model, const Normalizer& normalizer);

  /// Calls `token(id)` and `text(normalized text)` for the parts of a text, in order.
  template <class Token, class Text>
  void cut(std::string_view whole, const Normalizer& normalizer, Budget& budget, bool parse_special, Token token, Text text) const {
    for (const Segment& raw : find(raw_, whole, parse_special)) {
      if (raw.id) {
        token(*raw.id);
        continue;
      }
      const std::string normal = normalizer.apply(raw.text, budget);
      for (const Segment& segment : find(normalized_, normal, parse_special)) {
        if (segment.id) {
          token(*segment.id);
        } else {
          text(segment.text);
        }
      }
    }
  }

  std::optional<int> id(std::string_view content) const;
  const AddedToken* token(int id) const;
  int largest_id() const;

 private:
  using Index = std::uint32_t;  // of tokens_

  /// The tokens to search in a text, sorted by their bytes there.
  class Search {
   public:
    Search() : begins_(256, false) {}
    Search(const std::vector<AddedToken>& tokens, bool normalized);
    /// The longest token of them at byte `at` of `text`: its index and length.
    std::optional<std::pair<Index, std::size_t>> longest(const std::vector<AddedToken>& tokens, std::string_view text,
                                                         std::size_t at) const;

   private:
    std::vector<Index> sorted_;
    std::vector<bool> begins_;  // whether a token begins with this byte
  };

  std::vector<Segment> find(const Search& search, std::string_view text, bool parse_special) const;

  std::vector<AddedToken> tokens_;
  std::vector<Index> by_content_, by_id_;  // sorted
  Search raw_, normalized_;                // of tokens to search before and after normalization
};

}  // namespace tw::models
