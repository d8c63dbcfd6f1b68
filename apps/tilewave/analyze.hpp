#pragma once

#include <string>

#include "tilewave/analyze.hpp"

namespace tw::cli {

/// The model of a device by name: H200, A100 and 4090 from their data sheets, cpu by measuring for a few tenths of a second. Throws
/// InvalidArgument for any other name.
DeviceModel named_device_model(const std::string& name);

}  // namespace tw::cli
