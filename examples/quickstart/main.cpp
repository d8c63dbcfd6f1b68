// A matrix product with ReLU by a kernel of our own, on the CPU and, if there is one, the GPU: checked against a plain loop, and timed.
#include <cmath>
#include <cstdio>
#include <tilewave/launch.hpp>

#include "matmul_relu.tile.hpp"

int main() {
  std::puts(tw::find_embedded(MatmulRelu::source)->text);
  const int n = 1024;
  const tw::Tensor a = tw::Tensor::empty({n, n}, tw::DType::f16), b = tw::Tensor::empty({n, n}, tw::DType::f16);
  for (int i = 0; i < n * n; ++i) a.data<tw::f16>()[i] = tw::f16(std::sin(7.1f * i)), b.data<tw::f16>()[i] = tw::f16(std::cos(3.3f * i));
  int wrong = 0;
  for (const tw::Device device : {tw::Device::cpu(), tw::Device::cuda()}) {
    try {
      const tw::Stream stream = tw::Stream::standard(device);
      const tw::Tensor x = a.to(device), y = b.to(device), c = tw::Tensor::poisoned({n, n}, tw::DType::f16, stream);
      tw::Event begin(device), end(device);
      for (int run = 0; run < 2; ++run) {  // on a GPU the first run compiles the kernel, or finds it in the cache
        begin.record(stream);
        tw::launch<MatmulRelu>(stream, {.m = n / 128, .n = n / 128},
                               [&](auto& bind, auto& p) { bind(p.a, x), bind(p.b, y), bind(p.c, c); });
        end.record(stream);
      }
      const float ms = tw::Event::milliseconds(begin, end);
      const tw::Tensor result = c.to(tw::Device::cpu());
      for (int i = 0; i < n * n; i += 1021) {  // a sample of C: every row, all kinds of columns
        double sum = 0;
        for (int k = 0; k < n; ++k) sum += a.at({i / n, k}) * b.at({k, i % n});
        wrong += !(std::abs(result.at({i / n, i % n}) - std::fmax(sum, 0)) <= 1e-3 * std::abs(sum) + 1e-3);
      }
      std::printf("%s: %s, %.3f ms, %.2f TFLOP/s\n", device.name().c_str(), wrong ? "WRONG" : "correct", ms, 2e-9 * n * n * n / ms);
    } catch (const tw::DeviceError& error) {
      std::printf("%s: skipped: %s\n", device.name().c_str(), error.what());
    }
  }
  return wrong != 0;
}
