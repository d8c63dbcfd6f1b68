#include "kernels/attention/contents.hpp"

#include <cstdint>
#include <span>

#include "kernels/check.hpp"

namespace tw {

namespace {

void check_sequences(const char* name, const Tensor& cu_seqlens, const char* used_name, const Tensor* seqused, std::int64_t total,
                     const char* what) {
  check_offsets("attention_varlen", name, cu_seqlens, total, what);
  if (seqused == nullptr) return;
  const Tensor offsets = cu_seqlens.to(Device::cpu());
  const std::span cu(offsets.data<std::int32_t>(), static_cast<std::size_t>(offsets.numel()));
  const Tensor lengths = seqused->to(Device::cpu());
  for (std::size_t b = 0; b + 1 < cu.size(); ++b) {
    const std::int32_t used = lengths.data<std::int32_t>()[b];
    require(used >= 0 && used <= cu[b + 1] - cu[b], "attention_varlen: {}[{}] is {}; the sequence has {} {}", used_name, b, used,
            cu[b + 1] - cu[b], what);
  }
}

}  // namespace

void check_offsets(const char* op, const char* name, const Tensor& cu_seqlens, std::int64_t total, const char* what) {
  const Tensor offsets = cu_seqlens.to(Device::cpu());
  const std::span cu(offsets.data<std::int32_t>(), static_cast<std::size_t>(offsets.numel()));
  require(cu[0] >= 0, "{}: {}[0] is {}; it must be 0 or more", op, name, cu[0]);
  for (std::size_t b = 0; b + 1 < cu.size(); ++b)
    require(cu[b] <= cu[b + 1], "{}: {}[{}] is {} and {}[{}] is {}; they must not decrease", op, name, b, cu[b], name, b + 1, cu[b + 1]);
  require(cu.back() <= total, "{}: {}[{}] is {}; there are {} {}", op, name, cu.size() - 1, cu.back(), total, what);
}

void check_packed_contents(const PackedSequences& sequences, std::int64_t total_q, std::int64_t total_k, const Stream& stream) {
  stream.synchronize();
  check_sequences("cu_seqlens_q", sequences.cu_seqlens_q, "seqused_q", sequences.seqused_q, total_q, "queries");
  check_sequences("cu_seqlens_k", sequences.cu_seqlens_k, "seqused_k", sequences.seqused_k, total_k, "keys");
}

}  // namespace tw
