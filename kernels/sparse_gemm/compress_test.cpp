// prune_2_4(), compress_2_4(), decompress_2_4() and the layouts of metadata.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "kernels/sparse_gemm/call.hpp"
#include "kernels/sparse_gemm/reference.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/sparse_gemm.hpp"
#include "tilewave/tile/sparse.tile.hpp"

namespace tw::kernels::sparse_gemm {
namespace {

using namespace tw::test;

class Sparse24 : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::vector<float> draw(PlacedTensor& x) {
    if (x.tensor().dtype() != DType::i8) return x.fill_random(random);
    std::vector<float> values(static_cast<std::size_t>(x.tensor().numel()));
    for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 256) - 128);
    x.fill(values);
    return values;
  }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Sparse24, testing::ValuesIn(kDevices), device_name);

constexpr DType kElements[] = {DType::f16, DType::bf16, DType::fp8_e4m3, DType::i8};
constexpr std::int64_t kShapes[][2] = {{1, 4}, {16, 128}, {37, 260}, {70, 600}, {0, 8}, {5, 0}};

TEST_P(Sparse24, PrunesCompressesAndDecompresses) {
  for (const DType dtype : kElements) {
    for (const auto& [rows, cols] : kShapes) {
      for (const bool plain : {true, false}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(rows) + " x " + std::to_string(cols));
        const Placement placement = plain ? Placement{} : Placement{.order = {1, 0}, .offset = 3, .gap = 2};
        PlacedTensor x({rows, cols}, dtype, device, placement), y({rows, cols}, dtype, device, placement);
        const std::vector<float> expected = pruned(draw(x));
        PlacedTensor back({rows, cols}, dtype, device, placement);
        PlacedTensor values({rows, cols / 2}, dtype, device, {.gap = plain ? 0 : 3});
        const SparseMatrix sparse{values,
                                  Tensor::poisoned(SparseMatrix::metadata_shape(rows, cols, dtype), DType::u8, Stream::standard(device))};
        if (!launched([&] {
              prune_2_4(x, y);
              compress_2_4(y, sparse);
              decompress_2_4(sparse, back);
              prune_2_4(x, x);
            }))
          continue;
        const std::vector<double> wanted(expected.begin(), expected.end());
        EXPECT_EQ(y.values(), wanted);
        EXPECT_EQ(back.values(), wanted);
        EXPECT_EQ(x.values(), wanted);
        EXPECT_TRUE(y.gaps_intact());
        EXPECT_TRUE(back.gaps_intact());
        EXPECT_TRUE(values.gaps_intact());
        // Padding names two columns, too.
        const Tensor metadata = sparse.metadata.to(Device::cpu());
        const std::set<u32> valid{4, 8, 9, 12, 13, 14};
        for (std::int64_t i = 0; i < metadata.numel(); ++i) {
          const u32 byte = metadata.data<std::uint8_t>()[i];
          ASSERT_TRUE(valid.contains(byte & 15) && valid.contains(byte >> 4)) << "byte " << i << " is " << byte;
        }
      }
    }
  }
}

/// Ties, NaN, negative zero, and the integer that has no opposite.
TEST_P(Sparse24, WhichElementsAreKept) {
  const auto prune = [&](DType dtype, std::vector<float> group) {
    PlacedTensor x({1, 4}, dtype, device);
    x.fill(group);
    prune_2_4(x, x);
    return x.values();
  };
  if (!launched([&] { prune(DType::bf16, {1, 2, 3, 4}); })) return;
  using Group = std::vector<double>;
  EXPECT_EQ(prune(DType::bf16, {1, -1, 1, -1}), (Group{1, -1, 0, 0}));
  EXPECT_EQ(prune(DType::f16, {1, 2, -2, 2}), (Group{0, 2, -2, 0}));
  EXPECT_EQ(prune(DType::fp8_e4m3, {-3, 2, 2, 1}), (Group{-3, 2, 0, 0}));
  EXPECT_EQ(prune(DType::bf16, {0, -0.0f, 0, 5}), (Group{0, 0, 0, 5}));
  EXPECT_EQ(prune(DType::i8, {127, -128, 126, -127}), (Group{127, -128, 0, 0}));
  EXPECT_EQ(prune(DType::f16, {kInf, 5, -kInf, 7}), (Group{kInf, 0, -kInf, 0}));
  const std::vector<double> with_nan = prune(DType::bf16, {kInf, 1, kNaN, 2});
  EXPECT_EQ(with_nan[0], kInf);
  EXPECT_TRUE(std::isnan(with_nan[2]));
  EXPECT_EQ(with_nan[1] + with_nan[3], 0);
}

TEST_P(Sparse24, DenseMatricesAreRefused) {
  for (const DType dtype : kElements) {
    PlacedTensor dense({40, 64}, dtype, device);
    std::vector<float> values(40 * 64);
    for (const std::size_t col : {20u, 21u, 23u}) values[33 * 64 + col] = 2;
    dense.fill(values);
    const Stream stream = Stream::standard(device);
    const SparseMatrix sparse{Tensor::poisoned({40, 32}, dtype, stream),
                              Tensor::poisoned(SparseMatrix::metadata_shape(40, 64, dtype), DType::u8, stream)};
    const Tensor refused = Tensor::zeros({1}, DType::i32, stream);
    if (!device.is_cuda()) {
      expect_error<InvalidArgument>([&] { compress_2_4(dense, sparse); }, {"compress_2_4", "row 33", "3 nonzeros", "columns 20 to 23"});
      continue;
    }
    if (!launched([&] { compress_2_4(dense, sparse, {.refused = &refused}); })) continue;
    EXPECT_EQ(refused.to(Device::cpu()).data<std::int32_t>()[0], 1);
    values[33 * 64 + 20] = 0;
    dense.fill(values);
    const Tensor fits = Tensor::zeros({1}, DType::i32, stream);
    compress_2_4(dense, sparse, {.refused = &fits});
    EXPECT_EQ(fits.to(Device::cpu()).data<std::int32_t>()[0], 0);
  }
}

/// A matrix whose kept columns follow from row and group, so that every layout can be spelled out.
struct KnownMatrix {
  static constexpr int kFirst[] = {0, 0, 1, 0, 1, 2}, kSecond[] = {1, 2, 2, 3, 3, 3};
  std::int64_t rows, cols;
  SparseMatrix sparse;
  explicit KnownMatrix(std::int64_t m, std::int64_t k, DType dtype = DType::bf16)
      : rows(m), cols(k), sparse(SparseMatrix::allocate(m, k, dtype)) {
    std::vector<float> values(static_cast<std::size_t>(m * k));
    for (std::int64_t r = 0; r < m; ++r)
      for (std::int64_t g = 0; g < k / 4; ++g)
        for (const int column : {kFirst[pattern(r, g)], kSecond[pattern(r, g)]})
          values[static_cast<std::size_t>(r * k + 4 * g + column)] = 1;
    PlacedTensor dense({m, k}, dtype, Device::cpu());
    dense.fill(values);
    compress_2_4(dense, sparse);
  }
  static std::size_t pattern(std::int64_t r, std::int64_t g) { return static_cast<std::size_t>((r * 7 + g * 5 + r * g) % 6); }
  static u32 bits(std::int64_t r, std::int64_t g) { return group_metadata(kFirst[pattern(r, g)], kSecond[pattern(r, g)]); }
};

TEST(SparseLayouts, AreThoseOfOtherLibraries) {
  const KnownMatrix known(128, 256);
  const Tensor bytes = Tensor::empty({128, 32}, DType::u8);
  const std::uint8_t* const at = bytes.data<std::uint8_t>();
  export_metadata_2_4(known.sparse, bytes, MetadataLayout::rows);
  for (std::int64_t r = 0; r < 128; ++r)
    for (std::int64_t g = 0; g < 64; ++g) ASSERT_EQ(at[r * 32 + g / 2] >> (g % 2 * 4) & 15, KnownMatrix::bits(r, g)) << r << " " << g;

  // e16, word by word as a GPU of compute capability 8 loads them: quad q of a product's 16 rows has rows q and q + 8 of 16 columns.
  export_metadata_2_4(known.sparse, bytes, MetadataLayout::e16);
  for (std::int64_t r = 0; r < 128; ++r) {
    for (std::int64_t g = 0; g < 64; ++g) {
      const std::int64_t unit = g / 4, in_32 = r % 32;
      // Pairs of units, then blocks of 32 rows, then rows modulo 8, then rows 0 to 15 or 16 to 31, then the unit, then rows 0 to 7 or 8
      // to 15.
      const std::int64_t e = unit / 2 * 2 * 128 + r / 32 * 64 + in_32 % 8 * 8 + in_32 / 16 * 4 + unit % 2 * 2 + in_32 % 16 / 8;
      ASSERT_EQ(at[2 * e + g % 4 / 2] >> (g % 2 * 4) & 15, KnownMatrix::bits(r, g)) << r << " " << g;
    }
  }

  // e8: each 32-bit word is a lane's: row i0, then row i0 + 8, of 16 columns.
  for (const int block_k : {32, 64, 128}) {
    export_metadata_2_4(known.sparse, bytes, MetadataLayout::e8, block_k);
    const std::int64_t atom_bytes = 8 * block_k, n = block_k / 32;
    for (std::int64_t r = 0; r < 128; ++r) {
      for (std::int64_t g = 0; g < 64; ++g) {
        const std::int64_t col = 4 * g, in_k = col % block_k, in_m = r % 64;
        const std::int64_t word = in_m / 16 * 16 * n + in_k / 16 % 2 * 8 * n + in_m % 8 * n + in_k / 32;
        const std::int64_t byte = (col / block_k * 2 + r / 64) * atom_bytes + word * 4 + in_m % 16 / 8 * 2 + g % 4 / 2;
        ASSERT_EQ(at[byte] >> (g % 2 * 4) & 15, KnownMatrix::bits(r, g)) << block_k << ": " << r << " " << g;
      }
    }
  }
}

TEST(SparseLayouts, ComeBack) {
  const auto check = [](const KnownMatrix& known, MetadataLayout layout, int block_k = 128) {
    const Tensor bytes = Tensor::empty({known.rows, known.cols / 8}, DType::u8);
    export_metadata_2_4(known.sparse, bytes, layout, block_k);
    const SparseMatrix back{known.sparse.values, Tensor::poisoned(known.sparse.metadata.shape(), DType::u8)};
    import_metadata_2_4(bytes, back, layout, block_k);
    for (std::int64_t i = 0; i < back.metadata.numel(); ++i)
      ASSERT_EQ(back.metadata.data<std::uint8_t>()[i], known.sparse.metadata.data<std::uint8_t>()[i]) << i;
  };
  check(KnownMatrix(64, 192), MetadataLayout::e8, 64);
  check(KnownMatrix(64, 160, DType::f16), MetadataLayout::e8, 32);
  check(KnownMatrix(96, 96), MetadataLayout::e16);
  check(KnownMatrix(19, 200), MetadataLayout::rows);
  check(KnownMatrix(19, 200, DType::i8), MetadataLayout::rows);
  check(KnownMatrix(33, 520, DType::fp8_e4m3), MetadataLayout::rows);
}

TEST(SparseLayouts, BadInput) {
  const KnownMatrix known(32, 64);
  const Tensor bytes = Tensor::empty({32, 8}, DType::u8);
  const auto refused = [&](const SparseMatrix& sparse, const Tensor& to, MetadataLayout layout, int block_k,
                           std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { export_metadata_2_4(sparse, to, layout, block_k); }, parts);
  };
  refused(known.sparse, Tensor::empty({32, 9}, DType::u8), MetadataLayout::rows, 128, {"to is u8[32, 9]", "u8[32, 8]"});
  refused(known.sparse, bytes, MetadataLayout::e8, 32, {"values are bf16[32, 32]", "multiple of 64"});
  refused(known.sparse, bytes, MetadataLayout::e8, 96, {"block_k is 96", "128"});
  refused(KnownMatrix(32, 64, DType::i8).sparse, bytes, MetadataLayout::e16, 128, {"16-bit"});
  refused(KnownMatrix(32, 68).sparse, bytes, MetadataLayout::rows, 128, {"multiple of 8"});
  const Tensor wrong = Tensor::zeros({32, 8}, DType::u8);
  export_metadata_2_4(known.sparse, wrong, MetadataLayout::rows);
  wrong.data<std::uint8_t>()[3 * 8 + 2] = 0x4a;
  expect_error<InvalidArgument>([&] { import_metadata_2_4(wrong, known.sparse, MetadataLayout::rows); },
                                {"row 3, column 16", "10", "ascending"});
}

}  // namespace
}  // namespace tw::kernels::sparse_gemm
