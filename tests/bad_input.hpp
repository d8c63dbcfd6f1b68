#pragma once

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::test {

/// Tests of what a function refuses, with tensors on one device.
class BadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }

  /// Of bf16 by default, and not where its memory begins.
  PlacedTensor make(Shape shape, DType dtype = DType::bf16) const { return PlacedTensor(std::move(shape), dtype, device, {.offset = 8}); }
  PlacedTensor integers(const std::vector<float>& values, Shape shape) const {
    PlacedTensor t(std::move(shape), DType::i32, device);
    t.fill(values);
    return t;
  }

  /// The CPU where the test will be skipped.
  const Device device = cuda_device() ? GetParam() : Device::cpu();
};

}  // namespace tw::test
