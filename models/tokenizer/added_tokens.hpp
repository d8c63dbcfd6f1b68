#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "models/tokenizer/bpe.hpp"
#include "models/tokenizer/fields.hpp"
#include "models/tokenizer/normalizer.hpp"

namespace tw::models {

/// A member of "added_tokens": found in a text before everything else is done with it. The flags are the file's.
struct AddedToken {
  int id;
  std::string content;
  bool single_word, lstrip, rstrip, normalized, special;
  std::string decoded = {};  // what a decoder is given: `content`, normalized where the token is looked for in normalized text
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
  void cut(std::string_view whole, const Normalizer& normalizer, bool parse_special, Token token, Text text) const {
    for (const Segment& raw : find(raw_, whole, parse_special)) {
      if (raw.id) {
        token(*raw.id);
        continue;
      }
      const std::string normal = normalizer.apply(raw.text);
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
  /// A trie over the bytes of contents.
  class Search {
   public:
    Search();
    void add(std::string_view content, std::size_t index);
    /// The longest content that `text` has at byte `at`: its index and length.
    std::optional<std::pair<std::size_t, std::size_t>> longest(std::string_view text, std::size_t at) const;

   private:
    struct Node {
      std::unordered_map<unsigned char, std::size_t> next;
      std::optional<std::size_t> index;
    };
    std::vector<Node> nodes_;
    std::vector<bool> begins_;  // whether a content begins with that byte
  };

  std::vector<Segment> find(const Search& search, std::string_view text, bool parse_special) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string, std::size_t> by_content_;
  std::unordered_map<int, std::size_t> by_id_;
  Search raw_, normalized_;  // of tokens that are looked for before and after normalization
};

}  // namespace tw::models
