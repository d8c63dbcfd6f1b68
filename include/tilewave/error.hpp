#pragma once

#include <stdexcept>
#include <string>

namespace tw {

/// The base of all exceptions of Tilewave. The message names the argument, the value given and the values allowed.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A function does not accept an argument: its shape, dtype, stride, device, pointer or option. Or an output shares memory with another
/// operand and the function's header does not allow it (in place). Nothing was written.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The device has too little free memory. The message says how much was requested and how much is free. The process may continue.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// CUDA cannot be used, or a driver call failed. The message holds the call's name and the driver's text.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A kernel did not compile. The message holds the kernel's name, its type and the compiler's log.
class CompileError : public Error {
 public:
  using Error::Error;
};

/// A file cannot be read, or its content is invalid. The message begins with its name.
class FileError : public Error {
 public:
  using Error::Error;
};

}  // namespace tw
