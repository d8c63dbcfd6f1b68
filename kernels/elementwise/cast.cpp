#include "kernels/elementwise/cast.tile.hpp"

#include <cstdint>

#include "kernels/elementwise/variants.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/elementwise.hpp"

namespace tw {

template <>
struct DTypeOf<kernels::elementwise::Flag> {
  static constexpr DType value = DType::boolean;
};

namespace kernels::elementwise {
namespace {

/// Calls f<T>() with the type that `dtype`'s elements have in Cast.
template <class F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f.template operator()<float>();
    case DType::f16:
      return f.template operator()<f16>();
    case DType::bf16:
      return f.template operator()<bf16>();
    case DType::fp8_e4m3:
      return f.template operator()<fp8_e4m3>();
    case DType::fp8_e5m2:
      return f.template operator()<fp8_e5m2>();
    case DType::i8:
      return f.template operator()<std::int8_t>();
    case DType::i32:
      return f.template operator()<std::int32_t>();
    case DType::i64:
      return f.template operator()<std::int64_t>();
    case DType::u8:
      return f.template operator()<std::uint8_t>();
    case DType::boolean:
      return f.template operator()<Flag>();
  }
}

template <class From, class To>
Analysis analyze_cast(const ShapeValues& shape) {
  using Kernel = Cast<From, To>;
  const Tensor x = placeholder({shape["rows"], shape["cols"]}, dtype_of<From>), y = placeholder(x.shape(), dtype_of<To>);
  const detail::ElementwiseOperand inputs[] = {{"x", x}};
  const detail::ElementwisePlan plan = detail::plan_elementwise("cast", inputs, y, {}, Kernel::tile_rows, Kernel::tile_cols);
  return analyze<Kernel>(plan.grid, [&](auto& bind, auto& p) { detail::bind_elementwise(bind, p, plan); });
}

}  // namespace

std::vector<KernelVariant> registered_casts() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class From, class To>(const char* name) {
    variants.push_back({make_spec(kernel_info<Cast<From, To>>, true, true, name), analyze_cast<From, To>});
  };
  add.template operator()<float, bf16>("cast_f32_bf16");
  add.template operator()<bf16, float>("cast_bf16_f32");
  add.template operator()<bf16, fp8_e4m3>("cast_bf16_fp8_e4m3");
  add.template operator()<fp8_e4m3, bf16>("cast_fp8_e4m3_bf16");
  add.template operator()<std::int64_t, std::int32_t>("cast_i64_i32");
  return variants;
}

}  // namespace kernels::elementwise

void cast(const Tensor& x, const Tensor& y, const ElementwiseOptions& options) {
  using kernels::elementwise::Cast;
  using kernels::elementwise::with_type;
  with_type(x.dtype(), [&]<class From>() {
    with_type(y.dtype(), [&]<class To>() {
      using Kernel = Cast<From, To>;
      const detail::ElementwiseOperand inputs[] = {{"x", x}};
      detail::launch_elementwise<Kernel>(detail::plan_elementwise("cast", inputs, y, options, Kernel::tile_rows, Kernel::tile_cols));
    });
  });
}

}  // namespace tw
