// tilewave debug transcribe: looks at the result of every operator.

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "command.hpp"
#include "models/observe.hpp"
#include "models/safetensors.hpp"
#include "models/tensor_checks.hpp"
#include "runtime/files.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"

namespace tw::cli {
namespace {

namespace fs = std::filesystem;

struct DebugArguments {
  ModelArguments model;
  std::string audio, dump, compare;
  int dump_steps = 1;
  double bound = 0;
  speech::TranscribeOptions options{.segmentation = speech::Segmentation::none};
};

/// The relative L2 distance from a reference in f32 up to which results of `dtype` count as equal. 1e-4 is what the tests of the stages
/// allow; in 16 bits rounding errors add up over the layers.
double default_bound(DType dtype) { return dtype == DType::f32 ? 1e-4 : dtype == DType::f16 ? 1e-2 : 5e-2; }

std::string index_text(std::int64_t row_major, const Shape& shape) {
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    index[i] = row_major % shape[i];
    row_major /= shape[i];
  }
  return tw::format("[{}]", tw::join(index, ", "));
}

std::string dtype_in_safetensors(DType dtype) {
  std::string name(name_of(dtype));
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

std::string file_of(const std::string& folder, const std::string& name) { return (fs::path(folder) / (name + ".safetensors")).string(); }

/// Writes one tensor as a safetensors file.
void write_tensor(const std::string& folder, const std::string& name, const Tensor& tensor) {
  const std::size_t bytes = static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype());
  const nlohmann::ordered_json entry{
      {"dtype", dtype_in_safetensors(tensor.dtype())}, {"shape", tensor.shape()}, {"data_offsets", {0, bytes}}};
  std::string header = nlohmann::ordered_json{{name, entry}}.dump();
  header.append(7 - (header.size() + 7) % 8, ' ');
  std::string size;
  for (int i = 0; i < 8; ++i) size += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  std::string problem;
  const std::string_view data(static_cast<const char*>(tensor.data()), bytes);
  if (!write_file(file_of(folder, name), {size, header, data}, &problem)) throw Error(problem);
}

struct Compared {
  std::string name;
  models::Difference difference;
};

/// Checks, writes and compares what operators make. Results have names like "encoder_0.layer_3.down": the number after the stage counts
/// its calls.
class ResultChecks : public models::Observer {
 public:
  explicit ResultChecks(const DebugArguments& arguments) : a_(arguments) {}

  void stage_begin(std::string_view name, const Stream&) override {
    const int call = calls_[std::string(name)]++;
    stage_ = tw::format("{}_{}", name, call);
    dumps_ = !a_.dump.empty() && (name != "decode" || call < a_.dump_steps);
    in_stage_.clear();
  }

  void operator_end(const models::Operator& op, const Tensor* output, const Stream& stream) override {
    if (output == nullptr) return;
    std::string name = op.layer < 0 ? tw::format("{}.{}", stage_, op.name) : tw::format("{}.layer_{}.{}", stage_, op.layer, op.name);
    if (const int again = ++in_stage_[name]; again > 1) name += tw::format("_{}", again);  // once for each sequence, say
    ++operators_;
    stream.synchronize();
    const Tensor host = output->to(Device::cpu());
    if (dumps_) write_tensor(a_.dump, name, host);
    if (!a_.compare.empty()) compare(name, host);
    if (const models::NotFinite found = models::find_not_finite(host); found.first >= 0)
      throw Error(
          tw::format("{} made the first result that is not finite: {} NaN and {} infinities among {} elements, the first at {} of {}", name,
                     found.nans, found.infinities, host.numel(), index_text(found.first, host.shape()), host.describe()));
  }

  std::int64_t operators() const { return operators_; }
  const std::vector<Compared>& compared() const { return compared_; }

 private:
  void compare(const std::string& name, const Tensor& ours) {
    const std::string file = file_of(a_.compare, name);
    if (!fs::exists(file)) return;
    const models::SafeTensors tensors = models::SafeTensors::open(file);
    if (!tensors.contains(name)) throw Error(tw::format("{}: has no tensor {}", file, name));
    const Tensor theirs = tensors.tensor(name);
    const DType dtype = theirs.dtype();
    if (theirs.numel() != ours.numel() || (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16))
      throw Error(
          tw::format("{}: is {}; this run made {}: it is of another recording or checkpoint", file, theirs.describe(), ours.describe()));
    compared_.push_back({name, models::compare(ours, theirs)});
  }

  const DebugArguments& a_;
  std::string stage_;
  bool dumps_ = false;
  std::map<std::string, int> calls_, in_stage_;
  std::int64_t operators_ = 0;
  std::vector<Compared> compared_;
};

/// Prints the table. Returns whether all are within the bound.
bool report_comparison(const std::vector<Compared>& compared, double bound) {
  std::size_t width = 8;
  for (const Compared& each : compared) width = std::max(width, each.name.size());
  tw::print("{:<{}}  {:>11}  {:>11}  {:>9}\n", "operator", width, "relative L2", "largest", "bound");
  const Compared* first = nullptr;
  for (const Compared& each : compared) {
    const bool within = each.difference.relative_l2 <= bound;
    if (!within && first == nullptr) first = &each;
    tw::print("{:<{}}  {:>11.3e}  {:>11.3e}  {:>9.1e}{}\n", each.name, width, each.difference.relative_l2, each.difference.largest, bound,
              within ? "" : "  exceeded");
  }
  if (first == nullptr) {
    tw::print("All {} results are within their bound.\n", compared.size());
  } else {
    tw::print("The first to leave its bound: {}\n", first->name);
  }
  return first == nullptr;
}

void prepare_folders(const DebugArguments& a) {
  std::error_code error;
  if (!a.compare.empty() && !fs::is_directory(a.compare, error))
    throw Error(tw::format("--compare {}: there is no such directory", a.compare));
  if (a.dump.empty()) return;
  fs::create_directories(a.dump, error);
  if (error) throw Error(tw::format("--dump {}: {}", a.dump, error.message()));
  if (access(a.dump.c_str(), W_OK) != 0) throw Error(tw::format("--dump {}: {}", a.dump, std::strerror(errno)));
}

int run(const DebugArguments& a) {
  prepare_folders(a);
  const std::vector<float> samples = speech::read_audio(a.audio);
  const speech::Transcriber transcriber(a.model.model.empty() ? default_model() : a.model.model, load_options(a.model));
  ResultChecks checks(a);
  speech::Transcript transcript;
  {
    const models::Observing observing(&checks);
    transcript = transcriber.transcribe(samples, a.options);
  }
  tw::print("Transcription: {}\n", shown_line(stdout, transcript.text));
  tw::print("All elements of the results of {} operators are finite.\n", checks.operators());
  if (a.compare.empty()) return kOk;
  if (checks.compared().empty())
    throw Error(tw::format("--compare {}: has no result of this run, such as encoder_0.layer_0.down.safetensors", a.compare));
  const double bound = a.bound > 0 ? a.bound : default_bound(*transcriber.options().dtype);
  return report_comparison(checks.compared(), bound) ? kOk : kFailure;
}

}  // namespace

void add_debug(CLI::App& app, int& exit_code) {
  CLI::App* debug = app.add_subcommand("debug", "Look at the result of every operator of a model");
  debug->require_subcommand(1);
  CLI::App* command = debug->add_subcommand(
      "transcribe", "Transcribe a recording and check every operator's result: NaN, infinities, differences from a reference");
  static DebugArguments a;
  completes_with_files(command->add_option("AUDIO", a.audio, "A recording, as in `tilewave transcribe`")->required());
  add_model_options(*command, a.model);
  command->add_option("--dump", a.dump, "Write every result to a directory, one safetensors file each: encoder_0.layer_3.down.safetensors")
      ->type_name("DIR");
  command->add_option("--dump-steps", a.dump_steps, "With --dump: the number of decoding steps to write")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--compare", a.compare,
                   "Compare with the results in a directory, which tools/dump_reference.py or --dump wrote from the same recording")
      ->type_name("DIR");
  command
      ->add_option("--bound", a.bound, "With --compare: the largest relative L2 distance; default: 1e-4 in f32, 1e-2 in f16, 5e-2 in bf16")
      ->check(CLI::PositiveNumber);
  command->add_option("--max-new-tokens", a.options.max_new_tokens, "Maximum number of tokens")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_flag("--ignore-eos", a.options.ignore_end, "Always generate --max-new-tokens tokens (for random weights)");
  command->footer(
      "The recording is one prompt, as with `transcribe --segment none`. Exit code 1: a result is not finite, or leaves its bound.");
  command->callback([&exit_code] { exit_code = run(a); });
}

}  // namespace tw::cli
