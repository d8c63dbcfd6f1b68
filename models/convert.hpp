#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "models/safetensors.hpp"
#include "tilewave/quantized.hpp"

namespace tw::models {

/// Writes all tensors of `files` to one safetensors file: those in `layouts`, by name, in fewer bits, as Weights::set_layouts() says, and
/// the others as they are. Returns the file's SHA-256 in hexadecimal digits. `progress`, if any, is called with the bytes read so far and
/// the total. Needs memory for one tensor in f32. Throws FileError if the file cannot be written or a weight cannot be rounded.
std::string write_quantized(const SafeTensors& files, const std::map<std::string, QuantizedMatrix::Layout>& layouts,
                            const std::filesystem::path& file, const std::function<void(std::int64_t, std::int64_t)>& progress);

}  // namespace tw::models
