#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "models/tokenizer/budget.hpp"
#include "models/tokenizer/fields.hpp"
#include "models/tokenizer/regex.hpp"

namespace tw::models {

/// Converts tokens to text: steps for each token, then joining, then stripping at the front.
class Decoder {
 public:
  /// Joins tokens with spaces.
  Decoder() = default;
  explicit Decoder(const Fields& description) : file_(description.file()), joins_with_(Join::nothing) { add(description); }

  /// The state of one sequence of tokens.
  struct State {
    std::vector<std::string> bytes;  // pending bytes of each ByteFallback
    std::string held;                // an incomplete character
    bool is_first = true;
    std::size_t stripped = 0;  // characters stripped at the front
    Budget budget{""};
  };
  State begin() const;
  /// Appends the text completed by this token to `text`.
  void push(State& state, std::string_view token, std::string& text) const;
  /// Appends the rest.
  void finish(State& state, std::string& text) const;

 private:
  enum class Join { space, nothing, bytes };
  struct Replace {
    Regex regex;
    std::string content;
  };
  struct ByteFallback {
    std::size_t index;  // into State::bytes
  };
  struct Strip {
    std::string character;
    int start, stop;
  };

  void add(const Fields& description);
  void run(State& state, std::size_t index, std::string token, std::string& text) const;
  static std::string take_bytes(std::string& bytes);
  void join(State& state, std::string_view token, std::string& text) const;
  void strip_front(State& state, std::string_view piece, std::string& text) const;

  std::string file_;
  std::vector<std::variant<Replace, ByteFallback, Strip>> steps_;
  std::size_t byte_fallbacks_ = 0;
  Join joins_with_ = Join::space;
  bool is_joined_ = false;      // while steps are added: Fuse or ByteLevel was among them
  std::optional<Strip> front_;  // the one after it
};

}  // namespace tw::models
