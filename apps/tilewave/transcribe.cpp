// tilewave transcribe

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <set>

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
  throw Error(tw::format("no --model is given, and the bundled one is not beside {}", program.string()));
}

void add_model_options(CLI::App& command, ModelArguments& a) {
  command.add_option("--model", a.model, "Directory of a GLM-ASR checkpoint; default: the bundled one, which knows spoken English digits")
      ->type_name("DIR");
  command.add_option("--device", a.device, "auto (the first usable GPU, else the CPU), cpu, cuda or cuda:N")->capture_default_str();
  command.add_option("--dtype", a.dtype, "auto, f32, bf16 or f16; auto: f32 on the CPU, on a GPU the checkpoint's")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "f16"}))
      ->capture_default_str();
  command.add_option("--threads", a.threads, "Of the CPU; default: all that the process may use")->check(CLI::Range(1, 4096));
}

speech::LoadOptions load_options(const ModelArguments& a) {
  speech::LoadOptions options;
  if (a.threads > 0) set_cpu_threads(a.threads);
  try {
    options.device = Device::parse(a.device);
    if (a.dtype != "auto") options.dtype = parse_dtype(a.dtype);
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
  speech::TranscribeOptions options;
  std::vector<std::string> files;
};

/// A line at the end of the terminal, if standard error is one.
class Progress {
 public:
  ~Progress() { clear(); }
  void show(const std::string& line) {
    if (!terminal_) return;
    tw::print(stderr, "\r\033[K{}", line);
    std::fflush(stderr);
    shown_ = true;
  }
  void clear() {
    if (std::exchange(shown_, false)) tw::print(stderr, "\r\033[K");
  }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
};

std::string time_text(double seconds, char point) {
  const auto ms = static_cast<long>(seconds * 1000 + 0.5);
  return tw::format("{:02}:{:02}:{:02}{}{:03}", ms / 3600000, ms / 60000 % 60, ms / 1000 % 60, point, ms % 1000);
}

/// A segment's text as subtitles take it: on one line, since an empty one would end it; in WebVTT without markup.
std::string subtitle_text(const std::string& text, bool vtt) {
  std::string line;
  for (const char c : text) {
    if (c == '\n' || c == '\r') {
      line += ' ';
    } else if (vtt && (c == '&' || c == '<' || c == '>')) {
      line += c == '&' ? "&amp;" : c == '<' ? "&lt;" : "&gt;";
    } else {
      line += c;
    }
  }
  return line;
}

std::string subtitles(const Transcript& transcript, bool vtt) {
  std::string text = vtt ? "WEBVTT\n\n" : "";
  int number = 0;
  for (const TranscriptSegment& segment : transcript.segments) {
    if (segment.text.empty()) continue;
    const char point = vtt ? '.' : ',';
    if (!vtt) text += tw::format("{}\n", ++number);
    text +=
        tw::format("{} --> {}\n{}\n\n", time_text(segment.begin, point), time_text(segment.end, point), subtitle_text(segment.text, vtt));
  }
  return text;
}

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
          {"dtype", name_of(*loaded.dtype)}};
}

std::string extension(const std::string& format) { return format == "text" ? "txt" : format; }

/// Where each file's transcript goes; empty: to standard output.
std::vector<std::string> output_paths(const TranscribeArguments& a) {
  std::vector<std::string> paths(a.files.size());
  if (a.output.empty()) return paths;
  std::error_code error;
  const bool directory = fs::is_directory(a.output, error) || a.output.ends_with('/') || a.files.size() > 1;
  if (!directory) return {a.output};
  if (fs::exists(a.output, error) && !fs::is_directory(a.output, error))
    throw UsageError(tw::format("transcribe: --output {} is a file; of several recordings it must be a directory", a.output));
  std::set<std::string> taken;
  for (std::size_t i = 0; i < a.files.size(); ++i) {
    const std::string stem = a.files[i] == "-" ? "stdin" : fs::path(a.files[i]).stem().string();
    paths[i] = (fs::path(a.output) / tw::format("{}.{}", stem, extension(a.format))).string();
    if (!taken.insert(paths[i]).second)
      throw UsageError(tw::format("transcribe: two recordings would be written to {}; give them one by one", paths[i]));
  }
  fs::create_directories(a.output, error);
  if (error) throw Error(tw::format("{}: {}", a.output, error.message()));
  return paths;
}

std::vector<float> read(const std::string& file) {
  if (file != "-") return speech::read_audio(file);
  const std::string bytes{std::istreambuf_iterator<char>(std::cin), {}};
  return speech::read_audio(bytes, "standard input");
}

void write_text(const std::string& path, const std::string& text) {
  std::string problem;
  if (path.empty()) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
      throw std::system_error(errno, std::generic_category(), "standard output");
  } else if (!replace_file(path, {text}, &problem)) {
    throw Error(tw::format("{}: {}", path, problem));
  }
}

/// Recordings that are worked on together.
struct Group {
  std::vector<std::size_t> files;  ///< indices into the arguments
  std::vector<std::vector<float>> samples;
  double seconds = 0;
};

class Job {
 public:
  explicit Job(TranscribeArguments& arguments) : a_(arguments), paths_(output_paths(arguments)) {}

  int run() {
    const auto begin = Clock::now();
    const std::string model = a_.model.model.empty() ? default_model() : a_.model.model;
    speech::LoadOptions options = load_options(a_.model);
    options.progress = [&](std::int64_t done, std::int64_t all) {
      if (done / kProgressBytes != reported_ / kProgressBytes)
        progress_.show(tw::format("Loading {}: {} of {}", model, bytes_text(static_cast<std::size_t>(done)),
                                  bytes_text(static_cast<std::size_t>(all))));
      reported_ = done;
    };
    const speech::Transcriber transcriber(model, options);
    progress_.clear();
    load_seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();
    model_ = model;

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
      // A recording in one prompt may be too long for the model: the others are not to fail with it.
      const bool alone = a_.options.segmentation == speech::Segmentation::none;
      if (alone || group.seconds >= 30.0 * a_.options.batch) finish(transcriber, std::exchange(group, {}));
    }
    finish(transcriber, group);
    return failed_ ? kFailure : kOk;
  }

 private:
  static constexpr std::int64_t kProgressBytes = 64 << 20;

  void complain(const std::string& message) {
    progress_.clear();
    tw::print(stderr, "tilewave: {}\n", message);
    failed_ = true;
  }

  void warn(const std::string& message) {
    progress_.clear();
    tw::print(stderr, "tilewave: warning: {}\n", message);
  }

  void finish(const speech::Transcriber& transcriber, const Group& group) {
    if (group.files.empty()) return;
    const auto begin = Clock::now();
    speech::TranscribeOptions options = a_.options;
    const bool live = a_.format == "text" && a_.output.empty();
    std::size_t current = 0;  // of the files whose text is being printed
    bool begun = false;       // it has some
    const auto end_lines = [&](std::size_t file) {
      for (; current < file; ++current) write_text("", "\n");
      begun = false;
    };
    if (live) {
      options.on_text = [&](std::size_t file, std::string_view text) {
        progress_.clear();
        if (file > current) end_lines(file);
        write_text("", std::string(text));
        begun = true;
      };
    }
    options.on_progress = [&](double done, double all) {
      const double elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
      progress_.show(tw::format("{:.0f} of {:.0f} s, {:.1f} times real time", done, all, done / std::max(elapsed, 1e-9)));
    };
    std::vector<std::span<const float>> spans(group.samples.begin(), group.samples.end());
    speech::Transcripts result;
    try {
      result = transcriber.transcribe(spans, options);
    } catch (const InvalidArgument& error) {
      if (begun) end_lines(current + 1);
      for (const std::size_t file : group.files) complain(tw::format("{}: {}", a_.files[file], error.what()));
      return;
    }
    progress_.clear();
    if (live) end_lines(group.files.size());
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
      const std::string& path = paths_[group.files[i]];
      try {
        if (a_.format == "text") write_text(path, transcript.text + "\n");
        if (a_.format == "srt" || a_.format == "vtt") write_text(path, subtitles(transcript, a_.format == "vtt"));
        if (a_.format == "json")
          write_text(path, json_line(to_json(name, transcript, result.timings, load_seconds_, model_, transcriber.options())) + "\n");
      } catch (const Error& error) {
        complain(error.what());
      }
    }
  }

  TranscribeArguments& a_;
  std::vector<std::string> paths_;
  Progress progress_;
  std::string model_;
  double load_seconds_ = 0;
  std::int64_t reported_ = 0;
  bool failed_ = false;
};

}  // namespace

void add_transcribe(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("transcribe", "Turn recordings into text with a GLM-ASR checkpoint");
  static TranscribeArguments a;
  command->add_option("AUDIO", a.files, "Recordings: WAV, FLAC, OGG, Opus or MP3; - is standard input")->required();
  add_model_options(*command, a.model);
  command->add_option("--format", a.format, "text, json (a line for each recording), srt or vtt")
      ->check(CLI::IsMember({"text", "json", "srt", "vtt"}))
      ->capture_default_str();
  command->add_option("--output", a.output, "Write there instead of to standard output; of several recordings a directory")
      ->type_name("FILE|DIR");
  command
      ->add_option("--segment", a.segment, "auto: cut at silences, any length; none: windows of 30 s in one prompt, as the reference does")
      ->check(CLI::IsMember({"auto", "none"}))
      ->capture_default_str();
  command->add_option("--prompt", a.options.prompt, "Instead of the checkpoint's")->type_name("TEXT");
  command->add_option("--max-new-tokens", a.options.max_new_tokens, "Of a segment")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  command->add_option("--temperature", a.options.temperature, "0: the likeliest token always")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-p", a.options.top_p, "Draw from the likeliest tokens that together have this probability")
      ->capture_default_str();
  command->add_option("--seed", a.options.seed, "Of what is drawn")->capture_default_str();
  command->add_option("--batch", a.options.batch, "Segments that are worked on together; does not change the text")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  command->footer("Text appears as it is produced, a line for each recording. Formats of subtitles have a segment each.");
  command->callback([&exit_code] {
    if (a.files.size() > 1 && a.output.empty() && (a.format == "srt" || a.format == "vtt"))
      throw UsageError(tw::format("transcribe: subtitles of several recordings need --output DIR"));
    if (!(a.options.top_p > 0 && a.options.top_p <= 1)) throw UsageError("--top-p must be above 0 and at most 1");
    if (std::isnan(a.options.temperature)) throw UsageError("--temperature must be from 0 to 100");
    a.options.segmentation = a.segment == "none" ? speech::Segmentation::none : speech::Segmentation::automatic;
    exit_code = Job(a).run();
  });
}

}  // namespace tw::cli
