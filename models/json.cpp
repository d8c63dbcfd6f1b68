#include "models/json.hpp"

#include <vector>

#include "models/one_line.hpp"
#include "models/regular_file.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using nlohmann::json;

/// Builds a document while it is parsed, within limits. The parser's own callback could also stop early, but takes quadratic time: the
/// parser then searches a container's values whenever one of them ends.
class DocumentBuilder : public nlohmann::json_sax<json> {
 public:
  DocumentBuilder(const std::string& file, std::size_t memory) : file_(file), most_memory_(memory) {}
  json document;

  bool null() override { return put(nullptr, 0) != nullptr; }
  bool boolean(bool value) override { return put(value, 0) != nullptr; }
  bool number_integer(std::int64_t value) override { return put(value, 0) != nullptr; }
  bool number_unsigned(std::uint64_t value) override { return put(value, 0) != nullptr; }
  bool number_float(double value, const std::string&) override { return put(value, 0) != nullptr; }
  bool binary(json::binary_t&) override { return false; }  // not possible in a text
  bool string(std::string& value) override { return put(value, kString + value.size()) != nullptr; }

  bool start_object(std::size_t) override { return open(json::value_t::object, kObject); }
  bool start_array(std::size_t) override { return open(json::value_t::array, kArray); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& key) override {
    charge(kMember + key.size());
    member_ = &(*open_.back())[key];  // if a key occurs twice, the later value counts
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    throw FileError(tw::format("{}: not valid JSON: {}", file_, one_line(error.what())));
  }

 private:
  static constexpr std::size_t kDeepest = 64;
  // Bytes of memory per array element while the array grows, and per other value.
  static constexpr std::size_t kElement = 48, kString = 48, kArray = 32, kObject = 64, kMember = 96;

  void charge(std::size_t bytes) {
    memory_ += bytes;
    if (memory_ > most_memory_) throw FileError(tw::format("{}: JSON that takes more than {} bytes of memory", file_, most_memory_));
  }

  template <class T>
  json* put(const T& value, std::size_t bytes) {
    charge(kElement + bytes);
    if (open_.empty()) {
      document = value;
      return &document;
    }
    json& container = *open_.back();
    if (container.is_array()) return &container.get_ref<json::array_t&>().emplace_back(value);
    *member_ = value;
    return member_;
  }

  bool open(json::value_t container, std::size_t bytes) {
    if (open_.size() == kDeepest) throw FileError(tw::format("{}: JSON of more than {} levels", file_, kDeepest));
    open_.push_back(put(container, bytes));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string& file_;
  const std::size_t most_memory_;
  std::vector<json*> open_;  // containers
  json* member_ = nullptr;   // of the innermost object: the destination of its next value
  std::size_t memory_ = 0;
};

void append_brief(std::string& text, const json& value) {
  constexpr std::size_t kMost = 60;
  const auto dump = [](const json& v) { return v.dump(-1, ' ', false, json::error_handler_t::replace); };
  if (value.is_string()) {
    text += dump(value.get_ref<const std::string&>().substr(0, kMost));
  } else if (value.is_array()) {
    text += '[';
    for (auto each = value.begin(); each != value.end() && text.size() <= kMost; ++each) {
      if (each != value.begin()) text += ',';
      append_brief(text, *each);
    }
    text += ']';
  } else if (value.is_object()) {
    text += '{';
    for (auto each = value.begin(); each != value.end() && text.size() <= kMost; ++each) {
      if (each != value.begin()) text += ',';
      text += dump(each.key().substr(0, kMost)) + ':';
      append_brief(text, *each);
    }
    text += '}';
  } else {
    text += dump(value);
  }
}

}  // namespace

std::string brief(const json& value) {
  std::string text;
  append_brief(text, value);
  if (text.size() <= 60) return text;
  std::size_t end = 57;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // not inside a UTF-8 character
  return text.substr(0, end) + "...";
}

nlohmann::json parse_json(std::string_view text, const std::string& name, std::size_t memory) {
  // The parser treats a zero byte as the end.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos)
    throw FileError(tw::format("{}: not valid JSON: byte {} is zero", name, zero));
  DocumentBuilder builder(name, memory);
  json::sax_parse(text, &builder);  // it throws, or returns true
  return std::move(builder.document);
}

nlohmann::json load_json(const std::filesystem::path& file, std::size_t largest) {
  return parse_json(read_text(file, largest), file.string());
}

}  // namespace tw::models
