#include "apps/serve/error.hpp"

#include <nlohmann/json.hpp>

namespace tw::serve {

const char* error_type(int status) {
  if (status == 401) return "authentication_error";
  if (status == 429) return "rate_limit_error";
  return status >= 500 ? "server_error" : "invalid_request_error";
}

std::string error_json(const ApiError& error) {
  const auto or_null = [](const std::string& text) { return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text); };
  const nlohmann::ordered_json body = {
      {"error",
       {{"message", error.what()}, {"type", error_type(error.status)}, {"param", or_null(error.param)}, {"code", or_null(error.code)}}}};
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace tw::serve
