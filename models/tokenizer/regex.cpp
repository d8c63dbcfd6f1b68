#include "models/tokenizer/regex.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>

#include "models/one_line.hpp"
#include "models/tokenizer/unicode_additions.hpp"
#include "models/tokenizer/utf8.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

constexpr std::uint32_t kMostHeapKiB = 64 << 10;     // of one match
constexpr std::size_t kLargestJitStack = 16u << 20;  // bytes, of a thread
constexpr std::size_t kLongestPattern = 1u << 16;    // bytes
constexpr std::size_t kLongestTranslated = 1u << 20;

// Oniguruma's \s is White_Space; PCRE2's also has U+180E.
constexpr std::string_view kSpace = R"(\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kNoSpace =
    R"(\x{00}-\x{08}\x{0E}-\x{1F}\x{21}-\x{84}\x{86}-\x{9F}\x{A1}-\x{167F}\x{1681}-\x{1FFF}\x{200B}-\x{2027}\x{202A}-\x{202E}\x{2030}-\x{205E}\x{2060}-\x{2FFF}\x{3001}-\x{10FFFF})";

void append_range(std::string& set, char32_t first, char32_t last) {
  set += tw::format("\\x{{{:X}}}", static_cast<std::uint32_t>(first));
  if (last > first) set += tw::format("-\\x{{{:X}}}", static_cast<std::uint32_t>(last));
}

/// Items of a class: the characters of a general category (one or two letters).
std::string category(std::string_view name) {
  std::string set = tw::format("\\p{{{}}}", name);
  for (const UnicodeAddition& a : kUnicodeAdditions) {
    if (a.category.starts_with(name)) append_range(set, a.first, a.last);
  }
  return set;
}

/// Translates one pattern.
class Translation {
 public:
  Translation(std::string_view pattern, const std::string& file) : pattern_(pattern), file_(file) {}

  std::string run() {
    while (at_ < pattern_.size()) {
      if (in_class_) {
        class_item();
      } else {
        item();
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw FileError(
        tw::format("{}: the regular expression {} has {}, which is not supported", file_, in_quotes(pattern_), in_quotes(what)));
  }

  bool next_is(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }

  void item() {
    const char c = pattern_[at_];
    if (c == '\\') return escape();
    if (c == '^' || c == '$') refuse(pattern_.substr(at_, 1));
    if (c == '[') {
      in_class_ = true;
      out_ += '[';
      ++at_;
      if (next_is("^")) {
        out_ += '^';
        ++at_;
      }
      if (next_is("]")) refuse("[]");
      return;
    }
    if (c == '(') return group();
    if (c == '{') return interval();
    out_ += c;
    ++at_;
  }

  void class_item() {
    const char c = pattern_[at_];
    if (c == '\\') return escape();
    if (c == '[') refuse("[ inside [...]");
    if (next_is("&&")) refuse("&&");
    in_class_ = c != ']';
    out_ += c;
    ++at_;
  }

  void group() {
    if (next_is("(*")) refuse("(*");
    if (!next_is("(?")) {
      out_ += "(?:";  // group captures are not needed
      ++at_;
      return;
    }
    for (const std::string_view known : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
      if (!next_is(known)) continue;
      out_ += known;
      at_ += known.size();
      return;
    }
    refuse(pattern_.substr(at_, 4));
  }

  /// {n}, {n,}, {,m} or {n,m}; any other brace is a character.
  void interval() {
    const std::size_t close = pattern_.find('}', at_);
    const std::string_view inside = close == std::string_view::npos ? "" : pattern_.substr(at_ + 1, close - at_ - 1);
    const std::size_t comma = inside.find(',');
    const std::string_view low = inside.substr(0, comma);
    const std::string_view high = comma == std::string_view::npos ? "" : inside.substr(comma + 1);
    const auto is_number = [](std::string_view text) {
      return text.size() <= 5 && std::all_of(text.begin(), text.end(), [](unsigned char d) { return std::isdigit(d) != 0; });
    };
    if (!is_number(low) || !is_number(high) || (low.empty() && high.empty())) {
      out_ += "\\{";
      ++at_;
      return;
    }
    at_ = close + 1;
    if (next_is("+")) refuse("a + after {...}");
    if (comma == std::string_view::npos && next_is("?")) refuse("a ? after {n}");
    if (low.empty()) {
      out_ += tw::format("{{0,{}}}", high);
    } else {
      out_ += tw::format("{{{}}}", inside);
    }
  }

  /// Items of a class, in brackets unless there are some around them.
  void put_set(std::string_view set, bool is_negated = false) {
    if (in_class_) {
      out_ += set;
    } else {
      out_ += is_negated ? "[^" : "[";
      out_ += set;
      out_ += ']';
    }
  }

  void escape() {
    if (at_ + 1 >= pattern_.size()) refuse("a \\ at its end");
    const char c = pattern_[at_ + 1];
    const std::string_view whole = pattern_.substr(at_, 2);
    at_ += 2;
    const bool is_negated = c == 'D' || c == 'W';
    if (is_negated && in_class_) refuse(tw::format("{} inside [...]", whole));
    switch (c) {
      case 'r':
      case 'n':
      case 't':
      case 'f':
        out_ += whole;
        return;
      case 'v':
        out_ += "\\x0B";
        return;
      case 's':
        return put_set(kSpace);
      case 'S':
        return put_set(kNoSpace);
      case 'd':
      case 'D':
        return put_set(category("Nd"), is_negated);
      case 'w':
      case 'W':  // Oniguruma is special for the numbers of Latin-1
        return put_set(R"(\p{Alphabetic}\xB2\xB3\xB9\xBC-\xBE)" + category("L") + category("M") + category("Nd") + category("Pc"),
                       is_negated);
      case 'p':
      case 'P':
        return property(c == 'P');
      case 'x':
      case 'u':
        return code_point(c);
      default:
        break;
    }
    if (static_cast<unsigned char>(c) < 0x80 && std::ispunct(static_cast<unsigned char>(c)) == 0 && c != ' ') refuse(whole);
    if (static_cast<unsigned char>(c) >= 0x80) refuse("a \\ before a character that is not ASCII");
    out_ += whole;
  }

  void property(bool is_negated) {
    const std::size_t close = pattern_.find('}', at_);
    if (!next_is("{") || close == std::string_view::npos) refuse("\\p without {...}");
    std::string_view name = pattern_.substr(at_ + 1, close - at_ - 1);
    at_ = close + 1;
    if (name.starts_with('^')) {
      is_negated = !is_negated;
      name.remove_prefix(1);
    }
    if (is_negated && in_class_) refuse("a negated \\p inside [...]");
    constexpr std::array<std::string_view, 37> kCategories = {"L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl",
                                                              "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
                                                              "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cn", "Co", "Cs"};
    if (std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end()) return put_set(category(name), is_negated);
    const bool is_word =
        !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char l) { return std::isalpha(l) != 0 || l == '_'; });
    if (!is_word) refuse(tw::format("\\p{{{}}}", name));
    std::string script = tw::format("\\p{{sc:{}}}", name);
    if (name == "Han") {
      for (const auto& [first, last] : kHanAdditions) append_range(script, first, last);
    }
    put_set(script, is_negated);
  }

  /// \xHH (ASCII only: in Oniguruma it is a byte), \x{H...}, \uHHHH.
  void code_point(char kind) {
    const bool has_braces = kind == 'x' && next_is("{");
    const std::size_t first = at_ + (has_braces ? 1 : 0);
    std::size_t last = first;
    const std::size_t most = has_braces ? 6 : kind == 'u' ? 4 : 2;
    while (last < pattern_.size() && last - first < most && std::isxdigit(static_cast<unsigned char>(pattern_[last])) != 0) ++last;
    const std::string digits(pattern_.substr(first, last - first));
    const bool is_whole = has_braces ? !digits.empty() && pattern_.substr(last, 1) == "}" : digits.size() == most;
    if (!is_whole || (most == 2 && digits[0] > '7')) refuse(tw::format("\\{}{}", kind, digits));
    at_ = last + (has_braces ? 1 : 0);
    out_ += tw::format("\\x{{{}}}", digits);
  }

  std::string_view pattern_;
  const std::string& file_;
  std::size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

template <class T, void (*Free)(T*)>
struct Freed {
  void operator()(T* pointer) const { Free(pointer); }
};
template <class T, void (*Free)(T*)>
using Owned = std::unique_ptr<T, Freed<T, Free>>;

/// The resources that a thread needs for matching, shared by all expressions.
struct Workspace {
  Owned<pcre2_match_data, pcre2_match_data_free> match{pcre2_match_data_create(1, nullptr)};
  Owned<pcre2_match_context, pcre2_match_context_free> context{pcre2_match_context_create(nullptr)};
  Owned<pcre2_jit_stack, pcre2_jit_stack_free> stack{pcre2_jit_stack_create(64u << 10, kLargestJitStack, nullptr)};
  Workspace() {
    pcre2_set_match_limit(context.get(), ~std::uint32_t{0});  // count_steps() counts more than it does
    pcre2_set_heap_limit(context.get(), kMostHeapKiB);
    if (stack) pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
};

struct Progress {
  Budget& budget;
  std::size_t at;  // in the text
};

/// PCRE2's callout: it comes before every item of an expression is matched. An item may go over many characters (\p{L}+), hence the
/// distance.
int count_steps(pcre2_callout_block* block, void* data) {
  auto& progress = *static_cast<Progress*>(data);
  const std::size_t at = block->current_position;
  const std::size_t distance = at > progress.at ? at - progress.at : progress.at - at;
  progress.at = at;
  return progress.budget.take(1 + static_cast<std::int64_t>(distance)) ? 0 : PCRE2_ERROR_CALLOUT;
}

void require_length(std::size_t size, const std::string& file) {
  if (size > kLongestPattern)
    throw FileError(tw::format("{}: a regular expression of {} bytes; allowed: at most {}", file, size, kLongestPattern));
}

}  // namespace

Regex::Regex(const std::string& pattern, const std::string& file) : file_(file), pattern_(pattern) {
  require_length(pattern.size(), file);
  compile(Translation(pattern, file).run());
}

Regex Regex::literal(const std::string& text, const std::string& file) {
  require_length(text.size(), file);
  Regex regex;
  regex.file_ = file;
  regex.pattern_ = text;
  std::string escaped;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x80 && std::isalnum(static_cast<unsigned char>(c)) == 0) {
      escaped += tw::format("\\x{:02X}", static_cast<unsigned>(c));
    } else {
      escaped += c;
    }
  }
  regex.compile(escaped);
  return regex;
}

void Regex::compile(const std::string& translated) {
  if (translated.size() > kLongestTranslated)
    throw FileError(tw::format("{}: the regular expression {} has too many sets of characters", file_, in_quotes(pattern_)));
  int error = 0;
  PCRE2_SIZE offset = 0;
  const Owned<pcre2_compile_context, pcre2_compile_context_free> context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_AUTO_CALLOUT, &error, &offset, context.get());
  if (code == nullptr) throw FileError(tw::format("{}: the regular expression {}: {}", file_, in_quotes(pattern_), message_of(error)));
  code_ = std::shared_ptr<void>(code, [](void* c) { pcre2_code_free(static_cast<pcre2_code*>(c)); });
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // if this fails, matches are interpreted
}

void Regex::find_all(std::string_view text, std::vector<Match>& matches, Budget& budget) const {
  thread_local const Workspace workspace;
  Progress progress{budget, 0};
  pcre2_set_callout(workspace.context.get(), count_steps, &progress);
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  matches.clear();
  std::size_t at = 0;
  while (at <= text.size()) {
    const int found = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at, PCRE2_NO_UTF_CHECK,
                                  workspace.match.get(), workspace.context.get());
    if (found == PCRE2_ERROR_NOMATCH) return;
    if (found < 0) {
      throw FileError(tw::format("{}: the regular expression {} fails at byte {} of a text of {}: {}", file_, in_quotes(pattern_), at,
                                 text.size(), found == PCRE2_ERROR_CALLOUT ? "it takes too many steps" : message_of(found)));
    }
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(workspace.match.get());
    const Match match{bounds[0], bounds[1]};
    if (match.begin == match.end && !matches.empty() && matches.back().end == match.end) {
      if (at == text.size()) return;
      next_character(text, at);
      continue;
    }
    at = match.end;
    matches.push_back(match);
  }
}

Regex pattern_of(const Fields& pattern) {
  if (pattern.has("Regex")) return Regex(pattern.string("Regex"), pattern.file());
  const std::string text = pattern.string("String");
  if (text.empty()) pattern.fail("String is empty");
  return Regex::literal(text, pattern.file());
}

}  // namespace tw::models
