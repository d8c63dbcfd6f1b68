// A configuration file.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "models/json.hpp"
#include "tilewave/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    tw::models::parse_json({reinterpret_cast<const char*>(data), size}, "input");
  } catch (const tw::FileError&) {
  }
  return 0;
}
