#include "apps/serve/routes.hpp"

#include "apps/serve/models.hpp"
#include "apps/serve/page.hpp"
#include "apps/serve/realtime.hpp"
#include "apps/serve/transcriptions.hpp"

namespace tw::serve {

namespace {

using RequestPointer = std::shared_ptr<const HttpRequest>;
using ResponderPointer = std::shared_ptr<Responder>;

/// The process is alive.
void health(const RequestPointer&, const ResponderPointer& responder) {
  responder->send(200, {{"Content-Type", "application/json"}, {"Cache-Control", "no-store"}}, R"({"status":"ok"})");
}

/// Requests are welcome.
Handler ready_handler(const Service& service) {
  return [&service](const RequestPointer&, const ResponderPointer& responder) {
    const char* state = service.draining ? "draining" : service.loaded.load() == nullptr ? "loading" : "ready";
    const int status = service.draining || service.loaded.load() == nullptr ? 503 : 200;
    responder->send(status, {{"Content-Type", "application/json"}, {"Cache-Control", "no-store"}},
                    std::string(R"({"status":")") + state + R"("})");
  };
}

Handler metrics_handler(Service& service) {
  return [&service](const RequestPointer&, const ResponderPointer& responder) {
    responder->send(200, {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"}}, service.metrics.text(service.loaded));
  };
}

}  // namespace

std::vector<Route> routes(Service& service, const std::filesystem::path& samples) {
  return {
      {.method = "GET", .path = "/", .handler = page_handler(), .open = true},
      {.method = "GET", .path = "/samples", .handler = samples_handler(samples), .open = true},
      {.method = "GET", .path = "/samples/{name}", .handler = samples_handler(samples), .open = true},
      {.method = "GET", .path = "/health", .handler = health, .open = true, .quick = true},
      {.method = "GET", .path = "/ready", .handler = ready_handler(service), .open = true, .quick = true},
      {.method = "GET", .path = "/metrics", .handler = metrics_handler(service), .open = true, .quick = true},
      {.method = "GET", .path = "/v1/models", .handler = models_handler(service)},
      {.method = "GET", .path = "/v1/models/{id}", .handler = models_handler(service)},
      {.method = "POST", .path = "/v1/audio/transcriptions", .handler = transcriptions_handler(service)},
      {.method = "GET", .path = "/v1/realtime", .websocket = realtime_handler(service)},
  };
}

}  // namespace tw::serve
