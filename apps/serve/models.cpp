#include "apps/serve/models.hpp"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/formats/json.hpp"
#include "models/one_line.hpp"
#include "runtime/format.hpp"

namespace tw::serve {

namespace {

constexpr std::string_view kPath = "/v1/models";
constexpr std::string_view kOpenAis[] = {"whisper-1", "gpt-transcribe", "gpt-4o-transcribe", "gpt-4o-mini-transcribe",
                                         "gpt-4o-mini-transcribe-2025-12-15"};

nlohmann::ordered_json model_object(const Service& service) {
  return {{"id", service.model}, {"object", "model"}, {"created", service.created}, {"owned_by", "tilewave"}};
}

[[noreturn]] void unknown_model(const Service& service, std::string_view model, const std::string& parameter) {
  throw ApiError(404,
                 tw::format("the model {} does not exist; this server has {}", models::in_quotes(model), models::in_quotes(service.model)),
                 parameter, "model_not_found");
}

}  // namespace

void require_model(const Service& service, std::string_view model, const std::string& parameter) {
  if (model != service.model && std::find(std::begin(kOpenAis), std::end(kOpenAis), model) == std::end(kOpenAis))
    unknown_model(service, model, parameter);
}

Handler models_handler(const Service& service) {
  return [&service](const std::shared_ptr<const HttpRequest>& request, const std::shared_ptr<Responder>& responder) {
    std::string_view id = request->path;
    id.remove_prefix(std::min(id.size(), kPath.size()));
    nlohmann::ordered_json answer = model_object(service);
    if (id.empty() || id == "/")
      answer = {{"object", "list"}, {"data", nlohmann::ordered_json::array({answer})}};
    else if (id.substr(1) != service.model)
      unknown_model(service, id.substr(1), "model");
    responder->send(200, {{"Content-Type", "application/json"}}, formats::json_text(answer));
  };
}

}  // namespace tw::serve
