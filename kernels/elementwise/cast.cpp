#include "kernels/elementwise/cast.tile.hpp"

#include <compare>
#include <cstdint>
#include <string>

#include "kernels/elementwise/variants.hpp"
#include "kernels/named.hpp"
#include "runtime/format.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/elementwise.hpp"

namespace tw {

template <>
struct DTypeOf<kernels::elementwise::Flag> {
  static constexpr DType value = DType::boolean;
};

namespace kernels::elementwise {
namespace {

using detail::ElementwisePlan;

/// A Cast kernel of the GPU.
struct CastKernel {
  DType from, to;
  auto operator<=>(const CastKernel&) const = default;
};

const char* type_of(DType dtype) {
  switch (dtype) {
    case DType::i64:
      return "long";
    case DType::u8:
      return "tw::u8";
    case DType::boolean:
      return "tw::kernels::elementwise::Flag";
    default:
      return element_name(dtype);
  }
}
std::string type_of(const CastKernel& k) { return tw::format("tw::kernels::elementwise::Cast<{}, {}>", type_of(k.from), type_of(k.to)); }

/// The integer type, or f16, with elements of the same size.
DType bits_of(DType dtype) {
  switch (size_of(dtype)) {
    case 1:
      return DType::u8;
    case 2:
      return DType::f16;
    case 4:
      return DType::i32;
    default:
      return DType::i64;
  }
}
/// Calls f<T>() with the type of bits_of(dtype).
template <class F>
void with_bits(DType dtype, F f) {
  switch (size_of(dtype)) {
    case 1:
      return f.template operator()<std::uint8_t>();
    case 2:
      return f.template operator()<f16>();
    case 4:
      return f.template operator()<std::int32_t>();
    default:
      return f.template operator()<std::int64_t>();
  }
}

/// The plan with each tensor's dtype replaced by bits_of() it.
ElementwisePlan as_bits(ElementwisePlan plan) {
  for (std::vector<Tensor>& tensors : plan.parts)
    for (Tensor& t : tensors) t = Tensor::borrow(t.data(), t.shape(), bits_of(t.dtype()), t.device(), t.strides());
  return plan;
}

/// One launch function for all pairs of types with the same sizes, because their tiles and parameters are the same.
template <class Like>
void launch_on_gpu(const ElementwisePlan& part) {
  static KernelTable<CastKernel> table(type_of, Like::source);
  if (part.grid.count() == 0) return;
  const std::vector<Tensor>& tensors = part.parts[part.parts[0].empty() ? 1 : 0];
  const ElementwisePlan bits = as_bits(part);
  detail::launch_named<typename Like::template On<sm_90a::Target<>>::Params>(
      table[{tensors.front().dtype(), tensors.back().dtype()}], part.stream, part.grid,
      [&](auto& bind, auto& p) { detail::bind_elementwise(bind, p, bits); });
}

void cast_on_gpu(const Tensor& x, const Tensor& y, const ElementwiseOptions& options) {
  const detail::ElementwiseOperand inputs[] = {{"x", x}};
  with_bits(x.dtype(), [&]<class From>() {
    with_bits(y.dtype(), [&]<class To>() {
      using Like = Cast<From, To>;
      detail::launch_parts(detail::plan_elementwise("cast", inputs, y, options, Like::tile_rows, Like::tile_cols), Like::width,
                           launch_on_gpu<Like>);
    });
  });
}

/// Calls f<T>() with the type of `dtype`'s elements in Cast. f32 represents all of its values exactly.
template <class F>
TW_INLINE void with_type_in_f32(DType dtype, F f) {
  switch (dtype) {
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
    case DType::u8:
      return f.template operator()<std::uint8_t>();
    case DType::boolean:
      return f.template operator()<Flag>();
    default:
      return f.template operator()<float>();
  }
}
/// The same for any type.
template <class F>
TW_INLINE void with_type(DType dtype, F f) {
  if (dtype == DType::i32) return f.template operator()<std::int32_t>();
  if (dtype == DType::i64) return f.template operator()<std::int64_t>();
  with_type_in_f32(dtype, f);
}

/// A tensor whose type the kernel looks up at run time.
struct AnyOperand : cpu::GlobalView {
  DType dtype;

  template <class T, class Tile>
  TW_INLINE cpu::Global<T, Tile> as() const {
    cpu::Global<T, Tile> typed{};
    static_cast<cpu::GlobalView&>(typed) = *this;
    return typed;
  }
};
struct AnyBinder {
  void operator()(AnyOperand& operand, const Tensor* tensor) const {
    if (tensor == nullptr) return void(static_cast<BoundView&>(operand) = kNoTensor);
    detail::bind_view(operand, *tensor, tensor->dtype(), Device::cpu());
    operand.dtype = tensor->dtype();
  }
};

/// Cast on the CPU from i32, i64, or, with `Value` float, all other types. A kernel for each pair of types would mean a hundred kernels.
template <class Value>
struct CastOnCpu {
  static constexpr int tile_rows = 16, tile_cols = 256;

  template <class Target>
  struct On {
    template <class T>
    using RowsOf = Rows<Target, T, tile_rows, tile_cols>;
    using X = RowsOf<Value>;
    struct Part {
      AnyOperand in[1], out;
    };
    struct Params {
      Part parts[2];
      int tiles;
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const Part& part = p.parts[t.m < p.tiles ? 0 : 1];
      const AnyOperand &in = part.in[0], &out = part.out;
      const int row = t.m < p.tiles ? t.m * tile_rows : 0, col = t.n * tile_cols;
      const int j = out.size_j == 1 ? 0 : t.batch / out.size_i, i = t.batch - j * out.size_i;
      const auto copy = [&]<class T>() {
        RowsOf<T> x;
        block.load(x, in.as<const T, RowsOf<T>>(), row, col, i, j);
        block.store(x, out.as<T, RowsOf<T>>(), row, col, i, j);
      };
      X x;
      if constexpr (is_same<Value, float>) {
        // Copied unchanged: f32 does not keep every NaN, and fp8 saturates.
        if (in.dtype == out.dtype && size_of(in.dtype) == 2) return copy.template operator()<f16>();
        if (in.dtype == out.dtype && size_of(in.dtype) == 1 && in.dtype != DType::boolean) return copy.template operator()<std::uint8_t>();
        with_type_in_f32(in.dtype, [&]<class From>() { block.load(x, in.as<const From, X>(), row, col, i, j); });
      } else {
        block.load(x, in.as<const Value, X>(), row, col, i, j);
      }
      with_type(out.dtype, [&]<class To>() {
        if constexpr (Cast<Value, To>::rounds_twice) {
          RowsOf<float> rounded;
          block.fill(rounded, 0.0f);
          block.map(rounded, x, [](auto, Value value) { return to_float_odd(value); });
          block.store(rounded, out.as<To, RowsOf<float>>(), row, col, i, j);
        } else {
          block.store(x, out.as<To, X>(), row, col, i, j);
        }
      });
    }
  };
};

template <class Value>
void cast_on_cpu(const Tensor& x, const Tensor& y, const ElementwiseOptions& options) {
  using Kernel = CastOnCpu<Value>;
  const detail::ElementwiseOperand inputs[] = {{"x", x}};
  const ElementwisePlan plan = detail::plan_elementwise("cast", inputs, y, options, Kernel::tile_rows, Kernel::tile_cols);
  const AnyBinder bind;
  if (plan.grid.count() > 0) launch_cpu<Kernel>(plan.grid, [&](auto&, auto& p) { detail::bind_elementwise(bind, p, plan); });
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
    const std::string type = type_of(CastKernel{dtype_of<From>, dtype_of<To>});
    variants.push_back({make_spec({type, Cast<From, To>::source, nullptr}, true, true, name), analyze_cast<From, To>});
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
  using namespace kernels::elementwise;
  if (y.device().is_cuda()) return cast_on_gpu(x, y, options);
  if (x.dtype() == DType::i32) return cast_on_cpu<std::int32_t>(x, y, options);
  if (x.dtype() == DType::i64) return cast_on_cpu<std::int64_t>(x, y, options);
  cast_on_cpu<float>(x, y, options);
}

}  // namespace tw
