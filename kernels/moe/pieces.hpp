#pragma once

#include "tilewave/device.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/tensor.hpp"

// The pieces of moe_experts() and fused_moe(), whose callers have checked the tensors, and the checks that they share.

namespace tw::kernels::moe {

inline constexpr int kMostChosenExperts = 16;

/// Throws InvalidArgument unless k experts can be chosen by these logits with these options.
void check_route(const char* op, const Tensor& logits, std::int64_t k, Device device, const MoeRouteOptions& options);
void route(const Tensor& logits, const Tensor& weights, const Tensor& experts, const MoeRouteOptions& options, const Stream& stream);

/// Throws InvalidArgument unless there are 1 to 512 experts. `what`: the number in the message.
void check_experts(const char* op, const char* what, std::int64_t experts);
/// `rows`: null if nobody needs the tokens of the sorted rows.
void permute(const Tensor& experts, int n_experts, int first_expert, const Tensor& offsets, const Tensor* rows, const Tensor& places,
             const Stream& stream);

/// `scales`: those of a y of fp8_e4m3, otherwise null.
void dispatch(const Tensor& x, const Tensor& places, const Tensor& y, const Tensor* scales, const Stream& stream);
/// `addend`: may be null.
void combine(const Tensor& y, const Tensor& places, const Tensor& weights, const Tensor* addend, const Tensor& out, const Stream& stream);

}  // namespace tw::kernels::moe
