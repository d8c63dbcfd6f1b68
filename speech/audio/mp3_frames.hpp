#pragma once

#include <string>

#include "speech/audio/bytes.hpp"

namespace tw::speech {

/// Throws FileError, which begins with `name`, if an MP3 file was cut short: its last frame is incomplete, or it has fewer frames than its
/// Xing, Info or VBRI header says (by two or more: encoders differ in whether they count the header's own frame). Without such a header a
/// file that was cut between two frames cannot be told from a complete one. Tags and garbage between frames are skipped.
void check_mp3_frames(Bytes& file, const std::string& name);

}  // namespace tw::speech
