#pragma once

#include <cstddef>
#include <memory>

#include "tilewave/device.hpp"

namespace tw {

/// CPU memory that `gpu` copies from and to at its bus's full rate: page-locked, so it takes long to allocate and is best kept. Its
/// contents are undefined; null for 0 bytes. Throws OutOfMemory and DeviceError.
std::shared_ptr<void> allocate_pinned(std::size_t bytes, Device gpu);

}  // namespace tw
