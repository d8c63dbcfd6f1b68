#pragma once

#include "apps/serve/service.hpp"

namespace tw::serve {

/// GET /v1/realtime?intent=transcription: OpenAI's events for realtime transcription, current and beta. docs/serve.md lists them.
///
/// A message that is no valid event is answered with an `error` event, which names the field and the client's event_id, and changes
/// nothing.
WebSocketHandler realtime_handler(Service& service);

}  // namespace tw::serve
