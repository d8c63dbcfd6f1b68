#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "tilewave/error.hpp"
#include "tilewave/tilewave.h"

namespace tw::c_api {

/// The message that tw_last_error() returns on this thread.
std::string& last_error();

/// Runs f and converts exceptions to a status.
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

/// The caller's structure, of any version: missing fields are 0.
template <class Options>
Options known(const char* argument, const Options* given) {
  Options options{};
  if (given == nullptr) return options;
  if (given->struct_size < sizeof given->struct_size)
    throw InvalidArgument(std::string(argument) + ".struct_size is " + std::to_string(given->struct_size) +
                          "; set it to sizeof of the structure");
  std::memcpy(&options, given, std::min(given->struct_size, sizeof options));
  return options;
}

}  // namespace tw::c_api
