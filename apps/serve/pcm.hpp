#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tw::serve {

enum class PcmFormat {
  pcm16,      ///< 16 bits, little-endian
  g711_ulaw,  ///< 8 bits: ITU-T G.711, mu-law
  g711_alaw   ///< the same, A-law
};

/// Samples in [-1, 1] from raw mono audio. Throws ApiError 400, which names `field`, for half a sample.
std::vector<float> decode_pcm(std::string_view bytes, PcmFormat format, const std::string& field);

}  // namespace tw::serve
