#include <fmt/format.h>

#include <utility>

#include "kernels/check.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/configs.hpp"

namespace tw::kernels::gemm {

namespace {

constexpr Contract kColumns = Contract::columns;
constexpr Contract kRows = Contract::rows;

template <class T, Contract a, Contract b, class Act, bool kAddends, int kConfig>
using Variant = Gemm<T, a, b, Act, kAddends, kConfigs[kConfig].bm, kConfigs[kConfig].bn, 128 / static_cast<int>(sizeof(T)),
                     kConfigs[kConfig].stages, kConfigs[kConfig].cluster, kConfigs[kConfig].band>;

template <class T, Contract a, Contract b, int kConfig>
const KernelInfo& info_of(Activation activation, bool addends) {
  return with_activation(activation, [&]<class Act>(std::type_identity<Act>) -> const KernelInfo& {
    return addends ? kernel_info<Variant<T, a, b, Act, true, kConfig>> : kernel_info<Variant<T, a, b, Act, false, kConfig>>;
  });
}

/// `a`, `b`: as stored for these contractions.
template <class T, Contract a_contract, Contract b_contract, int kConfig>
void launch_config(const Call& call, const Tensor& a, const Tensor& b) {
  // Parameters do not depend on the activation and the addends, so one binding serves all ten variants.
  using Kernel = Variant<T, a_contract, b_contract, Identity, false, kConfig>;
  typename Kernel::template On<sm_90a::Target<>>::Params params{};
  detail::GpuBinder binder(call.stream.device());
  bind_call<T>(binder, params, call, a, b);
  constexpr Config config = kConfigs[kConfig];
  detail::launch_variant(info_of<T, a_contract, b_contract, kConfig>(call.activation, call.addends()), binder.tma_load, binder.tma_store,
                         &params, {ceil_div(call.m, config.bm), ceil_div(call.n, config.bn), call.batch}, call.stream);
}

template <class T, Contract a_contract, Contract b_contract>
void launch_contracts(const Call& call, const Tensor& a, const Tensor& b) {
  constexpr bool kBRows = b_contract == kRows;
  int chosen = call.config;
  if (chosen < 0)
    chosen =
        choose_config({call.m, call.n, call.k, call.batch, sizeof(T), call.addends(), kBRows, device_info(call.stream.device()).units});
  else
    require(chosen < static_cast<int>(kConfigs.size()) && allowed(kConfigs[static_cast<std::size_t>(chosen)], call.addends(), kBRows),
            "gemm: config is {}; it must be below {}, and with beta or a residual have at most 128 columns, with B stored [K, N] a "
            "multiple of 64",
            chosen, kConfigs.size());
  [&]<int... kConfig>(std::integer_sequence<int, kConfig...>) {
    const auto launch_if_chosen = [&]<int kIndex>() {
      if constexpr (allowed(kConfigs[kIndex], false, kBRows))
        if (chosen == kIndex) launch_config<T, a_contract, b_contract, kIndex>(call, a, b);
    };
    (launch_if_chosen.template operator()<kConfig>(), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(kConfigs.size())>{});
}

/// True when a [rows, K] operand is stored as [K, rows], dense along rows.
bool stored_transposed(const Tensor& t) { return t.stride(-1) != 1 && t.stride(-2) == 1 && t.shape(-1) > 1; }

template <class T>
void launch_16bit(const Call& call) {
  const bool a_rows = stored_transposed(call.a);
  const bool b_rows = stored_transposed(call.b);
  if (a_rows && b_rows)
    launch_contracts<T, kRows, kRows>(call, call.a.transpose(-2, -1), call.b.transpose(-2, -1));
  else if (b_rows)
    launch_contracts<T, kColumns, kRows>(call, call.a, call.b.transpose(-2, -1));
  else
    launch_contracts<T, kColumns, kColumns>(call, call.a, call.b);
}

template <class T, Contract a, Contract b, int kConfig>
KernelSpec registered_spec(const char* dtype, const char* layout, Activation activation = Activation::none, bool addends = false,
                           const char* suffix = "", bool tma_load = true, bool tma_store = true) {
  constexpr Config c = kConfigs[kConfig];
  return make_spec(info_of<T, a, b, kConfig>(activation, addends), tma_load, tma_store,
                   fmt::format("gemm_{}_{}_{}x{}{}{}", dtype, layout, c.bm, c.bn, c.cluster > 1 ? "_cluster" : "", suffix));
}

template <class T>
void register_16bit(std::vector<KernelSpec>& specs, const char* dtype) {
  [&]<int... kConfig>(std::integer_sequence<int, kConfig...>) {
    const auto add = [&]<int kIndex>() {
      specs.push_back(registered_spec<T, kColumns, kColumns, kIndex>(dtype, "nt"));
      if constexpr (allowed(kConfigs[kIndex], false, true)) {
        specs.push_back(registered_spec<T, kColumns, kRows, kIndex>(dtype, "nn"));
        specs.push_back(registered_spec<T, kRows, kRows, kIndex>(dtype, "tn"));
      }
    };
    (add.template operator()<kConfig>(), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(kConfigs.size())>{});
}

}  // namespace

void run_on_gpu(const Call& call) {
  switch (call.a.dtype()) {
    case DType::f16:
      return launch_16bit<f16>(call);
    case DType::bf16:
      return launch_16bit<bf16>(call);
    default:
      return launch_contracts<float, kColumns, kColumns>(call, call.a, call.b);  // tf32 products have no transposes
  }
}

std::vector<KernelSpec> registered() {
  std::vector<KernelSpec> specs;
  register_16bit<bf16>(specs, "bf16");
  register_16bit<f16>(specs, "f16");
  specs.push_back(registered_spec<float, kColumns, kColumns, 0>("tf32", "nt"));
  specs.push_back(registered_spec<float, kColumns, kColumns, 3>("tf32", "nt"));
  specs.push_back(registered_spec<float, kColumns, kColumns, 4>("tf32", "nt"));
  // Epilogues, on the widest tiles that each may use.
  specs.push_back(registered_spec<bf16, kColumns, kColumns, 0>("bf16", "nt", Activation::relu, false, "_relu"));
  specs.push_back(registered_spec<bf16, kColumns, kColumns, 0>("bf16", "nt", Activation::gelu_erf, false, "_gelu_erf"));
  specs.push_back(registered_spec<bf16, kColumns, kColumns, 0>("bf16", "nt", Activation::gelu_tanh, false, "_gelu_tanh"));
  specs.push_back(registered_spec<bf16, kColumns, kColumns, 0>("bf16", "nt", Activation::silu, false, "_silu"));
  specs.push_back(registered_spec<bf16, kColumns, kColumns, 3>("bf16", "nt", Activation::none, true, "_addends"));
  specs.push_back(registered_spec<bf16, kColumns, kColumns, 4>("bf16", "nt", Activation::gelu_erf, true, "_addends_gelu_erf"));
  specs.push_back(registered_spec<float, kColumns, kColumns, 3>("tf32", "nt", Activation::none, true, "_addends"));
  // Tensors that TMA cannot take.
  specs.push_back(registered_spec<bf16, kColumns, kColumns, 3>("bf16", "nt", Activation::none, false, "_strided", false, false));
  specs.push_back(registered_spec<bf16, kColumns, kColumns, 4>("bf16", "nt", Activation::none, true, "_addends_strided", false, false));
  specs.push_back(registered_spec<float, kColumns, kColumns, 3>("tf32", "nt", Activation::none, false, "_strided", false, false));
  return specs;
}

}  // namespace tw::kernels::gemm
