#pragma once

#include <string_view>

#include "tilewave/launch.hpp"

namespace tw::detail {

/// Throws InvalidArgument unless the module's default-constructed Params, `unbound`, have their Globals where the host's have them, of the
/// same types.
void require_layout(const ParamsUnderConstruction& params, std::string_view unbound);

/// Makes the tensor maps of what was bound, in the boxes that `unbound` says.
void make_maps(const GpuBinder& binder, const ParamsUnderConstruction& params, std::string_view unbound);

}  // namespace tw::detail
