// Files of tuned choices.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "runtime/tuned_json.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const tw::TunedChoices choices = tw::parse_tuned({reinterpret_cast<const char*>(data), size}, "CPU", "avx2");
  const tw::TunedChoices again = tw::parse_tuned(tw::format_tuned(choices, "CPU", "avx2"), "CPU", "avx2");
  if (again.size() != choices.size()) std::abort();
  for (const auto& [problem, choice] : choices) {
    const auto found = again.find(problem);
    if (found == again.end() || found->second.name != choice.name || found->second.values != choice.values) std::abort();
  }
  return 0;
}
