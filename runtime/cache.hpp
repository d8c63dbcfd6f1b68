#pragma once

// Compiled kernels on disk: one file each, named after the hash of all that it was compiled from.

#include <optional>
#include <string>

#include "tilewave/kernel.hpp"

namespace tw {

/// Reads an entry of `folder`. Nothing if it is not there, damaged, or belongs to another key: the caller compiles again.
std::optional<CompiledKernel> read_entry(const std::string& folder, const std::string& key);

/// Writes an entry so that a reader, also one in another process, sees all of it or none. On failure nothing is left behind, the reason is
/// in `problem` and the result is false.
bool write_entry(const std::string& folder, const std::string& key, const CompiledKernel& kernel, std::string* problem = nullptr);

/// The folders of compiled kernels that are only read: $TILEWAVE_PACK, then share/tilewave/kernels beside the folder of the shared library,
/// or of the program that it is linked into: PREFIX/share/tilewave/kernels for PREFIX/lib/libtilewave.so and PREFIX/bin/tilewave.
std::vector<std::string> pack_directories();

}  // namespace tw
