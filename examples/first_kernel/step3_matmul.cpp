#include "step3_matmul.tile.hpp"

#include <cmath>

#include "every_device.hpp"

int main() {
  const int M = 300, N = 200, K = 328;
  const tw::Tensor a = random_tensor({M, K}, tw::DType::f16, 1), b = random_tensor({K, N}, tw::DType::f16, 2);

  return on_every_device(2e-2, [&](tw::Device device) {
    const tw::Stream stream = tw::Stream::standard(device);
    const tw::Tensor x = a.to(device), y = b.to(device), c = tw::Tensor::poisoned({M, N}, tw::DType::f16, stream);
    const tw::TileGrid grid{.m = tw::ceil_div(M, 128), .n = tw::ceil_div(N, 64)};
    tw::launch<Matmul<tw::f16, 128, 64, 64, 4>>(stream, grid, [&](auto& bind, auto& params) {
      bind(params.a, x);
      bind(params.b, y);
      bind(params.c, c);
    });

    const tw::Tensor result = c.to(tw::Device::cpu());
    double error = 0;
    for (int row = 0; row < M; ++row) {
      for (int col = 0; col < N; ++col) {
        double sum = 0;
        for (int k = 0; k < K; ++k) sum += a.at({row, k}) * b.at({k, col});
        error = worse(error, std::abs(result.at({row, col}) - sum));
      }
    }
    return error;
  });
}
