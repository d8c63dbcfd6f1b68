// Layouts of tiles: every element has one place, and the places are those that the hardware prescribes.

#include "tilewave/layout.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/registry.hpp"

namespace tw {
namespace {

/// Threads and their elements, and the tile's elements, are one to one.
void expect_owned_once(const TileLayout& layout) {
  SCOPED_TRACE(::testing::Message() << layout.type << " " << layout.rows << " x " << layout.cols);
  ASSERT_NE(layout.element, nullptr);
  ASSERT_EQ(layout.threads * layout.size, layout.rows * layout.cols);
  std::set<std::pair<int, int>> seen;
  for (int thread = 0; thread < layout.threads; ++thread) {
    for (int i = 0; i < layout.size; ++i) {
      const auto [row, col] = layout.element(thread, i);
      ASSERT_TRUE(row >= 0 && row < layout.rows && col >= 0 && col < layout.cols) << row << ", " << col;
      ASSERT_TRUE(seen.emplace(row, col).second) << row << ", " << col << " belongs to two";
      // `width` elements from a multiple of it on lie side by side.
      if (i % layout.width != 0) {
        ASSERT_EQ(layout.element(thread, i - 1), std::pair(row, col - 1));
      }
    }
  }
}

template <class Tile>
void expect_bytes_used_once() {
  const TileLayout& layout = layout_of<Tile>;
  SCOPED_TRACE(::testing::Message() << layout.rows << " x " << layout.cols);
  const int bytes = static_cast<int>(size_of(layout.dtype));
  std::vector<bool> used(static_cast<std::size_t>(layout.rows * layout.cols));
  ASSERT_EQ(sizeof(Tile), used.size() * static_cast<std::size_t>(bytes));
  for (int row = 0; row < layout.rows; ++row) {
    for (int col = 0; col < layout.cols; ++col) {
      const int offset = layout.offset(row, col);
      ASSERT_EQ(offset % bytes, 0);
      const auto index = static_cast<std::size_t>(offset / bytes);
      ASSERT_LT(index, used.size());
      ASSERT_FALSE(used[index]) << row << ", " << col;
      used[index] = true;
    }
  }
}

TEST(TileLayouts, FragmentElementsAreOwnedOnce) {
  expect_owned_once(layout_of<sm_90a::Fragment<float, 64, 8>>);
  expect_owned_once(layout_of<sm_90a::Fragment<float, 64, 176>>);
  expect_owned_once(layout_of<sm_90a::Fragment<float, 192, 256>>);
  expect_owned_once(layout_of<sm_90a::Fragment<float, 64, 512, 16, 2>>);
  expect_owned_once(layout_of<sm_90a::Fragment<float, 128, 64, 16, 2>>);
  expect_owned_once(layout_of<sm_90a::TallFragment<float, 256, 32, 2>>);
  expect_owned_once(layout_of<sm_90a::Operand<bf16, 128, 80>>);
}

TEST(TileLayouts, RowsElementsAreOwnedOnce) {
  expect_owned_once(layout_of<sm_90a::Rows<float, 4, 32, 4, 0>>);
  expect_owned_once(layout_of<sm_90a::Rows<float, 8, 96, 4, 1>>);
  expect_owned_once(layout_of<sm_90a::Rows<float, 12, 64, 4, 0>>);
  expect_owned_once(layout_of<sm_90a::Rows<bf16, 16, 1024, 8, 4>>);
  expect_owned_once(layout_of<sm_90a::Rows<float, 1, 4096, 4, 0>>);  // all four warps share the row
  expect_owned_once(layout_of<sm_90a::Rows<float, 4, 2048, 16, 0>>);
  expect_owned_once(layout_of<sm_90a::Rows<float, 3, 1152, 12, 0>>);
}

TEST(TileLayouts, SharedBytesAreUsedOnce) {
  expect_bytes_used_once<sm_90a::Shared<bf16, 8, 64, Contract::columns>>();
  expect_bytes_used_once<sm_90a::Shared<f16, 72, 192, Contract::rows>>();
  expect_bytes_used_once<sm_90a::Shared<bf16, 256, 128, Contract::columns>>();
  expect_bytes_used_once<sm_90a::Shared<float, 128, 96, Contract::columns>>();
}

// PTX manual, wgmma's accumulators: row 16 w + l / 4 + 8 (i / 2 mod 2), column 8 (i / 4) + 2 (l mod 4) + i mod 2 of warp w, lane l.
TEST(TileLayouts, FragmentIsWgmmas) {
  const TileLayout& layout = layout_of<sm_90a::Fragment<float, 128, 64>>;
  for (int thread = 0; thread < layout.threads; ++thread) {
    for (int i = 0; i < layout.size; ++i) {
      const auto [row, col] = layout.element(thread, i);
      EXPECT_EQ(thread / 32, row / 16);
      EXPECT_EQ(thread % 32, 4 * (row % 8) + col % 8 / 2);
      EXPECT_EQ(i, col % 2 + 2 * (row % 16 / 8) + 4 * (col / 8));
    }
  }
}

// PTX manual, 16-bit A operand of 16 x 16: lane 4 (row mod 8) + (col mod 8) / 2, element col mod 2 + 2 (row / 8) + 4 (col / 8).
TEST(TileLayouts, OperandIsMmas) {
  const TileLayout& layout = layout_of<sm_90a::Operand<f16, 64, 32>>;
  EXPECT_EQ(layout.per_register, 2);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const auto [row, col] = layout.element(lane, i);
      EXPECT_EQ(lane, 4 * (row % 8) + col % 8 / 2);
      EXPECT_EQ(i, col % 2 + 2 * (row / 8) + 4 * (col / 8));
    }
  }
}

// The 128-byte swizzle of TMA and wgmma: address bits 4 to 6 are XORed with bits 7 to 9.
TEST(TileLayouts, SharedIsThe128ByteSwizzle) {
  const TileLayout& layout = layout_of<sm_90a::Shared<bf16, 64, 128, Contract::columns>>;
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < 128; ++col) {
      const int plain = col / 64 * 64 * 128 + row * 128 + col % 64 * 2;
      EXPECT_EQ(layout.offset(row, col), plain ^ (plain >> 3 & 0x70));
    }
  }
}

std::vector<std::string> described(const std::string& kernel) {
  std::vector<std::string> texts;
  for (const RegisteredKernel& registered : registered_kernels()) {
    if (registered.spec.name != kernel) continue;
    for (const KernelTile& tile : tiles_of(registered.spec))
      texts.push_back(std::string(tile.layout.type) + " " + std::to_string(tile.layout.rows) + " x " + std::to_string(tile.layout.cols) +
                      (tile.layout.contracts_rows ? " rows" : "") + ", " + tile.where);
  }
  return texts;
}

TEST(TileLayouts, KernelsTilesAreFound) {
  EXPECT_EQ(described("gemm_bf16_nn_128x256"),
            (std::vector<std::string>{"Shared 128 x 64, ring 1, 4 slots", "Shared 64 x 256 rows, ring 1, 4 slots",
                                      "Shared 64 x 64, staging, 2 slots for each warpgroup", "Fragment 128 x 256, state"}));
  EXPECT_EQ(
      described("gemm_tf32_nt_128x128"),  // f32 leaves without staging
      (std::vector<std::string>{"Shared 128 x 32, ring 1, 6 slots", "Shared 128 x 32, ring 1, 6 slots", "Fragment 128 x 128, state"}));
}

TEST(TileLayouts, EveryRegisteredKernelWithProductsHasTiles) {
  for (const RegisteredKernel& kernel : registered_kernels()) {
    SCOPED_TRACE(kernel.spec.name);
    const std::vector<KernelTile> tiles = tiles_of(kernel.spec);
    const bool loads = kernel.spec.type.find("::Gemm<") != std::string::npos ||
                       kernel.spec.type.find("::Convolution<") != std::string::npos ||
                       kernel.spec.type.find("::Attention<") != std::string::npos;
    if (loads) {
      EXPECT_GE(tiles.size(), 3u);
    }
    for (const KernelTile& tile : tiles) {
      EXPECT_NE(tile.layout.offset == nullptr, tile.layout.element == nullptr);
      EXPECT_NE(tile.where, "");
      if (tile.layout.element != nullptr) {
        EXPECT_EQ(tile.layout.threads * tile.layout.size, tile.layout.rows * tile.layout.cols);
      }
    }
  }
}

}  // namespace
}  // namespace tw
