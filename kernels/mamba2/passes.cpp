#include "kernels/generic_tiles.hpp"
#include "kernels/mamba2/call.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::mamba2 {

namespace {

/// Launches a kernel of rows of a dtype. The CPU has one for all.
template <template <class, int, int> class Kernel, int R, int C>
void launch_rows(const Call& call, DType dtype, const TileGrid& grid, auto bind) {
  if (grid.count() == 0) return;
  if (!call.stream.device().is_cuda()) return launch_cpu<Kernel<cpu::AnyFloat, R, C>>(grid, bind);
  with_float_type(dtype, [&]<class T>(std::type_identity<T>) { launch_gpu<Kernel<T, R, C>>(call.stream, grid, bind); });
}

/// Calls f(std::type_identity<T>, std::type_identity<U>) with the types of x and of a tensor of that dtype or f32.
template <class F>
void with_types(DType x, DType other, F f) {
  with_float_type(x,
                  [&]<class T>(std::type_identity<T> of_x) { other == DType::f32 ? f(of_x, std::type_identity<float>{}) : f(of_x, of_x); });
}

}  // namespace

Discretized run_discretize(const Call& call) {
  const Shape shape = call.dt.shape();
  const Discretized d{workspace(shape, DType::f32, call.stream), workspace(shape, DType::f32, call.stream)};
  launch_rows<StepSizes, kSizeRows, kSizeHeads>(call, call.dt.dtype(), sizes_grid(call),
                                                [&](auto& bind, auto& p) { bind_sizes(bind, p, call, d); });
  return d;
}

Tensor run_scale(const Call& call, const Discretized& d) {
  const Tensor scaled = workspace({call.batch(), call.length(), call.heads(), call.dim()}, call.x.dtype(), call.stream);
  with_rows(call.dim(), [&]<int R, int C>() {
    launch_rows<ScaleInputs, R, C>(call, call.x.dtype(), rows_grid(call, R),
                                   [&](auto& bind, auto& p) { bind_scale(bind, p, call, d, by_head(scaled)); });
  });
  return scaled;
}

void run_outputs(const Call& call, const Tensor& y) {
  with_rows(call.dim(), [&]<int R, int C>() {
    launch_rows<SkipAndGate, R, C>(call, call.x.dtype(), rows_grid(call, R), [&](auto& bind, auto& p) { bind_outputs(bind, p, call, y); });
  });
}

void run_output_gradients(const Call& call, const Gradients& g) {
  with_gradient_rows(call.dim(), [&]<int R, int C>() {
    launch_rows<OutputGradients, R, C>(call, call.x.dtype(), rows_grid(call, R),
                                       [&](auto& bind, auto& p) { bind_output_gradients(bind, p, call, g); });
  });
}

void run_input_gradients(const Call& call, const Discretized& d, const Gradients& g) {
  with_gradient_rows(call.dim(), [&]<int R, int C>() {
    launch_rows<InputGradients, R, C>(call, call.x.dtype(), rows_grid(call, kRun),
                                      [&](auto& bind, auto& p) { bind_input_gradients(bind, p, call, d, g); });
  });
}

void run_size_gradients(const Call& call, const Discretized& d, const Gradients& g) {
  launch_rows<SizeGradients, kSizeRows, kSizeHeads>(call, call.dt.dtype(), sizes_grid(call),
                                                    [&](auto& bind, auto& p) { bind_size_gradients(bind, p, call, d, g); });
}

void run_sum(const Stream& stream, const Tensor& sums, const Tensor& total) {
  const std::int64_t heads = total.shape(0), columns = total.shape(1);
  launch<SumOfRuns>(stream, {1, tiles(columns, SumOfRuns::tile_cols), static_cast<int>(heads)}, [&](auto& bind, auto& p) {
    bind(p.sums, sums.transpose(0, 1));
    bind(p.total, Tensor::borrow(total.data(), {heads, 1, columns}, DType::f32, total.device(), {total.stride(0), 0, total.stride(1)}));
  });
}

std::string type_of_scan(const ScanKernel& k) {
  return tw::format("tw::kernels::mamba2::Scan<{}, {}, {}, {}>", element_name(k.dtype), kScanState, kScanColumns, bool_name(k.gated));
}

bool scan_fits(const Stream& stream) { return generic_shared_bytes(stream) == 0; }

bool scan_pays(const Call& call) {
  // A walk has one block for each tile. With few, the outputs of all chunks at once use the SMs better, although they need three times the
  // bytes.
  const Device device = call.stream.device();
  return 3 * scan_grid(call).count() >= (device.is_cuda() ? device_info(device).units : 1);
}

void run_scan(const Call& call, const Tensor* initial, const Tensor* final, const Tensor& y) {
  const Shape shape{call.heads(), std::int64_t{chunks_of(call)} * kChunk};
  const auto room = [&] { return workspace(shape, DType::f32, call.stream); };
  const ScanCall scan{room(), room(), room(), initial, final, y};
  const auto fill_exponents = [&](auto& bind, auto& p) { bind_exponents(bind, p, call, scan); };
  const bool cuda = call.stream.device().is_cuda();
  if (!cuda)
    launch_cpu<ChunkExponents<cpu::AnyFloat, kExponentHeads>>(exponents_grid(call), fill_exponents);
  else
    with_float_type(call.dt.dtype(), [&]<class T>(std::type_identity<T>) {
      launch_gpu<ChunkExponents<T, kExponentHeads>>(call.stream, exponents_grid(call), fill_exponents);
    });
  const auto fill = [&](auto& bind, auto& p) { bind_scan(bind, p, call, scan); };
  const auto run = [&]<class T, bool gated>() {
    using Any = Scan<T, kScanState, kScanColumns, gated>;
    if (!cuda) return launch_cpu<Any>(scan_grid(call), fill);
    static KernelTable<ScanKernel> table(type_of_scan, Any::source);
    detail::launch_named<typename Any::template On<sm_90a::Target<>>::Params>(table[{call.x.dtype(), gated}], call.stream, scan_grid(call),
                                                                              fill);
  };
  const auto with_gate = [&]<class T>() { given(call.z) ? run.template operator()<T, true>() : run.template operator()<T, false>(); };
  call.x.dtype() == DType::f16 ? with_gate.template operator()<f16>() : with_gate.template operator()<bf16>();
}

std::string type_of_update(const UpdateKernel& k) {
  return tw::format("tw::kernels::mamba2::Update<{}, {}, {}, {}, {}>", element_name(k.x), element_name(k.dt), element_name(k.states),
                    update_rows(k.columns), k.columns);
}

void run_update(const UpdateCall& u) {
  const Call& call = u.call;
  // On a CPU one size for all is quicker to build.
  const bool cuda = call.stream.device().is_cuda();
  const int columns = cuda ? update_columns(call.state()) : 256, rows = update_rows(columns);
  const TileGrid grid = update_grid(call, rows);
  if (grid.count() == 0) return;
  const auto fill = [&](auto& bind, auto& p) { bind_update(bind, p, u); };
  with_types(call.x.dtype(), call.dt.dtype(), [&]<class T, class DT>(std::type_identity<T>, std::type_identity<DT>) {
    with_types(call.x.dtype(), u.states.dtype(), [&]<class X, class S>(std::type_identity<X>, std::type_identity<S>) {
      if constexpr (is_same<T, X>) {
        using Any = Update<T, DT, S, update_rows(256), 256>;
        if (!cuda) return launch_cpu<Any>(grid, fill);
        static KernelTable<UpdateKernel> table(type_of_update, Any::source);
        detail::launch_named<typename Any::template On<sm_90a::Target<>>::Params>(
            table[{call.x.dtype(), call.dt.dtype(), u.states.dtype(), columns}], call.stream, grid, fill);
      }
    });
  });
}

}  // namespace tw::kernels::mamba2
