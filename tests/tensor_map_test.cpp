#include "tilewave/detail/tensor_map.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>

#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/tensor.hpp"

namespace tw::test {
namespace {

using detail::MapElement;
using detail::TensorMapRequest;

alignas(128) char memory[4096];

/// Rows of 64 bf16 in a matrix of 1000 x 512.
TensorMapRequest good_request() {
  TensorMapRequest r;
  r.address = memory;
  r.element = MapElement::bf16;
  const std::uint64_t extents[4] = {512, 1000, 1, 1};
  const std::uint64_t strides[3] = {1024, 1024000, 1024000};
  const std::uint32_t box[4] = {64, 128, 1, 1};
  std::memcpy(r.extents, extents, sizeof(extents));
  std::memcpy(r.strides, strides, sizeof(strides));
  std::memcpy(r.box, box, sizeof(box));
  r.swizzle_bytes = 128;
  return r;
}

struct Case {
  const char* what;
  bool possible;
  std::function<void(TensorMapRequest&)> change;
};

TEST(TensorMap, PossibleExactlyWithinTheLimits) {
  const std::uint64_t big = std::uint64_t{1} << 32;
  const std::uint64_t far = std::uint64_t{1} << 40;
  const Case cases[] = {
      {"unchanged", true, [](auto&) {}},
      {"null", false, [](auto& r) { r.address = nullptr; }},
      {"off by 2 bytes", false, [](auto& r) { r.address = memory + 2; }},
      {"off by 8 bytes", false, [](auto& r) { r.address = memory + 8; }},
      {"off by 16 bytes", true, [](auto& r) { r.address = memory + 16; }},
      {"extent 0", false, [](auto& r) { r.extents[1] = 0; }},
      {"outer extent 0", false, [](auto& r) { r.extents[3] = 0; }},
      {"extent 1", true, [](auto& r) { r.extents[0] = 1; }},
      {"extent 2^32", true, [&](auto& r) { r.extents[1] = big; }},
      {"extent 2^32 + 1", false, [&](auto& r) { r.extents[1] = big + 1; }},
      {"row of 511 bf16", false, [](auto& r) { r.strides[0] = 1022; }},
      {"row of 504 bf16", true, [](auto& r) { r.strides[0] = 1008; }},
      {"stride 8", false, [](auto& r) { r.strides[2] = 8; }},
      {"stride 0", false, [](auto& r) { r.strides[1] = 0; }},
      {"stride 2^40 - 16", true, [&](auto& r) { r.strides[1] = far - 16; }},
      {"stride 2^40", false, [&](auto& r) { r.strides[1] = far; }},
      {"negative stride", false, [](auto& r) { r.strides[0] = static_cast<std::uint64_t>(-1024); }},
      {"box 256", true, [](auto& r) { r.box[1] = 256; }},
      {"box 257", false, [](auto& r) { r.box[1] = 257; }},
      {"box 0", false, [](auto& r) { r.box[2] = 0; }},
      {"steps of 2 and 8", true,
       [](auto& r) {
         r.steps[1] = 2;
         r.steps[2] = 8;
       }},
      {"step 0", false, [](auto& r) { r.steps[2] = 0; }},
      {"step 9", false, [](auto& r) { r.steps[1] = 9; }},
      {"step 2 within a row", false, [](auto& r) { r.steps[0] = 2; }},
      {"box row of 24 bytes", false, [](auto& r) { r.box[0] = 12; }},
      {"box row of 32 bytes", true, [](auto& r) { r.box[0] = 16; }},
      {"box row longer than the swizzle", false, [](auto& r) { r.box[0] = 128; }},
      {"long box row without swizzle", true,
       [](auto& r) {
         r.box[0] = 128;
         r.swizzle_bytes = 0;
       }},
      {"swizzle 64 with 128-byte rows", false, [](auto& r) { r.swizzle_bytes = 64; }},
      {"swizzle 48", false,
       [](auto& r) {
         r.swizzle_bytes = 48;
         r.box[0] = 16;
       }},
      {"f32 rows of 128 bytes", true,
       [](auto& r) {
         r.element = MapElement::f32;
         r.box[0] = 32;
       }},
      {"f32 rows of 256 bytes", false, [](auto& r) { r.element = MapElement::f32; }},
      {"u8 rows of 64 bytes", true, [](auto& r) { r.element = MapElement::u8; }},
  };
  for (const Case& c : cases) {
    TensorMapRequest request = good_request();
    c.change(request);
    EXPECT_EQ(detail::tensor_map_possible(request), c.possible) << c.what;
  }
}

TEST(TensorMap, ImpossibleRequestNamesItsFigures) {
  TensorMapRequest request = good_request();
  request.strides[0] = 1022;
  std::array<unsigned char, 128> out;
  out.fill(0x5a);
  try {
    detail::encode_tensor_map(out.data(), request);
    FAIL() << "not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("1022"), std::string::npos) << error.what();
  }
  for (unsigned char byte : out) EXPECT_EQ(byte, 0x5a);
  EXPECT_THROW(detail::encode_tensor_map(nullptr, good_request()), InvalidArgument);
}

TEST(TensorMap, EncodingWithoutADriverSaysSo) {
  if (!find_devices().cuda_driver.empty()) GTEST_SKIP() << "skipped: there is a driver";
  std::array<unsigned char, 128> out{};
  EXPECT_THROW(detail::encode_tensor_map(out.data(), good_request()), DeviceError);
}

TEST(TensorMap, cuda_EncodesWhatIsPossible) {
  skip_without_cuda();
  const Tensor tensor = Tensor::zeros({1000, 512}, DType::bf16, Stream::standard(Device::cuda()));
  TensorMapRequest request = good_request();
  request.address = tensor.data();
  std::array<unsigned char, 129> out{};  // an odd address: the encoder must not ask for an aligned one
  detail::encode_tensor_map(out.data() + 1, request);
  bool any = false;
  for (unsigned char byte : out) any = any || byte != 0;
  EXPECT_TRUE(any);
  for (int element = 0; element < 4; ++element) {
    request.element = static_cast<MapElement>(element);
    request.box[0] = 16;
    for (int swizzle : {0, 64, 128}) {
      request.swizzle_bytes = swizzle;
      EXPECT_NO_THROW(detail::encode_tensor_map(out.data(), request)) << element << " " << swizzle;
    }
  }
}

}  // namespace
}  // namespace tw::test
