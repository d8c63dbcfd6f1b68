#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tilewave/tensor.hpp"

namespace tw::kernels::transpose {

/// A row-major copy of x, row-major and on the CPU, with its last two dimensions exchanged.
inline Tensor reference(const Tensor& x) {
  const std::int64_t m = x.shape(-2), n = x.shape(-1), batch = x.rank() == 3 ? x.shape(0) : 1;
  const Tensor y = Tensor::empty(x.transpose(-2, -1).shape(), x.dtype());
  const auto size = static_cast<std::int64_t>(size_of(x.dtype()));
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t row = 0; row < m; ++row)
      for (std::int64_t col = 0; col < n; ++col)
        std::memcpy(static_cast<char*>(y.data()) + ((b * n + col) * m + row) * size,
                    static_cast<const char*>(x.data()) + ((b * m + row) * n + col) * size, static_cast<std::size_t>(size));
  return y;
}

}  // namespace tw::kernels::transpose
