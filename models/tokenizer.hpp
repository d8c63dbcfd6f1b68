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
  /// Whether special tokens in the text become their ids, as in a prompt's template. Otherwise they are ordinary text, as in a user's
  /// words.
  bool parse_special_tokens = false;
  /// Whether the tokens of the file's post-processor are added, such as "[gMASK]<sop>" or "<|begin_of_text|>" in front.
  bool add_special_tokens = false;
};

/// How Tokenizer::decode and StreamDecoder treat special tokens.
struct DecodeOptions {
  bool skip_special_tokens = false;
};

/// What a GGUF file has of a byte-level BPE tokenizer in place of a tokenizer.json.
struct TokenLists {
  enum class Kind { normal, special, added, unused };
  struct Token {
    std::string text;  ///< of normal tokens: in GPT-2's characters for bytes
    Kind kind;         ///< special and added tokens are searched in a text before it is cut into words; unused ones do not exist
  };
  std::vector<Token> tokens;        ///< by id
  std::vector<std::string> merges;  ///< "a b", the first to merge first
  std::string words;                ///< a regular expression that matches the words of a text
};

/// A byte-pair tokenizer of a Hugging Face tokenizer.json: the same ids, and the same text from ids, as their `tokenizers` library.
/// It reads BPE models (also with byte_fallback, ignore_merges and unk_token), the pre-tokenizers Split, ByteLevel and Digits, the
/// normalizers NFC, NFD, NFKC, NFKD, Replace, Prepend, Lowercase and Strip, the decoders ByteLevel, Replace, ByteFallback, Fuse and Strip,
/// the post-processors ByteLevel and TemplateProcessing, and Sequences of them. Anything else in the file is a FileError that names it;
/// `truncation` and `padding` are ignored, as transformers does.
///
/// Copies share everything. All functions are const; several threads may call them.
class Tokenizer {
 public:
  /// Throws FileError, whose message begins with the file's name.
  static Tokenizer load(const std::filesystem::path& file);
  /// The same for the file's text. Messages begin with `name`.
  static Tokenizer parse(std::string_view json, const std::string& name);
  /// From lists instead of a JSON document. Messages begin with `name`.
  static Tokenizer from(const TokenLists& lists, const std::string& name);

  /// The ids of a text in UTF-8. Invalid UTF-8 counts as U+FFFD, one for each maximal part of a character, as in Python's
  /// bytes.decode(errors="replace"). Time is O(n log n) of its bytes, also without any spaces. Throws FileError if one of the file's
  /// regular expressions needs too many steps or too much memory for it.
  std::vector<int> encode(std::string_view text, const EncodeOptions& options = {}) const;

  /// The text of ids, always UTF-8: U+FFFD where bytes do not form a character. Unknown ids give nothing.
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

/// Decodes ids incrementally. The concatenated results of push() and finish() are the same as Tokenizer::decode for all ids.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, const DecodeOptions& options = {});
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;
  ~StreamDecoder();

  /// The text completed by this id: whole characters, possibly none.
  std::string push(int id);
  /// The rest: U+FFFD for an incomplete character. The decoder may then be used for another sequence.
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tw::models
