#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tilewave/device.hpp"
#include "tilewave/dtype.hpp"
#include "tilewave/error.hpp"

struct DLManagedTensor;

namespace tw {

using Shape = std::vector<std::int64_t>;

/// A strided view of memory on one device. Copies share the memory. Strides count elements and may be 0 or negative in views. Arguments
/// that name a dimension may be negative: -1 is the last one.
class Tensor {
 public:
  /// No elements, no memory.
  Tensor() = default;

  /// Uninitialised, row-major. Throws InvalidArgument for a negative extent or a size that overflows, OutOfMemory.
  static Tensor empty(Shape shape, DType dtype, const Stream& stream = Stream::standard(Device::cpu()));
  /// All bits 0, row-major.
  static Tensor zeros(Shape shape, DType dtype, const Stream& stream = Stream::standard(Device::cpu()));
  /// Every byte 0xFF: NaN in every floating-point dtype. For tests: poisons memory that a kernel must overwrite.
  static Tensor poisoned(Shape shape, DType dtype, const Stream& stream = Stream::standard(Device::cpu()));
  /// Standard normal numbers, row-major: the same for the same shape and seed, on every device. f32, f16 or bf16, else InvalidArgument.
  static Tensor random(Shape shape, DType dtype, std::uint64_t seed, const Stream& stream = Stream::standard(Device::cpu()));
  /// A view of memory that Tilewave does not own. `strides` in elements; empty: row-major. `owner` is kept alive, if given.
  static Tensor borrow(void* data, Shape shape, DType dtype, Device device, std::vector<std::int64_t> strides = {},
                       std::shared_ptr<void> owner = nullptr);
  /// A CPU tensor with a copy of `values`.
  template <class T>
  static Tensor from(std::span<const T> values, Shape shape) {
    Tensor t = empty(std::move(shape), dtype_of<T>);
    t.fill_bytes(values.data(), values.size_bytes());
    return t;
  }

  int rank() const { return static_cast<int>(shape_.size()); }
  const Shape& shape() const { return shape_; }
  std::int64_t shape(int dim) const { return shape_[static_cast<std::size_t>(front_dim("shape: dim", dim))]; }
  const std::vector<std::int64_t>& strides() const { return strides_; }
  std::int64_t stride(int dim) const { return strides_[static_cast<std::size_t>(front_dim("stride: dim", dim))]; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  std::int64_t numel() const;
  bool is_contiguous() const;

  void* data() const { return data_; }
  /// The first element. Throws InvalidArgument if T is not the tensor's dtype.
  template <class T>
  T* data() const {
    require_dtype(dtype_of<T>);
    return static_cast<T*>(data_);
  }
  /// One element of a CPU tensor, as double. Throws InvalidArgument on a GPU tensor or for an index out of range.
  double at(std::span<const std::int64_t> index) const;
  double at(std::initializer_list<std::int64_t> index) const { return at(std::span(index.begin(), index.size())); }

  // Views of the same memory.
  Tensor slice(int dim, std::int64_t begin, std::int64_t end) const;  ///< elements [begin, end) of one dimension
  Tensor select(int dim, std::int64_t index) const;                   ///< one index; removes the dimension
  Tensor transpose(int dim0, int dim1) const;
  Tensor reshape(Shape shape) const;  ///< contiguous tensors only, else InvalidArgument

  /// A row-major copy on `device` (always a new tensor), complete when it returns. It is ordered after work on the standard streams; wait
  /// for work on other streams first.
  Tensor to(Device device) const;
  /// A row-major copy on the same device (CPU only) with every element converted, rounding to nearest even. To an integer type:
  /// out-of-range values become the nearest integer in range, NaN becomes 0. To bool: true if not 0.
  Tensor to(DType dtype) const;
  /// Copies the elements of `source`, which has the same shape and dtype and may be on any device. Both must be row-major unless both are
  /// on the CPU. They may overlap. Complete when it returns.
  void copy_from(const Tensor& source) const;
  /// The same in the order of `stream`, for tensors of its device and of the CPU, both row-major. On a GPU only enqueued: `source` may change
  /// again once it returns if it is on the CPU, and a destination on the CPU is complete after stream.synchronize().
  void copy_from(const Tensor& source, const Stream& stream) const;

  /// "f32[2, 3] on cpu", for messages.
  std::string describe() const;

  /// Exports the tensor as DLPack. The memory stays alive until the consumer calls the result's deleter.
  DLManagedTensor* to_dlpack() const;
  /// Imports a DLPack tensor without a copy and takes ownership of `managed`. Throws InvalidArgument for dtypes or devices that Tilewave
  /// does not support; the caller then keeps ownership.
  static Tensor from_dlpack(DLManagedTensor* managed);

 private:
  /// `dim` counted from the front. Throws InvalidArgument that names the argument.
  int front_dim(const char* argument, int dim) const { return dim >= 0 && dim < rank() ? dim : front_dim_of_last(argument, dim); }
  int front_dim_of_last(const char* argument, int dim) const;
  void require_dtype(DType dtype) const;
  void fill_bytes(const void* source, std::size_t bytes) const;

  std::shared_ptr<void> owner_;
  void* data_ = nullptr;
  Shape shape_ = {0};
  std::vector<std::int64_t> strides_ = {1};
  DType dtype_ = DType::f32;
  Device device_;
};

/// The largest absolute difference between corresponding elements of two tensors of the same shape, with any dtypes, on any devices; 0
/// without elements, NaN if any element is NaN. Wait for work on streams other than the standard ones first.
double max_difference(const Tensor& a, const Tensor& b);

}  // namespace tw
