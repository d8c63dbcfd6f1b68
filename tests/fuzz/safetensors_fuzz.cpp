// A safetensors file: its header, and the first and last byte of every tensor.
#include <cstddef>
#include <cstdint>
#include <span>

#include "models/safetensors.hpp"
#include "tilewave/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto tensors = tw::models::SafeTensors::parse(std::as_bytes(std::span(data, size)), "input");
    for (const auto& name : tensors.names()) {
      try {
        const tw::Tensor tensor = tensors.tensor(name);
        const auto* bytes = static_cast<const volatile unsigned char*>(tensor.data());
        if (tensors.bytes(name) > 0) static_cast<void>(bytes[0] + bytes[tensors.bytes(name) - 1]);
      } catch (const tw::FileError&) {  // its dtype
      }
    }
  } catch (const tw::FileError&) {
  }
  return 0;
}
