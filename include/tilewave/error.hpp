#pragma once

#include <stdexcept>
#include <string>

namespace tw {

/// Everything that Tilewave throws. The message names the argument, what was given and what is allowed.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument that a function does not accept: shape, dtype, stride, device, pointer or option; an output that shares memory with another
/// operand, unless the function's header allows it (in place). Nothing was written.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The device has too little free memory. The message says how much was asked for and how much is free; the process may go on.
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

/// A file that cannot be read, or does not hold what it should. The message begins with its name.
class FileError : public Error {
 public:
  using Error::Error;
};

}  // namespace tw
