#pragma once

#include <string>

#include "tilewave/analyze.hpp"

namespace tw::cli {

/// The device that the user names: H200, A100, 4090 by their data sheets; cpu by a measurement of a few tenths of a second. Throws
/// InvalidArgument for any other name.
DeviceModel named_device_model(const std::string& name);

}  // namespace tw::cli
