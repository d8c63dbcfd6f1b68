#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/decode_graphs.hpp"
#include "models/kv_cache.hpp"
#include "speech/glm_asr/model.hpp"
#include "speech/text_stream.hpp"
#include "tilewave/speech_engine.hpp"

namespace tw::speech {

/// A piece of audio that becomes one prompt.
struct Item {
  std::size_t file;
  std::size_t segment;  ///< in the file's transcript
  std::span<const float> samples;
  int prompt_tokens;
};

/// Recordings that belong together: their text is passed on in order. Job::prepare() makes one, on any thread.
struct Job {
  using Clock = std::chrono::steady_clock;

  TranscribeOptions options;
  std::uint64_t client = 0;
  /// Called once; the error is null if the transcripts are complete.
  std::function<void(Job& job, std::exception_ptr error)> on_done;
  std::vector<Item> items;
  std::vector<Transcript> files;
  int most_tokens = 0;  ///< in the cache of its longest item, at most

  std::size_t selected = 0;      ///< items whose processing has begun
  Clock::time_point begun = {};  ///< when that of the first has
  Clock::time_point first_text = {};

  /// Cuts `recordings`, which must outlive the job, into items. Throws InvalidArgument for samples that are not finite, and for audio whose
  /// prompt leaves no room in the model's context.
  static std::unique_ptr<Job> prepare(const GlmAsr& model, std::span<const std::span<const float>> recordings,
                                      const TranscribeOptions& options);

 private:
  friend class Scheduler;
  std::vector<TextStream> streams_;  ///< of the files
  std::vector<double> begins_;       ///< of the files, in seconds of all audio, which progress counts
  double seconds_ = 0;
  std::size_t front_ = 0;             ///< the first item whose text is not complete
  std::vector<std::string> pending_;  ///< of each item: text that is passed on after the items before it
  std::vector<bool> done_;
};

/// The number of windows to encode together. On the CPU one at a time uses the caches best.
inline int encoder_windows(Device device) { return device.is_cuda() ? 8 : 1; }

/// Tokens of prompts to process between two decoding steps. A GPU takes one long product for less than several short ones.
inline int prefill_tokens(Device device) { return device.is_cuda() ? 4096 : 1024; }

/// Continuous batching of jobs. One thread at a time.
class Scheduler {
 public:
  struct Options {
    int batch = 16;
    int windows = 1;  ///< encoded together
    int prefill_tokens = 1024;
    bool prompts_together = false;  ///< prompts of similar lengths; their sums may differ from those of one alone
    std::function<void(EngineStage, double, int)> on_stage = {};
  };

  /// `pool` holds the keys and values of all sequences.
  Scheduler(const GlmAsr& model, const LoadOptions& loaded, const Stream& stream, std::shared_ptr<models::KvPool> pool,
            const Options& options);
  ~Scheduler();

  /// Throws InvalidArgument for a job that the pool cannot hold.
  void require_room(const Job& job) const;
  /// The job's on_done is called by a step().
  Job* add(std::unique_ptr<Job> job);
  /// Ends a job with `error`, at once.
  void end(Job* job, std::exception_ptr error);

  /// Returns whether there is more to do.
  bool step();

  std::size_t waiting() const;  ///< jobs of which nothing was processed yet
  std::size_t jobs() const { return jobs_.size(); }
  std::size_t sequences() const { return running_.size(); }
  const Timings& timings() const { return timings_; }

 private:
  struct Sequence;
  using Sequences = std::vector<std::unique_ptr<Sequence>>;

  void stop_cancelled();
  void select();
  void encode();
  void prefill();
  std::vector<Sequence*> next_prompts(int tokens);
  void decode();
  std::vector<int> draw(const Tensor& logits, std::span<Sequence* const> rows);
  void accept(Sequence& sequence, int id);
  void emit(Job& job);
  void finish(std::span<Job* const> jobs, const std::map<Job*, std::exception_ptr>& failed);
  Job* next_job();
  bool safe(const Sequence* growing, int pages) const;
  std::exception_ptr not_finite(const Sequence& sequence, const std::string& stage) const;
  void end_all(std::span<Sequence* const> sequences, std::exception_ptr error);
  void note(EngineStage stage, double& sum, std::chrono::steady_clock::time_point begin, int count);

  const GlmAsr& model_;
  const LoadOptions& loaded_;
  const Stream& stream_;
  std::shared_ptr<models::KvPool> pool_;
  models::DecodeGraphs graphs_;
  Options options_;
  std::list<std::unique_ptr<Job>> jobs_;    ///< in the order of add()
  std::map<std::uint64_t, double> shares_;  ///< seconds of audio of each client with a job; the client with the fewest is next
  Sequences encoding_;                      ///< selected, not all windows encoded
  Sequences ready_;                         ///< encoded, the prompt not processed
  Sequences running_;                       ///< in the decoding batch, the oldest first
  Timings timings_;
};

}  // namespace tw::speech
