#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/launch.hpp"
#include "tilewave/tile/epilogue.tile.hpp"
#include "tilewave/tile/gemm.tile.hpp"

namespace tw {

struct GemmWithOptions {
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The columns of a tile of accumulators in gemm_with(), Acc::cols, on every device.
inline constexpr int kGemmWithColumns = 128;

namespace detail {

/// A user's epilogue, for as long as the program runs.
struct EpilogueInfo {
  std::string_view type;
  std::string_view source;  ///< empty: it runs on the CPU only
};
template <class Epilogue>
inline constexpr EpilogueInfo epilogue_info{type_name<Epilogue>(), source_of<Epilogue>()};

/// A checked call of gemm_with().
struct GemmWithCall {
  Tensor a, b;  ///< as the kernel contracts them: [M, K] or [K, M], and [N, K] or [K, N], each with or without a batch
  int k;
  TileGrid grid;
  const NamedKernel* kernel;  ///< on a GPU
  Stream stream;
};

GemmWithCall check_gemm_with(const EpilogueInfo& epilogue, const Tensor& a, const Tensor& b, DType dtype, const GemmWithOptions& options);

/// All that gemm_with() chooses from for that epilogue and dtype.
std::vector<KernelInfo> gemm_with_kernels(const EpilogueInfo& epilogue, DType dtype, GpuTarget target, std::string_view arch);

template <class Epilogue, class T, int kRows, int kDepth>
using GemmWith = kernels::gemm::Gemm<kernels::gemm::Operands<T, Contract::columns, Contract::columns>, Epilogue,
                                     kernels::gemm::Tiles<kRows, kGemmWithColumns, kDepth, 2, 1, 1>>;
inline constexpr int kGemmWithCpuRows = 128;

}  // namespace detail

/// A B with a user-defined Epilogue, which gets the accumulators (tilewave/tile/epilogue.tile.hpp; docs/language.md has an example):
///
///   tw::gemm_with<RowArgmax, tw::bf16>(x, w.transpose(0, 1), [&](auto& bind, auto& params) {
///     bind(params.largest, largest);  // [M, ceil(N / tw::kGemmWithColumns)]
///     bind(params.column, column);
///   });
///
/// `a`: [M, K] or [batch, M, K]; `b`: [K, N] or [batch, K, N], of type T: f32, f16, bf16, fp8_e4m3 or i8, with any strides, as gemm() takes
/// them. `bind_epilogue(binder, params)` fills in Epilogue::On<target, Acc>::Params; every Global must be bound. What it binds must not
/// overlap a or b.
///
/// `Acc` is a Fragment of f32, or of i32 if T is i8, with kGemmWithColumns columns, and holds complete sums: K is not split. Tiles may
/// reach beyond M x N: accumulators there are 0, and stores to a Global leave them out. The epilogue is not called if M, N or the batch is
/// 0; with K = 0 all accumulators are 0 (i8: an error). An epilogue may use 64 KiB of shared memory.
///
/// For a GPU the epilogue must be defined in an embedded file, its `source`, which includes "tilewave/tile/gemm.tile.hpp". It is compiled
/// at its first use. Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument, CompileError and
/// DeviceError.
template <class Epilogue, class T, class BindEpilogue>
void gemm_with(const Tensor& a, const Tensor& b, BindEpilogue bind_epilogue, const GemmWithOptions& options = {}) {
  const detail::GemmWithCall call = detail::check_gemm_with(detail::epilogue_info<Epilogue>, a, b, dtype_of<T>, options);
  if (call.grid.count() == 0) return;
  const auto bind_all = [&](auto& bind, auto& params) {
    bind(params.in.a, call.k > 0 ? &call.a : nullptr);
    bind(params.in.b, call.k > 0 ? &call.b : nullptr);
    params.in.depth = call.k;
    params.in.a_batches = call.a.rank() == 3 ? 1 : 0;
    params.in.b_batches = call.b.rank() == 3 ? 1 : 0;
    params.splits = 1;
    detail::bind_params(detail::type_name<Epilogue>(), detail::source_of<Epilogue>(), params.epilogue, bind, bind_epilogue);
  };
  if (!call.stream.device().is_cuda()) {
    launch_cpu<detail::GemmWith<Epilogue, T, detail::kGemmWithCpuRows, 192>>(call.grid, bind_all);
  } else if constexpr (requires { Epilogue::source; }) {
    using Kernel = detail::GemmWith<Epilogue, T, 64, 64>;  // for its Params alone: tile sizes do not change their layout
    detail::launch_named<typename Kernel::template On<sm_90a::Target<>>::Params>(*call.kernel, call.stream, call.grid, bind_all);
  } else {
    throw InvalidArgument("epilogue " + std::string(detail::type_name<Epilogue>()) +
                          " cannot run on a GPU: it has no `source`, the embedded *.tile.hpp file that defines it");
  }
}

/// The kernels that gemm_with() chooses from on a GPU, to compile them ahead of time or to inspect them:
/// compile(make_spec(info, true, true)), and for the generic target compile(for_target(make_spec(info, true, true), target), arch). Needs
/// no GPU.
template <class Epilogue, class T>
std::vector<KernelInfo> gemm_with_kernels(GpuTarget target = GpuTarget::sm_90a, std::string_view arch = "sm_90a") {
  return detail::gemm_with_kernels(detail::epilogue_info<Epilogue>, dtype_of<T>, target, arch);
}

}  // namespace tw
