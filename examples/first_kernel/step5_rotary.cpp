#include "step5_rotary.tile.hpp"

#include <cmath>

#include "every_device.hpp"

int main() {
  const int heads = 3, positions = 70, D = 128, half = D / 2;
  const tw::Tensor x = random_tensor({heads, positions, D}, tw::DType::bf16, 1);
  const tw::Tensor cos = tw::Tensor::empty({positions, half}, tw::DType::f32), sin = tw::Tensor::empty({positions, half}, tw::DType::f32);
  for (int i = 0; i < positions * half; ++i) {
    const double angle = i / half * std::pow(10000.0, -(i % half) / static_cast<double>(half));
    cos.data<float>()[i] = static_cast<float>(std::cos(angle));
    sin.data<float>()[i] = static_cast<float>(std::sin(angle));
  }

  return on_every_device(1e-2, [&](tw::Device device) {
    const tw::Stream stream = tw::Stream::standard(device);
    const tw::Tensor in = x.to(device), c = cos.to(device), s = sin.to(device);
    const tw::Tensor y = tw::Tensor::poisoned({heads, positions, D}, tw::DType::bf16, stream);
    tw::launch<Rotary<32, D>>(stream, {.m = tw::ceil_div(positions, 32), .batch = heads}, [&](auto& bind, auto& params) {
      bind(params.x, in);
      bind(params.y, y);
      params.cos = c.data<float>();
      params.sin = s.data<float>();
    });

    const tw::Tensor result = y.to(tw::Device::cpu());
    double error = 0;
    for (int head = 0; head < heads; ++head) {
      for (int row = 0; row < positions; ++row) {
        for (int j = 0; j < half; ++j) {
          const double a = x.at({head, row, j}), b = x.at({head, row, j + half}), cosine = cos.at({row, j}), sine = sin.at({row, j});
          error = worse(error, std::abs(result.at({head, row, j}) - (a * cosine - b * sine)));
          error = worse(error, std::abs(result.at({head, row, j + half}) - (b * cosine + a * sine)));
        }
      }
    }
    return error;
  });
}
