#include "models/tokenizer/added_tokens.hpp"

#include <algorithm>

#include "models/one_line.hpp"
#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"

namespace tw::models {

AddedTokens::AddedTokens(const Fields& file, const Bpe& model, const Normalizer& normalizer) {
  if (!file.has("added_tokens")) return;
  for (const Fields& entry : file.objects("added_tokens")) {
    AddedToken token{entry.number("id", kLargestTokenId), entry.string("content"),        entry.boolean("single_word", false),
                     entry.boolean("lstrip", false),      entry.boolean("rstrip", false), entry.boolean("normalized", true),
                     entry.boolean("special", false)};
    if (token.content.empty()) entry.fail("content is empty");
    const auto of_model = model.id(token.content);
    const auto owner = model.token(token.id);
    if ((of_model && *of_model != token.id) || (owner && *owner != token.content)) {
      entry.fail(tw::format("{} has the id {}, but in the model's vocab {} has the id {}", in_quotes(token.content), token.id,
                            in_quotes(of_model ? token.content : std::string(*owner)), of_model ? *of_model : token.id));
    }
    if (!by_id_.try_emplace(token.id, tokens_.size()).second) entry.fail(tw::format("the id {} is in the list twice", token.id));
    if (!by_content_.try_emplace(token.content, tokens_.size()).second)
      entry.fail(tw::format("{} is in the list twice", in_quotes(token.content)));
    tokens_.push_back(std::move(token));
  }
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    AddedToken& token = tokens_[i];
    token.decoded = token.normalized ? normalizer.apply(token.content) : token.content;
    (token.normalized ? normalized_ : raw_).add(token.decoded, i);
  }
}

AddedTokens::Search::Search() : nodes_(1), begins_(256, false) {}

void AddedTokens::Search::add(std::string_view content, std::size_t index) {
  if (content.empty()) return;
  begins_[static_cast<unsigned char>(content[0])] = true;
  std::size_t node = 0;
  for (const char c : content) {
    const auto [place, is_new] = nodes_[node].next.try_emplace(static_cast<unsigned char>(c), nodes_.size());
    node = place->second;
    if (is_new) nodes_.emplace_back();
  }
  if (!nodes_[node].index) nodes_[node].index = index;
}

std::optional<std::pair<std::size_t, std::size_t>> AddedTokens::Search::longest(std::string_view text, std::size_t at) const {
  std::optional<std::pair<std::size_t, std::size_t>> best;
  if (!begins_[static_cast<unsigned char>(text[at])]) return best;
  std::size_t node = 0;
  for (std::size_t length = 0;; ++length) {
    if (nodes_[node].index) best = {*nodes_[node].index, length};
    if (at + length == text.size()) return best;
    const auto next = nodes_[node].next.find(static_cast<unsigned char>(text[at + length]));
    if (next == nodes_[node].next.end()) return best;
    node = next->second;
  }
}

std::vector<Segment> AddedTokens::find(const Search& search, std::string_view text, bool parse_special) const {
  std::vector<Segment> segments;
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto match = search.longest(text, at);
    if (!match) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[match->first];
    std::size_t begin = at, end = at + match->second;
    at = end;  // a match that is dropped below covers others all the same
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
    while (token.rstrip && end < text.size()) {
      std::size_t behind = end;
      if (!is_white_space(next_character(text, behind))) break;
      end = behind;
    }
    if (begin > done) segments.push_back({{}, text.substr(done, begin - done)});
    segments.push_back({token.id, {}});
    done = end;
  }
  if (done < text.size()) segments.push_back({{}, text.substr(done)});
  return segments;
}

std::optional<int> AddedTokens::id(std::string_view content) const {
  const auto found = by_content_.find(std::string(content));
  if (found == by_content_.end()) return {};
  return tokens_[found->second].id;
}

const AddedToken* AddedTokens::token(int id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

int AddedTokens::largest_id() const {
  int largest = -1;
  for (const AddedToken& token : tokens_) largest = std::max(largest, token.id);
  return largest;
}

}  // namespace tw::models
