// A GGUF file: its metadata, the arrays of a tokenizer, and all of its tensors, decoded.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>

#include "models/gguf.hpp"
#include "tilewave/error.hpp"

namespace {

/// Runs f, which may refuse the input.
template <class F>
void attempt(F f) {
  try {
    f();
  } catch (const tw::FileError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  attempt([&] {
    const auto file = tw::models::Gguf::parse(std::as_bytes(std::span(data, size)), "input");
    for (const char* key : {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"}) {
      attempt([&] { file.strings(key, 1 << 20); });
      attempt([&] { file.integers(key, 1 << 20); });
    }
    attempt([&] { file.metadata().text("general.architecture"); });
    attempt([&] { file.metadata().integer("llama.block_count", 1, 1000); });
    attempt([&] { file.metadata().number("llama.rope.freq_base", 1, 1e12); });
    for (const tw::models::GgufTensors::Heads heads : {tw::models::GgufTensors::Heads{}, {.head_dim = 4, .rotary_dim = 2}}) {
      tw::models::GgufTensors tensors;
      for (const auto& name : file.names()) attempt([&] { tensors.add(file, name, file.shape(name), heads); });
      for (const auto& name : tensors.names()) {
        const tw::Shape& shape = tensors.shape(name);
        const std::int64_t count = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
        const tw::Tensor all = tw::Tensor::empty({count}, *tensors.element_dtype(name));
        tensors.read_elements(name, 0, all);
        const auto* bytes = static_cast<const volatile unsigned char*>(all.data());
        if (count > 0) static_cast<void>(bytes[0] + bytes[static_cast<std::size_t>(count) * size_of(all.dtype()) - 1]);
      }
    }
  });
  return 0;
}
