#pragma once

#include <string>
#include <string_view>

#include "apps/serve/service.hpp"

namespace tw::serve {

/// POST /v1/audio/transcriptions. Decodes the upload on the caller's thread; the engine's thread sends the answer.
Handler transcriptions_handler(Service& service);

/// TranscribeOptions::prompt for a client's prompt: Service::prompt_template with the prompt in it; "", which leaves the model its own
/// instruction, if either is empty.
std::string instruction(const Service& service, std::string_view prompt);

}  // namespace tw::serve
