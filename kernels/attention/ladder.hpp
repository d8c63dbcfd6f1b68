#pragma once

#include <span>
#include <vector>

#include "tilewave/device.hpp"
#include "tilewave/kernel.hpp"
#include "tilewave/tensor.hpp"

namespace tw::kernels::attention {

/// Self-attention of one length, all tensors on one device and of one dtype: bf16, on the CPU also f32.
struct LadderCall {
  Tensor q, k, v, o;  ///< [batch, heads, seqlen, 128], contiguous
  Tensor scores;      ///< [batch * heads, seqlen, seqlen]: what fusion saves
  bool causal = false;
  Stream stream = Stream::standard(Device::cpu());
};

/// One way to compute it, with one idea more than the rung before.
struct Rung {
  const char* name;
  void (*run)(const LadderCall&);  ///< enqueues it; the scale is 1 / sqrt(128)
};

inline constexpr int kLadderHeadDim = 128;

/// From the oldest to tw::attention itself.
std::span<const Rung> ladder();

/// The ladder's own kernels for a GPU.
std::vector<KernelSpec> ladder_kernels();

}  // namespace tw::kernels::attention
