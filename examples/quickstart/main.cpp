// A matrix product with ReLU, with the kernel in matmul_relu.tile.hpp, on the CPU and on every usable GPU: compared with the library's
// product, and timed.
#include <cstdio>
#include <tilewave/gemm.hpp>
#include <tilewave/launch.hpp>

#include "matmul_relu.tile.hpp"

int main() {
  const tw::DeviceReport found = tw::find_devices();
  std::printf("%s\n%s", tw::find_embedded(MatmulRelu::source)->text, found.problems().c_str());
  const int n = 1024;
  const tw::Tensor a = tw::Tensor::random({n, n}, tw::DType::f16, 1), b = tw::Tensor::random({n, n}, tw::DType::f16, 2);
  for (const tw::Device device : found.usable()) {
    const tw::Stream stream = tw::Stream::standard(device);
    const tw::Tensor x = a.to(device), y = b.to(device), c = tw::Tensor::poisoned({n, n}, tw::DType::f16, stream);
    const float ms = tw::milliseconds(stream, [&] {  // on a GPU the first call compiles the kernel, or finds it in the cache
      tw::launch<MatmulRelu>(stream, {.m = n / 128, .n = n / 128}, [&](auto& bind, auto& p) { bind(p.a, x), bind(p.b, y), bind(p.c, c); });
    });
    const double error = tw::max_difference(c, tw::matmul(a, b, {.activation = tw::Activation::relu}));
    std::printf("%s: largest error %.2g, %.3f ms, %.2f TFLOP/s\n", device.name().c_str(), error, ms, 2e-9 * n * n * n / ms);
    if (!(error <= 0.125)) return 1;  // one unit in the last place of the largest elements, above 128; NaN fails too
  }
}
