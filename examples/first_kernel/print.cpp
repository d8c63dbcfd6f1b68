#include "print.tile.hpp"

#include <cmath>

#include "every_device.hpp"

int main() {
  const tw::Tensor x = tw::Tensor::empty({16, 32}, tw::DType::f32);
  for (int i = 0; i < x.numel(); ++i) x.data<float>()[i] = 0.5f * static_cast<float>(i);

  return on_every_device(1e-5, [&](tw::Device device) {
    const tw::Stream stream = tw::Stream::standard(device);
    const tw::Tensor in = x.to(device), y = tw::Tensor::poisoned({16, 32}, tw::DType::f32, stream);
    tw::launch<Print>(stream, {.m = 4}, [&](auto& bind, auto& params) {
      bind(params.x, in);
      bind(params.y, y);
    });

    const tw::Tensor result = y.to(tw::Device::cpu());
    double error = 0;
    for (int i = 0; i < x.numel(); ++i) error = worse(error, std::abs(result.at({i / 32, i % 32}) - 10 * x.at({i / 32, i % 32})));
    return error;
  });
}
