#include "kernels/mamba2/chunks.hpp"

#include "kernels/check.hpp"
#include "kernels/mamba2/checks.hpp"
#include "kernels/named.hpp"
#include "kernels/rows.hpp"
#include "tilewave/mamba2_chunks.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

// The scan in five steps: the public functions, their checks and their launches.

namespace tw {

namespace {

using namespace kernels;
using namespace kernels::mamba2;

/// A contiguous tensor with this shape: what one of the steps gives another. `dims` names the dimensions.
void check_between(const char* op, NamedTensor t, const Shape& shape, const char* dims, Device device) {
  require(t.tensor->shape() == shape && t.tensor->is_contiguous(), "{}: {} is {}; it must be contiguous, [{}]: {}", op, t.name, *t.tensor,
          tw::join(shape, ", "), dims);
  check_operand(op, t.name, *t.tensor, t.tensor->dtype(), device);
}
void check_f32_between(const char* op, NamedTensor t, const Shape& shape, const char* dims, Device device) {
  check_between(op, t, shape, dims, device);
  check_operand(op, t.name, *t.tensor, DType::f32, device);
}

constexpr const char *kOfSteps = "[batch, nheads, nchunks, chunk_size]", *kOfStates = "[batch, nchunks, nheads, headdim, dstate]",
                     *kOfProducts = "[batch, nchunks, ngroups, chunk_size, chunk_size]";

/// The chunk size of a tensor with chunks of `seqlen` steps.
std::int64_t checked_chunk_size(const char* op, NamedTensor t, int rank, const char* dims) {
  require(t.tensor->rank() == rank, "{}: {} is {}; it must be {}", op, t.name, *t.tensor, dims);
  const std::int64_t size = t.tensor->shape(rank - 1);
  require(size >= 16 && size <= kLargestChunk && size % 16 == 0, "{}: {} is {}; its chunk_size must be a multiple of 16 from 16 to {}", op,
          t.name, *t.tensor, kLargestChunk);
  return size;
}

void check_16_bits(const char* op, NamedTensor t) {
  require(t.tensor->dtype() == DType::f16 || t.tensor->dtype() == DType::bf16, "{}: {} is {}; f16 and bf16 are supported", op, t.name,
          *t.tensor);
}

/// Numbers of chunks and heads together, and of steps, are ints.
void check_counts(const char* op, std::int64_t batch, std::int64_t chunks, std::int64_t heads, std::int64_t chunk_size) {
  const std::int64_t of_batch = std::max<std::int64_t>(batch, 1) * std::max<std::int64_t>(heads, 1);
  require(batch <= kLargestExtent && heads <= kLargestExtent && of_batch <= kLargestExtent && chunks <= kLargestExtent / of_batch &&
              chunks <= kLargestExtent / chunk_size,
          "{}: the batch is {}, nchunks {} and nheads {}; their product, and nchunks * chunk_size, must be at most {}", op, batch, chunks,
          heads, kLargestExtent);
}

/// dt and da_cumsum of x's steps.
void check_steps(const char* op, const Tensor& x, const Tensor& dt, const Tensor& sums) {
  const std::int64_t size = checked_chunk_size(op, {"dA_cumsum", &sums}, 4, kOfSteps);
  const Shape shape{x.shape(0), x.shape(2), ceil_div(x.shape(1), size), size};
  check_counts(op, shape[0], shape[2], shape[1], size);
  check_f32_between(op, {"dA_cumsum", &sums}, shape, kOfSteps, x.device());
  check_f32_between(op, {"dt", &dt}, shape, kOfSteps, x.device());
}

/// Launches a kernel with products, of f16 or bf16.
template <template <class> class Kernel>
void launch_products(const Stream& stream, DType dtype, auto grid_of, auto bind) {
  const auto run = [&]<class T>(std::type_identity<T>) {
    using Of = Kernel<T>;
    const auto fill = [&](auto& b, auto& p) { bind(b, p, Of::N); };
    launch<Of>(stream, grid_of(std::type_identity<Of>{}), fill);
  };
  dtype == DType::f16 ? run(std::type_identity<f16>{}) : run(std::type_identity<bf16>{});
}

}  // namespace

void mamba2_chunk_cumsum(const Tensor& dt, const Tensor& a, const Tensor& da_cumsum, const Tensor& dt_out,
                         const Mamba2ChunkCumsumOptions& options) {
  constexpr const char* op = "mamba2_chunk_cumsum";
  const Device device = dt.device();
  require(is_float(dt.dtype()), "{}: dt is {}; f32, f16 and bf16 are supported", op, dt);
  require(dt.rank() == 3, "{}: dt is {}; it must be [batch, seqlen, nheads]", op, dt);
  check_operand(op, "dt", dt, dt.dtype(), device);
  check_extents(op, "dt", dt);
  const Shape per_head{dt.shape(2)};
  check_f32(op, {"A", &a}, per_head, device);
  check_f32(op, {"dt_bias", options.dt_bias}, per_head, device);
  const std::int64_t size = checked_chunk_size(op, {"dA_cumsum", &da_cumsum}, 4, kOfSteps);
  const Shape shape{dt.shape(0), dt.shape(2), ceil_div(dt.shape(1), size), size};
  check_counts(op, shape[0], shape[2], shape[1], size);
  check_f32_between(op, {"dA_cumsum", &da_cumsum}, shape, kOfSteps, device);
  check_f32_between(op, {"dt_out", &dt_out}, shape, kOfSteps, device);
  if (options.seq_idx != nullptr) check_seq_idx(op, *options.seq_idx, {dt.shape(0), dt.shape(1)}, device);
  check_written(op, {{"dA_cumsum", &da_cumsum}, {"dt_out", &dt_out}},
                {{"dt", &dt}, {"A", &a}, {"dt_bias", options.dt_bias}, {"seq_idx", options.seq_idx}});
  const auto as_column = [](const Tensor& t) { return Tensor::borrow(t.data(), {t.shape(0), 1}, t.dtype(), t.device(), {t.stride(0), 0}); };
  const ChunkCumsumCall call{.dt = dt,
                             .rate = as_column(a),
                             .bias = options.dt_bias != nullptr ? as_column(*options.dt_bias) : Tensor(),
                             .seq_idx = options.seq_idx != nullptr ? *options.seq_idx : Tensor(),
                             .sums = da_cumsum,
                             .sizes = dt_out,
                             .size = checked_step_size(op, options)};
  const Stream stream = checked_stream(op, options.stream, device);
  if (da_cumsum.numel() == 0) return;
  const auto fill = [&](auto& bind, auto& p) { bind_cumsum(bind, p, call); };
  if (!device.is_cuda()) return launch_cpu<ChunkCumsum<cpu::AnyFloat, kCumsumHeads, kLargestChunk>>(cumsum_grid(call), fill);
  with_float_type(dt.dtype(), [&]<class T>(std::type_identity<T>) {
    launch_gpu<ChunkCumsum<T, kCumsumHeads, kLargestChunk>>(stream, cumsum_grid(call), fill);
  });
}

void mamba2_chunk_state(const Tensor& b, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& states,
                        const std::optional<Stream>& stream) {
  constexpr const char* op = "mamba2_chunk_state";
  check_16_bits(op, {"x", &x});
  check_inputs(op, x);
  check_keys(op, "B", b, x);
  check_steps(op, x, dt, da_cumsum);
  check_f32_between(op, {"states", &states}, {x.shape(0), da_cumsum.shape(2), x.shape(2), x.shape(3), b.shape(3)}, kOfStates, x.device());
  check_written(op, {{"states", &states}}, {{"B", &b}, {"x", &x}, {"dt", &dt}, {"dA_cumsum", &da_cumsum}});
  const Stream on = checked_stream(op, stream, x.device());
  if (states.numel() == 0) return;
  const ChunkCall call{.x = x, .keys = b, .sizes = dt, .sums = da_cumsum, .states = states};
  launch_products<ChunkState>(
      on, x.dtype(), [&]<class Kernel>(std::type_identity<Kernel>) { return chunk_state_grid<Kernel>(call); },
      [&](auto& bind, auto& p, int tile_columns) { bind_chunk_state(bind, p, call, tile_columns); });
}

void mamba2_state_passing(const Tensor& states, const Tensor& da_chunk_cumsum, const Tensor& passed,
                          const Mamba2StatePassingOptions& options) {
  constexpr const char* op = "mamba2_state_passing";
  const Device device = states.device();
  require(states.rank() == 5, "{}: states is {}; it must be {}", op, states, kOfStates);
  const Shape& shape = states.shape();
  check_counts(op, shape[0], shape[1], shape[2], 1);
  require(elements_of_state(states) <= kLargestExtent, "{}: states is {}; headdim * dstate must be at most {}", op, states, kLargestExtent);
  check_f32_between(op, {"states", &states}, shape, kOfStates, device);
  check_f32(op, {"dA_chunk_cumsum", &da_chunk_cumsum}, {shape[0], shape[2], shape[1]}, device);
  require(is_float(passed.dtype()), "{}: passed is {}; f32, f16 and bf16 are supported", op, passed);
  check_between(op, {"passed", &passed}, shape, kOfStates, device);
  const NamedTensor initial{"initial_states", options.initial_states}, final{"final_states", options.final_states};
  for (const NamedTensor& t : {initial, final})
    if (t.tensor != nullptr) check_f32_between(op, t, {shape[0], shape[2], shape[3], shape[4]}, "[batch, nheads, headdim, dstate]", device);
  check_written(op, {{"passed", &passed}, final}, {{"states", &states}, {"dA_chunk_cumsum", &da_chunk_cumsum}});
  check_disjoint(op, {"passed", &passed}, {initial});
  if (options.final_states != nullptr && options.initial_states != nullptr) check_in_place(op, final, initial);
  const Stream stream = checked_stream(op, options.stream, device);
  const StatePassingCall call{states, passed, da_chunk_cumsum, options.initial_states, options.final_states};
  const TileGrid grid = passing_grid(call, kPassedElements);
  if (grid.count() == 0) return;
  const auto fill = [&](auto& bind, auto& p) { bind_passing(bind, p, call); };
  if (!device.is_cuda()) return launch_cpu<StatePassing<cpu::AnyFloat, kPassedElements>>(grid, fill);
  with_float_type(passed.dtype(),
                  [&]<class T>(std::type_identity<T>) { launch_gpu<StatePassing<T, kPassedElements>>(stream, grid, fill); });
}

void mamba2_bmm_chunk(const Tensor& c, const Tensor& b, const Tensor& cb, const Mamba2BmmChunkOptions& options) {
  constexpr const char* op = "mamba2_bmm_chunk";
  check_16_bits(op, {"C", &c});
  require(c.rank() == 4 && c.shape(3) >= 1, "{}: C is {}; it must be [batch, seqlen, ngroups, dstate], with a dstate of at least 1", op, c);
  check_operand(op, "C", c, c.dtype(), c.device());
  check_extents(op, "C", c);
  check_like(op, {"B", &b}, {"C", &c});
  const std::int64_t size = checked_chunk_size(op, {"CB", &cb}, 5, kOfProducts), chunks = ceil_div(c.shape(1), size);
  check_counts(op, c.shape(0), chunks, c.shape(2), size);
  check_f32_between(op, {"CB", &cb}, {c.shape(0), chunks, c.shape(2), size, size}, kOfProducts, c.device());
  check_written(op, {{"CB", &cb}}, {{"C", &c}, {"B", &b}});
  const Stream stream = checked_stream(op, options.stream, c.device());
  if (cb.numel() == 0) return;
  const ChunkProductsCall call{c, b, cb, options.causal};
  launch_products<ChunkProducts>(
      stream, c.dtype(), [&]<class Kernel>(std::type_identity<Kernel>) { return products_grid<Kernel>(call); },
      [&](auto& bind, auto& p, int tile_columns) { bind_products(bind, p, call, tile_columns); });
}

void mamba2_chunk_scan(const Tensor& cb, const Tensor& x, const Tensor& dt, const Tensor& da_cumsum, const Tensor& c, const Tensor& states,
                       const Tensor& y, const Mamba2ChunkScanOptions& options) {
  constexpr const char* op = "mamba2_chunk_scan";
  check_16_bits(op, {"x", &x});
  check_inputs(op, x);
  check_keys(op, "C", c, x);
  check_steps(op, x, dt, da_cumsum);
  const std::int64_t chunks = da_cumsum.shape(2), size = da_cumsum.shape(3);
  check_f32_between(op, {"CB", &cb}, {x.shape(0), chunks, c.shape(2), size, size}, kOfProducts, x.device());
  check_between(op, {"states", &states}, {x.shape(0), chunks, x.shape(2), x.shape(3), c.shape(3)}, kOfStates, x.device());
  check_operand(op, "states", states, x.dtype(), x.device());
  check_like(op, {"y", &y}, {"x", &x});
  const NamedTensor z{"z", options.z}, ungated{"ungated", options.ungated};
  for (const NamedTensor& t : {z, ungated})
    if (t.tensor != nullptr) check_like(op, t, {"x", &x});
  const Tensor skip = options.d != nullptr ? checked_skip(op, *options.d, x) : Tensor();
  check_written(op, {{"y", &y}, ungated},
                {{"CB", &cb}, {"x", &x}, {"dt", &dt}, {"dA_cumsum", &da_cumsum}, {"C", &c}, {"states", &states}, {"D", options.d}, z});
  const Stream stream = checked_stream(op, options.stream, x.device());
  if (y.numel() == 0) return;
  const auto or_nothing = [](const Tensor* t) { return t != nullptr ? *t : Tensor(); };
  const ChunkCall call{.x = x,
                       .keys = c,
                       .sizes = dt,
                       .sums = da_cumsum,
                       .states = states,
                       .cb = cb,
                       .skip = skip,
                       .z = or_nothing(options.z),
                       .ungated = or_nothing(options.ungated),
                       .y = y};
  launch_products<ChunkScan>(
      stream, x.dtype(), [&]<class Kernel>(std::type_identity<Kernel>) { return chunk_scan_grid<Kernel>(call); },
      [&](auto& bind, auto& p, int tile_columns) { bind_chunk_scan(bind, p, call, tile_columns); });
}

}  // namespace tw
