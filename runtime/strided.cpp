#include "runtime/strided.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "tilewave/detail/parallel.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

struct Dim {
  std::int64_t extent;
  std::int64_t to_stride;    // bytes
  std::int64_t from_stride;  // bytes
};

template <std::size_t Bytes>
void copy_row(char* to, std::int64_t to_stride, const char* from, std::int64_t from_stride, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, Bytes);
}

using RowCopy = void (*)(char*, std::int64_t, const char*, std::int64_t, std::int64_t);

RowCopy row_copy(std::size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return copy_row<1>;
    case 2:
      return copy_row<2>;
    case 4:
      return copy_row<4>;
    case 8:
      return copy_row<8>;
    default:
      throw InvalidArgument("copy: elements have 1, 2, 4 or 8 bytes");
  }
}

// --- Conversions

/// A bool in memory. Its byte may hold more than 0 and 1 (poisoned memory does), which a C++ bool must not.
struct Flag {
  std::uint8_t byte = 0;
};

/// Rounds a double to a float such that rounding the float again, to fewer bits, gives the same result as rounding the double directly: an
/// inexact result becomes the neighbour whose last bit is 1 ("round to odd"; Boldo and Melquiond 2008).
float to_float_odd(double x) {
  const auto nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || std::isnan(x) || std::isinf(nearest)) return nearest;
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  if ((bits & 1) != 0) return nearest;
  // The other one of the two floats around x is odd. Larger magnitudes have larger bit patterns.
  const bool beyond = std::abs(static_cast<double>(nearest)) > std::abs(x);
  return std::bit_cast<float>(beyond ? bits - 1 : bits + 1);
}

/// The same from i64 to double: for |x| >= 2^53 the lowest 12 bits become one sticky bit.
double to_double_odd(std::int64_t x) {
  constexpr int kDropped = 12;
  constexpr std::uint64_t kMask = (std::uint64_t{1} << kDropped) - 1;
  const bool negative = x < 0;
  std::uint64_t magnitude = negative ? std::uint64_t{0} - static_cast<std::uint64_t>(x) : static_cast<std::uint64_t>(x);
  if (magnitude >= std::uint64_t{1} << 53 && (magnitude & kMask) != 0) magnitude = (magnitude & ~kMask) | (kMask + 1);
  const auto rounded = static_cast<double>(magnitude);
  return negative ? -rounded : rounded;
}

template <class T>
inline constexpr bool is_narrow_float =
    std::is_same_v<T, f16> || std::is_same_v<T, bf16> || std::is_same_v<T, fp8_e4m3> || std::is_same_v<T, fp8_e5m2>;

template <class To>
To integer_from(double x) {
  if (std::isnan(x)) return 0;
  const double rounded = std::nearbyint(x);
  // The limits as doubles: max() of i64 rounds up to 2^63, which is out of range itself.
  if (rounded <= static_cast<double>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (rounded >= static_cast<double>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(rounded);
}

template <class To, class From>
To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<From, Flag>) {
    return convert<To>(static_cast<std::int32_t>(x.byte != 0));
  } else if constexpr (is_narrow_float<From>) {
    return convert<To>(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, Flag>) {
    return {static_cast<std::uint8_t>(x != From{0})};
  } else if constexpr (std::is_integral_v<To>) {
    if constexpr (std::is_integral_v<From>) {
      const auto wide = static_cast<std::int64_t>(x);
      return static_cast<To>(std::clamp<std::int64_t>(wide, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()));
    } else {
      return integer_from<To>(static_cast<double>(x));
    }
  } else if constexpr (std::is_same_v<To, float>) {
    return static_cast<float>(x);
  } else if constexpr (std::is_integral_v<From>) {
    return To(to_float_odd(to_double_odd(static_cast<std::int64_t>(x))));
  } else {
    return To(x);
  }
}

/// Calls f with a value of the C++ type of `dtype`.
template <class F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(f16(0.0f));
    case DType::bf16:
      return f(bf16(0.0f));
    case DType::fp8_e4m3:
      return f(fp8_e4m3(0.0f));
    case DType::fp8_e5m2:
      return f(fp8_e5m2(0.0f));
    case DType::i8:
      return f(std::int8_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::i64:
      return f(std::int64_t{});
    case DType::u8:
      return f(std::uint8_t{});
    case DType::boolean:
      return f(Flag{});
  }
  throw InvalidArgument("dtype: unknown");
}

constexpr std::int64_t kConvertChunk = 64 * 1024;  // elements per task: long enough to be worth a thread's wake-up

}  // namespace

void copy_strided(void* to, std::span<const std::int64_t> to_strides, const void* from, std::span<const std::int64_t> from_strides,
                  std::span<const std::int64_t> shape, std::size_t element_bytes) {
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  // Merge dimensions that are contiguous in both arrays.
  std::vector<Dim> dims;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return;
    if (shape[i] == 1) continue;
    const Dim dim{shape[i], to_strides[i] * bytes, from_strides[i] * bytes};
    if (!dims.empty() && dims.back().to_stride == dim.to_stride * dim.extent && dims.back().from_stride == dim.from_stride * dim.extent) {
      dims.back() = {dims.back().extent * dim.extent, dim.to_stride, dim.from_stride};
    } else {
      dims.push_back(dim);
    }
  }
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  if (dims.empty()) {
    std::memcpy(out, in, element_bytes);
    return;
  }
  const Dim row = dims.back();
  dims.pop_back();
  const bool dense = row.to_stride == bytes && row.from_stride == bytes;
  const RowCopy copy = row_copy(element_bytes);
  std::vector<std::int64_t> index(dims.size(), 0);
  while (true) {
    if (dense) {
      std::memcpy(out, in, static_cast<std::size_t>(row.extent * bytes));
    } else {
      copy(out, row.to_stride, in, row.from_stride, row.extent);
    }
    std::size_t d = dims.size();
    while (d > 0) {  // the next index, like an odometer
      --d;
      out += dims[d].to_stride;
      in += dims[d].from_stride;
      if (++index[d] < dims[d].extent) break;
      out -= dims[d].to_stride * dims[d].extent;
      in -= dims[d].from_stride * dims[d].extent;
      index[d] = 0;
      if (d == 0) return;
    }
    if (dims.empty()) return;
  }
}

void convert_elements(void* to, DType to_dtype, const void* from, DType from_dtype, std::int64_t count) {
  with_type(to_dtype, [&](auto to_value) {
    with_type(from_dtype, [&](auto from_value) {
      using To = decltype(to_value);
      using From = decltype(from_value);
      auto* out = static_cast<To*>(to);
      const auto* in = static_cast<const From*>(from);
      detail::parallel_for((count + kConvertChunk - 1) / kConvertChunk, [&](long chunk) {
        const std::int64_t end = std::min(count, (chunk + 1) * kConvertChunk);
        for (std::int64_t i = chunk * kConvertChunk; i < end; ++i) out[i] = convert<To>(in[i]);
      });
    });
  });
}

double element_as_double(const void* element, DType dtype) {
  double result = 0;
  with_type(dtype, [&](auto value) {
    using T = decltype(value);
    value = *static_cast<const T*>(element);
    if constexpr (std::is_same_v<T, Flag>) {
      result = value.byte != 0 ? 1 : 0;
    } else if constexpr (is_narrow_float<T>) {
      result = static_cast<double>(static_cast<float>(value));
    } else {
      result = static_cast<double>(value);
    }
  });
  return result;
}

}  // namespace tw
