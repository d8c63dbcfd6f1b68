#pragma once

// Compiled kernels on disk: one file each, named after the hash of all its inputs.

#include <optional>
#include <string>
#include <string_view>

#include "tilewave/kernel.hpp"

namespace tw {

// An entry's checksum detects accidents only: anyone who can write to the folder controls what runs on the GPU. So each user has a private
// cache folder. To share kernels, users share a pack, a folder that only its owner can write.

/// Why the cache's folder `path` must not be used: another user owns it (other than root), or others can write it. Empty if it may be used,
/// or does not exist yet.
std::string folder_problem(const std::string& path);

/// cache_directory(), or the folder `below` in it. Created if it is missing, for this user only. Empty, with the reason, if it cannot be or
/// must not be used.
std::string cache_folder(const std::string& below, std::string* problem = nullptr);

/// Removes the temporary files of killed processes, those over an hour old, from a folder of entries or tuned choices.
void remove_stale_files(const std::string& folder);

/// Encodes an entry's file, and decodes it: nothing if it is damaged or belongs to another key.
std::string encode_entry(const std::string& key, const CompiledKernel& kernel);
std::optional<CompiledKernel> decode_entry(const std::string& key, std::string_view bytes);

/// Reads an entry of `folder`. Nothing if it is missing, damaged, or belongs to another key; the caller then compiles again.
std::optional<CompiledKernel> read_entry(const std::string& folder, const std::string& key);

/// Writes an entry atomically: a reader in any process sees all of it or none. Returns false on failure, with the reason in `problem` and
/// no file left.
bool write_entry(const std::string& folder, const std::string& key, const CompiledKernel& kernel, std::string* problem = nullptr);

/// The read-only folders of compiled kernels: $TILEWAVE_PACK, then share/tilewave/kernels next to the folder of the shared library, or of
/// the program that it is linked into: PREFIX/share/tilewave/kernels for PREFIX/lib/libtilewave.so and PREFIX/bin/tilewave.
std::vector<std::string> pack_directories();

}  // namespace tw
