// tilewave vad

#include <unistd.h>

#include <utility>

#include "apps/tilewave/terminal.hpp"
#include "command.hpp"
#include "runtime/format.hpp"
#include "speech/segment/segment.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"
#include "tilewave/voice_activity.hpp"

namespace tw::cli {
namespace {

struct VadArguments {
  std::vector<std::string> files;
  std::string by = "voice";
  speech::VoiceActivityOptions options = {};
  bool json = false;
};

std::vector<speech::Segment> find_spans(const std::vector<float>& samples, const VadArguments& a) {
  if (a.by == "voice") return speech::detect_speech(samples, a.options);
  return speech::cut_at_silences(samples, {.join_below_seconds = a.options.silence_seconds, .margin_seconds = a.options.prefix_seconds});
}

void show_spans(const std::string& file, const std::vector<float>& samples, const VadArguments& a) {
  constexpr double kRate = 16000;
  const std::vector<speech::Segment> spans = find_spans(samples, a);
  if (!a.json) {
    const std::string label = a.files.size() > 1 ? shown_line(stdout, file) + ": " : "";
    for (const speech::Segment& span : spans)
      tw::print("{}{:.3f} {:.3f}\n", label, static_cast<double>(span.begin) / kRate, static_cast<double>(span.end) / kRate);
    return;
  }
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const speech::Segment& span : spans)
    list.push_back({{"begin", static_cast<double>(span.begin) / kRate}, {"end", static_cast<double>(span.end) / kRate}});
  tw::print("{}\n", json_line({{"file", file}, {"duration", static_cast<double>(samples.size()) / kRate}, {"spans", std::move(list)}}));
}

}  // namespace

void add_vad(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("vad", "Print where speech is in recordings, in seconds");
  static VadArguments a;
  completes_with_files(command->add_option("AUDIO", a.files, "Recordings, as transcribe reads them; - is standard input")->required());
  command->add_flag("--json", a.json, "Print JSON, one line per recording");
  command
      ->add_option("--by", a.by, "voice: a network detects speech; level: all that is louder than the noise, as transcribe --segment auto")
      ->check(CLI::IsMember({"voice", "level"}))
      ->capture_default_str();
  command->add_option("--threshold", a.options.threshold, "How likely sound must be speech; of --by voice")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--prefix", a.options.prefix_seconds, "Seconds added before speech; with --by level (at most 1) also after it")
      ->check(CLI::Range(0.0, 5.0))
      ->capture_default_str();
  command->add_option("--suffix", a.options.suffix_seconds, "Seconds added after speech, at most those of --silence; of --by voice")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str();
  command->add_option("--silence", a.options.silence_seconds, "A pause of fewer seconds does not end speech")
      ->check(CLI::Range(0.1, 10.0))
      ->capture_default_str();
  command->footer(
      "A line has the begin and the end of a span; with several recordings it begins with the file's name. A recording without speech has "
      "no line, and no span in JSON.");
  command->callback([&exit_code] {
    if (a.options.suffix_seconds > a.options.silence_seconds)
      throw UsageError(
          tw::format("vad: --suffix is {}; it must be at most --silence, {}", a.options.suffix_seconds, a.options.silence_seconds));
    exit_code = kOk;
    for (const std::string& file : a.files) {
      try {
        const auto samples = file == "-" ? speech::read_audio_stream(STDIN_FILENO, "standard input") : speech::read_audio(file);
        show_spans(file, samples, a);
      } catch (const FileError& error) {  // the others are still read
        tw::print(stderr, "tilewave: {}\n", shown_line(stderr, error.what()));
        exit_code = kFailure;
      }
    }
  });
}

}  // namespace tw::cli
