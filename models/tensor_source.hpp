#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/tensor.hpp"

namespace tw::models {

/// The tensors of a checkpoint, whatever the format of its files. Several threads may call const functions.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  /// Sorted bytewise.
  virtual const std::vector<std::string>& names() const = 0;

  // For one tensor. An unknown name is a FileError.

  virtual const Shape& shape(std::string_view name) const = 0;
  /// In the file's spelling: "BF16", "Q4_K".
  virtual const std::string& dtype_name(std::string_view name) const = 0;
  /// In the file.
  virtual std::size_t bytes(std::string_view name) const = 0;
  /// The dtype of the elements that read_elements() gives: bf16, f16 or f32. Nothing if the tensor's elements cannot be read as these.
  virtual std::optional<DType> element_dtype(std::string_view name) const = 0;
  /// Fills `target`, a contiguous tensor on the CPU, with the elements from `first` on. Its dtype is element_dtype(), or without one that
  /// of the elements in the file.
  virtual void read_elements(std::string_view name, std::int64_t first, const Tensor& target) const = 0;

 protected:
  TensorSource() = default;
  TensorSource(const TensorSource&) = default;
  TensorSource& operator=(const TensorSource&) = default;
};

}  // namespace tw::models
