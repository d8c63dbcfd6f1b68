#include "apps/serve/multipart.hpp"

#include <algorithm>
#include <utility>

#include "apps/serve/error.hpp"
#include "models/one_line.hpp"
#include "runtime/format.hpp"

namespace tw::serve {

namespace {

constexpr std::string_view kBlank = " \t";

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) { return lower(x) == lower(y); });
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlank);
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(kBlank) + 1 - begin);
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c = lower(c);
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/// `text` with %XX replaced by the byte. Other percent signs stay.
std::string percent_decoded(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool escape = text[i] == '%' && i + 2 < text.size() && hex_digit(text[i + 1]) >= 0 && hex_digit(text[i + 2]) >= 0;
    result += escape ? static_cast<char>(16 * hex_digit(text[i + 1]) + hex_digit(text[i + 2])) : text[i];
    if (escape) i += 2;
  }
  return result;
}

/// A header's value, as in form-data; name="file"; filename="a.wav".
struct HeaderValue {
  std::string_view value;
  std::vector<std::pair<std::string_view, std::string>> parameters;

  /// The parameter of that name; null if there is none.
  const std::string* find(std::string_view name) const {
    for (const auto& [each, text] : parameters)
      if (same_word(each, name)) return &text;
    return nullptr;
  }
};

/// nullopt if `text` is not of that form, or has a parameter twice.
std::optional<HeaderValue> parse_value(std::string_view text) {
  HeaderValue result;
  std::size_t at = std::min(text.find(';'), text.size());
  result.value = trimmed(text.substr(0, at));
  while (at < text.size()) {
    at = text.find_first_not_of(kBlank, at + 1);  // after the semicolon
    if (at == std::string_view::npos) break;      // a semicolon at the end
    const std::size_t equals = text.find('=', at);
    if (equals == std::string_view::npos) return std::nullopt;
    const std::string_view name = trimmed(text.substr(at, equals - at));
    if (name.empty() || name.find_first_of(";\"") != std::string_view::npos || result.find(name)) return std::nullopt;
    std::string value;
    at = std::min(text.find_first_not_of(kBlank, equals + 1), text.size());
    if (at < text.size() && text[at] == '"') {
      for (++at;; ++at) {
        if (at >= text.size()) return std::nullopt;
        if (text[at] == '"') break;
        // Only these two: some clients send C:\folder\file.wav.
        if (text[at] == '\\' && at + 1 < text.size() && (text[at + 1] == '"' || text[at + 1] == '\\')) ++at;
        value += text[at];
      }
      at = std::min(text.find_first_not_of(kBlank, at + 1), text.size());
      if (at < text.size() && text[at] != ';') return std::nullopt;
    } else {
      const std::size_t end = std::min(text.find(';', at), text.size());
      value = trimmed(text.substr(at, end - at));
      at = end;
    }
    result.parameters.emplace_back(name, std::move(value));
  }
  return result;
}

/// The value of filename*, as in UTF-8''na%C3%AFve.wav; nullopt if it is not of that form.
std::optional<std::string> extended_value(std::string_view text) {
  const std::size_t charset = text.find('\'');
  if (charset == std::string_view::npos || !same_word(text.substr(0, charset), "utf-8")) return std::nullopt;
  const std::size_t language = text.find('\'', charset + 1);
  if (language == std::string_view::npos) return std::nullopt;
  return percent_decoded(text.substr(language + 1));
}

bool is_boundary_character(char c) {
  return (c >= '0' && c <= '9') || (lower(c) >= 'a' && lower(c) <= 'z') ||
         std::string_view("'()+_,-./:=? ").find(c) != std::string_view::npos;
}

[[noreturn]] void malformed(const std::string& what) { throw ApiError(400, tw::format("multipart/form-data: {}", what)); }

std::string boundary_of(std::string_view content_type) {
  const std::optional<HeaderValue> type = parse_value(content_type);
  const std::string_view name = type ? type->value : trimmed(content_type.substr(0, content_type.find(';')));
  if (!same_word(name, "multipart/form-data"))
    throw ApiError(415, tw::format("Content-Type is {}; it must be multipart/form-data", models::in_quotes(name)), "",
                   "unsupported_content_type");
  const std::string* boundary = type ? type->find("boundary") : nullptr;
  if (!boundary) malformed("Content-Type has no boundary");
  const bool valid = !boundary->empty() && boundary->size() <= 70 && boundary->back() != ' ' &&
                     std::all_of(boundary->begin(), boundary->end(), is_boundary_character);
  if (!valid) malformed("the boundary must have 1 to 70 letters, digits and characters of '()+_,-./:=? and not end with a space");
  return *boundary;
}

/// Finds the boundaries of a body.
class Boundaries {
 public:
  Boundaries(std::string_view body, const std::string& boundary) : body_(body), delimiter_("\r\n--" + boundary) {}

  /// The end of the text from `from` to the next boundary; moves past the boundary's line. nullopt if there is none.
  std::optional<std::size_t> next(std::size_t from) {
    // The first boundary may be at the beginning of the body.
    const std::string_view first = std::string_view(delimiter_).substr(2);
    if (from == 0 && body_.starts_with(first) && passes(first.size())) return 0;
    for (std::size_t at = body_.find(delimiter_, from); at != std::string_view::npos; at = body_.find(delimiter_, at + 2))
      if (passes(at + delimiter_.size())) return at;
    return std::nullopt;
  }

  std::size_t after() const { return after_; }  ///< where the text after the boundary begins
  bool last() const { return last_; }

 private:
  /// Whether the line of a boundary ends at `at`, so that it is not the beginning of another word.
  bool passes(std::size_t at) {
    last_ = body_.substr(at).starts_with("--");
    if (last_) return true;
    while (at < body_.size() && (body_[at] == ' ' || body_[at] == '\t')) ++at;
    if (!body_.substr(at).starts_with("\r\n")) return false;
    after_ = at;  // its line end may be the first one of an empty part's headers
    return true;
  }

  std::string_view body_;
  std::string delimiter_;
  std::size_t after_ = 0;
  bool last_ = false;
};

FormPart parse_part(std::string_view text, std::size_t number, const MultipartLimits& limits) {
  // `text` begins with the line end of the boundary. Headers and content are separated by an empty line.
  const std::size_t most = limits.header_bytes + 6, end = text.substr(0, std::min(text.size(), most)).find("\r\n\r\n");
  if (end == std::string_view::npos)
    malformed(text.size() > most ? tw::format("part {} has more than {} bytes of headers", number, limits.header_bytes)
                                 : tw::format("part {} has no empty line after its headers", number));
  FormPart part;
  part.content = text.substr(end + 4);
  bool named = false;
  for (std::size_t at = 0; at < end;) {
    const std::size_t begin = at + 2;  // after a line end
    at = std::min(text.find("\r\n", begin), end);
    const std::string_view line = text.substr(begin, at - begin);
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos || colon == 0)
      malformed(tw::format("part {} has the header {}; it must be a name and a value", number, models::in_quotes(line)));
    const std::string_view name = trimmed(line.substr(0, colon)), value = trimmed(line.substr(colon + 1));
    if (same_word(name, "content-type")) part.content_type = value;
    if (same_word(name, "content-transfer-encoding") && !same_word(value, "binary") && !same_word(value, "8bit") &&
        !same_word(value, "7bit"))
      malformed(tw::format("part {} is encoded as {}; it must be sent as it is", number, models::in_quotes(value)));
    if (!same_word(name, "content-disposition")) continue;
    const std::optional<HeaderValue> disposition = parse_value(value);
    const std::string* field = disposition && same_word(disposition->value, "form-data") ? disposition->find("name") : nullptr;
    if (!field || named)
      malformed(tw::format("part {} has Content-Disposition {}; it must be form-data with a name, once", number, models::in_quotes(value)));
    named = true;
    part.name = percent_decoded(*field);
    if (const std::string* file = disposition->find("filename")) part.filename = percent_decoded(*file);
    if (const std::string* extended = disposition->find("filename*"))
      if (std::optional<std::string> file = extended_value(*extended)) part.filename = std::move(file);
  }
  if (!named) malformed(tw::format("part {} has no Content-Disposition with its name", number));
  return part;
}

}  // namespace

std::vector<FormPart> parse_multipart(std::string_view content_type, std::string_view body, const MultipartLimits& limits) {
  Boundaries boundaries(body, boundary_of(content_type));
  if (!boundaries.next(0)) malformed("the body has no boundary of the Content-Type");
  std::vector<FormPart> parts;
  while (!boundaries.last()) {
    const std::size_t begin = boundaries.after();
    const std::optional<std::size_t> end = boundaries.next(begin);
    if (!end) malformed(tw::format("the body ends in part {}, without a last boundary", parts.size() + 1));
    if (parts.size() == limits.parts) malformed(tw::format("there are more than {} parts", limits.parts));
    parts.push_back(parse_part(body.substr(begin, *end - begin), parts.size() + 1, limits));
  }
  return parts;
}

}  // namespace tw::serve
