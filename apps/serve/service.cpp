#include "apps/serve/service.hpp"

#include <new>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::serve {

speech::Engine& Service::engine() const {
  speech::Engine* engine = loaded;
  if (engine == nullptr) throw ApiError(503, "the model is being loaded; try again in a moment", "", "model_loading");
  return *engine;
}

ApiError api_error(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const ApiError& error) {
    return error;
  } catch (const speech::QueueFull&) {
    return {429, "the queue is full; try again later", "", "queue_full"};
  } catch (const speech::Cancelled&) {
    return {503, "the request was cancelled", "", "cancelled"};
  } catch (const InvalidArgument& error) {
    return {400, error.what()};
  } catch (const FileError& error) {
    return {400, error.what()};
  } catch (...) {
    return {500, "the server could not process the request", "", "internal_error"};
  }
}

ApiError engine_error(const std::exception_ptr& exception) {
  const ApiError error = api_error(exception);
  return error.status == 400 ? api_error(std::make_exception_ptr(Error(error.what()))) : error;
}

void send_error(Responder& responder, const ApiError& error) {
  responder.send(error.status, {{"Content-Type", "application/json"}}, error_json(error));
}

}  // namespace tw::serve
