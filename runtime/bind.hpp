#pragma once

#include <string_view>

#include "tilewave/launch.hpp"

namespace tw::detail {

/// Throws InvalidArgument unless the Globals in `unbound`, the module's default-constructed Params, have the same offsets and types as on
/// the host.
void require_layout(const ParamsUnderConstruction& params, std::string_view unbound);

/// Makes the tensor maps of the bound tensors, with the boxes in `unbound`.
void make_maps(const GpuBinder& binder, const ParamsUnderConstruction& params, std::string_view unbound);

}  // namespace tw::detail
