#include "tilewave/transpose.hpp"

#include <algorithm>
#include <cstdint>

#include "kernels/check.hpp"
#include "kernels/transpose/transpose.tile.hpp"
#include "kernels/transpose/variants.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using kernels::transpose::kGpuSide;
using kernels::transpose::Transpose;

constexpr const char* kOp = "transpose";
/// The largest extent and number of tiles: indices stay ints, even at the end of a last, incomplete tile.
constexpr std::int64_t kLargest = std::int64_t{1} << 30;

Stream check(const Tensor& x, const Tensor& y, const TransposeOptions& options) {
  const Device device = y.device();
  require(x.rank() == 2 || x.rank() == 3, "{}: x is {}; it must be [M, N] or [batch, M, N]", kOp, x);
  check_operand(kOp, "x", x, x.dtype(), device);
  check_operand(kOp, "y", y, x.dtype(), device);
  check_output(kOp, "y", y);
  require(y.shape() == x.transpose(-2, -1).shape(), "{}: y is {}; for x {} it must be [{}]", kOp, y, x,
          tw::join(x.transpose(-2, -1).shape(), ", "));
  std::int64_t tiles = 1;
  for (int dim = 0; dim < x.rank(); ++dim) {
    require(x.shape(dim) <= kLargest, "{}: x is {}; extents are limited to {}", kOp, x, kLargest);
    const std::int64_t of_dim = dim < x.rank() - 2 ? x.shape(dim) : (x.shape(dim) + 15) / 16;  // of the smallest tiles
    require(of_dim == 0 || tiles <= kLargest / of_dim, "{}: x is {}, which is more than {} tiles", kOp, x, kLargest);
    tiles *= of_dim;
  }
  check_disjoint(kOp, {"y", &y}, {{"x", &x}});
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  return stream;
}

/// The widest pieces, of 16, 8 or 4 bytes, that divide the rows of both tensors. If none does, the width does not matter: the kernel copies
/// element by element.
int piece_bytes(const Tensor& x, const Tensor& y) {
  std::uint64_t all = reinterpret_cast<std::uint64_t>(x.data()) | reinterpret_cast<std::uint64_t>(y.data());
  for (const Tensor* t : {&x, &y}) {
    all |= static_cast<std::uint64_t>(t->shape(-1)) * size_of(t->dtype());
    for (int dim = 0; dim + 1 < t->rank(); ++dim) all |= static_cast<std::uint64_t>(t->stride(dim)) * size_of(t->dtype());
  }
  return all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : 4;
}

/// CPU tiles: rows are long enough for the hardware prefetcher, and a tile stays in the L2 cache.
constexpr int kCpuSide = 128;

/// Elements are moved as the bits of a type of their size.
template <class T>
void run(const Tensor& x, const Tensor& y, const Stream& stream) {
  const auto bits = [](const Tensor& t) { return Tensor::borrow(t.data(), t.shape(), dtype_of<T>, t.device(), t.strides()); };
  const auto bind_call = [&](auto& bind, auto& p) {
    bind(p.x, bits(x));
    bind(p.y, bits(y));
  };
  const auto grid = [&](int side) -> TileGrid {
    const auto tiles = [&](std::int64_t extent) { return static_cast<int>((extent + side - 1) / side); };
    return {tiles(x.shape(-2)), tiles(x.shape(-1)), x.rank() == 3 ? static_cast<int>(x.shape(0)) : 1};
  };
  if (!stream.device().is_cuda()) return launch_cpu<Transpose<T, kCpuSide, 1>>(grid(kCpuSide), bind_call);
  const auto launch = [&]<int kBytes>() {
    constexpr int kWidth = std::max(kBytes / static_cast<int>(sizeof(T)), 1);
    launch_gpu<Transpose<T, kGpuSide<T>, kWidth>>(stream, grid(kGpuSide<T>), bind_call);
  };
  switch (piece_bytes(x, y)) {
    case 16:
      return launch.template operator()<16>();
    case 8:
      return launch.template operator()<8>();
    default:
      return launch.template operator()<4>();
  }
}

}  // namespace

void transpose(const Tensor& x, const Tensor& y, const TransposeOptions& options) {
  const Stream stream = check(x, y, options);
  if (x.numel() == 0) return;
  switch (size_of(x.dtype())) {
    case 1:
      return run<std::uint8_t>(x, y, stream);
    case 2:
      return run<bf16>(x, y, stream);
    case 4:
      return run<std::int32_t>(x, y, stream);
    default:
      return run<std::int64_t>(x, y, stream);
  }
}

namespace kernels::transpose {

namespace {

template <class T>
Analysis analyze_shape(const ShapeValues& shape) {
  using Kernel = Transpose<T, kGpuSide<T>, 16 / static_cast<int>(sizeof(T))>;
  const Tensor x = placeholder({shape["batch"], shape["M"], shape["N"]}, dtype_of<T>);
  const Tensor y = placeholder({shape["batch"], shape["N"], shape["M"]}, dtype_of<T>);
  const auto tiles = [](int extent) { return ceil_div(extent, Kernel::side); };
  return analyze<Kernel>({tiles(shape.integer("M")), tiles(shape.integer("N")), shape.integer("batch")}, [&](auto& bind, auto& p) {
    bind(p.x, x);
    bind(p.y, y);
  });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class T>(const char* name) {
    variants.push_back(
        {make_spec(kernel_info<Transpose<T, kGpuSide<T>, 16 / static_cast<int>(sizeof(T))>>, true, true, name), analyze_shape<T>});
  };
  add.template operator()<std::uint8_t>("transpose_1_byte");
  add.template operator()<bf16>("transpose_2_bytes");
  add.template operator()<std::int32_t>("transpose_4_bytes");
  add.template operator()<std::int64_t>("transpose_8_bytes");
  return variants;
}

}  // namespace kernels::transpose
}  // namespace tw
