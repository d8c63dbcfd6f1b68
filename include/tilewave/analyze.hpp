#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tilewave/launch.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tile/analysis/run.tile.hpp"

// Counts the bytes that a kernel moves and the operations that it does, from its own source, and predicts the shortest time that a device
// needs for them. Nothing is computed and no memory is needed:
//
//   const tw::Tensor a = tw::placeholder({m, k}, tw::DType::f16), ...;
//   const tw::Analysis counts = tw::analyze<Matmul<tw::f16, 128, 128, 64, 4>>(grid, [&](auto& bind, auto& params) { bind(params.a, a); });
//   const tw::Roofline time = tw::roofline(counts, *tw::find_device_model("H200"));

namespace tw {

using analysis::OperandType;

/// "f32", "f16", "bf16", "fp8", "i8".
const char* name_of(OperandType operands);

/// A number for each operand type.
template <class T>
using PerOperandType = std::array<T, static_cast<std::size_t>(OperandType::count)>;

/// Arithmetic operations by kind.
struct Operations {
  /// Matrix products: two operations for each multiply-add, counted for whole tiles, as tensor cores compute them.
  PerOperandType<std::uint64_t> products{};
  PerOperandType<std::uint64_t> inside{};  ///< only those on elements inside the tensors: 2 M N K for a matrix product
  std::uint64_t f32 = 0;                   ///< in element functions and reductions: +, *, comparisons, max, min
  std::uint64_t special = 0;               ///< exp2, log2, sqrt, rsqrt, reciprocal, division, erf, sin, cos; tanh and sigmoid count twice
  std::uint64_t all_products() const;
};

/// The counts of one launch.
struct Analysis {
  std::int64_t tiles = 0;
  int threads = 0;                ///< per block on the GPU
  std::int64_t shared_bytes = 0;  ///< per block: rings, buffers, staging and scratch, without barriers (1 KB) and padding

  std::uint64_t global_read = 0;     ///< bytes that blocks load from global memory; bytes loaded by several blocks count several times
  std::uint64_t global_written = 0;  ///< bytes that blocks store
  std::uint64_t unique_read = 0;     ///< bytes of the tensors that are read, each counted once: the minimum memory traffic
  std::uint64_t unique_written = 0;  ///< the same for tensors that are written
  std::uint64_t shared_traffic = 0;  ///< bytes into and out of shared memory, including the operands of products

  Operations operations;
  Operations largest_tile;      ///< for each kind, the count of the tile with the most
  std::uint64_t uncounted = 0;  ///< elements passed to functions that take float instead of auto; their arithmetic is not counted
};

/// A tensor of zeros for analyze(): its addresses are reserved, but memory is used only when it is written. Throws InvalidArgument if the
/// shape does not fit into the address space.
Tensor placeholder(Shape shape, DType dtype);

/// A processor according to its data sheet. Rates are per second for the whole device, at the boost clock, without sparsity.
struct DeviceModel {
  std::string name;
  std::string source;  ///< where the figures come from
  int units = 1;       ///< SMs, or threads of a CPU
  double memory_bytes = 0;
  PerOperandType<double> products{};  ///< 0: not supported
  double f32 = 0;                     ///< a fused multiply-add counts as two
  double special = 0;
  std::int64_t shared_per_block = 0;  ///< bytes; 0: no limit
  bool skips_padding = false;         ///< products of elements outside the tensors are not computed
};

/// H200, A100 and RTX 4090.
const std::vector<DeviceModel>& device_models();
/// Finds a model by "H200", "A100" or "4090", or by a device name that contains one of these ("NVIDIA H200"); null if there is none.
const DeviceModel* find_device_model(std::string_view name);
/// A CPU with `threads` threads, each with `flops` f32 operations per second, and a memory bandwidth of `bytes` per second. Products of all
/// types are computed in f32; a special function costs 20 operations (the length of exp2 in math.tile.hpp).
DeviceModel cpu_model(std::string name, int threads, double flops, double bytes);

/// The shortest time of a launch whose tensors are not in the device's cache: all resources work at the same time, each at its peak rate.
struct Roofline {
  double memory = 0;    ///< seconds for the unique bytes
  double products = 0;  ///< seconds for matrix products
  double f32 = 0;
  double special = 0;
  double seconds = 0;  ///< the largest of these
  const char* bound = "memory";
};

/// A tile runs on one unit, so the busiest unit has at least ceil(tiles / units) average tiles, and at least the largest tile. Throws
/// InvalidArgument for products of a type that the device does not support.
Roofline roofline(const Analysis& analysis, const DeviceModel& device);

namespace detail {

/// A bound tensor's memory, each byte counted once.
struct AnalysedArray {
  const void* data;
  std::uint64_t bytes;
};

/// Binds tensors on any device to Globals of the analysis target.
class AnalysisBinder {
 public:
  template <class G>
  void operator()(G& global, const Tensor& tensor) {
    bind_view(global, tensor, dtype_of<typename G::Element>, tensor.device());
    global.place = add(tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor* tensor) {
    if (tensor == nullptr) return void(static_cast<BoundView&>(global) = kNoTensor);
    (*this)(global, *tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window) {
    global.window = window;
    (*this)(global, tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, CopiedRows) {
    (*this)(global, tensor);
  }
  template <class G>
  void operator()(G& global, const Tensor& tensor, const Window& window, CopiedRows) {
    (*this)(global, tensor, window);
  }
  const std::vector<AnalysedArray>& arrays() const { return arrays_; }

 private:
  int add(const Tensor& tensor);
  std::vector<AnalysedArray> arrays_;
};

struct AnalysisKernel {
  int threads;
  std::int64_t shared_bytes;
  Tile (*at)(const TileGrid& grid, int index);
  void (*run)(const void* params, Tile tile, u8* arena);
};
Analysis analyze_tiles(const AnalysisKernel& kernel, const void* params, const TileGrid& grid, const std::vector<AnalysedArray>& arrays);

}  // namespace detail

/// Counts what launch<Kernel>(stream, grid, bind) would do. Tensors may be placeholders.
///
/// Bytes and products are exact; parts of tiles outside a tensor are not moved. Element functions are exact if their work depends neither
/// on values nor on row and column together: each runs for the first row and the first column of its tile. Every element is 1, and branches
/// on values go as for 1. An operation on a row counts once, although the threads that share the row repeat it. Up to 2048 tiles, all are
/// run. For more, one of each group of equal tiles along each dimension of the grid is run, and 256 others as a check; if they differ from
/// their groups, all are run.
///
/// Element functions must take elements and values of rows as `auto`, otherwise their arithmetic is not counted. Arrays must be Pointers,
/// otherwise their bytes are not counted.
template <class Kernel, class Bind>
Analysis analyze(TileGrid grid, Bind bind) {
  using On = typename Kernel::template On<analysis::Target>;
  typename On::Params params{};
  detail::AnalysisBinder binder;
  detail::bind_params(detail::type_name<Kernel>(), detail::source_of<Kernel>(), params, binder, bind);
  constexpr int cluster = detail::cluster_of<On>();
  grid.m = ceil_div(grid.m, cluster) * cluster;
  constexpr int warpgroups = ceil_div(detail::warps_of<On>(), 4) + (detail::has_load<On> ? 1 : 0);
  const detail::AnalysisKernel kernel{
      warpgroups * 128, analysis::memory_bytes<On>(),
      [](const TileGrid& g, int index) { return detail::ScheduleOf<On>::Type::at(g, index); },
      [](const void* p, Tile tile, u8* arena) { analysis::run<On>(*static_cast<const typename On::Params*>(p), tile, arena); }};
  return detail::analyze_tiles(kernel, &params, grid, binder.arrays());
}

}  // namespace tw
