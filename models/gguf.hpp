#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/config_reader.hpp"
#include "models/gguf_blocks.hpp"
#include "models/tensor_source.hpp"

namespace tw::models {

struct FileBytes;

/// A file in the GGUF format, version 2 or 3, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Opening it reads
/// the metadata and the list of tensors; arrays and tensors are read on request. It is an error if the file's size or modification time
/// changes in between.
///
/// Opening a file checks all of its header, which may have up to 64 MiB: counts and lengths against the file, types, no key and no tensor
/// twice, at most 65536 of each, tensors aligned, in the file, without overlaps and holes. Errors are FileError: one line with the file,
/// the key or tensor, what was found, what is allowed.
///
/// Copies share the open file. Several threads may call const functions.
class Gguf {
 public:
  static Gguf open(const std::filesystem::path& file);
  /// The same for a file's bytes, which must outlive the result. Messages begin with `name`.
  static Gguf parse(std::span<const std::byte> bytes, const std::string& name);

  const std::string& file() const;

  /// Scalars and strings by their keys, and arrays of up to 64 numbers. Longer arrays and arrays of strings are empty objects here.
  const ConfigReader& metadata() const { return metadata_; }
  // Whole arrays. Throws FileError if there is no such array of at most `most` elements under `key`.
  std::vector<std::string> strings(const std::string& key, std::uint64_t most) const;
  std::vector<std::int64_t> integers(const std::string& key, std::uint64_t most) const;

  /// Sorted bytewise.
  const std::vector<std::string>& names() const { return names_; }

  // For one tensor. An unknown name is a FileError.

  /// Outermost extent first: the reverse of the file's order.
  const Shape& shape(std::string_view name) const { return tensor(name).shape; }
  const BlockFormat& format(std::string_view name) const { return *tensor(name).format; }
  std::size_t bytes(std::string_view name) const { return tensor(name).bytes; }
  /// Fills `target` with the tensor's stored bytes from `offset` on.
  void read(std::string_view name, std::size_t offset, std::span<std::byte> target) const;

 private:
  struct Array {
    std::uint32_t type = 0;  // of the elements
    std::uint64_t count = 0;
    std::size_t offset = 0;  // of the first element in the file
  };
  struct Stored {
    const BlockFormat* format = nullptr;
    Shape shape;
    std::size_t offset = 0;  // in the file
    std::size_t bytes = 0;
  };
  class HeaderReader;

  explicit Gguf(std::shared_ptr<const FileBytes> file);
  const Stored& tensor(std::string_view name) const;
  const Array& array(const std::string& key, std::uint64_t most) const;

  std::shared_ptr<const FileBytes> file_;
  ConfigReader metadata_;
  std::map<std::string, Array> arrays_;
  std::map<std::string, Stored, std::less<>> tensors_;
  std::vector<std::string> names_;
  std::size_t header_end_ = 0;  // of the metadata and the list of tensors
};

/// Tensors of GGUF files for Weights: decoded, and in the order of rows that the model expects.
class GgufTensors : public TensorSource {
 public:
  /// How many rows of each head are rotated, in a matrix whose rows are those of heads. The file has the two members of a rotated pair next
  /// to each other; the model expects all first members before all second ones. Rows that are not rotated follow, unchanged.
  struct Heads {
    int head_dim = 1;
    int rotary_dim = 0;  ///< 0: rows are in the model's order
  };

  /// Adds the tensor `name` of `file`. `shape` replaces the file's, with as many elements. Throws FileError if there is already one of
  /// this name, or if the rows are not those of whole heads, or a head not whole blocks.
  void add(const Gguf& file, const std::string& name, Shape shape, const Heads& heads);
  void add(const Gguf& file, const std::string& name) { add(file, name, file.shape(name), {}); }

  const std::vector<std::string>& names() const override { return names_; }
  const Shape& shape(std::string_view name) const override { return entry(name).shape; }
  const std::string& dtype_name(std::string_view name) const override { return entry(name).file.format(name).name; }
  std::size_t bytes(std::string_view name) const override { return entry(name).file.bytes(name); }
  std::optional<DType> element_dtype(std::string_view name) const override { return entry(name).file.format(name).dtype; }
  void read_elements(std::string_view name, std::int64_t first, const Tensor& target) const override;

 private:
  struct Entry {
    Gguf file;
    Shape shape;
    Heads heads;
  };
  const Entry& entry(std::string_view name) const;

  std::map<std::string, Entry, std::less<>> entries_;
  std::vector<std::string> names_;
};

}  // namespace tw::models
