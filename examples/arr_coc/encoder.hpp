#pragma once

#include <tilewave/norm.hpp>

#include "relevance.hpp"

namespace arr_coc {

inline constexpr int kHeads = 4, kHeadDim = 64, kDim = kHeads * kHeadDim;

/// The tokens of all patches, packed one patch after the other.
struct Tokens {
  tw::Tensor values;      ///< f32 [tokens, kChannels]
  tw::Tensor cu_seqlens;  ///< i32 [patches + 1]: where each patch's tokens begin
};

/// Cuts each patch into as many cells as it has tokens and gives each token the mean of its cell's pixels. `n` cells stand in
/// round(sqrt(n)) rows of almost equal numbers. A patch side of 48 pixels or more has room for the 20 cells of 400 tokens.
inline Tokens sample(const Texture& texture, std::span<const Patch> patches) {
  std::vector<float> values;
  std::vector<int> cu_seqlens = {0};
  for (const Patch& patch : patches) {
    const int rows = static_cast<int>(std::sqrt(patch.tokens) + 0.5);
    for (int row = 0; row < rows; ++row) {
      const int y0 = patch.y + patch.height * row / rows, y1 = patch.y + patch.height * (row + 1) / rows;
      const int cells = patch.tokens * (row + 1) / rows - patch.tokens * row / rows;
      for (int cell = 0; cell < cells; ++cell) {
        const int x0 = patch.x + patch.width * cell / cells, x1 = patch.x + patch.width * (cell + 1) / cells;
        std::array<double, kChannels> sums = {};
        for (int y = y0; y < y1; ++y) {
          for (int x = x0; x < x1; ++x) {
            for (std::size_t c = 0; c < kChannels; ++c) sums[c] += texture.at(x, y)[c];
          }
        }
        for (const double sum : sums) values.push_back(static_cast<float>(sum / ((y1 - y0) * (x1 - x0))));
      }
    }
    cu_seqlens.push_back(cu_seqlens.back() + patch.tokens);
  }
  return {tw::Tensor::from<float>(values, {cu_seqlens.back(), kChannels}), tw::Tensor::from<int>(cu_seqlens, {std::ssize(cu_seqlens)})};
}

/// A layer of multi-query attention, in which a token sees the tokens of its own patch: x = tokens E, h = rms_norm(x),
/// y = x + attention(h Q, h K, h V) O. Its query heads share one head of keys and values. In f32 on the CPU, in bf16 on a GPU.
class Encoder {
 public:
  explicit Encoder(tw::Device device) : device_(device), dtype_(device.is_cuda() ? tw::DType::bf16 : tw::DType::f32) {}

  /// [tokens, kDim], of dtype() and on the encoder's device.
  tw::Tensor operator()(const Tokens& tokens) const {
    const tw::Stream stream = tw::Stream::standard(device_);
    const tw::Tensor x = tw::matmul(tokens.values.to(dtype_).to(device_), embed_), cu_seqlens = tokens.cu_seqlens.to(device_);
    const tw::Tensor h = tw::Tensor::empty(x.shape(), dtype_, stream),
                     o = tw::Tensor::empty({x.shape(0), kHeads, kHeadDim}, dtype_, stream);
    tw::rms_norm(x, h);
    const tw::Tensor q = tw::matmul(h, query_).reshape(o.shape());
    const tw::Tensor k = tw::matmul(h, key_).reshape({x.shape(0), 1, kHeadDim}), v = tw::matmul(h, value_).reshape(k.shape());
    tw::attention_varlen(q, k, v, o, {cu_seqlens, cu_seqlens});
    return tw::matmul(o.reshape(x.shape()), output_, {.residual = &x});
  }

  tw::DType dtype() const { return dtype_; }

 private:
  tw::Tensor prepare(std::uint32_t seed, int rows, int cols) const { return weight(seed, rows, cols).to(dtype_).to(device_); }

  tw::Device device_;
  tw::DType dtype_;
  tw::Tensor embed_ = prepare(4, kChannels, kDim), query_ = prepare(5, kDim, kDim), key_ = prepare(6, kDim, kHeadDim),
             value_ = prepare(7, kDim, kHeadDim), output_ = prepare(8, kDim, kDim);
};

}  // namespace arr_coc
