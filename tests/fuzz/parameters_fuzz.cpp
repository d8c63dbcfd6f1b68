// Any fields of a transcription are accepted with values in range, or refused by the name of one of them.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "apps/serve/error.hpp"
#include "apps/serve/parameters.hpp"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

/// Fields, each a name, a line end, and a value that a byte 0xFE ends, which UTF-8 does not have. File and model come first.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view left(reinterpret_cast<const char*>(data), size);
  std::vector<tw::serve::FormPart> form(2);
  form[0].name = "file";
  form[1].name = "model";
  form[1].content = "whisper-1";
  while (!left.empty()) {
    const std::string_view field = left.substr(0, left.find('\xFE'));
    left.remove_prefix(std::min(left.size(), field.size() + 1));
    const std::size_t line = std::min(field.find('\n'), field.size());
    tw::serve::FormPart& part = form.emplace_back();
    part.name = field.substr(0, line);
    part.content = field.substr(std::min(field.size(), line + 1));
  }
  try {
    const tw::serve::TranscriptionParameters parameters = tw::serve::parse_parameters(form);
    require(parameters.temperature >= 0 && parameters.temperature <= 1);
    require(!parameters.language.empty() && parameters.model == "whisper-1");
    require(parameters.prompt.size() <= 65536);
  } catch (const tw::serve::ApiError& error) {
    require(error.status == 400 && !error.param.empty());
    const nlohmann::json answer = nlohmann::json::parse(tw::serve::error_json(error));
    require(answer["error"]["message"].get<std::string>().size() < 2000);
  }
  return 0;
}
