#include "tilewave/dtype.hpp"

#include <string>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

struct Entry {
  DType dtype;
  std::string_view name;
  std::size_t size;
};

constexpr Entry kTypes[] = {{DType::f32, "f32", 4},           {DType::f16, "f16", 2},           {DType::bf16, "bf16", 2},
                            {DType::fp8_e4m3, "fp8_e4m3", 1}, {DType::fp8_e5m2, "fp8_e5m2", 1}, {DType::i8, "i8", 1},
                            {DType::i32, "i32", 4},           {DType::i64, "i64", 8},           {DType::u8, "u8", 1},
                            {DType::boolean, "bool", 1}};

const Entry& entry(DType dtype) {
  for (const Entry& type : kTypes) {
    if (type.dtype == dtype) return type;
  }
  throw InvalidArgument(tw::format("dtype is {}; allowed: a DType", static_cast<int>(dtype)));
}

}  // namespace

std::size_t size_of(DType dtype) { return entry(dtype).size; }

std::string_view name_of(DType dtype) { return entry(dtype).name; }

DType parse_dtype(std::string_view name) {
  std::string allowed;
  for (const Entry& type : kTypes) {
    if (type.name == name) return type.dtype;
    allowed += (allowed.empty() ? "" : ", ") + std::string(type.name);
  }
  throw InvalidArgument(tw::format("dtype is \"{}\"; allowed: {}", name, allowed));
}

}  // namespace tw
