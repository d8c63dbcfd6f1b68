#pragma once

#include <filesystem>
#include <vector>

#include "apps/serve/server.hpp"

namespace tw::serve {

/// All that the server answers. `samples`: the folder of the bundled recordings; it need not exist.
std::vector<Route> routes(Service& service, const std::filesystem::path& samples);

}  // namespace tw::serve
