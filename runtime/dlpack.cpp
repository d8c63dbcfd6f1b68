#include <dlpack/dlpack.h>

#include <memory>

#include "runtime/format.hpp"
#include "tilewave/tensor.hpp"

namespace tw {
namespace {

// Codes of later DLPack releases than the one whose header we build with; codes never change.
constexpr std::uint8_t kBool = 6;
constexpr std::uint8_t kFloat8E4m3fn = 10;
constexpr std::uint8_t kFloat8E5m2 = 12;

struct Match {
  DType dtype;
  std::uint8_t code;
  std::uint8_t bits;
};

constexpr Match kMatches[] = {
    {DType::f32, kDLFloat, 32},        {DType::f16, kDLFloat, 16}, {DType::bf16, kDLBfloat, 16}, {DType::fp8_e4m3, kFloat8E4m3fn, 8},
    {DType::fp8_e5m2, kFloat8E5m2, 8}, {DType::i8, kDLInt, 8},     {DType::i32, kDLInt, 32},     {DType::i64, kDLInt, 64},
    {DType::u8, kDLUInt, 8},           {DType::boolean, kBool, 8}};

DLDataType to_dl(DType dtype) {
  for (const Match& type : kMatches) {
    if (type.dtype == dtype) return {type.code, type.bits, 1};
  }
  throw InvalidArgument(tw::format("to_dlpack: dtype {} has no DLPack code", name_of(dtype)));
}

DType from_dl(DLDataType type) {
  for (const Match& known : kMatches) {
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) return known.dtype;
  }
  throw InvalidArgument(
      tw::format("from_dlpack: dtype has code {}, {} bits and {} lanes; allowed: one lane of f32, f16, bf16, fp8_e4m3, fp8_e5m2, "
                 "i8, i32, i64, u8 or bool",
                 type.code, type.bits, type.lanes));
}

Device from_dl(DLDevice device) {
  switch (static_cast<int>(device.device_type)) {
    case kDLCPU:
    case kDLCUDAHost:
      return Device::cpu();
    case kDLCUDA:
    case kDLCUDAManaged:
      if (device.device_id < 0) throw InvalidArgument(tw::format("from_dlpack: device_id is {}; allowed: 0 or more", device.device_id));
      return Device::cuda(device.device_id);
    default:
      throw InvalidArgument(tw::format("from_dlpack: device has type {}; allowed: {} (CPU), {} (CUDA), {} (pinned), {} (managed)",
                                       static_cast<int>(device.device_type), static_cast<int>(kDLCPU), static_cast<int>(kDLCUDA),
                                       static_cast<int>(kDLCUDAHost), static_cast<int>(kDLCUDAManaged)));
  }
}

/// A DLManagedTensor and what it points to.
struct Exported {
  Tensor tensor;
  Shape shape;
  std::vector<std::int64_t> strides;
  DLManagedTensor managed;
};

}  // namespace

DLManagedTensor* Tensor::to_dlpack() const {
  auto exported = std::make_unique<Exported>();
  exported->tensor = *this;
  exported->shape = shape_;
  exported->strides = strides_;
  DLManagedTensor& managed = exported->managed;
  managed = {};
  managed.dl_tensor.data = data_;
  managed.dl_tensor.device = {device_.is_cuda() ? kDLCUDA : kDLCPU, device_.index};
  managed.dl_tensor.ndim = rank();
  managed.dl_tensor.dtype = to_dl(dtype_);
  managed.dl_tensor.shape = exported->shape.data();
  managed.dl_tensor.strides = exported->strides.data();
  managed.manager_ctx = exported.get();
  managed.deleter = [](DLManagedTensor* self) { delete static_cast<Exported*>(self->manager_ctx); };
  return &exported.release()->managed;
}

Tensor Tensor::from_dlpack(DLManagedTensor* managed) {
  if (managed == nullptr) throw InvalidArgument("from_dlpack: managed is null; allowed: a DLManagedTensor");
  const DLTensor& source = managed->dl_tensor;
  if (source.ndim < 0 || (source.ndim > 0 && source.shape == nullptr)) {
    throw InvalidArgument(tw::format("from_dlpack: ndim is {}{}; allowed: 0 or more, with a shape", source.ndim,
                                     source.shape == nullptr ? " without a shape" : ""));
  }
  Shape shape(source.shape, source.shape + source.ndim);
  std::vector<std::int64_t> strides;
  if (source.strides != nullptr) strides.assign(source.strides, source.strides + source.ndim);
  char* data = source.data == nullptr ? nullptr : static_cast<char*>(source.data) + source.byte_offset;
  Tensor t = borrow(data, std::move(shape), from_dl(source.dtype), from_dl(source.device), std::move(strides));
  // Nothing above can fail any more: from here on it is ours.
  t.owner_ = std::shared_ptr<DLManagedTensor>(managed, [](DLManagedTensor* self) {
    if (self->deleter != nullptr) self->deleter(self);
  });
  return t;
}

}  // namespace tw
