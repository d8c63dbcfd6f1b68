#pragma once

#include <optional>

#include "tilewave/tensor.hpp"

// Mixture of experts: the whole layer, fused_moe(), and its pieces. Each token is routed to k of the experts. Tokens are sorted by expert,
// the experts' products are grouped_gemm()s, and the weighted sum of a token's k results is its output. Nothing waits for the device, so
// all of it can be captured into a graph, and every result is the same in every run.

namespace tw {

enum class MoeScore { softmax, sigmoid };

/// What decides which groups of experts are considered.
enum class MoeGroupScore {
  largest,    ///< the group's best expert (DeepSeek-V2, arXiv 2405.04434)
  sum_of_two  ///< its two best experts' scores plus bias, added (DeepSeek-V3, arXiv 2412.19437)
};

struct MoeRouteOptions {
  MoeScore score = MoeScore::softmax;
  const Tensor* bias = nullptr;  ///< f32 [experts], added to the scores for the choice, not for the weights (DeepSeek-V3)
  int groups = 1;                ///< neighbouring experts form a group, experts / groups each; 1 to 64
  int groups_taken = 1;          ///< experts are chosen from this many groups, the best ones
  MoeGroupScore group_score = MoeGroupScore::largest;
  bool renormalise = false;           ///< divide a token's weights by their sum, or by 1e-20 if that is larger
  float scale = 1;                    ///< of the weights, after renormalise (routed_scaling_factor)
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// Chooses k experts for each token.
///
///     s = softmax(logits(t, :)) or sigmoid(logits(t, :)), in f32
///     experts(t, :) = the k largest of s + bias in the groups taken, descending; of equal ones the lower expert first
///     weights(t, n) = scale s(experts(t, n)) [/ the sum of s over experts(t, :)]
///
/// Without a bias and without group sums experts are compared by their logits, whose order is that of the exact scores. Of groups with
/// equal scores the lower one comes first. A logit of NaN or -infinity has the score 0 and comes after all others, whatever its bias; so
/// does a sum that is NaN. A logit of +infinity counts as the largest finite number.
///
/// `logits`: [tokens, experts], f32, f16 or bf16, 1 to 512 experts. `weights`: f32 [tokens, k], `experts`: i32 [tokens, k]; k from 1 to 16,
/// and at most the number of experts in the groups taken. Any strides; on a GPU contiguous rows of whole 16-byte pieces are fast.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides, devices or
/// options that do not fit, with nothing written; CompileError, DeviceError.
void moe_route(const Tensor& logits, const Tensor& weights, const Tensor& experts, const MoeRouteOptions& options = {});

struct MoePermutationOptions {
  int first_expert = 0;               ///< the tables are for experts first_expert to first_expert + n_experts - 1
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// Sorts assignments by expert: the tables with which tokens go to their experts and come back. Among those of one expert the order is that
/// of tokens, then of choices.
///
///     offsets(e)      the first sorted row of expert first_expert + e; offsets(n_experts) is the number of sorted rows
///     rows(r)         the token of sorted row r; -1 from offsets(n_experts) on
///     places(t, n)    the sorted row of token t's n-th choice; -1 if its expert is not one of these, as with expert parallelism
///
/// `experts`: i32 [tokens, k] with any numbers; tokens * k at most 2^30. n_experts: 1 to 512. `offsets`: i32 [n_experts + 1], `rows`: i32
/// [tokens * k], `places`: i32 [tokens, k]. All contiguous.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns): one launch for up to 2048 assignments, otherwise three. Throws
/// InvalidArgument for shapes, dtypes, strides, devices or options that do not fit, with nothing written; CompileError, DeviceError.
void moe_permutation(const Tensor& experts, int n_experts, const Tensor& offsets, const Tensor& rows, const Tensor& places,
                     const MoePermutationOptions& options = {});

struct MoeDispatchOptions {
  const Tensor* scales = nullptr;     ///< for a y of fp8_e4m3: f32 [rows, H / 128]
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y(places(t, n)) = x(t) for all n: copies each token to its sorted rows. Rows of y that no place names are left alone; places outside y
/// are skipped.
///
/// `x`: [tokens, H], `y`: [rows, H], of one dtype, f32, f16 or bf16, any strides. `places`: i32 [tokens, k], any strides; no row twice.
///
/// A y of fp8_e4m3 with scales is x as cast_fp8() casts it, with a scale for each 128 elements. H is then a multiple of 128. Rows of
/// `scales` are written like those of y.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void moe_dispatch(const Tensor& x, const Tensor& places, const Tensor& y, const MoeDispatchOptions& options = {});

struct MoeCombineOptions {
  const Tensor* addend = nullptr;     ///< [tokens, H] of out's dtype, added to the sum: the shared experts' output or a residual
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// out(t) = [addend(t) +] the sum over n of weights(t, n) y(places(t, n)), added in this order, in f32, rounded once. Places outside y,
/// such as -1, are skipped with their weights.
///
/// `y`: [rows, H], `out`: [tokens, H], of one dtype, f32, f16 or bf16. `places`: i32 [tokens, k], `weights`: f32 [tokens, k]. Any strides.
/// out may be the addend.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void moe_combine(const Tensor& y, const Tensor& places, const Tensor& weights, const Tensor& out, const MoeCombineOptions& options = {});

struct MoeExpertsOptions {
  int first_expert = 0;                    ///< the weights are those of experts first_expert on; others contribute nothing
  const Tensor* shared_gate_up = nullptr;  ///< [2 S, H], interleaved like w_gate_up: an expert of every token, or several side by side
  const Tensor* shared_down = nullptr;     ///< [H, S]
  const Tensor* addend = nullptr;          ///< [tokens, H] of out's dtype, added to the sum, such as a residual
  /// Of fp8_e4m3 weights: f32, one for each block of 128 x 128. Those of w_gate_up [E, 2 I / 128, H / 128], w_down [E, H / 128, I / 128],
  /// shared_gate_up [2 S / 128, H / 128] and shared_down [H / 128, S / 128], of any strides. Of u8 weights: one for each group of G
  /// columns, contiguous, u8 (mxfp4, G is 32) or f16 (int4, G is 32 or 128). Those of w_gate_up [E, 2 I, H / G], and so on.
  const Tensor* gate_up_scale = nullptr;
  const Tensor* down_scale = nullptr;
  const Tensor* shared_gate_up_scale = nullptr;
  const Tensor* shared_down_scale = nullptr;
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// The experts' part of a mixture-of-experts layer, with SwiGLU experts:
///
///     mlp(e, x) = w_down(e) (silu(gate) * up),  gate and up = the even and odd rows of w_gate_up(e) x
///     out(t) = [addend(t) +] [mlp(shared, x(t)) +] the sum over n of weights(t, n) mlp(experts(t, n), x(t))
///
/// Computed as moe_permutation(), moe_dispatch(), two grouped_gemm()s and moe_combine(). Products accumulate in f32. Gated activations, the
/// experts' results, and the shared experts' result with the addend are rounded to x's dtype.
///
/// `x`, `out`: [tokens, H], f16 or bf16, on the CPU also f32. `weights`: f32 [tokens, k], any strides. `experts`: i32 [tokens, k],
/// contiguous, k from 1 to 16; an expert outside first_expert to first_expert + E - 1 contributes nothing, so ranks can divide the experts
/// among them. `w_gate_up`: [E, 2 I, H], its rows gate and up in turn, g0 u0 g1 u1 ...; `w_down`: [E, H, I]; E from 1 to 512, H and I at
/// least 1. All of x's dtype, any strides. out may be the addend.
///
/// Weights may be of fp8_e4m3 with scales of blocks, and x of bf16. The first I rows of w_gate_up(e), and S of shared_gate_up, are then
/// gate, the others up, since 128 rows have one scale. H, I and S are multiples of 128. x and the gated activations are cast as by
/// cast_fp8(), and the products are grouped_gemm()s and gemm()s of fp8, which give bf16.
///
/// Weights may be of u8 with scales of groups, in the formats and the packing of QuantizedMatrix: mxfp4, or int4 without zero points. Two
/// codes share a byte, so w_gate_up is [E, 2 I, H / 2], w_down [E, H, I / 2], shared_gate_up [2 S, H / 2] and shared_down [H, S / 2], all
/// contiguous from a multiple of 16 bytes on. Rows of gate and up take turns, as in x's dtype. H, I and S are multiples of the group. The
/// products have dequant_gemm()'s accuracy, and gate and up are rounded to x's dtype. With a shared expert x's columns are adjacent.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Work memory, tokens * k * (2 H + I) elements and more, belongs to
/// the stream, or to the graph that captures the call. Throws InvalidArgument for shapes, dtypes, strides, devices or options that do not
/// fit, with nothing written; CompileError, DeviceError.
void moe_experts(const Tensor& x, const Tensor& weights, const Tensor& experts, const Tensor& w_gate_up, const Tensor& w_down,
                 const Tensor& out, const MoeExpertsOptions& options = {});

struct FusedMoeOptions {
  MoeRouteOptions route = {};         ///< its stream is not used
  MoeExpertsOptions experts = {};     ///< its stream is not used
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// A whole mixture-of-experts layer: moe_route(), then moe_experts(). `logits`: [tokens, experts] of all experts, those of other ranks too;
/// each token takes k. Otherwise as these two.
void fused_moe(const Tensor& x, const Tensor& logits, int k, const Tensor& w_gate_up, const Tensor& w_down, const Tensor& out,
               const FusedMoeOptions& options = {});

}  // namespace tw
