// A tokenizer.json, and after a zero byte, if there is one, a text: encoded, decoded, and decoded as a stream.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "models/tokenizer.hpp"
#include "tilewave/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t zero = std::min(input.find('\0'), size);
  const std::string_view text =
      zero < size ? input.substr(zero + 1) : "The <|user|> it's 12345\r\n e\xCC\x81 \xE4\xB8\xAD \xF0\x9F\x98\x80 \xFF";
  try {
    const auto tokenizer = tw::models::Tokenizer::parse(input.substr(0, zero), "input");
    for (const bool parse : {false, true}) {
      const auto ids = tokenizer.encode(text, {.parse_special_tokens = parse, .add_special_tokens = parse});
      std::string streamed;
      tw::models::StreamDecoder stream(tokenizer);
      for (const int id : ids) streamed += stream.push(id);
      streamed += stream.finish();
      if (streamed != tokenizer.decode(ids)) std::abort();
    }
  } catch (const tw::FileError&) {
  }
  return 0;
}
