#pragma once

// Compiled kernels on disk: one file each, named after the hash of all that it was compiled from.

#include <optional>
#include <string>
#include <string_view>

#include "tilewave/kernel.hpp"

namespace tw {

// An entry's checksum is against accidents: whoever can write the folder decides what runs on the GPU. So the cache is a folder of the
// user's own, and users share a pack instead, a folder that only its maker can write.

/// Why the cache's folder `path` must not be used: another user owns it (other than root), or others can write it. Empty if it may be used,
/// also when it does not exist yet.
std::string folder_problem(const std::string& path);

/// cache_directory(), or the folder `below` in it. Created if it is missing, for this user only. Empty, with the reason, if it cannot be or
/// must not be used.
std::string cache_folder(const std::string& below, std::string* problem = nullptr);

/// Removes what processes that were killed left in a folder of entries or tuned choices: temporary files over an hour old.
void remove_stale_files(const std::string& folder);

/// The bytes of an entry's file, and what they hold: nothing if they are damaged or belong to another key.
std::string encode_entry(const std::string& key, const CompiledKernel& kernel);
std::optional<CompiledKernel> decode_entry(const std::string& key, std::string_view bytes);

/// Reads an entry of `folder`. Nothing if it is not there, damaged, or belongs to another key: the caller compiles again.
std::optional<CompiledKernel> read_entry(const std::string& folder, const std::string& key);

/// Writes an entry so that a reader, also one in another process, sees all of it or none. On failure nothing is left behind, the reason is
/// in `problem` and the result is false.
bool write_entry(const std::string& folder, const std::string& key, const CompiledKernel& kernel, std::string* problem = nullptr);

/// The folders of compiled kernels that are only read: $TILEWAVE_PACK, then share/tilewave/kernels beside the folder of the shared library,
/// or of the program that it is linked into: PREFIX/share/tilewave/kernels for PREFIX/lib/libtilewave.so and PREFIX/bin/tilewave.
std::vector<std::string> pack_directories();

}  // namespace tw
