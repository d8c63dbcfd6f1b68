#include "step1_elementwise.tile.hpp"

#include <cmath>

#include "every_device.hpp"

int main() {
  const int rows = 100, cols = 300;  // not multiples of the tile: elements outside are not written
  const tw::Tensor gate = random_tensor({rows, cols}, tw::DType::bf16, 1), up = random_tensor({rows, cols}, tw::DType::bf16, 2);

  return on_every_device(1e-2, [&](tw::Device device) {
    const tw::Stream stream = tw::Stream::standard(device);
    const tw::Tensor g = gate.to(device), u = up.to(device), y = tw::Tensor::poisoned({rows, cols}, tw::DType::bf16, stream);
    const tw::TileGrid grid{.m = tw::ceil_div(rows, 16), .n = tw::ceil_div(cols, 128)};
    tw::launch<SiluMul<16, 128>>(stream, grid, [&](auto& bind, auto& params) {
      bind(params.gate, g);
      bind(params.up, u);
      bind(params.y, y);
    });

    const tw::Tensor result = y.to(tw::Device::cpu());
    double error = 0;
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < cols; ++col) {
        const double x = gate.at({row, col});
        error = worse(error, std::abs(result.at({row, col}) - x / (1 + std::exp(-x)) * up.at({row, col})));
      }
    }
    return error;
  });
}
