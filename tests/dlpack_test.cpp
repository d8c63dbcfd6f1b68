#include <dlpack/dlpack.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/support.hpp"
#include "tilewave/tensor.hpp"

namespace tw::test {
namespace {

/// A producer's tensor, whose deleter counts.
struct Producer {
  std::vector<float> values = {0, 1, 2, 3, 4, 5};
  std::vector<std::int64_t> shape = {2, 3};
  std::vector<std::int64_t> strides = {3, 1};
  int deleted = 0;
  DLManagedTensor managed{};

  Producer() {
    managed.dl_tensor.data = values.data();
    managed.dl_tensor.device = {kDLCPU, 0};
    managed.dl_tensor.ndim = 2;
    managed.dl_tensor.dtype = {kDLFloat, 32, 1};
    managed.dl_tensor.shape = shape.data();
    managed.dl_tensor.strides = strides.data();
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensor* self) { ++static_cast<Producer*>(self->manager_ctx)->deleted; };
  }
};

TEST(DLPack, InSharesMemoryUntilTheLastViewGoes) {
  Producer producer;
  {
    Tensor row;
    {
      const Tensor t = Tensor::from_dlpack(&producer.managed);
      EXPECT_EQ(t.data(), producer.values.data());
      EXPECT_EQ(t.shape(), (Shape{2, 3}));
      EXPECT_EQ(t.dtype(), DType::f32);
      EXPECT_EQ(t.at({1, 2}), 5);
      row = t.select(0, 1);
    }
    EXPECT_EQ(producer.deleted, 0);
    EXPECT_EQ(row.at({0}), 3);
  }
  EXPECT_EQ(producer.deleted, 1);
}

TEST(DLPack, InReadsOffsetsStridesAndTheirAbsence) {
  Producer producer;
  producer.managed.dl_tensor.byte_offset = 4;
  producer.shape = {2, 2};
  EXPECT_EQ(Tensor::from_dlpack(&producer.managed).at({1, 1}), 5);
  producer.strides = {1, 3};
  producer.managed.dl_tensor.byte_offset = 0;
  producer.shape = {3, 2};
  const Tensor transposed = Tensor::from_dlpack(&producer.managed);
  EXPECT_EQ(transposed.at({2, 1}), 5);
  EXPECT_EQ(transposed.at({1, 0}), 1);
  producer.managed.dl_tensor.strides = nullptr;
  EXPECT_EQ(Tensor::from_dlpack(&producer.managed).strides(), (std::vector<std::int64_t>{2, 1}));
  producer.managed.deleter = nullptr;
  EXPECT_EQ(Tensor::from_dlpack(&producer.managed).numel(), 6);
  producer.managed.dl_tensor.ndim = 0;
  EXPECT_EQ(Tensor::from_dlpack(&producer.managed).at({}), 0);
}

TEST(DLPack, WhatIsRefusedStaysTheCallers) {
  auto refused = [](auto change, const char* what) {
    Producer producer;
    change(producer);
    EXPECT_THROW(Tensor::from_dlpack(&producer.managed), InvalidArgument) << what;
    EXPECT_EQ(producer.deleted, 0) << what;
  };
  refused([](Producer& p) { p.managed.dl_tensor.dtype = {kDLFloat, 64, 1}; }, "f64");
  refused([](Producer& p) { p.managed.dl_tensor.dtype = {kDLComplex, 64, 1}; }, "complex");
  refused([](Producer& p) { p.managed.dl_tensor.dtype = {kDLFloat, 32, 4}; }, "lanes");
  refused([](Producer& p) { p.managed.dl_tensor.dtype = {200, 8, 1}; }, "unknown code");
  refused([](Producer& p) { p.managed.dl_tensor.device = {kDLROCM, 0}; }, "device");
  refused([](Producer& p) { p.managed.dl_tensor.device = {kDLCUDA, -1}; }, "device index");
  refused([](Producer& p) { p.managed.dl_tensor.ndim = -1; }, "ndim");
  refused([](Producer& p) { p.managed.dl_tensor.shape = nullptr; }, "no shape");
  refused([](Producer& p) { p.managed.dl_tensor.data = nullptr; }, "no data");
  refused([](Producer& p) { p.shape[0] = -2; }, "negative extent");
  refused([](Producer& p) { p.shape[0] = std::int64_t{1} << 62; }, "overflow");
  refused([](Producer& p) { p.strides[0] = std::int64_t{1} << 62; }, "stride overflow");
  refused([](Producer& p) { p.managed.dl_tensor.byte_offset = 2; }, "unaligned");
  EXPECT_THROW(Tensor::from_dlpack(nullptr), InvalidArgument);
}

TEST(DLPack, OutKeepsMemoryAlive) {
  auto owner = std::make_shared<std::vector<float>>(std::vector<float>{0, 1, 2, 3, 4, 5});
  const std::weak_ptr<std::vector<float>> watch = owner;
  DLManagedTensor* out = nullptr;
  {
    const Tensor t = Tensor::borrow(owner->data(), {2, 3}, DType::f32, Device::cpu(), {}, owner).transpose(0, 1);
    owner.reset();
    out = t.to_dlpack();
  }
  ASSERT_FALSE(watch.expired());
  EXPECT_EQ(out->dl_tensor.ndim, 2);
  EXPECT_EQ(out->dl_tensor.shape[0], 3);
  EXPECT_EQ(out->dl_tensor.strides[0], 1);
  EXPECT_EQ(out->dl_tensor.strides[1], 3);
  EXPECT_EQ(out->dl_tensor.device.device_type, kDLCPU);
  EXPECT_EQ(out->dl_tensor.byte_offset, 0u);
  EXPECT_EQ(static_cast<float*>(out->dl_tensor.data)[5], 5);
  out->deleter(out);
  EXPECT_TRUE(watch.expired());
}

TEST(DLPack, EveryDTypeGoesRound) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2, DType::i8, DType::i32, DType::i64, DType::u8,
                      DType::boolean}) {
    const Tensor t = Tensor::zeros({3, 2}, dtype);
    const Tensor back = Tensor::from_dlpack(t.to_dlpack());
    EXPECT_EQ(back.dtype(), dtype);
    EXPECT_EQ(back.data(), t.data());
    EXPECT_EQ(back.shape(), t.shape());
  }
  EXPECT_EQ(Tensor::from_dlpack(Tensor::zeros({0, 2}, DType::f32).to_dlpack()).shape(), (Shape{0, 2}));
  EXPECT_EQ(Tensor::from_dlpack(Tensor::zeros({}, DType::f32).to_dlpack()).numel(), 1);
}

TEST(DLPack, cuda_GoesRound) {
  skip_without_cuda();
  const Tensor t = Tensor::zeros({4}, DType::bf16, Stream::standard(Device::cuda()));
  DLManagedTensor* out = t.to_dlpack();
  EXPECT_EQ(out->dl_tensor.device.device_type, kDLCUDA);
  const Tensor back = Tensor::from_dlpack(out);
  EXPECT_EQ(back.device(), Device::cuda());
  EXPECT_EQ(back.data(), t.data());
  EXPECT_EQ(back.to(Device::cpu()).at({3}), 0);
}

}  // namespace
}  // namespace tw::test
