#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/device.hpp"
#include "tilewave/dtype.hpp"
#include "tilewave/error.hpp"
#include "tilewave/f32_products.hpp"
#include "tilewave/quantized.hpp"

// Speech to text with GLM-ASR checkpoints, in the library tilewave_speech.

namespace tw::speech {

/// The audio of a file (WAV, FLAC, OGG, Opus, MP3): mono samples at 16 kHz, in about [-1, 1]. Throws FileError, whose message begins with
/// the file's name.
std::vector<float> read_audio(const std::string& file);
/// The same for an open file from its current position, or for a pipe such as standard input. A pipe is decoded as it arrives (WAV, FLAC)
/// or goes through an unnamed temporary file (OGG, Opus, MP3). Messages begin with `name`.
std::vector<float> read_audio_stream(int descriptor, const std::string& name);
/// The same for a file's bytes. Messages begin with `name`.
std::vector<float> read_audio(std::string_view bytes, const std::string& name);

/// Mono samples at 16 kHz from samples at `rate` Hz, 1000 to 768000, with soxr at high quality. Throws InvalidArgument for another rate and
/// for samples that are not finite.
std::vector<float> resample(std::span<const float> samples, int rate);

struct LoadOptions {
  Device device = Device::cpu();
  /// Type of weights and activations: f32, bf16 or f16 (accumulation is always f32). Default: f32 on the CPU; on a GPU the checkpoint's,
  /// with bf16 for f32.
  std::optional<DType> dtype = {};
  /// Rounds the weights of the linear layers of encoder, projector and decoder to fewer bits while they are loaded; the head of the decoder
  /// to int8 where layers are in int4. Norms, biases, embeddings (also as a head) and convolutions stay in `dtype`. A checkpoint that
  /// convert_checkpoint() wrote needs no option, and allows only its own layout.
  QuantizedMatrix::Layout weights = {.format = WeightFormat::plain};
  F32Products f32_products = F32Products::tf32;  ///< how a GPU multiplies in f32
  /// Called while weights are read, with the bytes done and the total.
  std::function<void(std::int64_t done, std::int64_t all)> progress = {};
  /// Of a model in GGUF files: the one with the audio encoder.
  std::filesystem::path mmproj = {};
  /// Called while GPU kernels are compiled that neither the cache nor a pack has, with the number done and the total. This happens while
  /// the weights are read, so the calls come from another thread, but never two callbacks at the same time.
  std::function<void(std::size_t done, std::size_t all)> compile_progress = {};
};

/// Writes the checkpoint in `directory` to the new directory `result`, with the weights of linear layers rounded as LoadOptions::weights
/// says. config.json says what was done, SHA256SUMS has the checksums, and all other files that are not weights are copied. The result
/// appears under its name when it is complete. `progress`, if any, is called with the bytes read so far and the total. Throws FileError if
/// the checkpoint cannot be read or the result exists or cannot be written, InvalidArgument for a layout that does not fit.
void convert_checkpoint(const std::filesystem::path& directory, const std::filesystem::path& result, const QuantizedMatrix::Layout& layout,
                        const std::function<void(std::int64_t done, std::int64_t all)>& progress = {});

enum class Segmentation {
  automatic,  ///< cuts audio at silences into segments of at most 30 s, or the checkpoint's limit, and transcribes them separately; skips
              ///< silence
  vad,        ///< the same, but keeps what voice activity detection takes for speech (voice_activity.hpp): better in noise
  none        ///< windows of 30 s in one prompt, as in the reference implementation; the model's context limits the length
};

struct TranscribeOptions {
  Segmentation segmentation = Segmentation::automatic;
  std::string prompt = {};   ///< replaces the checkpoint's; special tokens in it are treated as text
  int max_new_tokens = 500;  ///< per segment
  double temperature = 0;    ///< 0: greedy; otherwise scores are divided by it. At most 100
  double top_p = 1;          ///< with a temperature: only the likeliest tokens that together have this probability
  std::uint64_t seed = 0;    ///< with a temperature: the same seed gives the same text
  int batch = 8;             ///< segments per batch, 1 to 16; does not change the text (in f32, exactly)
  bool ignore_end = false;   ///< always generate max_new_tokens; for benchmarks
  bool logprobs = false;     ///< fill TranscriptSegment::logprobs and ::token_texts
  /// Called with each piece of text as it is produced: files and segments in order, whole characters. The pieces of a file together are its
  /// text.
  std::function<void(std::size_t file, std::string_view text)> on_text = {};
  /// Called as segments finish, with the seconds of audio done, including silence, and the total.
  std::function<void(double done, double all)> on_progress = {};
  /// After a stop request transcribe() throws Cancelled, at the next token or the next stage.
  std::stop_token cancel = {};
};

struct TranscriptSegment {
  double begin = 0, end = 0;  ///< seconds
  std::string text;
  std::vector<int> tokens;  ///< without the end token
  /// With TranscribeOptions::logprobs, for each token: the natural logarithm of its probability at temperature 1, and the text that it
  /// completes, in whole characters.
  std::vector<float> logprobs = {};
  std::vector<std::string> token_texts = {};
  bool truncated = false;   ///< ended by max_new_tokens or the model's context, not by the model
  bool repetition = false;  ///< ended because the model repeated itself endlessly
};

/// Seconds spent in the stages. Files in the same batch share them.
struct Timings {
  double features = 0;  ///< segmentation and log-mel
  double encoder = 0;   ///< and projector
  double prefill = 0;
  double decode = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t decode_steps = 0;  ///< each of a whole batch
};

struct Transcript {
  std::string text;  ///< the segments' texts, joined by spaces
  std::vector<TranscriptSegment> segments;
  double duration = 0;  ///< seconds of audio
  bool truncated = false;
  std::int64_t prompt_tokens = 0;  ///< of all segments
  std::int64_t audio_tokens = 0;   ///< those of them that stand for audio
};

struct Transcripts {
  std::vector<Transcript> files;
  Timings timings;
};

/// transcribe() was stopped through TranscribeOptions::cancel.
class Cancelled : public Error {
 public:
  using Error::Error;
};

/// Memory and work of a model, computed from its shapes.
struct ModelSize {
  std::int64_t weight_bytes = 0;  ///< all weights, as loaded
  std::int64_t decode_bytes = 0;  ///< the weights that each decoding step reads
  std::int64_t cache_bytes = 0;   ///< keys and values of one token
  double encoder_flops = 0;       ///< of a window of 30 s, products only, a multiply-add counting twice
  double decode_flops = 0;        ///< of a token through the decoder and its head, likewise
};

/// A loaded model. Load it once; transcribe() may be called from any thread, and runs one call at a time. Throws Error if it is called from
/// a callback of another call on the same object, because it would deadlock.
class Transcriber {
 public:
  /// Loads the checkpoint `model`. This is a directory with config.json, processor_config.json, tokenizer.json, model.safetensors and so
  /// on, as published; or, with options.mmproj, a GGUF file as llama.cpp publishes it: docs/transcribe.md. Throws FileError for files that
  /// are missing, damaged, of another architecture or contradict each other; InvalidArgument for options that do not fit; OutOfMemory,
  /// DeviceError, CompileError.
  explicit Transcriber(const std::filesystem::path& model, const LoadOptions& options = {});
  ~Transcriber();
  Transcriber(Transcriber&&) noexcept;
  Transcriber& operator=(Transcriber&&) noexcept;

  /// Transcribes mono audio at 16 kHz. Throws InvalidArgument for options out of range, samples that are not finite, and audio that does
  /// not fit the model's context (Segmentation::none); Cancelled; Error, which names the stage, if the model computes scores that are NaN
  /// or infinite.
  Transcript transcribe(std::span<const float> samples, const TranscribeOptions& options = {}) const;
  /// The same for several files: their segments are batched.
  Transcripts transcribe(std::span<const std::span<const float>> files, const TranscribeOptions& options = {}) const;

  const LoadOptions& options() const;  ///< device, dtype and weights as chosen
  ModelSize size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tw::speech
