#include "kernels/decode_step/decode_step.hpp"

#include <string>

#include "kernels/decode_step/launch.hpp"
#include "runtime/format.hpp"
#include "tilewave/device.hpp"

namespace tw::kernels::decode_step {

namespace {

constexpr const char* kSource = "kernels/decode_step/decode_step.tile.hpp";

std::string type_of(const Kernel& k) {
  return tw::format("tw::kernels::decode_step::DecodeStep<{}, {}, {}, {}, {}>", element_name(k.dtype), k.head_dim, k.group, kMostSequences,
                    k.stages);
}

template <DType dtype>
void run_as(const Decoder& decoder, const Step& step, const Stream& stream) {
  static KernelTable<Kernel> table(type_of, kSource);
  const Launch launch(decoder, step, device_info(stream.device()).units, stream);
  const Kernel kernel{.dtype = dtype, .head_dim = decoder.head_dim, .group = decoder.heads / decoder.kv_heads};
  // The layout of Params is that of any kernel of the dtype.
  using Params = typename HostKernel<Kernel{.dtype = dtype}>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<Params>(table[kernel], stream, launch.grid(), [&](auto& bind, auto& p) { launch.bind_to(bind, p); });
}

}  // namespace

bool supports(const Decoder& d, std::int64_t sequences, const Stream& stream) {
  if (!stream.device().is_cuda() || stream.target() != GpuTarget::sm_90a || sequences > kMostSequences || d.qkv.rank() != 2) return false;
  const DType dtype = d.qkv.dtype();
  const int group = d.kv_heads > 0 ? d.heads / d.kv_heads : 0;
  const bool known = (dtype == DType::bf16 || dtype == DType::f16) && (d.head_dim == 64 || d.head_dim == 128) &&
                     (group == 1 || group == 2 || group == 4 || group == 8) && group * d.kv_heads == d.heads;
  return known && d.qkv.shape(1) % 128 == 0 && d.out.shape(1) % 128 == 0 && d.down.shape(1) % 128 == 0 && d.head.shape(0) % 8 == 0 &&
         d.head.shape(1) == d.qkv.shape(1);
}

void run(const Decoder& decoder, const Step& step, const Stream& stream) {
  if (decoder.qkv.dtype() == DType::bf16)
    run_as<DType::bf16>(decoder, step, stream);
  else
    run_as<DType::f16>(decoder, step, stream);
}

}  // namespace tw::kernels::decode_step
