#include "models/safetensors.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <set>

#include "models/json.hpp"
#include "models/one_line.hpp"
#include "models/regular_file.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

constexpr std::size_t kLargestHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kMostTensors = 1 << 18;        // per checkpoint: the largest have 10^5
constexpr std::size_t kMostDimensions = 32;          // per shape: far more than any model has, few enough to print
constexpr int kDeepestMetadata = 64;
constexpr std::size_t kPrefix = 8;  // the header's size, little-endian

struct ElementType {
  std::string_view name;
  std::size_t bytes;
  std::optional<DType> dtype;
};
constexpr std::array kElementTypes = {
    ElementType{"F32", 4, DType::f32},
    ElementType{"F16", 2, DType::f16},
    ElementType{"BF16", 2, DType::bf16},
    ElementType{"I8", 1, DType::i8},
    ElementType{"U8", 1, DType::u8},
    ElementType{"I32", 4, DType::i32},
    ElementType{"I64", 8, DType::i64},
    ElementType{"F8_E4M3", 1, DType::fp8_e4m3},
    ElementType{"F8_E5M2", 1, DType::fp8_e5m2},
    ElementType{"BOOL", 1, {}},
    ElementType{"I16", 2, {}},
    ElementType{"U16", 2, {}},
    ElementType{"U32", 4, {}},
    ElementType{"U64", 8, {}},
    ElementType{"F64", 8, {}},
};

const ElementType* element_type(std::string_view name) {
  const auto* found = std::find_if(kElementTypes.begin(), kElementTypes.end(), [&](const ElementType& t) { return t.name == name; });
  return found == kElementTypes.end() ? nullptr : found;
}

/// The bytes of a tensor; nothing if they, or the product of the extents other than 0, exceed what a Tensor can have.
std::optional<std::uint64_t> bytes_of(const Shape& shape, std::size_t element_bytes) {
  std::uint64_t product = element_bytes;
  bool is_empty = false;
  for (const std::int64_t extent : shape) {
    if (extent == 0) {
      is_empty = true;
    } else if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(extent), &product) ||
               product > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return {};
    }
  }
  return is_empty ? 0 : product;
}

}  // namespace

/// Reads {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}} in one pass and without a
/// document in memory, which for a hostile header of 100 MB would take gigabytes.
class SafeTensors::HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  struct Found {
    std::string name, dtype;
    Shape shape;
    std::uint64_t begin, end;  // in the data
  };

  explicit HeaderReader(const std::string& file) : file_(file) {}
  std::vector<Found> found;

  bool null() override { return scalar("null"); }
  bool boolean(bool) override { return scalar("a boolean"); }
  bool number_integer(std::int64_t value) override { return scalar(tw::format("{}", value)); }
  bool number_float(double, const std::string& text) override { return scalar(text); }
  bool binary(nlohmann::json::binary_t&) override { return scalar("binary"); }
  bool string(std::string& value) override {
    if (place_ == Place::dtype) {
      dtype_ = value;
      place_ = Place::entry;
      return true;
    }
    return scalar(in_quotes(value));
  }
  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::extents) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        fail(tw::format("shape has the extent {}; allowed: at most {}", value, std::numeric_limits<std::int64_t>::max()));
      if (shape_->size() == kMostDimensions) fail(tw::format("shape has more than {} extents", kMostDimensions));
      shape_->push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ == Place::bounds) {
      if (offsets_->size() == 2) fail("data_offsets has more than two numbers; allowed: [begin, end]");
      offsets_->push_back(value);
      return true;
    }
    return scalar(tw::format("{}", value));
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::start) {
      place_ = Place::top;
    } else if (place_ == Place::value) {
      place_ = Place::entry;
      dtype_.reset();
      shape_.reset();
      offsets_.reset();
    } else {
      enter("an object");
    }
    return true;
  }
  bool end_object() override {
    if (place_ == Place::skipped) return leave();
    if (place_ == Place::entry) {
      if (!dtype_) fail("has no dtype");
      if (!shape_) fail("has no shape");
      if (!offsets_) fail("has no data_offsets");
      if (found.size() == kMostTensors) throw FileError(tw::format("{}: more than {} tensors", file_, kMostTensors));
      found.push_back({name_, *dtype_, std::move(*shape_), (*offsets_)[0], (*offsets_)[1]});
      place_ = Place::top;
    }
    return true;
  }
  bool start_array(std::size_t) override {
    if (place_ == Place::shape) {
      place_ = Place::extents;
      shape_.emplace();
    } else if (place_ == Place::offsets) {
      place_ = Place::bounds;
      offsets_.emplace();
    } else {
      enter("an array");
    }
    return true;
  }
  bool end_array() override {
    if (place_ == Place::skipped) return leave();
    if (place_ == Place::bounds && offsets_->size() != 2)
      fail(tw::format("data_offsets has {} numbers; allowed: [begin, end]", offsets_->size()));
    place_ = Place::entry;
    return true;
  }

  bool key(std::string& key) override {
    if (place_ == Place::skipped) return true;
    if (place_ == Place::top) {
      if (!seen_.insert(key).second) throw FileError(tw::format("{}: tensor {} is in the header twice", file_, in_quotes(key)));
      name_ = key;
      place_ = Place::value;
      if (key == "__metadata__") skip(Place::top);
      return true;
    }
    const bool again = (key == "dtype" && dtype_) || (key == "shape" && shape_) || (key == "data_offsets" && offsets_);
    if (again) fail(tw::format("has {} twice", key));
    if (key == "dtype") {
      place_ = Place::dtype;
    } else if (key == "shape") {
      place_ = Place::shape;
    } else if (key == "data_offsets") {
      place_ = Place::offsets;
    } else {
      skip(Place::entry);
    }
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) override {
    throw FileError(tw::format("{}: the header is not valid JSON: {}", file_, one_line(error.what())));
  }

 private:
  // The position of the next value: `value` is inside a tensor's object, `extents` and `bounds` inside its arrays, `skipped` inside a value
  // that is not read.
  enum class Place { start, top, value, entry, dtype, shape, extents, offsets, bounds, skipped };

  [[noreturn]] void fail(const std::string& what) const { throw FileError(tw::format("{}: tensor {}: {}", file_, in_quotes(name_), what)); }

  [[noreturn]] void misplaced(const std::string& what) const {
    switch (place_) {
      case Place::start:
        throw FileError(tw::format("{}: the header is {}; allowed: a JSON object", file_, what));
      case Place::dtype:
        fail(tw::format("dtype is {}; allowed: a string", what));
      case Place::shape:
        fail(tw::format("shape is {}; allowed: an array", what));
      case Place::offsets:
        fail(tw::format("data_offsets is {}; allowed: an array", what));
      case Place::extents:
        fail(tw::format("shape holds {}; allowed: whole numbers from 0", what));
      case Place::bounds:
        fail(tw::format("data_offsets holds {}; allowed: whole numbers from 0", what));
      default:
        fail(tw::format("is {}; allowed: an object", what));
    }
  }

  bool scalar(const std::string& what) {
    if (place_ != Place::skipped) misplaced(what);
    if (depth_ == 0) place_ = after_skipped_;
    return true;
  }

  void skip(Place after) {
    place_ = Place::skipped;
    after_skipped_ = after;
    depth_ = 0;
  }
  void enter(const char* what) {
    if (place_ != Place::skipped) misplaced(what);
    if (++depth_ > kDeepestMetadata) throw FileError(tw::format("{}: the header has more than {} levels", file_, kDeepestMetadata));
  }
  bool leave() {
    if (--depth_ == 0) place_ = after_skipped_;
    return true;
  }

  const std::string& file_;
  Place place_ = Place::start;
  Place after_skipped_ = Place::top;
  int depth_ = 0;  // inside a skipped value
  std::set<std::string, std::less<>> seen_;
  std::string name_;
  std::optional<std::string> dtype_;
  std::optional<Shape> shape_;
  std::optional<std::vector<std::uint64_t>> offsets_;
};

void SafeTensors::add(std::shared_ptr<const File> file) {
  const std::string& in = file->name;
  const std::string start = file->read_text(0, std::min(file->size, std::size_t{64}));
  refuse_lfs_pointer(start, in);
  if (file->size < kPrefix) throw FileError(tw::format("{}: {} bytes; a safetensors file has at least {}", in, file->size, kPrefix));
  std::uint64_t header_size = 0;
  for (std::size_t i = kPrefix; i-- > 0;) header_size = header_size << 8 | static_cast<unsigned char>(start[i]);
  const std::size_t largest = std::min(kLargestHeader, file->size - kPrefix);
  if (header_size > largest) {
    throw FileError(tw::format("{}: the header has {} bytes; allowed: at most {}, {}", in, header_size, largest,
                               largest == kLargestHeader ? "the format's limit" : "the rest of the file"));
  }
  const std::size_t data = kPrefix + header_size;
  const std::uint64_t data_size = file->size - data;
  const std::string text = file->read_text(kPrefix, header_size);
  // The parser treats a zero byte as the end.
  if (const std::size_t zero = text.find('\0'); zero != std::string::npos)
    throw FileError(tw::format("{}: the header is not valid JSON: byte {} is zero", in, zero));

  HeaderReader reader(in);
  nlohmann::json::sax_parse(text, &reader);  // it throws, or returns true

  auto& found = reader.found;
  for (const auto& t : found) {
    const auto fail = [&](const std::string& what) { throw FileError(tw::format("{}: tensor {}: {}", in, in_quotes(t.name), what)); };
    if (t.begin > t.end || t.end > data_size)
      fail(tw::format("data_offsets are [{}, {}]; allowed: begin <= end <= {}, the file's bytes after its header", t.begin, t.end,
                      data_size));
    const ElementType* type = element_type(t.dtype);
    if (type == nullptr) continue;
    const auto size = bytes_of(t.shape, type->bytes);
    if (!size) fail(tw::format("shape [{}] has more elements than can be counted", tw::join(t.shape, ", ")));
    if (*size != t.end - t.begin)
      fail(tw::format("{} of shape [{}] has {} bytes, but data_offsets [{}, {}] are {}", t.dtype, tw::join(t.shape, ", "), *size, t.begin,
                      t.end, t.end - t.begin));
  }

  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t expected = 0;
  for (const auto& t : found) {
    if (t.begin != expected) {
      throw FileError(tw::format("{}: tensor {}: begins at byte {} of the data, but the one before ends at {}: {} are not allowed", in,
                                 in_quotes(t.name), t.begin, expected, t.begin < expected ? "overlaps" : "holes"));
    }
    expected = t.end;
  }
  if (expected != data_size)
    throw FileError(tw::format("{}: {} bytes after the header; its tensors have {}: nothing else is allowed", in, data_size, expected));

  for (auto& t : found) {
    Entry entry{file, std::move(t.dtype), std::move(t.shape), data + t.begin, t.end - t.begin};
    const auto [place, is_new] = entries_.try_emplace(t.name, std::move(entry));
    if (!is_new) throw FileError(tw::format("{}: tensor {} is in {}, too; allowed: once", in, in_quotes(t.name), place->second.file->name));
  }
  if (entries_.size() > kMostTensors) throw FileError(tw::format("{}: more than {} tensors", source_, kMostTensors));
}

void SafeTensors::list_names() {
  for (const auto& [name, unused] : entries_) names_.push_back(name);
}

SafeTensors SafeTensors::parse(std::span<const std::byte> bytes, const std::string& name) {
  SafeTensors result;
  result.source_ = name;
  result.add(std::make_shared<const File>(name, bytes));
  result.list_names();
  return result;
}

SafeTensors SafeTensors::open(const std::filesystem::path& file) {
  SafeTensors result;
  result.source_ = file.string();
  result.add(std::make_shared<const File>(file));
  result.list_names();
  return result;
}

SafeTensors SafeTensors::open_directory(const std::filesystem::path& directory) {
  std::error_code ignored;
  const auto single = directory / "model.safetensors";
  if (std::filesystem::exists(single, ignored)) return open(single);
  const auto index_file = directory / "model.safetensors.index.json";
  if (!std::filesystem::exists(index_file, ignored))
    throw FileError(tw::format("{}: neither model.safetensors nor model.safetensors.index.json is there", directory.string()));

  const std::string index_name = index_file.string();
  const nlohmann::json index = load_json(index_file);
  const auto map_entry = index.is_object() ? index.find("weight_map") : index.end();
  if (map_entry == index.end() || !map_entry->is_object())
    throw FileError(tw::format("{}: no weight_map; allowed: an object that names each tensor's file", index_name));

  SafeTensors result;
  result.source_ = directory.string();
  std::map<std::string, std::string> paths;  // of the shards, by their names in the index
  for (const auto& [name, shard] : map_entry->items()) {
    if (!shard.is_string()) throw FileError(tw::format("{}: tensor {}: its file is not a string", index_name, in_quotes(name)));
    const auto& text = shard.get_ref<const std::string&>();
    if (text.empty() || text == "." || text == ".." || text.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      throw FileError(tw::format("{}: tensor {}: its file is {}; allowed: the name of a file beside the index", index_name, in_quotes(name),
                                 in_quotes(text)));
    }
    paths.try_emplace(text, (directory / text).string());
  }
  for (const auto& [shard, path] : paths) {
    if (!std::filesystem::exists(path, ignored))
      throw FileError(tw::format("{}: names {}, which is not there", index_name, in_quotes(shard)));
    result.add(std::make_shared<const File>(path));
  }
  for (const auto& [name, shard] : map_entry->items()) {
    const auto found = result.entries_.find(name);
    const std::string& path = paths.at(shard.get_ref<const std::string&>());
    if (found == result.entries_.end() || found->second.file->name != path)
      throw FileError(tw::format("{}: tensor {} is not in it, as {} says", path, in_quotes(name), index_name));
  }
  result.list_names();
  return result;
}

const SafeTensors::Entry& SafeTensors::entry(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw FileError(tw::format("{}: no tensor {}", source_, in_quotes(name)));
  return found->second;
}

std::size_t SafeTensors::bytes() const {
  std::size_t sum = 0;
  for (const auto& [unused, entry] : entries_) sum += entry.bytes;
  return sum;
}

DType SafeTensors::dtype(std::string_view name) const {
  const Entry& e = entry(name);
  const ElementType* type = element_type(e.dtype);
  if (type == nullptr || !type->dtype) {
    std::vector<std::string_view> allowed;
    for (const ElementType& t : kElementTypes) {
      if (t.dtype) allowed.push_back(t.name);
    }
    throw FileError(
        tw::format("{}: tensor {}: dtype is {}; allowed: {}", e.file->name, in_quotes(name), in_quotes(e.dtype), tw::join(allowed, ", ")));
  }
  return *type->dtype;
}

std::optional<DType> SafeTensors::element_dtype(std::string_view name) const {
  const ElementType* type = element_type(entry(name).dtype);
  const bool is_weight = type != nullptr && (type->dtype == DType::f32 || type->dtype == DType::f16 || type->dtype == DType::bf16);
  return is_weight ? type->dtype : std::nullopt;
}

Tensor SafeTensors::tensor(std::string_view name) const {
  const Entry& e = entry(name);
  const DType dtype = this->dtype(name);
  const Tensor result = Tensor::empty(e.shape, dtype);
  e.file->read(e.offset, {static_cast<std::byte*>(result.data()), e.bytes});
  return result;
}

void SafeTensors::read(std::string_view name, std::size_t offset, std::span<std::byte> target) const {
  const Entry& e = entry(name);
  if (offset > e.bytes || target.size() > e.bytes - offset)
    throw InvalidArgument(tw::format("bytes {} to {} of tensor {}; it has {}", offset, offset + target.size(), in_quotes(name), e.bytes));
  e.file->read(e.offset + offset, target);
}

void SafeTensors::read_elements(std::string_view name, std::int64_t first, const Tensor& target) const {
  const std::size_t element = size_of(target.dtype());
  read(name, static_cast<std::size_t>(first) * element,
       {static_cast<std::byte*>(target.data()), static_cast<std::size_t>(target.numel()) * element});
}

const std::string& SafeTensors::file(std::string_view name) const { return entry(name).file->name; }

}  // namespace tw::models
