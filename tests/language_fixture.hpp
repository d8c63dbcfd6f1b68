#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

// What the tests of the tile language share: they run on the CPU and, where there is one, on a GPU.

namespace tw::test {

class Language : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }
  void TearDown() override { cpu::set_poison_released_slots(poison_before_); }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();

 private:
  const bool poison_before_ = cpu::poison_released_slots();
};

/// Ways for a tensor to lie: dense, aligned with gaps, unaligned, strided in every dimension, transposed, backwards.
inline std::vector<Placement> placements(DType dtype, bool batched) {
  const std::int64_t sixteen_bytes = 16 / static_cast<std::int64_t>(size_of(dtype));
  return {{},
          {.offset = 2 * sixteen_bytes, .gap = sixteen_bytes, .align = sixteen_bytes},
          {.offset = 1},
          {.offset = 3, .gap = 5},
          {.offset = 1, .step = 3, .gap = 2},
          {.order = batched ? std::vector{0, 2, 1} : std::vector{1, 0}, .gap = 1},
          {.gap = 4, .reversed = true}};
}

}  // namespace tw::test
