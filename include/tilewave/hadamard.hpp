#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tilewave/tensor.hpp"

namespace tw {

struct HadamardOptions {
  float scale = 1;                    ///< finite; 1 / sqrt(n) makes the transform orthogonal
  const Tensor* factors = nullptr;    ///< f32 [n]: x is multiplied by these first, for example by random signs; default: ones
  std::optional<Stream> stream = {};  ///< default: the device's standard stream
};

/// y = scale (x * factors) H of rows of n elements, where H is a symmetric n x n matrix of 1 and -1 with H H = n I. So with a scale of
/// 1 / sqrt(n) and without factors a second call restores x. In f32, rounded once.
///
/// n = m 2^k: 2, 4, 8, ... 32768 (m = 1), or 12 2^k, 20 2^k or 28 2^k, at most 24576, 20480 and 28672; k may be 0. H is the Kronecker
/// product of H_m and the Walsh-Hadamard matrix W of order 2^k in its natural (Sylvester's) order:
///   y[2^k c + d] = scale sum over a, b of x[2^k a + b] factors[2^k a + b] H_m(a, c) W(b, d),   W(b, d) = (-1)^(number of ones in b & d).
/// H_1 is 1. The others are Paley's second construction: H_m = [C + I, C - I; C - I, -C - I], where C is the conference matrix of the
/// quadratic residues of the field of m / 2 - 1 elements (5, 9 or 13).
///
/// `x`, `y`: 1 to 4 dimensions, one shape, any strides, f32, f16 or bf16 each; y may be x. A row with a NaN or an infinity has no finite
/// result.
///
/// Enqueues on the stream and returns (on the CPU: done when it returns). Throws InvalidArgument for shapes, dtypes, strides or devices
/// that do not fit, with nothing written; CompileError, DeviceError.
void hadamard(const Tensor& x, const Tensor& y, const HadamardOptions& options = {});

/// Whether hadamard() transforms rows of n elements.
bool is_hadamard_size(std::int64_t n);

}  // namespace tw
