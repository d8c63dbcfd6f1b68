/* transcribe_c CHECKPOINT AUDIO: the text as it is produced, then the segments' times. */

#include <stdio.h>

#include "tilewave/tilewave.h"

static int32_t print(void* user, const char* text, size_t bytes) {
  (void)user;
  fwrite(text, 1, bytes, stdout);
  fflush(stdout);
  return 0; /* go on */
}

static int fail(void) {
  fprintf(stderr, "transcribe_c: %s\n", tw_last_error());
  return 1;
}

int main(int argc, char** argv) {
  tw_transcriber* transcriber = NULL;
  tw_transcript* transcript = NULL;
  tw_transcribe_options options = {sizeof options};
  size_t i;
  if (argc != 3) {
    fprintf(stderr, "usage: transcribe_c CHECKPOINT AUDIO\n");
    return 2;
  }
  options.on_text = print;
  if (tw_transcriber_load(argv[1], NULL, &transcriber) != TW_OK) return fail();
  if (tw_transcribe_file(transcriber, argv[2], &options, &transcript) != TW_OK) return fail();
  printf("\n");
  for (i = 0; i < tw_transcript_segment_count(transcript); ++i) {
    tw_transcript_segment segment = {sizeof segment};
    if (tw_transcript_segment_at(transcript, i, &segment) != TW_OK) return fail();
    printf("%7.2f to %7.2f s: %s\n", segment.begin, segment.end, segment.text);
  }
  tw_transcript_free(transcript);
  tw_transcriber_free(transcriber);
  return 0;
}
