#pragma once

#include <optional>
#include <string_view>

#include "tilewave/kernel.hpp"

namespace tw {

/// Name of the constant that every generated program defines: a tw::Module.
inline constexpr const char* kModuleSymbol = "tilewave_module";

/// Reads the constant from a cubin, which is an ELF file. Needs no GPU. Nothing if the file is damaged or has no such constant.
std::optional<ModuleInfo> read_module(std::string_view cubin);

}  // namespace tw
