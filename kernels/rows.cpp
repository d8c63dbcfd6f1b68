#include "kernels/rows.hpp"

#include <algorithm>

namespace tw::kernels {

namespace {
constexpr int kShares[] = {8, 16, 24, 32, 40};
constexpr int kRowWarps[] = {1, 2, 4, 8, 16};

int share_of(std::int64_t cols, int row_warps) {
  for (const int share : kShares)
    if (cols <= std::int64_t{32} * row_warps * share) return share;
  return 0;
}
}  // namespace

RowConfig choose_rows(std::int64_t rows, std::int64_t cols, int units, int max_share) {
  constexpr int kWarpsPerUnit = 16;  // a quarter of an SM's maximum
  RowConfig chosen{16, max_share};
  for (const int row_warps : kRowWarps) {
    const int share = share_of(cols, row_warps);
    if (share == 0 || share > max_share) continue;
    chosen = {row_warps, share};
    if (share == 8 || rows * row_warps >= std::int64_t{kWarpsPerUnit} * units) break;
  }
  return chosen;
}

std::vector<RowConfig> row_configs(std::int64_t cols, int max_share) {
  std::vector<RowConfig> configs;
  for (const int row_warps : kRowWarps) {
    const int share = share_of(cols, row_warps);
    if (share > 0 && share <= max_share) configs.push_back({row_warps, share});
  }
  return configs;
}

int piece_columns(std::initializer_list<DType> dtypes) {
  return std::all_of(dtypes.begin(), dtypes.end(), [](DType dtype) { return size_of(dtype) == 2; }) ? 8 : 4;
}

Tensor columns_of(const Tensor& t, std::int64_t first, std::int64_t size, std::int64_t step) {
  Shape shape = t.shape();
  std::vector<std::int64_t> strides = t.strides();
  auto* const data = static_cast<char*>(t.data()) + first * strides.back() * static_cast<std::int64_t>(size_of(t.dtype()));
  shape.back() = size;
  strides.back() *= step;
  return Tensor::borrow(data, std::move(shape), t.dtype(), t.device(), std::move(strides));
}

void check_extents(const char* op, const char* argument, const Tensor& tensor) {
  for (int dim = 0; dim < tensor.rank(); ++dim)
    require(tensor.shape(dim) <= kLargestExtent, "{}: {} is {}; extents are limited to {}", op, argument, tensor, kLargestExtent);
}

RowViews::RowViews(std::span<const Tensor* const> operands) {
  const int rank = operands[0]->rank();
  Shape sizes;  // outer dimensions, merged
  std::vector<std::vector<std::int64_t>> strides(operands.size());
  for (int dim = 0; dim + 1 < rank; ++dim) {
    const std::int64_t size = operands[0]->shape(dim);
    if (size == 1) continue;
    bool merge = !sizes.empty() && sizes.back() * size <= kLargestExtent;
    for (std::size_t n = 0; n < operands.size() && merge; ++n) merge = strides[n].back() == operands[n]->stride(dim) * size;
    if (merge) {
      sizes.back() *= size;
      for (std::size_t n = 0; n < operands.size(); ++n) strides[n].back() = operands[n]->stride(dim);
    } else {
      sizes.push_back(size);
      for (std::size_t n = 0; n < operands.size(); ++n) strides[n].push_back(operands[n]->stride(dim));
    }
  }
  const std::size_t missing = 3 - sizes.size();
  sizes.insert(sizes.begin(), missing, 1);
  for (std::size_t n = 0; n < operands.size(); ++n) {
    const Tensor& t = *operands[n];
    strides[n].insert(strides[n].begin(), missing, 0);
    Shape shape = sizes;
    shape.push_back(t.shape(-1));
    strides[n].push_back(t.stride(-1));
    views_.push_back(Tensor::borrow(t.data(), std::move(shape), t.dtype(), t.device(), std::move(strides[n])));
  }
}

TileGrid row_grid(const char* op, const RowViews& views, std::int64_t cols, int tile_rows, int tile_cols) {
  const std::int64_t m = (views.rows() + tile_rows - 1) / tile_rows, n = (cols + tile_cols - 1) / tile_cols;
  require(m * n <= kLargestExtent && m * n * views.outer() <= kLargestExtent, "{}: {} x {} x {} tiles; they are limited to {}", op,
          views.outer(), m, n, kLargestExtent);
  return {static_cast<int>(m), static_cast<int>(n), static_cast<int>(views.outer())};
}

}  // namespace tw::kernels
