#include "kernels/tf32_parts.hpp"

#include "kernels/elementwise/tf32_parts.tile.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"

namespace tw {

namespace {
thread_local F32Products current = F32Products::tf32;
}  // namespace

ScopedF32Products::ScopedF32Products(F32Products products) : before_(current) { current = products; }
ScopedF32Products::~ScopedF32Products() { current = before_; }
F32Products f32_products() { return current; }

Tensor kernels::tf32_parts(const Tensor& x, ProductSide side, const Stream& stream) {
  Shape shape = x.shape();
  const std::int64_t k = shape.back();
  shape.back() = 3 * k;
  const Tensor parts = workspace(std::move(shape), DType::f32, stream);
  const auto part = [&](int n) { return parts.slice(-1, n * k, (n + 1) * k); };
  const int low = side == ProductSide::left ? 1 : 2;
  for (int n = 0; n < 3; ++n)
    n == low ? elementwise<Tf32Low>({x}, part(n), {.stream = stream}) : elementwise<Tf32High>({x}, part(n), {.stream = stream});
  return parts;
}

}  // namespace tw
