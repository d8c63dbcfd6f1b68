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
#include <sstream>
#include <utility>

#include "apps/formats/confidence.hpp"
#include "apps/formats/json.hpp"
#include "apps/formats/subtitles.hpp"
#include "apps/tilewave/recordings.hpp"
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

void add_weights_option(CLI::App& command, std::string& weights) {
  completes_with(command
                     .add_option("--weights", weights,
                                 "Round the weights of linear layers to int8, fp8, or int4 (in groups of 32; int4:128, and :zeros after "
                                 "either, for zero points); default: as the checkpoint has them")
                     ->type_name("FORMAT"),
                 weight_formats);
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
  add_weights_option(command, a.weights);
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

LoadProgress::LoadProgress(Screen& screen, const std::string& model, speech::LoadOptions& options) : screen_(screen) {
  options.progress = [this, model](std::int64_t done, std::int64_t all) {
    constexpr std::int64_t kReportBytes = 64 << 20;
    const bool report = done / kReportBytes != reported_ / kReportBytes || done == all;
    reported_ = done;
    if (!report) return;
    const auto text = [](std::int64_t bytes) { return bytes_text(static_cast<std::size_t>(bytes)); };
    loading_ = done < all ? tw::format("loading {}: {} of {}", model, text(done), text(all)) : "";
    show();
  };
  options.compile_progress = [this](std::size_t done, std::size_t all) {
    compiling_ = done < all ? tw::format("compiling {} of {} kernels", done + 1, all) : "";
    show();
  };
}

void LoadProgress::show() {
  if (const std::string line = compiling_ + (compiling_.empty() || loading_.empty() ? "" : ", ") + loading_; !line.empty())
    screen_.progress(line);
  else
    screen_.clear_progress();
}

namespace {

using Clock = std::chrono::steady_clock;
using speech::Transcript;
using speech::TranscriptSegment;

struct TranscribeArguments {
  ModelArguments model;
  std::string format = "text", output, segment = "auto";
  bool json = false, logprobs = false, quiet = false;
  speech::TranscribeOptions options;
  std::vector<std::string> files;
  std::vector<Recording> recordings;
  bool several = false;  ///< several were given, or a folder or pattern: then lines begin with names, and --output is a folder
};

nlohmann::ordered_json to_json(const std::string& file, const Transcript& transcript, const speech::Timings& timings, double load_seconds,
                               const std::string& model, const speech::LoadOptions& loaded, bool logprobs) {
  nlohmann::ordered_json segments = nlohmann::ordered_json::array();
  for (const TranscriptSegment& s : transcript.segments) {
    segments.push_back({{"begin", s.begin},
                        {"end", s.end},
                        {"text", s.text},
                        {"tokens", s.tokens},
                        {"truncated", s.truncated},
                        {"repetition", s.repetition}});
    if (logprobs) segments.back()["logprobs"] = formats::token_logprobs({.text = {}, .segments = {s}});
  }
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

std::string extension(const std::string& format) { return format == "text" ? "txt" : format == "verbose_json" ? "json" : format; }

/// The format is that of a whole file, so that several recordings need several files.
bool needs_files(const std::string& format) { return format == "srt" || format == "vtt" || format == "lrc"; }

/// csv of one of several recordings: with a first column for its file, and without the line that names the columns.
std::string csv_rows(const std::string& file, const std::string& csv) {
  std::string quoted, rows;
  for (const char c : file) quoted.append(c == '"' ? 2 : 1, c);
  std::istringstream lines(csv);
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line)) rows += tw::format("\"{}\",{}\n", quoted, line);
  return rows;
}

bool output_is_directory(const TranscribeArguments& a) {
  std::error_code error;
  return a.several || a.output.ends_with('/') || fs::is_directory(a.output, error);
}

/// The format that the suffix of a single output file implies.
std::string implied_format(const TranscribeArguments& a) {
  std::string suffix = fs::path(a.output).extension().string();
  std::transform(suffix.begin(), suffix.end(), suffix.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const bool known = suffix == ".srt" || suffix == ".vtt" || suffix == ".lrc" || suffix == ".csv" || suffix == ".json";
  return known && !output_is_directory(a) ? suffix.substr(1) : "text";
}

/// The output path of each recording's transcript; empty: standard output.
std::vector<std::string> output_paths(const TranscribeArguments& a) {
  if (a.output.empty()) return std::vector<std::string>(a.recordings.size());
  if (!output_is_directory(a)) return {a.output};
  std::error_code error;
  if (fs::exists(a.output, error) && !fs::is_directory(a.output, error))
    throw UsageError(tw::format("transcribe: --output {} is a file; with several recordings it must be a directory", a.output));
  return transcript_paths(a.recordings, a.output, "." + extension(a.format));
}

/// Throws UsageError if a transcript would overwrite a recording, even under another name.
void require_separate(const std::vector<Recording>& recordings, const std::vector<std::string>& outputs) {
  const auto status_of = [](const std::string& path, const std::string& standard, int descriptor) {
    struct stat status {};
    const int failed = path == standard ? fstat(descriptor, &status) : stat(path.c_str(), &status);
    // A terminal may be both.
    const bool is_file = failed == 0 && !S_ISCHR(status.st_mode) && !S_ISSOCK(status.st_mode);
    return is_file ? std::optional(std::pair(status.st_dev, status.st_ino)) : std::nullopt;
  };
  std::map<std::pair<dev_t, ino_t>, std::string> read;
  for (const Recording& each : recordings)
    if (const auto file = status_of(each.file, "-", STDIN_FILENO)) read.emplace(*file, each.file == "-" ? "on standard input" : each.file);
  for (const std::string& output : outputs) {
    const auto file = status_of(output, "", STDOUT_FILENO);
    if (!file || !read.contains(*file)) continue;
    throw UsageError(tw::format("transcribe: {} would overwrite the recording {}: they are the same file",
                                output.empty() ? "standard output" : "--output " + output, read.at(*file)));
  }
}

/// How much of the work a recording is, for the progress bar: nearly in proportion to its length if all have the same format.
double work_of(const Recording& recording) {
  std::error_code error;
  const std::uintmax_t bytes = fs::file_size(recording.file, error);
  return error ? 1 : static_cast<double>(std::max<std::uintmax_t>(bytes, 1));
}

std::vector<float> read(const std::string& file) {
  return file == "-" ? speech::read_audio_stream(STDIN_FILENO, "standard input") : speech::read_audio(file);
}

/// Recordings that are transcribed together.
struct Group {
  std::vector<std::size_t> files;  ///< indices into the arguments
  std::vector<std::vector<float>> samples;
  double seconds = 0;
  double work = 0;
};

class Job {
 public:
  Job(TranscribeArguments& arguments, std::vector<std::string> problems)
      : a_(arguments),
        problems_(std::move(problems)),
        paths_(output_paths(arguments)),
        screen_(arguments.quiet ? Screen::Progress::hidden : Screen::Progress::shown) {
    require_separate(a_.recordings, paths_);
    for (const Recording& each : a_.recordings) all_work_ += work_of(each);
  }

  int run() {
    for (const std::string& problem : problems_) complain(problem);
    if (a_.recordings.empty()) return kFailure;
    const auto begin = Clock::now();
    model_ = a_.model.model.empty() ? default_model() : a_.model.model;
    speech::LoadOptions options = load_options(a_.model);
    if (a_.model.model.empty() && !a_.quiet) screen_.message(kBundledModelNote);
    if (output_is_directory(a_) && !a_.output.empty()) {
      std::error_code error;
      fs::create_directories(a_.output, error);
      if (error) throw Error(tw::format("{}: {}", a_.output, error.message()));
    }
    LoadProgress progress(screen_, model_, options);
    const speech::Transcriber transcriber(model_, options);
    screen_.clear_progress();
    load_seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();

    loaded_ = Clock::now();
    Group group;
    for (std::size_t i = 0; i < a_.recordings.size(); ++i) {
      const Recording& recording = a_.recordings[i];
      const double work = work_of(recording);
      try {
        group.samples.push_back(read(recording.file));
      } catch (const Error& error) {
        complain(error.what());
        done_work_ += work;
        continue;
      }
      group.files.push_back(i);
      group.seconds += static_cast<double>(group.samples.back().size()) / 16000;
      group.work += work;
      // A recording in one prompt may be too long for the model. The others must not fail with it.
      const bool alone = a_.options.segmentation == speech::Segmentation::none;
      if (alone || group.seconds >= 30.0 * a_.options.batch) finish(transcriber, std::exchange(group, {}));
    }
    finish(transcriber, group);
    return failed_ ? kFailure : kOk;
  }

 private:
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
    if (output_is_directory(a_)) {
      std::error_code error;
      const fs::path folder = fs::path(path).parent_path();
      fs::create_directories(folder, error);
      if (error) throw Error(tw::format("{}: {}", folder.string(), error.message()));
    }
    std::string problem;
    if (!write_file(path, {shown_at(path, text)}, &problem)) throw Error(problem);
  }

  /// What the output of `file` gets in the format.
  std::string text_of(std::size_t file, const Transcript& transcript, const speech::Timings& timings, const speech::LoadOptions& loaded) {
    using formats::SubtitleFormat, formats::subtitles;
    const std::string& name = a_.recordings[file].file;
    const bool among_several = a_.several && a_.output.empty();
    if (a_.format == "srt") return subtitles(transcript.segments, SubtitleFormat::srt);
    if (a_.format == "vtt") return subtitles(transcript.segments, SubtitleFormat::vtt);
    if (a_.format == "lrc") return subtitles(transcript.segments, SubtitleFormat::lrc);
    if (a_.format == "csv") {
      const std::string csv = subtitles(transcript.segments, SubtitleFormat::csv);
      if (!among_several) return csv;
      return (std::exchange(table_begun_, true) ? "" : "file,start,end,text\n") + csv_rows(name, csv);
    }
    if (a_.format == "json") return json_line(to_json(name, transcript, timings, load_seconds_, model_, loaded, a_.logprobs)) + "\n";
    if (a_.format == "verbose_json") {
      nlohmann::ordered_json json;
      if (among_several) json["file"] = name;
      json.update(formats::verbose_json(transcript, {.temperature = a_.options.temperature}));
      if (a_.logprobs) json["logprobs"] = formats::token_logprobs(transcript);
      return json_line(json) + "\n";
    }
    return transcript.text + "\n";
  }

  void write_colored(const std::string& name, const Transcript& transcript) {
    if (a_.several) screen_.text(shown_line(stdout, name) + (transcript.text.empty() ? ":" : ": "));
    for (const auto& [text, confidence] : formats::confidence_spans(transcript)) {
      using enum formats::Confidence;
      screen_.text(text, confidence == low      ? Screen::Color::red
                         : confidence == medium ? Screen::Color::yellow
                         : confidence == high   ? Screen::Color::green
                                                : Screen::Color::none);
    }
    screen_.text("\n");
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
      if (std::exchange(begun_, true) || !job_.a_.several) return;
      screen_.text(shown_line(stdout, job_.a_.recordings[group_.files[current_]].file) + ":");
      begun_empty_ = true;
    }

    const Job& job_;
    Screen& screen_;
    const Group& group_;
    std::size_t current_ = 0;   ///< index into the group's files
    bool begun_ = false;        ///< its line has begun
    bool begun_empty_ = false;  ///< and contains only the name
  };

  void show_progress(const Group& group, double done, double all) {
    const double fraction = (done_work_ + group.work * (all > 0 ? done / all : 0)) / all_work_;
    const double elapsed = std::max(std::chrono::duration<double>(Clock::now() - loaded_).count(), 1e-9), seconds = done_seconds_ + done;
    std::string line = a_.recordings.size() == 1 ? tw::format("{:.0f} of {:.0f} s", done, all)
                                                 : tw::format("{} of {} recordings", group.files.front(), a_.recordings.size());
    if (seconds > 0) line += tw::format(", {:.1f} times real time", seconds / elapsed);
    if (seconds > 0 && fraction < 1) line += tw::format(", {} left", duration_text(elapsed * (1 - fraction) / fraction));
    screen_.progress(fraction, line);
  }

  void finish(const speech::Transcriber& transcriber, const Group& group) {
    if (group.files.empty()) return;
    speech::TranscribeOptions options = a_.options;
    options.logprobs = a_.logprobs || a_.format == "verbose_json";  // for its avg_logprob
    const bool live = a_.format == "text" && a_.output.empty() && !a_.logprobs;
    LiveText text(*this, screen_, group);
    if (live) options.on_text = [&](std::size_t file, std::string_view added) { text.add(file, added); };
    options.on_progress = [&](double done, double all) { show_progress(group, done, all); };
    show_progress(group, 0, group.seconds);
    std::vector<std::span<const float>> spans(group.samples.begin(), group.samples.end());
    speech::Transcripts result;
    try {
      result = transcriber.transcribe(spans, options);
    } catch (const InvalidArgument& error) {
      text.end_begun_line();
      for (const std::size_t file : group.files) complain(tw::format("{}: {}", a_.recordings[file].file, error.what()));
      done_work_ += group.work;
      return;
    }
    done_work_ += group.work;
    done_seconds_ += group.seconds;
    screen_.clear_progress();
    if (live) text.end_lines(group.files.size());
    for (std::size_t i = 0; i < group.files.size(); ++i) {
      const std::string& name = a_.recordings[group.files[i]].file;
      const Transcript& transcript = result.files[i];
      for (const TranscriptSegment& s : transcript.segments) {
        if (s.truncated)
          warn(
              tw::format("{}: {:.1f} to {:.1f} s: ended by the token limit, not by the model; see --max-new-tokens", name, s.begin, s.end));
        if (s.repetition) warn(tw::format("{}: {:.1f} to {:.1f} s: the model repeats itself; stopped", name, s.begin, s.end));
      }
      if (live) continue;
      try {
        if (a_.format == "text" && a_.logprobs)
          write_colored(name, transcript);
        else
          write(group.files[i], text_of(group.files[i], transcript, result.timings, transcriber.options()));
      } catch (const Error& error) {
        complain(error.what());
      }
    }
  }

  TranscribeArguments& a_;
  std::vector<std::string> problems_;
  std::vector<std::string> paths_;
  Screen screen_;
  std::string model_;
  double load_seconds_ = 0;
  Clock::time_point loaded_;
  double all_work_ = 0, done_work_ = 0, done_seconds_ = 0;  ///< for the progress
  bool table_begun_ = false;                                ///< of csv for several recordings
  bool failed_ = false;
};

}  // namespace

void add_transcribe(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("transcribe", "Turn recordings into text with a GLM-ASR checkpoint");
  static TranscribeArguments a;
  completes_with_files(command
                           ->add_option("AUDIO", a.files,
                                        "Recordings: WAV, FLAC, OGG, Opus, MP3, and with FFmpeg webm, m4a and others; folders, searched "
                                        "recursively; patterns such as "
                                        "'talks/**/*.mp3'; - is standard input")
                           ->required());
  add_model_options(*command, a.model);
  CLI::Option* format =
      command
          ->add_option(
              "--format", a.format,
              "text, json (one line per recording), srt, vtt, lrc, csv, or verbose_json, OpenAI's; default: text, or what the suffix of "
              "--output implies")
          ->check(CLI::IsMember({"text", "json", "srt", "vtt", "lrc", "csv", "verbose_json"}));
  command->add_flag("--json", a.json, "Print JSON: --format json")->excludes(format);
  command
      ->add_option("--output", a.output,
                   "Write to a file, or for several recordings to a directory, instead of standard output. The suffixes .json, .srt, "
                   ".vtt, .lrc and .csv set the format")
      ->type_name("FILE|DIR");
  command
      ->add_option("--segment", a.segment,
                   "auto: cut at silences, for recordings of any length; vad: the same by voice activity, better in noise; none: windows "
                   "of 30 s in one prompt, as in the reference implementation")
      ->check(CLI::IsMember({"auto", "vad", "none"}))
      ->capture_default_str();
  command->add_flag(
      "--logprobs", a.logprobs,
      "How probable each token was: in the formats json and verbose_json, or as the colour of text in a terminal (red: below 50 %, "
      "yellow: below 90 %, else green)");
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
    Recordings recordings = find_recordings(a.files);
    a.recordings = std::move(recordings.found);
    a.several = a.files.size() > 1 || recordings.searched;
    if (a.json) a.format = "json";
    if (!a.json && format->count() == 0) a.format = implied_format(a);
    if (a.several && a.output.empty() && needs_files(a.format))
      throw UsageError(tw::format("transcribe: --format {} with several recordings needs --output DIR", a.format));
    if (a.logprobs && a.format != "json" && a.format != "verbose_json" && (a.format != "text" || !a.output.empty() || !has_colors()))
      throw UsageError("transcribe: --logprobs needs --format json or verbose_json, or text in a terminal with colours");
    if (!(a.options.top_p > 0 && a.options.top_p <= 1)) throw UsageError("--top-p must be greater than 0 and at most 1");
    if (std::isnan(a.options.temperature)) throw UsageError("--temperature must be from 0 to 100");
    a.options.segmentation = a.segment == "none"  ? speech::Segmentation::none
                             : a.segment == "vad" ? speech::Segmentation::vad
                                                  : speech::Segmentation::automatic;
    exit_code = Job(a, std::move(recordings.problems)).run();
  });
}

}  // namespace tw::cli
