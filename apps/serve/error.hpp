#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace tw::serve {

/// A request that cannot be served. The client gets OpenAI's error object:
/// {"error": {"message": ..., "type": ..., "param": ... or null, "code": ... or null}}
struct ApiError : std::runtime_error {
  ApiError(int http_status, std::string message, std::string parameter = "", std::string error_code = "")
      : std::runtime_error(message), status(http_status), param(std::move(parameter)), code(std::move(error_code)) {}

  int status;         ///< of HTTP: 400, 401, 404, 405, 408, 413, 415, 429, 500, 503
  std::string param;  ///< the field at fault; "": none
  std::string code;   ///< such as "invalid_api_key"; "": none
};

/// "invalid_request_error", "authentication_error", "rate_limit_error" or "server_error".
const char* error_type(int status);

/// The body for `error`.
std::string error_json(const ApiError& error);

}  // namespace tw::serve
