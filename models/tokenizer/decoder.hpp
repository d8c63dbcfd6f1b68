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

/// How tokens become text: steps for each token, then how they are joined, then what is taken off the front.
class Decoder {
 public:
  /// Tokens with spaces between them.
  Decoder() = default;
  explicit Decoder(const Fields& description) : file_(description.file()), joins_with_(Join::nothing) { add(description); }

  /// Of one sequence of tokens.
  struct State {
    std::vector<std::string> bytes;  // of each ByteFallback: those that wait for more
    std::string held;                // the beginning of a character
    bool is_first = true;
    std::size_t stripped = 0;  // characters that were taken off the front
    Budget budget{""};
  };
  State begin() const;
  /// Appends to `text` what is complete with this token.
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
