#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/tensor_source.hpp"
#include "tilewave/tensor.hpp"

namespace tw::models {

struct FileBytes;

/// The tensors of a checkpoint in the safetensors format (https://huggingface.co/docs/safetensors). Opening it reads the headers; a
/// tensor's elements are read on request. It is an error if the file's size or modification time changes in between.
///
/// Opening a file checks all of its header: its size (at most 100 MB), types, shapes against byte ranges, ranges against
/// the file, no overlaps, no holes, nothing after the last tensor, no name twice, at most 262144 tensors. Errors are FileError: one line
/// with the file, the tensor, what was found, what is allowed.
///
/// Copies share the open files. Several threads may call const functions.
class SafeTensors : public TensorSource {
 public:
  /// One file.
  static SafeTensors open(const std::filesystem::path& file);
  /// A checkpoint: `model.safetensors`, or else all files in `model.safetensors.index.json`. Each tensor in the index
  /// must be in its file; tensors that are only in the files are also listed.
  static SafeTensors open_directory(const std::filesystem::path& directory);
  /// The same for a file's bytes, which must outlive the result. Messages begin with `name`.
  static SafeTensors parse(std::span<const std::byte> bytes, const std::string& name);

  /// Sorted bytewise.
  const std::vector<std::string>& names() const override { return names_; }
  bool contains(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  /// The bytes of all tensors.
  std::size_t bytes() const;

  // For one tensor. An unknown name is a FileError.

  /// Reads all of it: row-major, on the CPU. A dtype without a counterpart in tw::DType is a FileError.
  Tensor tensor(std::string_view name) const;
  /// Fills `target` with the bytes from `offset` on.
  void read(std::string_view name, std::size_t offset, std::span<std::byte> target) const;
  const Shape& shape(std::string_view name) const override { return entry(name).shape; }
  DType dtype(std::string_view name) const;
  /// In the file's spelling: "BF16". May be an unknown type.
  const std::string& dtype_name(std::string_view name) const override { return entry(name).dtype; }
  std::size_t bytes(std::string_view name) const override { return entry(name).bytes; }
  std::optional<DType> element_dtype(std::string_view name) const override;
  void read_elements(std::string_view name, std::int64_t first, const Tensor& target) const override;
  /// The file that holds it, for messages about its content.
  const std::string& file(std::string_view name) const;

 private:
  using File = FileBytes;
  struct Entry {
    std::shared_ptr<const File> file;
    std::string dtype;  // in the file's spelling
    Shape shape;
    std::size_t offset = 0;  // in the file
    std::size_t bytes = 0;
  };
  class HeaderReader;

  void add(std::shared_ptr<const File> file);
  void list_names();
  const Entry& entry(std::string_view name) const;

  std::string source_;  // the file, or the directory
  std::map<std::string, Entry, std::less<>> entries_;
  std::vector<std::string> names_;
};

}  // namespace tw::models
