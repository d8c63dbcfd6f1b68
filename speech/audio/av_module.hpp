#pragma once

#include <functional>
#include <span>
#include <string>

#include "speech/audio/bytes.hpp"

namespace tw::speech {

/// Why libtilewave_av.so cannot be loaded; empty if it can. It is looked for beside this library or program, in the folder above, in
/// ../lib, and where the loader looks.
const std::string& av_module_problem();

/// Decodes a file through that module, which must be there. `take` gets interleaved samples, their number of channels and their rate. What
/// it throws passes through. Returns false for a container that is not read. Throws FileError, which begins with `name`, if the file cannot
/// be decoded. The size of `bytes` must be known.
bool decode_with_av(Bytes& bytes, const std::string& name,
                    const std::function<void(std::span<const float> samples, int channels, int rate)>& take);

}  // namespace tw::speech
