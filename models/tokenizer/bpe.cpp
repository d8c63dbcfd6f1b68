#include "models/tokenizer/bpe.hpp"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

#include "models/one_line.hpp"
#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::models {

Bpe::Bpe(const Fields& model) {
  const std::string type = model.type("BPE");
  if (type != "BPE") model.unsupported(type, "BPE");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.has(name) && !model.string(name).empty())
      model.fail(tw::format("{} is {}, which is not supported", name, in_quotes(model.string(name))));
  }
  if (model.has("dropout") && model.at("dropout") != 0) model.fail("dropout is not supported: it makes ids random");
  read_vocabulary(model);
  read_merges(model);
  fuses_unknown_ = model.boolean("fuse_unk", false);
  byte_fallback_ = model.boolean("byte_fallback", false);
  ignore_merges_ = model.boolean("ignore_merges", false);
  if (model.has("unk_token")) {
    unknown_ = id(model.string("unk_token"));
    if (!unknown_) model.fail(tw::format("unk_token {} is not in vocab", in_quotes(model.string("unk_token"))));
  }
  for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) byte_ids_[byte] = id(tw::format("<0x{:02X}>", byte));
  character_ids_.fill(-1);
  for (char32_t c = 0; c < character_ids_.size(); ++c) {
    std::string text;
    append_utf8(text, c);
    character_ids_[c] = id(text).value_or(-1);
  }
}

void Bpe::read_vocabulary(const Fields& model) {
  const auto& vocabulary = model.at("vocab");
  if (!vocabulary.is_object()) model.fail(tw::format("vocab is {}; allowed: an object", vocabulary.type_name()));
  int largest = -1;
  for (const auto& [token, value] : vocabulary.items()) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > static_cast<std::uint64_t>(kLargestTokenId))
      model.fail(tw::format("vocab: the id of {} is not a whole number from 0 to {}", in_quotes(token), kLargestTokenId));
    if (token.size() > kLongestToken)
      model.fail(tw::format("vocab: a token of {} bytes, {}; allowed: at most {}", token.size(), in_quotes(token), kLongestToken));
    largest = std::max(largest, value.get<int>());
  }
  tokens_.resize(static_cast<std::size_t>(largest + 1), Token{0, kNone});
  by_text_.reserve(vocabulary.size());
  for (const auto& [text, value] : vocabulary.items()) {  // sorted
    const int id = value.get<int>();
    if (const auto other = token(id))
      model.fail(tw::format("vocab: both {} and {} have the id {}", in_quotes(*other), in_quotes(text), id));
    tokens_[static_cast<std::size_t>(id)] = {static_cast<std::uint32_t>(texts_.size()), static_cast<std::uint32_t>(text.size())};
    texts_ += text;
    by_text_.push_back(id);
  }
}

void Bpe::read_merges(const Fields& model) {
  const auto& list = model.array("merges");
  merges_.reserve(list.size());
  std::int32_t rank = 0;
  std::string both;
  for (const auto& element : list) {
    std::string_view left, right;
    if (element.is_string()) {
      const std::string_view text = element.get_ref<const std::string&>();
      const std::size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos)
        model.fail(tw::format("merges[{}] is {}; allowed: two tokens with a space between them", rank, in_quotes(text)));
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (element.is_array() && element.size() == 2 && element[0].is_string() && element[1].is_string()) {
      left = element[0].get_ref<const std::string&>();
      right = element[1].get_ref<const std::string&>();
    } else {
      model.fail(tw::format("merges[{}] is {}; allowed: \"a b\" or [\"a\", \"b\"]", rank, element.type_name()));
    }
    both.assign(left).append(right);
    const auto require = [&](std::string_view token) {
      const auto found = id(token);
      if (!found) model.fail(tw::format("merges[{}]: {} is not in vocab", rank, in_quotes(token)));
      return *found;
    };
    const int left_id = require(left), right_id = require(right);
    merges_.push_back({left_id, right_id, rank, require(both)});
    ++rank;
  }
  // If a pair is listed twice, the later one counts, as in `tokenizers`: it is put first, and find() takes the first.
  std::sort(merges_.begin(), merges_.end(),
            [](const Merge& a, const Merge& b) { return std::tuple(a.left, a.right, b.rank) < std::tuple(b.left, b.right, a.rank); });
  merges_of_.resize(tokens_.size() + 1, 0);
  for (const Merge& merge : merges_) ++merges_of_[static_cast<std::size_t>(merge.left) + 1];
  std::partial_sum(merges_of_.begin(), merges_of_.end(), merges_of_.begin());
}

std::optional<int> Bpe::id(std::string_view token) const {
  const auto found =
      std::lower_bound(by_text_.begin(), by_text_.end(), token, [this](int id, std::string_view text) { return *this->token(id) < text; });
  if (found == by_text_.end() || *this->token(*found) != token) return {};
  return *found;
}

std::optional<std::string_view> Bpe::token(int id) const {
  if (id < 0 || id >= size()) return {};
  const Token& token = tokens_[static_cast<std::size_t>(id)];
  if (token.bytes == kNone) return {};
  return std::string_view(texts_).substr(token.offset, token.bytes);
}

const Bpe::Merge* Bpe::find(int left, int right) const {
  const Merge* begin = merges_.data() + merges_of_[static_cast<std::size_t>(left)];
  const Merge* end = merges_.data() + merges_of_[static_cast<std::size_t>(left) + 1];
  const Merge* found = std::lower_bound(begin, end, right, [](const Merge& merge, int wanted) { return merge.right < wanted; });
  return found != end && found->right == right ? found : nullptr;
}

void Bpe::encode(std::string_view word, std::vector<int>& ids) const {
  if (ignore_merges_) {
    if (const auto whole = id(word)) return ids.push_back(*whole);
  }
  const std::size_t first = ids.size();
  bool has_unknown = false;  // an unknown token has not been appended yet
  for (std::size_t at = 0; at < word.size();) {
    const std::size_t begin = at;
    const char32_t c = next_character(word, at);
    const std::string_view character = word.substr(begin, at - begin);
    const int known = c < character_ids_.size() ? character_ids_[c] : id(character).value_or(-1);
    if (known >= 0) {
      if (has_unknown) ids.push_back(*unknown_);
      has_unknown = false;
      ids.push_back(known);
      continue;
    }
    if (byte_fallback_) {
      const auto byte_id = [&](char byte) { return byte_ids_[static_cast<unsigned char>(byte)]; };
      if (std::all_of(character.begin(), character.end(), [&](char byte) { return byte_id(byte).has_value(); })) {
        for (const char byte : character) ids.push_back(*byte_id(byte));  // before a pending unknown token, as in `tokenizers`
        continue;
      }
    }
    if (!unknown_) continue;  // it has no token
    if (has_unknown && !fuses_unknown_) ids.push_back(*unknown_);
    has_unknown = true;
  }
  if (has_unknown) ids.push_back(*unknown_);
  constexpr std::size_t kShort = 48;  // from this length on the queue is faster
  if (ids.size() - first <= kShort) {
    merge_short(ids, first);
  } else {
    merge_long(ids, first);
  }
}

/// Quadratic, and fast for words.
void Bpe::merge_short(std::vector<int>& symbols, std::size_t first) const {
  constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();
  struct Candidate {
    std::int32_t rank, merged;
  };
  std::array<Candidate, 48> with_next;
  std::size_t count = symbols.size() - first;
  const auto update = [&](std::size_t i) {
    const Merge* merge = find(symbols[first + i], symbols[first + i + 1]);
    with_next[i] = merge == nullptr ? Candidate{kNever, 0} : Candidate{merge->rank, merge->merged};
  };
  for (std::size_t i = 0; i + 1 < count; ++i) update(i);
  while (count > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < count; ++i) {
      if (with_next[i].rank < with_next[best].rank) best = i;
    }
    if (with_next[best].rank == kNever) return;
    symbols[first + best] = with_next[best].merged;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(first + best + 1));
    for (std::size_t i = best + 1; i + 2 < count; ++i) with_next[i] = with_next[i + 1];
    --count;
    if (best > 0) update(best - 1);
    if (best + 1 < count) update(best);
  }
}

/// With a list of symbols and a queue of pairs: O(n log n).
void Bpe::merge_long(std::vector<int>& symbols, std::size_t first) const {
  constexpr std::uint32_t kEnd = ~std::uint32_t{0};
  struct Symbol {
    int id;
    std::uint32_t previous, next;
  };
  struct Candidate {
    std::int32_t rank;
    std::uint32_t at;
    std::int32_t left, right;  // the pair when it was queued; if it has changed since, the entry is void
  };
  const auto later = [](const Candidate& a, const Candidate& b) { return a.rank != b.rank ? a.rank > b.rank : a.at > b.at; };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> queue(later);

  const auto count = static_cast<std::uint32_t>(symbols.size() - first);
  std::vector<Symbol> list(count);
  for (std::uint32_t i = 0; i < count; ++i) list[i] = {symbols[first + i], i == 0 ? kEnd : i - 1, i + 1 == count ? kEnd : i + 1};
  const auto consider = [&](std::uint32_t at) {
    const int left = list[at].id, right = list[list[at].next].id;
    if (const Merge* merge = find(left, right)) queue.push({merge->rank, at, left, right});
  };
  for (std::uint32_t i = 0; i + 1 < count; ++i) consider(i);
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = list[top.at];
    if (left.id != top.left || left.next == kEnd || list[left.next].id != top.right) continue;
    Symbol& right = list[left.next];
    left.id = find(top.left, top.right)->merged;
    left.next = right.next;
    right.id = -1;
    if (left.next != kEnd) {
      list[left.next].previous = top.at;
      consider(top.at);
    }
    if (left.previous != kEnd) consider(left.previous);
  }
  symbols.resize(first);
  for (std::uint32_t i = 0; i != kEnd; i = list[i].next) symbols.push_back(list[i].id);
}

}  // namespace tw::models
