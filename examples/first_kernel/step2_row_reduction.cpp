#include "step2_row_reduction.tile.hpp"

#include <cmath>

#include "every_device.hpp"

int main() {
  const int rows = 50, cols = 960;
  const float epsilon = 1e-5f;
  const tw::Tensor x = random_tensor({rows, cols}, tw::DType::bf16, 1), weight = random_tensor({cols}, tw::DType::f32, 2);

  return on_every_device(2e-2, [&](tw::Device device) {
    const tw::Stream stream = tw::Stream::standard(device);
    const tw::Tensor in = x.to(device), w = weight.to(device), y = tw::Tensor::poisoned({rows, cols}, tw::DType::bf16, stream);
    tw::launch<RmsNorm<8, 1024>>(stream, {.m = tw::ceil_div(rows, 8)}, [&](auto& bind, auto& params) {
      bind(params.x, in);
      bind(params.y, y);
      params.weight = w.data<float>();
      params.epsilon = epsilon;
    });

    const tw::Tensor result = y.to(tw::Device::cpu());
    double error = 0;
    for (int row = 0; row < rows; ++row) {
      double squares = 0;
      for (int col = 0; col < cols; ++col) squares += x.at({row, col}) * x.at({row, col});
      const double scale = 1 / std::sqrt(squares / cols + epsilon);
      for (int col = 0; col < cols; ++col) {
        error = worse(error, std::abs(result.at({row, col}) - x.at({row, col}) * scale * weight.at({col})));
      }
    }
    return error;
  });
}
