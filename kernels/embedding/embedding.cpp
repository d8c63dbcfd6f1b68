#include "tilewave/embedding.hpp"

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/check.hpp"
#include "kernels/embedding/embedding.tile.hpp"
#include "kernels/embedding/variants.hpp"
#include "kernels/rows.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using kernels::embedding::Embedding;

constexpr const char* kOp = "embedding";

/// Throws for the first id that is out of range. Reads the ids, so it is for the CPU only.
template <class Id>
void check_ids(const Tensor& ids, std::int64_t vocabulary) {
  const Id* const values = ids.data<Id>();
  for (std::int64_t t = 0; t < ids.numel(); ++t)
    require(values[t] >= 0 && values[t] < vocabulary, "{}: ids[{}] is {}; the table has rows 0 to {}", kOp, t, values[t], vocabulary - 1);
}

/// Checks the call. Returns y as [t, dim] and the stream.
struct Call {
  Tensor y;
  Stream stream;
};

Call check(const Tensor& table, const Tensor& ids, const Tensor& y, const EmbeddingOptions& options) {
  const Device device = y.device();
  const DType dtype = table.dtype();
  const bool fp8 = kernels::is_8bit_float(dtype);
  require(fp8 || kernels::is_float(dtype), "{}: table is {}; f32, f16, bf16, fp8_e4m3 and fp8_e5m2 are supported", kOp, table);
  require(table.rank() == 2, "{}: table is {}; it must be [vocabulary, dim]", kOp, table);
  check_operand(kOp, "table", table, dtype, device);
  require(ids.dtype() == DType::i32 || ids.dtype() == DType::i64, "{}: ids is {}; i32 and i64 are supported", kOp, ids);
  check_operand(kOp, "ids", ids, ids.dtype(), device);
  require(ids.is_contiguous(), "{}: ids is {}; it must be contiguous", kOp, ids);
  require(y.dtype() == DType::f32 || (fp8 ? y.dtype() == DType::f16 || y.dtype() == DType::bf16 : y.dtype() == dtype),
          "{}: y is {}; for table {} it must be {}", kOp, y, table, fp8 ? "f32, f16 or bf16" : "of the same dtype or f32");
  check_operand(kOp, "y", y, y.dtype(), device);
  check_output(kOp, "y", y);
  const std::int64_t count = ids.numel(), vocabulary = table.shape(0), dim = table.shape(1);
  Shape shape = ids.shape();
  shape.push_back(dim);
  const Shape flat{count, dim};
  require(y.shape() == flat || (y.shape() == shape && y.is_contiguous()),
          "{}: y is {}; for table {} and ids {} it must be [{}], or contiguous, [{}]", kOp, y, table, ids, tw::join(flat, ", "),
          tw::join(shape, ", "));
  constexpr std::int64_t largest = std::numeric_limits<int>::max();
  require(vocabulary <= largest && dim <= 1 << 30, "{}: table is {}; its rows are limited to {}, dim to {}", kOp, table, largest, 1 << 30);
  const std::int64_t tiles = (dim + 511) / 512;  // of the smallest size on all devices, 2 x 128 x 4 / 2
  require(count <= largest / std::max<std::int64_t>(tiles, 1), "{}: y is {}, which is more than {} tiles", kOp, y, largest);
  require(vocabulary > 0 || y.numel() == 0, "{}: table is {}; it has no row that the {} ids could name", kOp, table, count);
  check_disjoint(kOp, {"y", &y}, {{"table", &table}, {"ids", &ids}});
  require(std::isfinite(options.scale), "{}: scale is {}; it must be finite", kOp, options.scale);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  if (!device.is_cuda()) ids.dtype() == DType::i32 ? check_ids<std::int32_t>(ids, vocabulary) : check_ids<std::int64_t>(ids, vocabulary);
  return {y.shape() == flat ? y : y.reshape(flat), stream};
}

template <class Kernel>
TileGrid grid_of(const Tensor& table, const Tensor& ids) {
  return {static_cast<int>(ids.numel()), static_cast<int>((table.shape(1) + Kernel::cols - 1) / Kernel::cols), 1};
}

template <class T, class Out>
void run(const Tensor& table, const Tensor& ids, const Call& call, float scale) {
  using Kernel = Embedding<T, Out>;
  launch<Kernel>(call.stream, grid_of<Kernel>(table, ids), [&](auto& bind, auto& p) {
    bind(p.table, table);
    bind(p.y, call.y);
    p.ids = ids.dtype() == DType::i32 ? ids.data<std::int32_t>() : nullptr;
    p.long_ids = static_cast<const i64*>(ids.data());
    p.scale = scale;
  });
}

template <class T>
void run_fp8(const Tensor& table, const Tensor& ids, const Call& call, float scale) {
  switch (call.y.dtype()) {
    case DType::f16:
      return run<T, f16>(table, ids, call, scale);
    case DType::bf16:
      return run<T, bf16>(table, ids, call, scale);
    default:
      return run<T, float>(table, ids, call, scale);
  }
}

}  // namespace

void embedding(const Tensor& table, const Tensor& ids, const Tensor& y, const EmbeddingOptions& options) {
  const Call call = check(table, ids, y, options);
  if (y.numel() == 0) return;
  const float scale = options.scale;
  const bool widened = y.dtype() != table.dtype();
  switch (table.dtype()) {
    case DType::f16:
      return widened ? run<f16, float>(table, ids, call, scale) : run<f16, f16>(table, ids, call, scale);
    case DType::bf16:
      return widened ? run<bf16, float>(table, ids, call, scale) : run<bf16, bf16>(table, ids, call, scale);
    case DType::fp8_e4m3:
      return run_fp8<fp8_e4m3>(table, ids, call, scale);
    case DType::fp8_e5m2:
      return run_fp8<fp8_e5m2>(table, ids, call, scale);
    default:
      return run<float, float>(table, ids, call, scale);
  }
}

namespace kernels::embedding {

namespace {

template <class T, class Out>
Analysis analyze_shape(const ShapeValues& shape) {
  using Kernel = Embedding<T, Out>;
  const Tensor table = placeholder({shape["vocabulary"], shape["dim"]}, dtype_of<T>), ids = placeholder({shape["ids"]}, DType::i32);
  const Tensor y = placeholder({shape["ids"], shape["dim"]}, dtype_of<Out>);
  return analyze<Kernel>(grid_of<Kernel>(table, ids), [&](auto& bind, auto& p) {
    bind(p.table, table);
    bind(p.y, y);
    p.ids = ids.data<std::int32_t>();
    p.scale = 1;
  });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class T, class Out>(const char* name) {
    variants.push_back({make_spec(kernel_info<Embedding<T, Out>>, true, true, name), analyze_shape<T, Out>});
  };
  add.template operator()<bf16, bf16>("embedding_bf16");
  add.template operator()<f16, f16>("embedding_f16");
  add.template operator()<float, float>("embedding_f32");
  add.template operator()<fp8_e4m3, bf16>("embedding_fp8_e4m3_bf16");
  return variants;
}

}  // namespace kernels::embedding
}  // namespace tw
