#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tw::models {

/// How Tokenizer::encode treats special tokens.
struct EncodeOptions {
  /// Whether special tokens that are written in the text become their ids, as a prompt's template wants it. Otherwise they are text like
  /// any other, as a user's words should be.
  bool parse_special_tokens = false;
  /// Whether the tokens of the file's post-processor are added: "[gMASK]<sop>" or "<|begin_of_text|>" in front, say.
  bool add_special_tokens = false;
};

/// How Tokenizer::decode and StreamDecoder treat special tokens.
struct DecodeOptions {
  bool skip_special_tokens = false;
};

/// A byte-pair tokenizer of a Hugging Face tokenizer.json: the same ids, and the same text from ids, as their `tokenizers` library gives.
/// It reads BPE models (also with byte_fallback, ignore_merges and unk_token), the pre-tokenizers Split, ByteLevel and Digits, the
/// normalizers NFC, NFD, NFKC, NFKD, Replace, Prepend, Lowercase and Strip, the decoders ByteLevel, Replace, ByteFallback, Fuse and Strip,
/// the post-processors ByteLevel and TemplateProcessing, and Sequences of them. What else a file holds is a FileError that names it;
/// `truncation` and `padding` are ignored, as transformers does.
///
/// Copies share everything. All functions are const and may be called by several threads.
class Tokenizer {
 public:
  /// Throws FileError, whose message begins with the file's name.
  static Tokenizer load(const std::filesystem::path& file);
  /// The same of the file's text; `name` begins the messages.
  static Tokenizer parse(std::string_view json, const std::string& name);

  /// The ids of a text in UTF-8. What is no UTF-8 counts as U+FFFD, one for each maximal part of a character, as in Python's
  /// bytes.decode(errors="replace"). Time is O(n log n) of its bytes, also without any spaces. Throws FileError when one of the file's
  /// regular expressions needs too many steps or too much memory on it.
  std::vector<int> encode(std::string_view text, const EncodeOptions& options = {}) const;

  /// The text of ids, always UTF-8: U+FFFD where bytes form no character. Ids that are none of this tokenizer's give nothing.
  std::string decode(std::span<const int> ids, const DecodeOptions& options = {}) const;

  /// The id of a token in the file's spelling, added tokens included.
  std::optional<int> token_id(std::string_view token) const;
  /// The inverse.
  std::optional<std::string> token(int id) const;
  /// The largest id plus 1. Ids between may be unused.
  int vocab_size() const;

 private:
  friend class StreamDecoder;
  struct Parts;
  explicit Tokenizer(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

  std::shared_ptr<const Parts> parts_;
};

/// Decodes ids one by one. The texts that push() and finish() return, one after the other, are what Tokenizer::decode gives for all ids.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, const DecodeOptions& options = {});
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;
  ~StreamDecoder();

  /// The text that is complete with this id: whole characters, maybe none.
  std::string push(int id);
  /// What is left: U+FFFD where a character remained incomplete. The decoder may then be used for another sequence.
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tw::models
