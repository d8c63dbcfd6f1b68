#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "tests/accuracy.hpp"
#include "tilewave/tensor.hpp"

namespace tw::test {

/// How a tensor lies in memory.
struct Placement {
  std::vector<int> order = {};  ///< its dimensions, outermost first; default: row-major
  std::int64_t offset = 0;      ///< elements before the first
  std::int64_t step = 1;        ///< stride of the innermost dimension
  std::int64_t gap = 0;         ///< elements between one slice and the next, in every dimension but the innermost
  std::int64_t align = 1;       ///< strides but the innermost are rounded up to a multiple of this
  bool reversed = false;        ///< the outermost dimension runs backwards
};

/// A tensor of f32, f16, bf16, fp8, i8, i32 or i64 in the middle of poisoned memory. What lies around it an op must not read (NaN
/// would reach its results) and not write (gaps_intact() would tell). Filled and read through the CPU.
class PlacedTensor {
 public:
  PlacedTensor(Shape shape, DType dtype, Device device, Placement p = {}) : strides_(shape.size()) {
    if (p.order.empty()) {
      p.order.resize(shape.size());
      std::iota(p.order.begin(), p.order.end(), 0);
    }
    std::int64_t next = p.step;
    for (std::size_t i = shape.size(); i-- > 0;) {
      const auto dim = static_cast<std::size_t>(p.order[i]);
      strides_[dim] = next;
      next = (next * shape[dim] + p.gap + p.align - 1) / p.align * p.align;
    }
    first_ = p.offset;
    if (p.reversed) {
      const auto outermost = static_cast<std::size_t>(p.order.front());
      first_ += strides_[outermost] * std::max<std::int64_t>(shape[outermost] - 1, 0);
      strides_[outermost] = -strides_[outermost];
    }
    constexpr std::int64_t kAfter = 64;
    buffer_ = Tensor::poisoned({p.offset + next + kAfter}, dtype, Stream::standard(device));
    auto* const data = static_cast<char*>(buffer_.data()) + first_ * static_cast<std::int64_t>(size_of(dtype));
    tensor_ = Tensor::borrow(data, std::move(shape), dtype, device, strides_, std::make_shared<Tensor>(buffer_));
  }

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }

  /// Sets the elements, in row-major order; they are rounded to the dtype.
  void fill(std::span<const float> values) {
    const Tensor host = buffer_.to(Device::cpu());
    std::size_t next = 0;
    for_each_offset([&](std::int64_t offset) { put(host, offset, values[next++]); });
    buffer_.copy_from(host);
  }
  /// Fills it with N(0, sigma^2) and returns what the elements are then.
  std::vector<float> fill_random(std::mt19937_64& random, float sigma = 1) {
    std::vector<float> values(static_cast<std::size_t>(tensor_.numel()));
    std::normal_distribution<float> normal(0, sigma);
    for (float& x : values) x = round_to(tensor_.dtype(), normal(random));
    fill(values);
    return values;
  }
  /// The elements in row-major order. Waits for the device's standard stream.
  std::vector<double> values() const {
    const Tensor host = buffer_.to(Device::cpu());
    std::vector<double> values;
    values.reserve(static_cast<std::size_t>(tensor_.numel()));
    for_each_offset([&](std::int64_t offset) { values.push_back(get(host, offset)); });
    return values;
  }
  /// Whether every byte that belongs to no element is as it was poisoned.
  testing::AssertionResult gaps_intact() const {
    const Tensor host = buffer_.to(Device::cpu());
    const std::size_t size = size_of(host.dtype());
    const auto* const bytes = static_cast<const unsigned char*>(host.data());
    // Poison with the same elements in it, compared as a whole: byte by byte it takes half of a test's time under the sanitizers.
    std::vector<unsigned char> intact(static_cast<std::size_t>(host.numel()) * size, 0xff);
    for_each_offset([&](std::int64_t offset) {
      const std::size_t at = static_cast<std::size_t>(offset) * size;
      std::memcpy(intact.data() + at, bytes + at, size);
    });
    if (std::memcmp(intact.data(), bytes, intact.size()) != 0) {
      const std::ptrdiff_t written = std::mismatch(intact.begin(), intact.end(), bytes).first - intact.begin();
      return testing::AssertionFailure() << "memory outside of " << tensor_.describe() << " was written, at "
                                         << written / static_cast<std::ptrdiff_t>(size) - first_ << " elements from the first";
    }
    return testing::AssertionSuccess();
  }
  /// Whether nothing was written at all.
  testing::AssertionResult untouched() const {
    const Tensor host = buffer_.to(Device::cpu());
    const auto* const bytes = static_cast<const unsigned char*>(host.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(host.numel()) * size_of(host.dtype()); ++i)
      if (bytes[i] != 0xff) return testing::AssertionFailure() << tensor_.describe() << " was written";
    return testing::AssertionSuccess();
  }

 private:
  /// f(offset in the buffer) for every element, in row-major order.
  template <class F>
  void for_each_offset(F f) const {
    const Shape& shape = tensor_.shape();
    std::vector<std::int64_t> index(shape.size(), 0);
    std::int64_t offset = first_;
    for (std::int64_t left = tensor_.numel(); left > 0; --left) {
      f(offset);
      for (std::size_t dim = shape.size(); dim-- > 0;) {
        offset += strides_[dim];
        if (++index[dim] < shape[dim]) break;
        offset -= strides_[dim] * shape[dim];
        index[dim] = 0;
      }
    }
  }
  static void put(const Tensor& host, std::int64_t offset, float x) {
    if (host.dtype() == DType::f16)
      host.data<f16>()[offset] = f16(x);
    else if (host.dtype() == DType::bf16)
      host.data<bf16>()[offset] = bf16(x);
    else if (host.dtype() == DType::fp8_e4m3)
      host.data<fp8_e4m3>()[offset] = fp8_e4m3(x);
    else if (host.dtype() == DType::fp8_e5m2)
      host.data<fp8_e5m2>()[offset] = fp8_e5m2(x);
    else if (host.dtype() == DType::i8)
      host.data<std::int8_t>()[offset] = static_cast<std::int8_t>(x);
    else if (host.dtype() == DType::i32)
      host.data<std::int32_t>()[offset] = static_cast<std::int32_t>(x);
    else if (host.dtype() == DType::i8)
      host.data<i8>()[offset] = static_cast<i8>(x);
    else if (host.dtype() == DType::i64)
      host.data<std::int64_t>()[offset] = static_cast<std::int64_t>(x);
    else
      host.data<float>()[offset] = x;
  }
  static double get(const Tensor& host, std::int64_t offset) {
    if (host.dtype() == DType::f16) return static_cast<float>(host.data<f16>()[offset]);
    if (host.dtype() == DType::bf16) return static_cast<float>(host.data<bf16>()[offset]);
    if (host.dtype() == DType::fp8_e4m3) return static_cast<float>(host.data<fp8_e4m3>()[offset]);
    if (host.dtype() == DType::fp8_e5m2) return static_cast<float>(host.data<fp8_e5m2>()[offset]);
    if (host.dtype() == DType::i8) return host.data<std::int8_t>()[offset];
    if (host.dtype() == DType::i32) return host.data<std::int32_t>()[offset];
    if (host.dtype() == DType::i8) return host.data<i8>()[offset];
    if (host.dtype() == DType::i64) return static_cast<double>(host.data<std::int64_t>()[offset]);
    return host.data<float>()[offset];
  }

  std::vector<std::int64_t> strides_;
  std::int64_t first_ = 0;  ///< offset of the first element in the buffer
  Tensor buffer_;
  Tensor tensor_;
};

}  // namespace tw::test
