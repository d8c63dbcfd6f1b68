#include "models/convert.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "models/one_line.hpp"
#include "models/weights.hpp"
#include "runtime/format.hpp"
#include "runtime/sha256.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

namespace {

/// A new file, and the SHA-256 of what is written to it.
class HashedFile {
 public:
  explicit HashedFile(const std::filesystem::path& path) : name_(path.string()), file_(std::fopen(name_.c_str(), "wbx"), std::fclose) {
    if (file_ == nullptr) fail();
  }
  void write(const void* bytes, std::size_t size) {
    if (std::fwrite(bytes, 1, size, file_.get()) != size) fail();
    hash_.add({static_cast<const char*>(bytes), size});
  }
  std::string finish() {
    if (std::fclose(file_.release()) != 0) fail();
    return hex(hash_.finish());
  }

 private:
  [[noreturn]] void fail() const { throw FileError(tw::format("{}: {}", name_, std::strerror(errno))); }

  std::string name_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  Sha256 hash_;
};

std::size_t bytes_of(const Tensor& t) { return static_cast<std::size_t>(t.numel()) * size_of(t.dtype()); }

/// The JSON at the beginning of the file, with 8 bytes of its length.
std::string header_of(const SafeTensors& files, const std::map<std::string, QuantizedMatrix::Layout>& layouts) {
  auto header = nlohmann::ordered_json::object();
  std::size_t at = 0;
  const auto add = [&](const std::string& name, const std::string& dtype, const Shape& shape, std::size_t bytes) {
    header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  };
  for (const std::string& name : files.names()) {
    const Shape& shape = files.shape(name);
    const auto layout = layouts.find(name);
    if (layout == layouts.end()) {
      add(name, files.dtype_name(name), shape, files.bytes(name));
      continue;
    }
    for_tensors(name, QuantizedMatrix::allocate(0, shape[1], layout->second),
                [&](const std::string& part, const char* dtype, const Tensor& t) {
                  Shape extents = t.shape();
                  extents[0] = shape[0];
                  std::size_t bytes = size_of(t.dtype());
                  for (const std::int64_t extent : extents) bytes *= static_cast<std::size_t>(extent);
                  add(part, dtype, extents, bytes);
                });
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string size(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) size[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return size + text;
}

}  // namespace

std::string write_quantized(const SafeTensors& files, const std::map<std::string, QuantizedMatrix::Layout>& layouts,
                            const std::filesystem::path& file, const std::function<void(std::int64_t, std::int64_t)>& progress) {
  HashedFile out(file);
  const std::string header = header_of(files, layouts);
  out.write(header.data(), header.size());
  std::int64_t done = 0;
  for (const std::string& name : files.names()) {
    if (const auto layout = layouts.find(name); layout != layouts.end()) {
      const Tensor stored = files.tensor(name), exact = Tensor::empty(stored.shape(), DType::f32);
      cast(stored, exact);
      try {
        for_tensors(name, quantize(exact, layout->second),
                    [&](const std::string&, const char*, const Tensor& t) { out.write(t.data(), bytes_of(t)); });
      } catch (const InvalidArgument& error) {
        throw FileError(tw::format("{}: {}: {}", files.file(name), one_line(name), error.what()));
      }
    } else {
      constexpr std::size_t kPiece = 16 << 20;
      std::vector<std::byte> piece;
      for (std::size_t at = 0; at < files.bytes(name); at += piece.size()) {
        piece.resize(std::min(kPiece, files.bytes(name) - at));
        files.read(name, at, piece);
        out.write(piece.data(), piece.size());
      }
    }
    done += static_cast<std::int64_t>(files.bytes(name));
    if (progress) progress(done, static_cast<std::int64_t>(files.bytes()));
  }
  return out.finish();
}

}  // namespace tw::models
