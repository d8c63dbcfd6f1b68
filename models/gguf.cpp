#include "models/gguf.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>

#include "models/one_line.hpp"
#include "models/regular_file.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

constexpr std::size_t kLargestGgufHeader = std::size_t{64} << 20;  // a vocabulary of 262144 tokens and twice as many merges takes 14 MB
constexpr std::uint64_t kMostEntries = 1 << 16;                    // keys; tensors: the largest models have 10^4
constexpr std::size_t kLongestName = 1024;                         // bytes, of a tensor; ggml allows 63
constexpr std::size_t kLongestKey = 65535;                         // bytes; the format's own limit
constexpr std::size_t kMostExtents = 4;                            // the format's own limit
constexpr std::uint64_t kMostNumbers = 64;                         // of an array that is kept with the scalars
constexpr std::int64_t kLargestAlignment = 1 << 16;

/// The types of metadata values, by their numbers in the file.
enum class ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
constexpr std::array<std::size_t, 13> kValueBytes = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};  // at least, for strings and arrays

}  // namespace

/// Reads a part of a file from its beginning to its end, in pieces.
class GgufCursor {
 public:
  /// `end_is` says what `end` is, for messages.
  GgufCursor(const FileBytes& file, std::size_t begin, std::size_t end, std::string end_is)
      : file_(file), at_(begin), end_(end), end_is_(std::move(end_is)) {}

  std::string where;  ///< what is read, for messages

  [[noreturn]] void fail(const std::string& what) const {
    throw FileError(tw::format("{}: {}{}{}", file_.name, where, where.empty() ? "" : ": ", what));
  }

  std::size_t at() const { return at_; }
  std::size_t left() const { return end_ - at_; }

  template <class T>
  T number() {
    std::array<std::byte, sizeof(T)> bytes;
    copy(bytes);
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }

  /// `what` has `count` elements of at least `bytes` each: throws if they do not fit what is left.
  void require(std::uint64_t count, std::size_t bytes, const char* what) const {
    if (count > left() / bytes) fail(tw::format("{} {}; {} bytes are left to {}", count, what, left(), end_is_));
  }

  /// A string's length, which fits what is left.
  std::size_t length() {
    const auto length = number<std::uint64_t>();
    require(length, 1, "bytes of a string");
    return length;
  }
  std::string string() {
    std::string text(length(), '\0');
    copy(std::as_writable_bytes(std::span(text)));
    return text;
  }
  /// The name of a key or a tensor. It is part of messages.
  std::string name(std::size_t longest) {
    const std::size_t size = length();
    if (size > longest) fail(tw::format("has a name of {} bytes; allowed: at most {}", size, longest));
    std::string text(size, '\0');
    copy(std::as_writable_bytes(std::span(text)));
    if (std::any_of(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }))
      fail("has a name with characters other than those of printable ASCII");
    return text;
  }
  void skip(std::size_t bytes) { at_ += bytes; }

 private:
  void copy(std::span<std::byte> target) {
    if (target.size() > left()) fail(tw::format("ends at byte {}, {}", end_, end_is_));
    while (!target.empty()) {
      if (at_ < window_begin_ || at_ >= window_begin_ + window_.size()) {
        constexpr std::size_t kWindow = 1 << 16;
        window_.resize(std::min(kWindow, left()));
        window_begin_ = at_;
        file_.read(at_, window_);
      }
      const std::size_t offset = at_ - window_begin_, count = std::min(target.size(), window_.size() - offset);
      std::memcpy(target.data(), window_.data() + offset, count);
      target = target.subspan(count);
      at_ += count;
    }
  }

  const FileBytes& file_;
  std::size_t at_, end_;
  std::string end_is_;
  std::vector<std::byte> window_;  // of the file, from window_begin_
  std::size_t window_begin_ = 0;
};

namespace {

/// Calls f with a value of the type of an integer in metadata; returns whether it is one.
template <class F>
bool visit_integer(ValueType type, GgufCursor& from, F f) {
  switch (type) {
    case ValueType::u8:
      f(from.number<std::uint8_t>());
      return true;
    case ValueType::i8:
      f(from.number<std::int8_t>());
      return true;
    case ValueType::u16:
      f(from.number<std::uint16_t>());
      return true;
    case ValueType::i16:
      f(from.number<std::int16_t>());
      return true;
    case ValueType::u32:
      f(from.number<std::uint32_t>());
      return true;
    case ValueType::i32:
      f(from.number<std::int32_t>());
      return true;
    case ValueType::u64:
      f(from.number<std::uint64_t>());
      return true;
    case ValueType::i64:
      f(from.number<std::int64_t>());
      return true;
    default:
      return false;
  }
}

/// A value that is no array.
nlohmann::json read_scalar(ValueType type, GgufCursor& from) {
  nlohmann::json value;
  if (visit_integer(type, from, [&](auto number) { value = number; })) return value;
  if (type == ValueType::f32) return from.number<float>();
  if (type == ValueType::f64) return from.number<double>();
  if (type == ValueType::string) return from.string();
  const auto flag = from.number<std::uint8_t>();
  if (flag > 1) from.fail(tw::format("is the boolean {}; allowed: 0 and 1", flag));
  return flag == 1;
}

ValueType read_type(GgufCursor& from) {
  const auto type = from.number<std::uint32_t>();
  if (type >= kValueBytes.size()) from.fail(tw::format("has the type {}; allowed: 0 to {}", type, kValueBytes.size() - 1));
  return static_cast<ValueType>(type);
}

}  // namespace

/// Reads the header in the order of the file.
class Gguf::HeaderReader {
 public:
  HeaderReader(Gguf& into, const FileBytes& file)
      : into_(into),
        file_(file),
        from_(file, 0, std::min(file.size, kLargestGgufHeader),
              file.size > kLargestGgufHeader ? tw::format("the largest header, {} bytes", kLargestGgufHeader) : "the end of the file") {}

  void read() {
    const auto counts = read_start();
    nlohmann::json metadata = nlohmann::json::object();
    for (std::uint64_t i = 0; i < counts.keys; ++i) read_entry(i, metadata);
    into_.metadata_ = ConfigReader(file_.name, std::move(metadata));
    for (std::uint64_t i = 0; i < counts.tensors; ++i) read_tensor(i);
    into_.header_end_ = from_.at();
    place_tensors();
  }

 private:
  struct Counts {
    std::uint64_t tensors, keys;
  };

  Counts read_start() {
    refuse_lfs_pointer(file_.read_text(0, std::min(file_.size, std::size_t{64})), file_.name);
    constexpr std::size_t kStart = 24;
    if (file_.size < kStart) from_.fail(tw::format("{} bytes; a GGUF file has at least {}", file_.size, kStart));
    const auto magic = from_.number<std::uint32_t>();
    const auto version = from_.number<std::uint32_t>();
    constexpr std::uint32_t kMagic = 0x46554747, kSwapped = 0x47475546;  // "GGUF"
    if (magic == kSwapped || (magic == kMagic && (version & 0xFFFF) == 0 && version != 0))
      from_.fail("a big-endian GGUF file; only little-endian ones are read");
    if (magic != kMagic) from_.fail("not a GGUF file, which begins with \"GGUF\"");
    if (version != 2 && version != 3) from_.fail(tw::format("version {} of the GGUF format; allowed: 2 and 3", version));
    const Counts counts{from_.number<std::uint64_t>(), from_.number<std::uint64_t>()};
    if (counts.tensors > kMostEntries) from_.fail(tw::format("{} tensors; allowed: at most {}", counts.tensors, kMostEntries));
    if (counts.keys > kMostEntries) from_.fail(tw::format("{} metadata keys; allowed: at most {}", counts.keys, kMostEntries));
    return counts;
  }

  void read_entry(std::uint64_t index, nlohmann::json& metadata) {
    from_.where = tw::format("metadata entry {}", index);
    const std::string key = from_.name(kLongestKey);
    from_.where = tw::format("metadata {}", in_quotes(key));
    if (metadata.contains(key)) from_.fail("is there twice");
    const ValueType type = read_type(from_);
    metadata[key] = type == ValueType::array ? read_array(key) : read_scalar(type, from_);
  }

  nlohmann::json read_array(const std::string& key) {
    const ValueType type = read_type(from_);
    if (type == ValueType::array) from_.fail("is an array of arrays; allowed: an array of scalars or strings");
    Array array{static_cast<std::uint32_t>(type), from_.number<std::uint64_t>(), 0};
    const std::size_t element = kValueBytes[array.type];
    from_.require(array.count, element, "elements of an array");
    array.offset = from_.at();
    into_.arrays_.emplace(key, array);
    if (type == ValueType::string) {
      for (std::uint64_t i = 0; i < array.count; ++i) from_.skip(from_.length());
      return nlohmann::json::object();
    }
    if (array.count > kMostNumbers) {
      from_.skip(array.count * element);
      return nlohmann::json::object();
    }
    nlohmann::json values = nlohmann::json::array();
    for (std::uint64_t i = 0; i < array.count; ++i) values.push_back(read_scalar(type, from_));
    return values;
  }

  void read_tensor(std::uint64_t index) {
    from_.where = tw::format("tensor {}", index);
    const std::string name = from_.name(kLongestName);
    from_.where = tw::format("tensor {}", in_quotes(name));
    Stored tensor;
    const auto dimensions = from_.number<std::uint32_t>();
    if (dimensions < 1 || dimensions > kMostExtents)
      from_.fail(tw::format("has {} dimensions; allowed: 1 to {}", dimensions, kMostExtents));
    for (std::uint32_t i = 0; i < dimensions; ++i) {
      const auto extent = from_.number<std::uint64_t>();
      if (extent > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        from_.fail(tw::format("has the extent {}; allowed: at most {}", extent, std::numeric_limits<std::int64_t>::max()));
      tensor.shape.push_back(static_cast<std::int64_t>(extent));
    }
    std::reverse(tensor.shape.begin(), tensor.shape.end());
    const auto type = from_.number<std::uint32_t>();
    tensor.format = block_format(type);
    if (tensor.format == nullptr)
      from_.fail(tw::format("has the type {}; supported: {}", unsupported_format_name(type), supported_formats()));
    tensor.offset = from_.number<std::uint64_t>();  // in the data, so far
    tensor.bytes = bytes_of(tensor);
    if (!into_.tensors_.try_emplace(name, std::move(tensor)).second) from_.fail("is there twice");
  }

  std::size_t bytes_of(const Stored& tensor) const {
    const auto block = static_cast<std::uint64_t>(tensor.format->elements);
    const auto row = static_cast<std::uint64_t>(tensor.shape.back());
    if (row % block != 0)
      from_.fail(tw::format("{} of shape [{}]; allowed: rows of a multiple of {} elements", tensor.format->name,
                            tw::join(tensor.shape, ", "), block));
    std::uint64_t bytes = row / block * static_cast<std::uint64_t>(tensor.format->bytes);
    // As bytes of f32, so that the number of elements can be counted even if each takes half a byte.
    std::uint64_t elements = sizeof(float);
    bool fits = row / block <= file_.size;
    for (const std::int64_t extent : tensor.shape)
      fits = fits && !__builtin_mul_overflow(elements, static_cast<std::uint64_t>(extent), &elements);
    for (std::size_t i = 0; i + 1 < tensor.shape.size(); ++i)
      fits = fits && !__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(tensor.shape[i]), &bytes);
    if (!fits || elements > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) || bytes > file_.size)
      from_.fail(
          tw::format("{} of shape [{}] is larger than the file, {} bytes", tensor.format->name, tw::join(tensor.shape, ", "), file_.size));
    return bytes;
  }

  /// Checks that the tensors fill the data, each from the next aligned offset, and makes their offsets those in the file.
  void place_tensors() {
    from_.where.clear();
    const std::int64_t given = into_.metadata_.integer("general.alignment", 1, kLargestAlignment, 32);
    const auto alignment = static_cast<std::uint64_t>(given);
    if (alignment < 8 || (alignment & (alignment - 1)) != 0)
      into_.metadata_.fail("general.alignment", tw::format("allowed: a power of two from 8 to {}", kLargestAlignment));
    const auto aligned = [&](std::uint64_t offset) { return (offset + alignment - 1) / alignment * alignment; };
    const std::uint64_t data = aligned(into_.header_end_);
    const std::uint64_t size = file_.size > data ? file_.size - data : 0;

    std::vector<std::pair<const std::string*, Stored*>> order;
    for (auto& [name, tensor] : into_.tensors_) order.emplace_back(&name, &tensor);
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
      return std::pair(a.second->offset, a.second->bytes) < std::pair(b.second->offset, b.second->bytes);
    });
    std::uint64_t end = 0;
    for (const auto& [name, tensor] : order) {
      from_.where = tw::format("tensor {}", in_quotes(*name));
      if (tensor->offset % alignment != 0)
        from_.fail(tw::format("begins at byte {} of the data; allowed: a multiple of {}", tensor->offset, alignment));
      if (tensor->offset != aligned(end))
        from_.fail(tw::format("begins at byte {} of the data, but the one before ends at {}: {} are not allowed", tensor->offset, end,
                              tensor->offset < end ? "overlaps" : "holes"));
      end = tensor->offset + tensor->bytes;  // no overflow: the offset is at most the end of tensors in the file
      if (end > size) from_.fail(tw::format("ends at byte {} of the data, of which the file has {}: it may be incomplete", end, size));
      tensor->offset += data;
      into_.names_.push_back(*name);
    }
    from_.where.clear();
    if (size > aligned(end)) from_.fail(tw::format("{} bytes of data; its tensors have {}: nothing else is allowed", size, end));
    std::sort(into_.names_.begin(), into_.names_.end());
  }

  Gguf& into_;
  const FileBytes& file_;
  GgufCursor from_;
};

Gguf::Gguf(std::shared_ptr<const FileBytes> file) : file_(std::move(file)), metadata_(file_->name, nlohmann::json::object()) {
  HeaderReader(*this, *file_).read();
}

Gguf Gguf::open(const std::filesystem::path& file) { return Gguf(std::make_shared<const FileBytes>(file)); }

Gguf Gguf::parse(std::span<const std::byte> bytes, const std::string& name) { return Gguf(std::make_shared<const FileBytes>(name, bytes)); }

const std::string& Gguf::file() const { return file_->name; }

const Gguf::Stored& Gguf::tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw FileError(tw::format("{}: no tensor {}", file_->name, in_quotes(name)));
  return found->second;
}

const Gguf::Array& Gguf::array(const std::string& key, std::uint64_t most) const {
  const auto found = arrays_.find(key);
  if (found == arrays_.end()) metadata_.fail(key, "allowed: an array");
  if (found->second.count > most)
    throw FileError(tw::format("{}: {} has {} elements; allowed: at most {}", file_->name, key, found->second.count, most));
  return found->second;
}

std::vector<std::string> Gguf::strings(const std::string& key, std::uint64_t most) const {
  const Array& a = array(key, most);
  if (static_cast<ValueType>(a.type) != ValueType::string)
    throw FileError(tw::format("{}: {} is not an array of strings", file_->name, key));
  GgufCursor from(*file_, a.offset, header_end_, "the end of the header");
  from.where = key;
  std::vector<std::string> all;
  for (std::uint64_t i = 0; i < a.count; ++i) all.push_back(from.string());
  return all;
}

std::vector<std::int64_t> Gguf::integers(const std::string& key, std::uint64_t most) const {
  const Array& a = array(key, most);
  GgufCursor from(*file_, a.offset, header_end_, "the end of the header");
  from.where = key;
  std::vector<std::int64_t> all;
  for (std::uint64_t i = 0; i < a.count; ++i) {
    const bool is_integer = visit_integer(static_cast<ValueType>(a.type), from, [&](auto number) {
      if (!std::in_range<std::int64_t>(number))
        from.fail(tw::format("holds {}; allowed: at most {}", number, std::numeric_limits<std::int64_t>::max()));
      all.push_back(static_cast<std::int64_t>(number));
    });
    if (!is_integer) from.fail("is not an array of integers");
  }
  return all;
}

void Gguf::read(std::string_view name, std::size_t offset, std::span<std::byte> target) const {
  const Stored& t = tensor(name);
  if (offset > t.bytes || target.size() > t.bytes - offset)
    throw InvalidArgument(tw::format("bytes {} to {} of tensor {}; it has {}", offset, offset + target.size(), in_quotes(name), t.bytes));
  file_->read(t.offset + offset, target);
}

namespace {

std::int64_t elements_of(const Shape& shape) { return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()); }

/// Reads elements of a tensor as BlockFormat::dtype. `first` and the number must be those of whole blocks.
void read_decoded(const Gguf& file, std::string_view name, std::int64_t first, std::span<std::byte> target) {
  const BlockFormat& format = file.format(name);
  const std::size_t element = size_of(format.dtype);
  if (format.decode == nullptr) return file.read(name, static_cast<std::size_t>(first) * element, target);
  constexpr std::size_t kPiece = 1 << 16;  // elements: few enough to stay in the cache between reading and decoding
  const auto block_bytes = static_cast<std::size_t>(format.bytes), block_elements = static_cast<std::size_t>(format.elements);
  const std::size_t most = kPiece / block_elements;  // blocks
  const std::size_t wanted = target.size() / element;
  if (static_cast<std::size_t>(first) % block_elements != 0 || wanted % block_elements != 0)
    throw InvalidArgument(tw::format("{} elements of tensor {} from {}: not those of whole blocks", wanted, in_quotes(name), first));
  std::vector<std::byte> stored(most * block_bytes);
  std::size_t block = static_cast<std::size_t>(first) / block_elements;
  auto* values = reinterpret_cast<float*>(target.data());
  for (std::size_t left = wanted / block_elements; left > 0;) {
    const std::size_t count = std::min(left, most);
    const auto piece = std::span(stored).first(count * block_bytes);
    file.read(name, block * block_bytes, piece);
    decode_blocks(format, piece, {values, count * block_elements});
    values += count * block_elements;
    block += count;
    left -= count;
  }
}

}  // namespace

void GgufTensors::add(const Gguf& file, const std::string& name, Shape shape, const Heads& heads) {
  const Shape& stored = file.shape(name);
  if (elements_of(shape) != elements_of(stored))
    throw InvalidArgument(tw::format("tensor {} is [{}], not [{}]", name, tw::join(stored, ", "), tw::join(shape, ", ")));
  if (heads.rotary_dim > 0) {
    if (shape.front() == 0 || shape.front() % heads.head_dim != 0)
      throw FileError(tw::format("{}: {} is [{}]; allowed: a multiple of {} rows, those of a head", file.file(), name,
                                 tw::join(stored, ", "), heads.head_dim));
    const BlockFormat& format = file.format(name);
    if (elements_of(shape) / shape.front() * heads.head_dim % format.elements != 0)
      throw FileError(tw::format("{}: {} is {}; allowed: a format without blocks of {} elements, which belong to two heads", file.file(),
                                 name, format.name, format.elements));
  }
  const auto [other, is_new] = entries_.try_emplace(name, Entry{file, std::move(shape), heads});
  if (!is_new)
    throw FileError(tw::format("{}: tensor {} is in {}, too; allowed: once", file.file(), in_quotes(name), other->second.file.file()));
  names_.insert(std::upper_bound(names_.begin(), names_.end(), name), name);
}

const GgufTensors::Entry& GgufTensors::entry(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw FileError(tw::format("no tensor {}", in_quotes(name)));
  return found->second;
}

void GgufTensors::read_elements(std::string_view name, std::int64_t first, const Tensor& target) const {
  if (target.numel() == 0) return;
  const Entry& e = entry(name);
  const std::size_t element = size_of(target.dtype());
  auto* out = static_cast<std::byte*>(target.data());
  const std::int64_t end = first + target.numel();
  if (e.heads.rotary_dim == 0) return read_decoded(e.file, name, first, {out, static_cast<std::size_t>(target.numel()) * element});

  // Whole heads are read, and the rows that were asked for are copied from them.
  const std::int64_t row = elements_of(e.shape) / e.shape.front(), head = row * e.heads.head_dim, half = e.heads.rotary_dim / 2;
  std::vector<std::byte> stored(static_cast<std::size_t>(head) * element);
  for (std::int64_t begin = first / head * head; begin < end; begin += head) {
    read_decoded(e.file, name, begin, stored);
    for (std::int64_t i = 0; i < e.heads.head_dim; ++i) {
      const std::int64_t from = i < 2 * half ? i % half * 2 + i / half : i;
      const std::int64_t row_begin = std::max(first, begin + i * row), row_end = std::min(end, begin + (i + 1) * row);
      if (row_begin >= row_end) continue;
      const std::int64_t within = row_begin - (begin + i * row);
      std::memcpy(out + static_cast<std::size_t>(row_begin - first) * element,
                  stored.data() + static_cast<std::size_t>(from * row + within) * element,
                  static_cast<std::size_t>(row_end - row_begin) * element);
    }
  }
}

}  // namespace tw::models
