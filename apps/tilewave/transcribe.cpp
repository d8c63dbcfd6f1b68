// tilewave transcribe

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "apps/tilewave/subtitles.hpp"
#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "command.hpp"
#include "runtime/files.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"

namespace tw::cli {

namespace fs = std::filesystem;

std::string default_model() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  // Installed, or in the folder that the project is built in.
  for (const char* place : {"../share/tilewave/models/digits", "../assets/digits"}) {
    const fs::path directory = (program.parent_path() / place).lexically_normal();
    if (fs::exists(directory / "config.json", error)) return directory.string();
  }
  throw Error(tw::format("--model is not given, and there is no bundled checkpoint next to {}", program.string()));
}

void add_model_options(CLI::App& command, ModelArguments& a) {
  command
      .add_option("--model", a.model,
                  "Directory of a GLM-ASR checkpoint, or a GGUF file with --mmproj; default: the bundled one, which knows spoken English "
                  "digits")
      ->type_name("DIR|FILE");
  command.add_option("--mmproj", a.mmproj, "The GGUF file with the audio encoder of a model in GGUF files")->type_name("FILE");
  add_device_option(command, a.device);
  command.add_option("--dtype", a.dtype, "auto, f32, bf16 or f16; auto: f32 on the CPU, the checkpoint's type on a GPU")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "f16"}))
      ->capture_default_str();
  completes_with(command
                     .add_option("--weights", a.weights,
                                 "Round the weights of linear layers to int8, fp8, or int4 (in groups of 32; int4:128, and :zeros after "
                                 "either, for zero points); default: as the checkpoint has them")
                     ->type_name("FORMAT"),
                 weight_formats);
  command
      .add_option("--f32-products", a.f32_products, "tf32 or exact: how a GPU multiplies with --dtype f32; exact is several times slower")
      ->check(CLI::IsMember({"tf32", "exact"}))
      ->capture_default_str();
  command.add_option("--threads", a.threads, "CPU threads; default: all cores that the process may use")->check(CLI::Range(1, 1024));
}

speech::LoadOptions load_options(const ModelArguments& a) {
  speech::LoadOptions options;
  if (a.threads > 0) set_cpu_threads(a.threads);
  std::error_code ignored;
  if (!a.mmproj.empty() && (a.model.empty() || fs::is_directory(a.model, ignored)))
    throw UsageError(tw::format("--mmproj needs --model with a GGUF file, not {}", a.model.empty() ? "the bundled checkpoint" : a.model));
  if (a.mmproj.empty() && fs::path(a.model).extension() == ".gguf" && !fs::is_directory(a.model, ignored))
    throw UsageError(tw::format("--model {} needs --mmproj with the GGUF file of its audio encoder", a.model));
  options.mmproj = a.mmproj;
  try {
    options.device = Device::parse(a.device);
    if (a.dtype != "auto") options.dtype = parse_dtype(a.dtype);
    options.weights = parse_weight_layout(a.weights);
    if (a.f32_products == "exact") options.f32_products = F32Products::exact;
  } catch (const InvalidArgument& error) {
    throw UsageError(error.what());
  }
  return options;
}

namespace {

using Clock = std::chrono::steady_clock;
using speech::Transcript;
using speech::TranscriptSegment;

struct TranscribeArguments {
  ModelArguments model;
  std::string format = "text", output, segment = "auto";
  bool json = false, quiet = false;
  speech::TranscribeOptions options;
  std::vector<std::string> files;
};

nlohmann::ordered_json to_json(const std::string& file, const Transcript& transcript, const speech::Timings& timings, double load_seconds,
                               const std::string& model, const speech::LoadOptions& loaded) {
  nlohmann::ordered_json segments = nlohmann::ordered_json::array();
  for (const TranscriptSegment& s : transcript.segments)
    segments.push_back({{"begin", s.begin},
                        {"end", s.end},
                        {"text", s.text},
                        {"tokens", s.tokens},
                        {"truncated", s.truncated},
                        {"repetition", s.repetition}});
  return {{"file", file},
          {"text", transcript.text},
          {"duration", transcript.duration},
          {"truncated", transcript.truncated},
          {"segments", std::move(segments)},
          {"seconds",
           {{"load", load_seconds},
            {"features", timings.features},
            {"encoder", timings.encoder},
            {"prefill", timings.prefill},
            {"decode", timings.decode}}},
          {"model", model},
          {"device", loaded.device.name()},
          {"dtype", name_of(*loaded.dtype)},
          {"weights", text_of(loaded.weights)}};
}

std::string extension(const std::string& format) { return format == "text" ? "txt" : format; }

bool output_is_directory(const TranscribeArguments& a) {
  std::error_code error;
  return a.files.size() > 1 || a.output.ends_with('/') || fs::is_directory(a.output, error);
}

/// The format that the suffix of a single output file implies.
std::string implied_format(const TranscribeArguments& a) {
  std::string suffix = fs::path(a.output).extension().string();
  std::transform(suffix.begin(), suffix.end(), suffix.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const bool known = suffix == ".srt" || suffix == ".vtt" || suffix == ".json";
  return known && !output_is_directory(a) ? suffix.substr(1) : "text";
}

/// The output path of each file's transcript; empty: standard output.
std::vector<std::string> output_paths(const TranscribeArguments& a) {
  std::vector<std::string> paths(a.files.size());
  if (a.output.empty()) return paths;
  if (!output_is_directory(a)) return {a.output};
  std::error_code error;
  if (fs::exists(a.output, error) && !fs::is_directory(a.output, error))
    throw UsageError(tw::format("transcribe: --output {} is a file; with several recordings it must be a directory", a.output));
  std::set<std::string> taken;
  for (std::size_t i = 0; i < a.files.size(); ++i) {
    const std::string stem = a.files[i] == "-" ? "stdin" : fs::path(a.files[i]).stem().string();
    paths[i] = (fs::path(a.output) / tw::format("{}.{}", stem, extension(a.format))).string();
    if (!taken.insert(paths[i]).second)
      throw UsageError(tw::format("transcribe: two recordings would be written to {}; transcribe them separately", paths[i]));
  }
  return paths;
}

/// Throws UsageError if a transcript would overwrite a recording, even under another name.
void require_separate(const std::vector<std::string>& recordings, const std::vector<std::string>& outputs) {
  const auto status_of = [](const std::string& path, const std::string& standard, int descriptor) {
    struct stat status {};
    const int failed = path == standard ? fstat(descriptor, &status) : stat(path.c_str(), &status);
    // A terminal may be both.
    const bool is_file = failed == 0 && !S_ISCHR(status.st_mode) && !S_ISSOCK(status.st_mode);
    return is_file ? std::optional(std::pair(status.st_dev, status.st_ino)) : std::nullopt;
  };
  std::map<std::pair<dev_t, ino_t>, std::string> read;
  for (const std::string& recording : recordings)
    if (const auto file = status_of(recording, "-", STDIN_FILENO)) read.emplace(*file, recording == "-" ? "on standard input" : recording);
  for (const std::string& output : outputs) {
    const auto file = status_of(output, "", STDOUT_FILENO);
    if (!file || !read.contains(*file)) continue;
    throw UsageError(tw::format("transcribe: {} would overwrite the recording {}: they are the same file",
                                output.empty() ? "standard output" : "--output " + output, read.at(*file)));
  }
}

std::vector<float> read(const std::string& file) {
  return file == "-" ? speech::read_audio_stream(STDIN_FILENO, "standard input") : speech::read_audio(file);
}

/// Recordings that are transcribed together.
struct Group {
  std::vector<std::size_t> files;  ///< indices into the arguments
  std::vector<std::vector<float>> samples;
  double seconds = 0;
};

class Job {
 public:
  explicit Job(TranscribeArguments& arguments)
      : a_(arguments), paths_(output_paths(arguments)), screen_(arguments.quiet ? Screen::Progress::hidden : Screen::Progress::shown) {
    require_separate(a_.files, paths_);
  }

  int run() {
    const auto begin = Clock::now();
    model_ = a_.model.model.empty() ? default_model() : a_.model.model;
    speech::LoadOptions options = load_options(a_.model);
    if (a_.model.model.empty() && !a_.quiet) screen_.message(kBundledModelNote);
    if (output_is_directory(a_) && !a_.output.empty()) {
      std::error_code error;
      fs::create_directories(a_.output, error);
      if (error) throw Error(tw::format("{}: {}", a_.output, error.message()));
    }
    options.progress = [&](std::int64_t done, std::int64_t all) {
      const bool report = done / kProgressBytes != reported_ / kProgressBytes || done == all;
      reported_ = done;
      if (!report) return;
      const auto text = [](std::int64_t bytes) { return bytes_text(static_cast<std::size_t>(bytes)); };
      loading_ = done < all ? tw::format("loading {}: {} of {}", model_, text(done), text(all)) : "";
      show_load_progress();
    };
    options.compile_progress = [&](std::size_t done, std::size_t all) {
      compiling_ = done < all ? tw::format("compiling {} of {} kernels", done + 1, all) : "";
      show_load_progress();
    };
    const speech::Transcriber transcriber(model_, options);
    screen_.clear_progress();
    load_seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();

    Group group;
    for (std::size_t i = 0; i < a_.files.size(); ++i) {
      try {
        group.samples.push_back(read(a_.files[i]));
      } catch (const Error& error) {
        complain(error.what());
        continue;
      }
      group.files.push_back(i);
      group.seconds += static_cast<double>(group.samples.back().size()) / 16000;
      // A recording in one prompt may be too long for the model. The others must not fail with it.
      const bool alone = a_.options.segmentation == speech::Segmentation::none;
      if (alone || group.seconds >= 30.0 * a_.options.batch) finish(transcriber, std::exchange(group, {}));
    }
    finish(transcriber, group);
    return failed_ ? kFailure : kOk;
  }

 private:
  static constexpr std::int64_t kProgressBytes = 64 << 20;
  static constexpr const char* kBundledModelNote =
      "tilewave: no --model: the bundled checkpoint knows spoken English digits only. For other speech: hf download "
      "zai-org/GLM-ASR-Nano-2512 --local-dir glm-asr-nano, then --model glm-asr-nano";

  void show_load_progress() {
    if (const std::string line = compiling_ + (compiling_.empty() || loading_.empty() ? "" : ", ") + loading_; !line.empty())
      screen_.progress(line);
    else
      screen_.clear_progress();
  }

  void complain(const std::string& message) {
    screen_.message(tw::format("tilewave: {}", message));
    failed_ = true;
  }

  void warn(const std::string& message) { screen_.message(tw::format("tilewave: warning: {}", message)); }

  /// Writes a whole transcript to the output of `file`.
  void write(std::size_t file, const std::string& text) {
    const std::string& path = paths_[file];
    if (path.empty()) return screen_.text(text);
    screen_.clear_progress();
    std::string problem;
    if (!write_file(path, {shown_at(path, text)}, &problem)) throw Error(problem);
  }

  /// Writes the lines of a group's texts as they are produced.
  class LiveText {
   public:
    LiveText(const Job& job, Screen& screen, const Group& group) : job_(job), screen_(screen), group_(group) {}

    void add(std::size_t file, std::string_view text) {
      end_lines(file);
      begin_line();
      if (begun_empty_) screen_.text(" ");
      begun_empty_ = false;
      screen_.text(text);
    }
    /// Ends the lines of the group's files before `file`.
    void end_lines(std::size_t file) {
      for (; current_ < file; ++current_) {
        begin_line();
        screen_.text("\n");
        begun_ = begun_empty_ = false;
      }
    }
    void end_begun_line() {
      if (begun_) end_lines(current_ + 1);
    }

   private:
    void begin_line() {
      if (std::exchange(begun_, true) || job_.a_.files.size() == 1) return;
      screen_.text(shown_line(stdout, job_.a_.files[group_.files[current_]]) + ":");
      begun_empty_ = true;
    }

    const Job& job_;
    Screen& screen_;
    const Group& group_;
    std::size_t current_ = 0;   ///< index into the group's files
    bool begun_ = false;        ///< its line has begun
    bool begun_empty_ = false;  ///< and contains only the name
  };

  void show_progress(const Group& group, Clock::time_point begin, double done, double all) {
    const double elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
    std::string line = tw::format("{:.0f} of {:.0f} s", done, all);
    if (done > 0) line += tw::format(", {:.1f} times real time", done / std::max(elapsed, 1e-9));
    if (a_.files.size() > 1)
      line += tw::format(", recordings {} to {} of {}", group.files.front() + 1, group.files.back() + 1, a_.files.size());
    screen_.progress(line);
  }

  void finish(const speech::Transcriber& transcriber, const Group& group) {
    if (group.files.empty()) return;
    const auto begin = Clock::now();
    speech::TranscribeOptions options = a_.options;
    const bool live = a_.format == "text" && a_.output.empty();
    LiveText text(*this, screen_, group);
    if (live) options.on_text = [&](std::size_t file, std::string_view added) { text.add(file, added); };
    options.on_progress = [&](double done, double all) { show_progress(group, begin, done, all); };
    show_progress(group, begin, 0, group.seconds);
    std::vector<std::span<const float>> spans(group.samples.begin(), group.samples.end());
    speech::Transcripts result;
    try {
      result = transcriber.transcribe(spans, options);
    } catch (const InvalidArgument& error) {
      text.end_begun_line();
      for (const std::size_t file : group.files) complain(tw::format("{}: {}", a_.files[file], error.what()));
      return;
    }
    screen_.clear_progress();
    if (live) text.end_lines(group.files.size());
    for (std::size_t i = 0; i < group.files.size(); ++i) {
      const std::string& name = a_.files[group.files[i]];
      const Transcript& transcript = result.files[i];
      for (const TranscriptSegment& s : transcript.segments) {
        if (s.truncated)
          warn(
              tw::format("{}: {:.1f} to {:.1f} s: ended by the token limit, not by the model; see --max-new-tokens", name, s.begin, s.end));
        if (s.repetition) warn(tw::format("{}: {:.1f} to {:.1f} s: the model repeats itself; stopped", name, s.begin, s.end));
      }
      if (live) continue;
      try {
        if (a_.format == "text") write(group.files[i], transcript.text + "\n");
        if (a_.format == "srt") write(group.files[i], subtitles(transcript.segments, SubtitleFormat::srt));
        if (a_.format == "vtt") write(group.files[i], subtitles(transcript.segments, SubtitleFormat::vtt));
        if (a_.format == "json")
          write(group.files[i], json_line(to_json(name, transcript, result.timings, load_seconds_, model_, transcriber.options())) + "\n");
      } catch (const Error& error) {
        complain(error.what());
      }
    }
  }

  TranscribeArguments& a_;
  std::vector<std::string> paths_;
  Screen screen_;
  std::string model_;
  std::string loading_, compiling_;  ///< what of the load goes on; empty: done
  double load_seconds_ = 0;
  std::int64_t reported_ = 0;
  bool failed_ = false;
};

}  // namespace

void add_transcribe(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("transcribe", "Turn recordings into text with a GLM-ASR checkpoint");
  static TranscribeArguments a;
  completes_with_files(command->add_option("AUDIO", a.files, "Recordings: WAV, FLAC, OGG, Opus or MP3; - is standard input")->required());
  add_model_options(*command, a.model);
  CLI::Option* format =
      command->add_option("--format", a.format, "text, json (one line per recording), srt or vtt; default: from the suffix of --output")
          ->check(CLI::IsMember({"text", "json", "srt", "vtt"}))
          ->capture_default_str();
  command->add_flag("--json", a.json, "Print JSON: --format json")->excludes(format);
  command
      ->add_option("--output", a.output,
                   "Write to a file, or for several recordings to a directory, instead of standard output. The suffixes .json, .srt and "
                   ".vtt set the format")
      ->type_name("FILE|DIR");
  command
      ->add_option(
          "--segment", a.segment,
          "auto: cut at silences, for recordings of any length; none: windows of 30 s in one prompt, as in the reference implementation")
      ->check(CLI::IsMember({"auto", "none"}))
      ->capture_default_str();
  command->add_option("--prompt", a.options.prompt, "The prompt; default: the checkpoint's")->type_name("TEXT");
  command->add_option("--max-new-tokens", a.options.max_new_tokens, "Maximum number of tokens per segment")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--temperature", a.options.temperature, "Sampling temperature; 0: greedy, always the likeliest token")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-p", a.options.top_p, "Sample from the likeliest tokens that together have this probability")
      ->capture_default_str();
  command->add_option("--seed", a.options.seed, "Seed for sampling")->check(unsigned_number())->capture_default_str();
  command->add_option("--batch", a.options.batch, "Segments per batch; does not change the text")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  command->add_flag("-q,--quiet", a.quiet, "Print only warnings and errors on standard error, no progress and no notes");
  command->footer(
      "Text appears as it is produced, one line per recording. With several recordings each line begins with the file's name.\n"
      "Subtitles have one entry per segment.");
  command->callback([&exit_code, format] {
    if (a.json) a.format = "json";
    if (!a.json && format->count() == 0) a.format = implied_format(a);
    if (a.files.size() > 1 && a.output.empty() && (a.format == "srt" || a.format == "vtt"))
      throw UsageError(tw::format("transcribe: subtitles of several recordings need --output DIR"));
    if (!(a.options.top_p > 0 && a.options.top_p <= 1)) throw UsageError("--top-p must be greater than 0 and at most 1");
    if (std::isnan(a.options.temperature)) throw UsageError("--temperature must be from 0 to 100");
    a.options.segmentation = a.segment == "none" ? speech::Segmentation::none : speech::Segmentation::automatic;
    exit_code = Job(a).run();
  });
}

}  // namespace tw::cli
