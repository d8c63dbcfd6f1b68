#include "benchmarks/yardsticks.hpp"

#include <cmath>
#include <cstring>

#include "benchmarks/yardsticks.tile.hpp"
#include "runtime/cuda_driver.hpp"
#include "runtime/gpu.hpp"
#include "tilewave/launch.hpp"

namespace tw::bench {
namespace {

constexpr int kCols = kYardstickCols;
constexpr double kRowBytes = kCols * sizeof(float);

Tensor random_rows(double bytes, const Stream& stream, std::uint64_t seed) {
  return random_normal({static_cast<std::int64_t>(std::ceil(bytes / kRowBytes)), kCols}, DType::f32, stream.device(), seed);
}

TileGrid tiles_of(const Tensor& tensor, int rows) { return {.m = ceil_div(static_cast<int>(tensor.shape(0)), rows)}; }

void copy_by_driver(const Tensor& from, const Tensor& to, const Stream& stream) {
  const CurrentContext current(Gpu::get(stream.device().index));
  const auto address = [](const Tensor& tensor) { return reinterpret_cast<cuda::Address>(tensor.data()); };
  const auto bytes = static_cast<std::size_t>(from.numel()) * sizeof(float);
  cuda::check(cuda::driver().memcpy_async(address(to), address(from), bytes, static_cast<cuda::Stream>(stream.native())), "cuMemcpyAsync");
}

/// The exclusive or of all words: a chain that compilers make vectors of, unlike a sum of floats.
void read_on_cpu(const Tensor& from, const Tensor& to) {
  const auto* const words = static_cast<const std::uint64_t*>(from.data());
  const std::int64_t count = from.numel() / 2;
  std::uint64_t all = 0;
  for (std::int64_t i = 0; i < count; ++i) all ^= words[i];
  std::memcpy(to.data(), &all, sizeof(all));
}

}  // namespace

CopyYardstick::CopyYardstick(double bytes, const Stream& stream)
    : stream_(stream),
      from_(random_rows(bytes / 2, stream, 101)),
      to_(random_rows(bytes / 2, stream, 102)),
      bytes_(2.0 * kRowBytes * static_cast<double>(from_.shape(0))) {}

std::vector<Contender> CopyYardstick::contenders() const {
  if (!stream_.device().is_cuda()) {
    return {{"memcpy", [this] { std::memcpy(to_.data(), from_.data(), static_cast<std::size_t>(from_.numel()) * sizeof(float)); }}};
  }
  const auto kernel = [this] {
    launch<Copy<kCopyRows, kCols>>(stream_, tiles_of(from_, kCopyRows), [this](auto& bind, auto& p) {
      bind(p.from, from_);
      bind(p.to, to_);
    });
  };
  return {{"cuMemcpyAsync", [this] { copy_by_driver(from_, to_, stream_); }}, {"kernel", kernel}};
}

ReadYardstick::ReadYardstick(double bytes, const Stream& stream)
    : stream_(stream),
      from_(random_rows(bytes, stream, 103)),
      sums_(Tensor::poisoned({from_.shape(0) + 1}, DType::f32, stream)),
      bytes_(kRowBytes * static_cast<double>(from_.shape(0))) {}

Contender ReadYardstick::contender() const {
  if (!stream_.device().is_cuda()) return {"read", [this] { read_on_cpu(from_, sums_); }};
  return {"read", [this] {
            launch<Read<kReadRows, kCols>>(stream_, tiles_of(from_, kReadRows), [this](auto& bind, auto& p) {
              bind(p.from, from_);
              p.sums = sums_.data<float>();
            });
          }};
}

Contender empty_kernel(const Stream& stream) {
  return {"empty", [stream] { launch<Empty>(stream, {}, [](auto&, auto&) {}); }};
}

}  // namespace tw::bench
