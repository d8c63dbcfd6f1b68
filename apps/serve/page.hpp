#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "apps/serve/http.hpp"

namespace tw::serve {

/// The page of the server, page/index.html, which is embedded in the program.
std::string_view page_text();

/// GET /: the page, with a Content-Security-Policy that allows its own script and style alone.
Handler page_handler();

/// GET /samples: the recordings that transcripts.txt in `directory` lists, as [{"name": ..., "text": ...}]; [] if there is no such file.
/// GET /samples/NAME: one of them.
Handler samples_handler(const std::filesystem::path& directory);

}  // namespace tw::serve
