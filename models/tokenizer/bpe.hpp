#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/tokenizer/fields.hpp"

namespace tw::models {

constexpr int kLargestTokenId = (1 << 24) - 1;  // vocabularies of today have up to 2^18
constexpr std::size_t kLongestToken = 1 << 16;  // bytes: many times those of today

/// Byte-pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): repeatedly merges the pair of neighbours in
/// a word that comes first in the list of merges.
class Bpe {
 public:
  /// Moves the strings out of `model`, the member "model" of a tokenizer.json.
  explicit Bpe(const Fields& model);

  /// Appends a word's ids.
  void encode(std::string_view word, std::vector<int>& ids) const;

  std::optional<int> id(std::string_view token) const;
  std::optional<std::string_view> token(int id) const;
  /// The largest id plus 1.
  int size() const { return static_cast<int>(tokens_.size()); }

 private:
  struct Merge {
    std::int32_t left, right, rank, merged;
  };
  struct Token {
    std::uint32_t offset, bytes;  // in texts_; kNone
  };
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  void read_vocabulary(const Fields& model);
  void read_merges(const Fields& model);
  const Merge* find(int left, int right) const;
  void merge_short(std::vector<int>& symbols, std::size_t first) const;
  void merge_long(std::vector<int>& symbols, std::size_t first) const;

  // Sorted lists instead of hash tables: in a malicious file all keys could have the same hash.
  std::string texts_;                             // of all tokens
  std::vector<Token> tokens_;                     // by id
  std::vector<int> by_text_;                      // ids
  std::array<int, 0x800> character_ids_;          // of one-character tokens up to U+07FF, which form all byte-level words; or -1
  std::vector<Merge> merges_;                     // by left, then right
  std::vector<std::uint32_t> merges_of_;          // offsets by left token; one more than tokens
  std::array<std::optional<int>, 256> byte_ids_;  // of <0x00> to <0xFF>
  std::optional<int> unknown_;
  bool fuses_unknown_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
};

}  // namespace tw::models
