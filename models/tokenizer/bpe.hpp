#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "models/tokenizer/fields.hpp"

namespace tw::models {

constexpr int kLargestTokenId = (1 << 24) - 1;  // vocabularies of today have up to 2^18

/// Byte-pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): of all neighbours in a word the pair that comes first in
/// the list of merges becomes one, as long as there is one.
class Bpe {
 public:
  /// Takes the strings of `model`, which is the member "model" of a tokenizer.json.
  explicit Bpe(const Fields& model);

  /// Appends a word's ids.
  void encode(std::string_view word, std::vector<int>& ids) const;

  std::optional<int> id(std::string_view token) const;
  std::optional<std::string_view> token(int id) const;
  /// The largest id plus 1.
  int size() const { return static_cast<int>(tokens_.size()); }

 private:
  struct Merge {
    std::uint64_t pair;  // left id << 32 | right id; kNone
    std::int32_t rank, merged;
  };
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  void read_vocabulary(const Fields& model);
  void read_merges(const Fields& model);
  const Merge* find(int left, int right) const;
  Merge& slot(std::uint64_t pair);
  void merge_short(std::vector<int>& symbols, std::size_t first) const;
  void merge_long(std::vector<int>& symbols, std::size_t first) const;

  std::vector<std::optional<std::string>> tokens_;
  std::unordered_map<std::string_view, int> ids_;  // of tokens_
  std::array<int, 0x800> character_ids_;           // of one-character tokens up to U+07FF: all that byte-level words consist of; or -1
  std::vector<Merge> merges_;                      // a hash table with open addresses; its size is a power of two
  std::array<std::optional<int>, 256> byte_ids_;   // of <0x00> to <0xFF>
  std::optional<int> unknown_;
  bool fuses_unknown_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
};

}  // namespace tw::models
