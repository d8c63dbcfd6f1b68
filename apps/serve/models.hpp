#pragma once

#include <string>
#include <string_view>

#include "apps/serve/service.hpp"

namespace tw::serve {

/// Throws ApiError 404, which names `parameter`, unless `model` is the served model. The names of OpenAI's models for transcription stand
/// for it, too, because programs have them built in; not the one that tells speakers apart.
void require_model(const Service& service, std::string_view model, const std::string& parameter = "model");

/// GET /v1/models and /v1/models/{id}.
Handler models_handler(const Service& service);

}  // namespace tw::serve
