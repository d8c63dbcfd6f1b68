#include "runtime/tuned_json.hpp"

#include <limits>
#include <nlohmann/json.hpp>

namespace tw {
namespace {

using Json = nlohmann::json;  // not ordered_json, which searches all keys of an object for each new one
constexpr int kFormat = 1;

}  // namespace

TunedChoices parse_tuned(std::string_view text, std::string_view device, std::string_view compiler) {
  try {
    const Json json = Json::parse(text);
    if (json.at("format") != kFormat || json.at("device") != device || json.at("compiler") != compiler) return {};
    TunedChoices choices;
    for (const auto& [problem, choice] : json.at("choices").items()) {
      TunedChoice& kept = choices[problem];
      kept.name = choice.at("name");
      for (const Json& value : choice.at("values").get_ref<const Json::array_t&>()) {
        const double number = value.is_number_integer() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
        if (!(number >= std::numeric_limits<int>::min() && number <= std::numeric_limits<int>::max())) return {};
        kept.values.push_back(static_cast<int>(number));
      }
    }
    return choices;
  } catch (const Json::exception&) {
    return {};
  }
}

std::string format_tuned(const TunedChoices& choices, std::string_view device, std::string_view compiler) {
  Json json{{"format", kFormat}, {"device", device}, {"compiler", compiler}, {"choices", Json::object()}};
  for (const auto& [problem, choice] : choices) json["choices"][problem] = {{"name", choice.name}, {"values", choice.values}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tw
