#pragma once

#include <exception>
#include <string>

#include "tilewave/error.hpp"
#include "tilewave/tilewave.h"

namespace tw::c_api {

/// The message that tw_last_error() returns on this thread.
std::string& last_error();

/// Runs f and turns what it throws into a status.
template <class F>
tw_status guard(F f) noexcept {
  try {
    try {
      f();
      return TW_OK;
    } catch (const std::exception& error) {
      last_error() = error.what();
      throw;
    }
  } catch (const InvalidArgument&) {
    return TW_INVALID_ARGUMENT;
  } catch (const OutOfMemory&) {
    return TW_OUT_OF_MEMORY;
  } catch (const DeviceError&) {
    return TW_DEVICE_ERROR;
  } catch (const CompileError&) {
    return TW_COMPILE_ERROR;
  } catch (const FileError&) {
    return TW_FILE_ERROR;
  } catch (...) {
    return TW_FAILURE;
  }
}

}  // namespace tw::c_api
