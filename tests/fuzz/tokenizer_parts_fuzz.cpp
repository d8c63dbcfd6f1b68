// A tokenizer.json of valid parts in any number and order, and a text of any length: added tokens, normalizers, pre-tokenizers, decoders,
// merges. Encoding and decoding end, give an error or the same as a stream. To be run with -timeout=10 -rss_limit_mb=2048.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "models/tokenizer.hpp"
#include "tilewave/error.hpp"

namespace {

using nlohmann::json;

std::string text_of(FuzzedDataProvider& input, int most_repetitions) {
  static const char* const kUnits[] = {"a",      "b",   "ab", " ", "\n", "1", "\xC3\xA9", "\xE4\xB8\xAD", "\xCC\x81", "\xEF\xB7\xBA",
                                       "<0x41>", "<x>", "A"};
  std::string text;
  for (int parts = input.ConsumeIntegralInRange(0, 4); parts > 0; --parts) {
    const std::string unit = input.PickValueInArray(kUnits);
    for (int i = input.ConsumeIntegralInRange(1, most_repetitions); i > 0; --i) text += unit;
  }
  return text;
}

json pattern_of(FuzzedDataProvider& input) {
  static const char* const kExpressions[] = {"a",
                                             "a*",
                                             "\\s+",
                                             "\\p{L}+",
                                             "a*a*[bc]",
                                             "(?:a|aa)+b",
                                             "\\w*\\w*!",
                                             "(?=a)",
                                             "\\p{N}{1,3}",
                                             "[^\\s\\p{L}]+",
                                             "(?<=a)b|c",
                                             "(?:a+)+c",
                                             "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"};
  if (input.ConsumeBool()) return {{"Regex", input.PickValueInArray(kExpressions)}};
  return {{"String", text_of(input, 3) + "a"}};
}

json step(FuzzedDataProvider& input, int kind) {
  static const char* const kForms[] = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"};
  static const char* const kBehaviors[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
  const int which = input.ConsumeIntegralInRange(0, 3);
  if (which == 0 && kind != 1) return {{"type", "Replace"}, {"pattern", pattern_of(input)}, {"content", text_of(input, 20)}};
  if (kind == 0) {
    if (which == 1) return {{"type", "Prepend"}, {"prepend", text_of(input, 1000)}};
    if (which == 2) return {{"type", "Strip"}, {"strip_left", input.ConsumeBool()}, {"strip_right", input.ConsumeBool()}};
    return {{"type", input.PickValueInArray(kForms)}};
  }
  if (kind == 1) {
    if (which == 0) return {{"type", "Digits"}, {"individual_digits", input.ConsumeBool()}};
    if (which == 1) return {{"type", "ByteLevel"}, {"use_regex", input.ConsumeBool()}, {"add_prefix_space", input.ConsumeBool()}};
    return {{"type", "Split"},
            {"pattern", pattern_of(input)},
            {"behavior", input.PickValueInArray(kBehaviors)},
            {"invert", input.ConsumeBool()}};
  }
  if (which == 1) return {{"type", "ByteFallback"}};
  if (which == 2) return {{"type", input.ConsumeBool() ? "Fuse" : "ByteLevel"}};
  return {{"type", "Strip"}, {"content", "a"}, {"start", input.ConsumeIntegralInRange(0, 3)}, {"stop", input.ConsumeIntegralInRange(0, 3)}};
}

json sequence(FuzzedDataProvider& input, int kind, const char* list) {
  json steps = json::array();
  for (int different = input.ConsumeIntegralInRange(0, 4); different > 0; --different) {
    const json one = step(input, kind);
    for (int i = input.ConsumeIntegralInRange(1, 70); i > 0; --i) steps.push_back(one);
  }
  return {{"type", "Sequence"}, {list, steps}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  json vocabulary = {{"a", 0}, {"b", 1}, {" ", 2}, {"1", 3}, {"<0xC3>", 4}, {"<0xA9>", 5}, {"<0x41>", 6}, {"\xC3\xA9", 7}};
  json merges = json::array();
  std::string merged = "a";
  for (int i = input.ConsumeIntegralInRange(0, 300); i > 0; --i) {  // a a, aa a, aaa a ..., in this order or the other
    merges.push_back({merged, "a"});
    merged += 'a';
    vocabulary[merged] = vocabulary.size();
  }
  if (input.ConsumeBool()) std::reverse(merges.begin(), merges.end());
  json added = json::array();
  for (int kinds = input.ConsumeIntegralInRange(0, 3); kinds > 0; --kinds) {
    const std::string content = text_of(input, 300);
    const bool single_word = input.ConsumeBool(), lstrip = input.ConsumeBool(), rstrip = input.ConsumeBool(),
               normalized = input.ConsumeBool(), special = input.ConsumeBool();
    const int count = input.ConsumeIntegralInRange(1, 2000);
    for (int i = 0; i < count; ++i)
      added.push_back({{"id", 1000 + added.size()},
                       {"content", i == 0 ? content : content + std::to_string(i)},
                       {"single_word", single_word},
                       {"lstrip", lstrip},
                       {"rstrip", rstrip},
                       {"normalized", normalized},
                       {"special", special}});
  }
  json file = {{"added_tokens", added}, {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", merges}, {"byte_fallback", true}}}};
  if (input.ConsumeBool()) file["normalizer"] = sequence(input, 0, "normalizers");
  if (input.ConsumeBool()) file["pre_tokenizer"] = sequence(input, 1, "pretokenizers");
  if (input.ConsumeBool()) file["decoder"] = sequence(input, 2, "decoders");
  const std::string text = text_of(input, 5000);
  try {
    const auto tokenizer = tw::models::Tokenizer::parse(file.dump(), "input");
    const auto ids = tokenizer.encode(text, {.parse_special_tokens = true});
    std::string streamed;
    tw::models::StreamDecoder stream(tokenizer);
    for (const int id : ids) streamed += stream.push(id);
    if (streamed + stream.finish() != tokenizer.decode(ids)) std::abort();
  } catch (const tw::FileError&) {
  }
  return 0;
}
