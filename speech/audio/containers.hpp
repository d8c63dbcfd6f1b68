#pragma once

#include <string>

#include "speech/audio/bytes.hpp"

namespace tw::speech {

// Throw FileError, which begins with `name`, if a file was cut short, which FFmpeg's readers pass over in silence, or if its outermost
// structure is damaged.

/// MP4, m4a, MOV (ISO 14496-12): a box goes on after the end of the file, or there is no index.
void check_mp4_boxes(Bytes& file, const std::string& name);
/// Matroska, WebM (RFC 9559): an element goes on after the end of the file. A recording by a browser has clusters of unknown size, which
/// are looked into.
void check_matroska_elements(Bytes& file, const std::string& name);
/// AAC in ADTS (ISO 14496-3): the last frame goes on after the end of the file.
void check_adts_frames(Bytes& file, const std::string& name);

}  // namespace tw::speech
