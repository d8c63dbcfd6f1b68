// tilewave convert

#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "command.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"

namespace tw::cli {

void add_convert(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("convert", "Write a checkpoint with the weights of its linear layers in fewer bits");
  static std::string model, result, weights;
  static bool quiet = false;
  command->add_option("MODEL", model, "Directory of a GLM-ASR checkpoint")->type_name("DIR")->required();
  command->add_option("OUT", result, "The new directory")->type_name("DIR")->required();
  completes_with(
      command->add_option("--weights", weights, "int8, fp8, or int4 (in groups of 32; int4:128, and :zeros after either, for zero points)")
          ->type_name("FORMAT")
          ->required(),
      weight_formats);
  command->add_flag("-q,--quiet", quiet, "Print only errors on standard error, no progress");
  command->footer(
      "What transcribe --weights does in memory, written once. The result has all other files of the checkpoint, config.json says what "
      "was\n"
      "done, and `sha256sum -c SHA256SUMS` in it checks the weights. It appears when it is complete.");
  command->callback([&exit_code] {
    QuantizedMatrix::Layout layout;
    try {
      layout = parse_weight_layout(weights);
    } catch (const InvalidArgument& error) {
      throw UsageError(error.what());
    }
    if (layout.format == WeightFormat::plain) throw UsageError("convert: --weights is plain; int8, fp8 and int4 are supported");
    Screen screen(quiet ? Screen::Progress::hidden : Screen::Progress::shown);
    speech::convert_checkpoint(model, result, layout, [&](std::int64_t done, std::int64_t all) {
      screen.progress(tw::format("Converting {}: {} of {}", model, bytes_text(static_cast<std::size_t>(done)),
                                 bytes_text(static_cast<std::size_t>(all))));
    });
    screen.clear_progress();
    exit_code = kOk;
  });
}

}  // namespace tw::cli
