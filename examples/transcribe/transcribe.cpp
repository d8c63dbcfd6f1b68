// transcribe CHECKPOINT AUDIO...: prints the text of each recording with its times.

#include <cstdio>
#include <exception>
#include <vector>

#include "tilewave/speech.hpp"

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: transcribe CHECKPOINT AUDIO...\n");
    return 2;
  }
  try {
    const tw::speech::Transcriber transcriber(argv[1], {.device = tw::best_device()});
    for (int i = 2; i < argc; ++i) {
      const std::vector<float> samples = tw::speech::read_audio(argv[i]);  // mono, 16 kHz
      const tw::speech::Transcript transcript = transcriber.transcribe(samples);
      for (const tw::speech::TranscriptSegment& segment : transcript.segments)
        std::printf("%7.2f to %7.2f s: %s\n", segment.begin, segment.end, segment.text.c_str());
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "transcribe: %s\n", error.what());
    return 1;
  }
}
