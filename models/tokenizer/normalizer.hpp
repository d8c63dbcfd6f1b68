#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "models/tokenizer/budget.hpp"
#include "models/tokenizer/fields.hpp"
#include "models/tokenizer/regex.hpp"

namespace tw::models {

/// Changes a text before it is split into words.
class Normalizer {
 public:
  /// Changes nothing.
  Normalizer() = default;
  explicit Normalizer(const Fields& description) { add(description); }

  std::string apply(std::string_view text, Budget& budget) const;

 private:
  enum class Form { nfc, nfd, nfkc, nfkd };
  struct Replace {
    Regex regex;
    std::string content;
  };
  struct Prepend {
    std::string text;
  };
  struct Lowercase {};
  struct Strip {
    bool left, right;
  };

  void add(const Fields& description);
  static std::string apply(Form form, std::string_view text, Budget& budget);
  static std::string apply(const Replace& step, std::string_view text, Budget& budget);
  static std::string apply(const Prepend& step, std::string_view text, Budget& budget);
  static std::string apply(const Lowercase& step, std::string_view text, Budget& budget);
  static std::string apply(const Strip& step, std::string_view text, Budget& budget);

  std::vector<std::variant<Form, Replace, Prepend, Lowercase, Strip>> steps_;
};

/// `text` with every match replaced. `what` is the step's name, for messages.
std::string replace_all(const Regex& regex, std::string_view text, const std::string& content, Budget& budget, const char* what);

}  // namespace tw::models
