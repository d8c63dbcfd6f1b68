#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/tensor.hpp"

namespace tw::models {

/// The tensors of a checkpoint in the safetensors format (https://huggingface.co/docs/safetensors). Opening it reads the headers; a
/// tensor's elements are read when they are asked for. A file whose size or modification time changes between is an error.
///
/// All that a header says is checked when the file is opened: its size (at most 100 MB), types, shapes against byte ranges, ranges against
/// the file, no overlaps, no holes, nothing after the last tensor, no name twice, at most 262144 tensors. Errors are FileError: one line
/// with the file, the tensor, what was found, what is allowed.
///
/// Copies share the open files. Const functions may be called by several threads.
class SafeTensors {
 public:
  /// One file.
  static SafeTensors open(const std::filesystem::path& file);
  /// A checkpoint: `model.safetensors`, or where that is absent all files that `model.safetensors.index.json` names. Each tensor that the
  /// index names must be in the file that it names; tensors which only the files name are listed, too.
  static SafeTensors open_directory(const std::filesystem::path& directory);
  /// The same of a file's bytes, which must outlive the result. `name` begins the messages.
  static SafeTensors parse(std::span<const std::byte> bytes, const std::string& name);

  /// Sorted bytewise.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  /// Of all tensors together.
  std::size_t bytes() const;

  // Of one tensor. A name that is not there is a FileError.

  /// Reads all of it: row-major, on the CPU. A dtype without a counterpart in tw::DType is a FileError.
  Tensor tensor(std::string_view name) const;
  /// Reads the bytes from `offset` on that `target` has room for.
  void read(std::string_view name, std::size_t offset, std::span<std::byte> target) const;
  const Shape& shape(std::string_view name) const { return entry(name).shape; }
  DType dtype(std::string_view name) const;
  /// As the file spells it: "BF16". Whatever it is.
  const std::string& dtype_name(std::string_view name) const { return entry(name).dtype; }
  std::size_t bytes(std::string_view name) const { return entry(name).bytes; }
  /// The file that holds it, for messages about its content.
  const std::string& file(std::string_view name) const;

 private:
  struct File;
  struct Entry {
    std::shared_ptr<const File> file;
    std::string dtype;  // as the file spells it
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
