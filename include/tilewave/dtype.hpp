#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "tilewave/tile/types.tile.hpp"

namespace tw {

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored \
    "-Wshadow"  // GCC 12 takes the scoped enumerators i8, u8, ... for redeclarations of the types tw::i8, tw::u8, ...
#endif
/// Element types of a Tensor. DTypeOf below maps the tile language's types to them.
enum class DType : std::uint8_t { f32, f16, bf16, fp8_e4m3, fp8_e5m2, i8, i32, i64, u8, boolean };
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

/// Size of one element in bytes.
std::size_t size_of(DType dtype);

/// "f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "i8", "i32", "i64", "u8", "bool".
std::string_view name_of(DType dtype);

/// The inverse of name_of. Throws InvalidArgument for any other text.
DType parse_dtype(std::string_view name);

/// The DType of a C++ element type: DTypeOf<bf16>::value.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<fp8_e4m3> {
  static constexpr DType value = DType::fp8_e4m3;
};
template <>
struct DTypeOf<fp8_e5m2> {
  static constexpr DType value = DType::fp8_e5m2;
};
template <>
struct DTypeOf<std::int8_t> {
  static constexpr DType value = DType::i8;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::i64;
};
/// The tile language's i64. It is not std::int64_t where `long` has 64 bits.
template <>
struct DTypeOf<std::conditional_t<std::is_same_v<i64, std::int64_t>, void, i64>> {
  static constexpr DType value = DType::i64;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::boolean;
};
/// Bytes of 4-bit or 2-bit codes, and scales that are powers of two.
template <class T>
requires(codes_in<T> > 1 || is_same<T, e8m0>) struct DTypeOf<T> {
  static constexpr DType value = DType::u8;
};

template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

}  // namespace tw
