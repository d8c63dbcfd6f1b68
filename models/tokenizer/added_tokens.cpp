#include "models/tokenizer/added_tokens.hpp"

#include <algorithm>
#include <numeric>

#include "models/one_line.hpp"
#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::models {
namespace {

constexpr std::size_t kLongestAddedToken = 1024;  // bytes: at each byte of a text up to this many are compared

}  // namespace

AddedTokens::AddedTokens(const Fields& file, const Bpe& model, const Normalizer& normalizer) {
  if (!file.has("added_tokens")) return;
  file.for_each("added_tokens", [&](const Fields& entry) {
    AddedToken token{entry.number("id", kLargestTokenId), entry.string("content"),        entry.boolean("single_word", false),
                     entry.boolean("lstrip", false),      entry.boolean("rstrip", false), entry.boolean("normalized", true),
                     entry.boolean("special", false)};
    if (token.content.empty()) entry.fail("content is empty");
    if (token.content.size() > kLongestAddedToken)
      entry.fail(tw::format("content has {} bytes; allowed: at most {}", token.content.size(), kLongestAddedToken));
    const auto of_model = model.id(token.content);
    const auto owner = model.token(token.id);
    if ((of_model && *of_model != token.id) || (owner && *owner != token.content)) {
      entry.fail(tw::format("{} has the id {}, but in the model's vocab {} has the id {}", in_quotes(token.content), token.id,
                            in_quotes(of_model ? token.content : std::string(*owner)), of_model ? *of_model : token.id));
    }
    tokens_.push_back(std::move(token));
  });
  const auto sorted_by = [this](auto key) {
    std::vector<Index> order(tokens_.size());
    std::iota(order.begin(), order.end(), Index{0});
    std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return key(tokens_[a]) < key(tokens_[b]); });
    return order;
  };
  by_id_ = sorted_by([](const AddedToken& token) { return token.id; });
  for (std::size_t i = 1; i < by_id_.size(); ++i) {
    if (const int id = tokens_[by_id_[i]].id; id == tokens_[by_id_[i - 1]].id)
      file.element("added_tokens", by_id_[i]).fail(tw::format("the id {} is in the list twice", id));
  }
  by_content_ = sorted_by([](const AddedToken& token) { return std::string_view(token.content); });
  for (std::size_t i = 1; i < by_content_.size(); ++i) {
    if (const auto& content = tokens_[by_content_[i]].content; content == tokens_[by_content_[i - 1]].content)
      file.element("added_tokens", by_content_[i]).fail(tw::format("{} is in the list twice", in_quotes(content)));
  }
  Budget budget(file.file());
  for (AddedToken& token : tokens_) token.decoded = token.normalized ? normalizer.apply(token.content, budget) : token.content;
  raw_ = Search(tokens_, false);
  normalized_ = Search(tokens_, true);
}

AddedTokens::Search::Search(const std::vector<AddedToken>& tokens, bool normalized) : Search() {
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i].normalized == normalized && !tokens[i].decoded.empty()) sorted_.push_back(static_cast<Index>(i));
  std::stable_sort(sorted_.begin(), sorted_.end(), [&](Index a, Index b) { return tokens[a].decoded < tokens[b].decoded; });
  // If the normalizer made several tokens equal, the first one counts.
  const auto same = [&](Index a, Index b) { return tokens[a].decoded == tokens[b].decoded; };
  sorted_.erase(std::unique(sorted_.begin(), sorted_.end(), same), sorted_.end());
  for (const Index i : sorted_) begins_[static_cast<unsigned char>(tokens[i].decoded[0])] = true;
}

std::optional<std::pair<AddedTokens::Index, std::size_t>> AddedTokens::Search::longest(const std::vector<AddedToken>& tokens,
                                                                                       std::string_view text, std::size_t at) const {
  std::optional<std::pair<Index, std::size_t>> best;
  if (!begins_[static_cast<unsigned char>(text[at])]) return best;
  auto begin = sorted_.begin(), end = sorted_.end();  // tokens that begin with the first `length` bytes of the text
  for (std::size_t length = 0;; ++length) {
    if (begin != end && tokens[*begin].decoded.size() == length) best = {*begin++, length};  // the shortest one is the first
    if (begin == end || at + length == text.size()) return best;
    const auto next = static_cast<unsigned char>(text[at + length]);
    const auto byte = [&](Index i) { return static_cast<unsigned char>(tokens[i].decoded[length]); };
    if (byte(*begin) != next) begin = std::partition_point(begin, end, [&](Index i) { return byte(i) < next; });
    if (begin != end && byte(*(end - 1)) != next) end = std::partition_point(begin, end, [&](Index i) { return byte(i) <= next; });
  }
}

std::vector<Segment> AddedTokens::find(const Search& search, std::string_view text, bool parse_special) const {
  std::vector<Segment> segments;
  std::size_t done = 0;
  std::size_t white_end = 0;  // there is white space before it, back to where the last token with rstrip ended: it is gone over once
  for (std::size_t at = 0; at < text.size();) {
    const auto match = search.longest(tokens_, text, at);
    if (!match) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[match->first];
    std::size_t begin = at, end = at + match->second;
    at = end;  // a match that is dropped below still covers others
    if (token.special && !parse_special) continue;
    if (token.single_word) {
      std::size_t before = begin == 0 ? 0 : previous_character(text, begin), after = end;
      if (begin > 0 && is_word_character(next_character(text, before))) continue;
      if (end < text.size() && is_word_character(next_character(text, after))) continue;
    }
    while (token.lstrip && begin > done) {
      const std::size_t before = previous_character(text, begin);
      std::size_t behind = before;
      if (!is_white_space(next_character(text, behind))) break;
      begin = before;
    }
    if (token.rstrip && end < white_end) end = white_end;
    while (token.rstrip && end < text.size()) {
      std::size_t behind = end;
      if (!is_white_space(next_character(text, behind))) break;
      end = white_end = behind;
    }
    if (begin > done) segments.push_back({{}, text.substr(done, begin - done)});
    segments.push_back({token.id, {}});
    done = end;
  }
  if (done < text.size()) segments.push_back({{}, text.substr(done)});
  return segments;
}

std::optional<int> AddedTokens::id(std::string_view content) const {
  const auto found = std::lower_bound(by_content_.begin(), by_content_.end(), content,
                                      [this](Index i, std::string_view wanted) { return tokens_[i].content < wanted; });
  if (found == by_content_.end() || tokens_[*found].content != content) return {};
  return tokens_[*found].id;
}

const AddedToken* AddedTokens::token(int id) const {
  const auto found = std::lower_bound(by_id_.begin(), by_id_.end(), id, [this](Index i, int wanted) { return tokens_[i].id < wanted; });
  return found == by_id_.end() || tokens_[*found].id != id ? nullptr : &tokens_[*found];
}

int AddedTokens::largest_id() const { return by_id_.empty() ? -1 : tokens_[by_id_.back()].id; }

}  // namespace tw::models
