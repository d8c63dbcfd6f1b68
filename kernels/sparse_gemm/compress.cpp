#include <array>
#include <string>
#include <utility>

#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "kernels/sparse_gemm/call.hpp"
#include "kernels/sparse_gemm/kernels.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels::sparse_gemm;

/// f.operator()<Bits, kInteger>() for the dtype.
template <class F>
void with_bits(DType dtype, F f) {
  if (dtype == DType::i8)
    f.template operator()<u8, true>();
  else if (size_of(dtype) == 1)
    f.template operator()<u8, false>();
  else
    f.template operator()<u16, false>();
}

void check_matrix(const char* op, const char* name, const Tensor& t, Device device) {
  require(is_sparse_dtype(t.dtype()) && t.rank() == 2 && t.shape(1) % 4 == 0,
          "{}: {} is {}; it must be [M, K] of f16, bf16, fp8_e4m3 or i8, with K a multiple of 4", op, name, t);
  check_operand(op, name, t, t.dtype(), device);
  kernels::check_extents(op, name, t);
}

void check_same(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape) {
  require(t.dtype() == dtype && t.shape() == shape, "{}: {} is {}; it must be {}[{}]", op, name, t, name_of(dtype), tw::join(shape, ", "));
}

/// Throws for the first group, in order of rows, with more than two nonzeros.
template <class Bits, bool kInteger>
void refuse_dense(const char* op, const Tensor& dense) {
  const auto* const first = static_cast<const Bits*>(dense.data());
  constexpr std::int64_t kTogether = 16;
  const std::int64_t rows = dense.shape(0), cols = dense.shape(1);
  detail::parallel_for(static_cast<long>((rows + kTogether - 1) / kTogether), [&](long part) {
    for (std::int64_t row = part * kTogether; row < std::min(rows, (part + 1) * kTogether); ++row) {
      for (std::int64_t col = 0; col < cols; col += 4) {
        int nonzeros = 0;
        for (std::int64_t i = 0; i < 4; ++i)
          nonzeros += magnitude<Bits, kInteger>(first[row * dense.stride(0) + (col + i) * dense.stride(1)]) != 0;
        require(nonzeros <= 2, "{}: dense is {}; row {} has {} nonzeros in columns {} to {}, of which at most two are allowed", op, dense,
                row, nonzeros, col, col + 3);
      }
    }
  });
}

}  // namespace

void prune_2_4(const Tensor& x, const Tensor& y, const std::optional<Stream>& stream) {
  constexpr const char* op = "prune_2_4";
  check_matrix(op, "x", x, y.device());
  check_same(op, "y", y, x.dtype(), x.shape());
  check_operand(op, "y", y, x.dtype(), y.device());
  check_output(op, "y", y);
  check_in_place(op, {"y", &y}, {"x", &x});
  const Stream on = checked_stream(op, stream, y.device());
  if (y.numel() == 0) return;
  with_bits(x.dtype(), [&]<class Bits, bool kInteger>() {
    launch<Prune<Bits, kInteger>>(on, groups_grid(x.shape(0), x.shape(1), x.dtype()), [&](auto&, auto& p) {
      bind_matrix(p.x, x);
      bind_matrix(p.y, y);
      p.rows = static_cast<int>(x.shape(0));
      p.cols = static_cast<int>(x.shape(1));
    });
  });
}

void compress_2_4(const Tensor& dense, const SparseMatrix& sparse, const Compress24Options& options) {
  constexpr const char* op = "compress_2_4";
  const Device device = dense.device();
  check_matrix(op, "dense", dense, device);
  check_sparse(op, sparse, device);
  check_same(op, "values", sparse.values, dense.dtype(), {dense.shape(0), dense.shape(1) / 2});
  check_output(op, "values", sparse.values);
  check_disjoint(op, {"values", &sparse.values}, {{"dense", &dense}, {"metadata", &sparse.metadata}, {"refused", options.refused}});
  check_disjoint(op, {"metadata", &sparse.metadata}, {{"dense", &dense}, {"refused", options.refused}});
  if (options.refused) {
    check_same(op, "refused", *options.refused, DType::i32, {1});
    check_operand(op, "refused", *options.refused, DType::i32, device);
    check_disjoint(op, {"refused", options.refused}, {{"dense", &dense}});
  }
  const Stream on = checked_stream(op, options.stream, device);
  if (dense.numel() == 0) return;
  with_bits(dense.dtype(), [&]<class Bits, bool kInteger>() {
    if (!device.is_cuda()) refuse_dense<Bits, kInteger>(op, dense);
    launch<Compress<Bits, kInteger>>(on, groups_grid(dense.shape(0), dense.shape(1), dense.dtype()),
                                     [&](auto&, auto& p) { bind_compress(p, dense, sparse, options.refused); });
  });
}

void decompress_2_4(const SparseMatrix& sparse, const Tensor& dense, const std::optional<Stream>& stream) {
  constexpr const char* op = "decompress_2_4";
  const Device device = dense.device();
  check_sparse(op, sparse, device);
  check_same(op, "dense", dense, sparse.dtype(), {sparse.rows(), sparse.columns()});
  check_operand(op, "dense", dense, dense.dtype(), device);
  check_output(op, "dense", dense);
  check_disjoint(op, {"dense", &dense}, {{"values", &sparse.values}, {"metadata", &sparse.metadata}});
  const Stream on = checked_stream(op, stream, device);
  if (dense.numel() == 0) return;
  with_bits(dense.dtype(), [&]<class Bits, bool kInteger>() {
    launch<Decompress<Bits>>(on, groups_grid(dense.shape(0), dense.shape(1), dense.dtype()), [&](auto&, auto& p) {
      bind_matrix(p.values, sparse.values);
      bind_matrix(p.dense, dense);
      p.metadata = sparse.metadata.data<u8>();
      p.rows = static_cast<int>(dense.shape(0));
      p.cols = static_cast<int>(dense.shape(1));
    });
  });
}

namespace {

/// The byte of columns 8 c to 8 c + 7 of a row, in a layout of [M, K / 8] bytes.
std::int64_t byte_in(MetadataLayout layout, std::int64_t rows, int block_k, std::int64_t row, std::int64_t c, std::int64_t row_bytes) {
  if (layout == MetadataLayout::e16) {
    std::int64_t r = row / 32 * 32 + row % 8 * 4 + row % 32 / 8, unit = c / 2;
    if (r % 2 != unit % 2) {  // upper right or lower left of 2 x 2
      const std::int64_t right = unit % 2;
      r += right ? 1 : -1;
      unit += right ? -1 : 1;
    }
    return 2 * (2 * rows * (unit / 2) + 2 * r + unit % 2) + c % 2;
  }
  if (layout == MetadataLayout::e8) {
    const std::int64_t n = block_k / 32, in_atom = c % (4 * n), atom = c / (4 * n) * (rows / 64) + row / 64;
    return atom * 256 * n + in_atom % 2 + 2 * (row % 16 / 8) + 4 * (in_atom / 4) + 4 * n * (row % 8) + 32 * n * (in_atom / 2 % 2) +
           64 * n * (row % 64 / 16);
  }
  return row * row_bytes + c;
}

/// Calls f(byte of `metadata`, byte of `other`, row, first column) for every eight columns.
template <class F>
void for_bytes(const char* op, const SparseMatrix& sparse, const char* name, const Tensor& other, MetadataLayout layout, int block_k, F f) {
  check_sparse(op, sparse, Device::cpu());
  const std::int64_t rows = sparse.rows(), cols = sparse.columns();
  require(cols % 8 == 0, "{}: values are {}; K must be a multiple of 8", op, sparse.values);
  check_same(op, name, other, DType::u8, {rows, cols / 8});
  check_operand(op, name, other, DType::u8, Device::cpu());
  require(other.is_contiguous(), "{}: {} is {} with strides [{}]; it must be row-major", op, name, other, tw::join(other.strides(), ", "));
  const bool sixteen = size_of(sparse.dtype()) == 2;
  if (layout == MetadataLayout::e16)
    require(sixteen && rows % 32 == 0 && cols % 32 == 0, "{}: values are {}; e16 is for 16-bit elements, with M and K multiples of 32", op,
            sparse.values);
  if (layout == MetadataLayout::e8) {
    require(block_k == 32 || block_k == 64 || block_k == 128, "{}: block_k is {}; it must be 32, 64 or 128", op, block_k);
    require(sixteen && rows % 64 == 0 && cols % block_k == 0,
            "{}: values are {}; e8 is for 16-bit elements, with M a multiple of 64 and K of block_k, {}", op, sparse.values, block_k);
  }
  u8* const metadata = sparse.metadata.data<u8>();
  u8* const bytes = other.data<u8>();
  const int rows16 = static_cast<int>((rows + 15) / 16);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; col += 8) {
      const auto place = [&](auto bits) {
        return Groups<decltype(bits)>::metadata_byte(static_cast<int>(row), static_cast<int>(col), rows16);
      };
      f(metadata[sixteen ? place(u16{}) : place(u8{})], bytes[byte_in(layout, rows, block_k, row, col / 8, cols / 8)], row, col);
    }
  }
}

}  // namespace

void export_metadata_2_4(const SparseMatrix& sparse, const Tensor& to, MetadataLayout layout, int block_k) {
  for_bytes("export_metadata_2_4", sparse, "to", to, layout, block_k, [](u8 from, u8& byte, std::int64_t, std::int64_t) { byte = from; });
}

void import_metadata_2_4(const Tensor& from, const SparseMatrix& sparse, MetadataLayout layout, int block_k) {
  constexpr const char* op = "import_metadata_2_4";
  for_bytes(op, sparse, "from", from, layout, block_k, [&](u8&, u8 byte, std::int64_t row, std::int64_t col) {
    for (int half = 0; half < 2; ++half) {
      const u32 bits = static_cast<u32>(byte) >> (4 * half) & 15u;
      require(first_kept(bits) < second_kept(bits),
              "{}: from is {}; the bits of row {}, column {} are {}, which name no two ascending columns", op, from, row, col + 4 * half,
              bits);
    }
  });
  const Tensor& metadata = sparse.metadata;
  constexpr u8 kNone = kNoGroup | kNoGroup << 4;
  std::fill_n(metadata.data<u8>(), metadata.numel(), kNone);
  for_bytes(op, sparse, "from", from, layout, block_k, [](u8& to, u8 byte, std::int64_t, std::int64_t) { to = byte; });
}

}  // namespace tw
