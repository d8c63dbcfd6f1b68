#pragma once

#include <string>

#include "command.hpp"
#include "tilewave/speech.hpp"

namespace tw::cli {

/// What the commands that load a model have in common.
struct ModelArguments {
  std::string model, device = "auto", dtype = "auto";
  int threads = 0;
};

void add_model_options(CLI::App& command, ModelArguments& arguments);

/// Sets the number of threads, too. Throws UsageError.
speech::LoadOptions load_options(const ModelArguments& arguments);

/// The bundled checkpoint's directory. Throws Error when it is not there.
std::string default_model();

}  // namespace tw::cli
