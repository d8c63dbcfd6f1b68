// tilewave kernels list | source | layout | compile; analyze and warm have files of their own

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "command.hpp"
#include "compile.hpp"
#include "draw_layout.hpp"
#include "kernels/registry.hpp"
#include "layout.hpp"
#include "runtime/format.hpp"
#include "runtime/target.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

struct KernelsArguments {
  bool json = false;
  bool program = false;
  std::string name;
  std::vector<std::string> names;
  CompileOptions compile;
  std::string target = "auto";  ///< of compile
  LayoutOptions layout;
};

std::vector<std::string> names_of(const std::vector<RegisteredKernel>& kernels) {
  std::vector<std::string> names;
  for (const RegisteredKernel& kernel : kernels) names.push_back(kernel.spec.name);
  return names;
}

void list(const KernelsArguments& a) {
  const std::vector<RegisteredKernel> kernels = known_kernels();
  if (!a.json) {
    std::size_t width = 4;
    for (const RegisteredKernel& kernel : kernels) width = std::max(width, kernel.spec.name.size());
    tw::print("{:<10} {:<{}} {:<36} {}\n", "family", "name", width, "source", "type");
    for (const RegisteredKernel& kernel : kernels) {
      tw::print("{:<10} {:<{}} {:<36} {}\n", kernel.family, kernel.spec.name, width, kernel.spec.source, kernel.spec.type);
    }
    return;
  }
  auto json = nlohmann::ordered_json::array();
  for (const RegisteredKernel& kernel : kernels) {
    json.push_back({{"family", kernel.family}, {"name", kernel.spec.name}, {"type", kernel.spec.type}, {"source", kernel.spec.source}});
  }
  print_json(json);
}

void source(const KernelsArguments& a) {
  const KernelSpec spec = find_kernel(known_kernels(), a.name).spec;
  if (a.program) {
    const std::string text = kernel_source(spec);
    std::fwrite(text.data(), 1, text.size(), stdout);
    return;
  }
  const EmbeddedFile* file = find_embedded(spec.source);
  if (file == nullptr) throw Error(tw::format("kernel {}: its source {} is not embedded in this program", spec.name, spec.source));
  std::fwrite(file->text, 1, file->size, stdout);
}

void layout(const KernelsArguments& a) {
  const LayoutOptions& options = a.layout;
  const int given = !a.name.empty() + !options.shared.empty() + !options.fragment.empty() + !options.rows.empty();
  if (given != 1) throw UsageError("kernels layout: give exactly one of NAME, --shared, --fragment, --rows");
  if (a.name.empty()) {
    const KernelTile tile = described_tile(options);
    draw_tiles(describe(tile.layout), {tile}, options);
  } else {
    const RegisteredKernel kernel = find_kernel(known_kernels(), a.name);
    if (kernel.family == kModelFamily)
      throw UsageError(tw::format("kernels layout: the tiles of {} are not known; choose a kernel of another family", a.name));
    draw_tiles(a.name, tiles_of(kernel.spec), options);
  }
}

int compile(const KernelsArguments& a) {
  GpuTarget target = GpuTarget::automatic;
  try {
    target = target_of_architecture(a.compile.arch);
    if (!a.target.empty() && a.target != "auto") {
      const GpuTarget wanted = parse_gpu_target(a.target);
      if (wanted == GpuTarget::sm_90a && target != wanted)
        throw InvalidArgument(tw::format("target is sm_90a, which needs --arch sm_90a; --arch is {}", a.compile.arch));
      target = wanted;
    }
  } catch (const InvalidArgument& error) {
    throw UsageError(tw::format("kernels compile: {}", error.what()));
  }
  std::vector<RegisteredKernel> kernels = known_kernels(a.compile.arch, target);
  if (!a.names.empty()) {
    std::vector<RegisteredKernel> chosen;
    for (const std::string& name : a.names) {
      const std::size_t before = chosen.size();
      std::ranges::copy_if(kernels, std::back_inserter(chosen), [&](const RegisteredKernel& kernel) { return kernel.family == name; });
      if (chosen.size() == before) chosen.push_back(find_kernel(kernels, name));
    }
    kernels = std::move(chosen);
  }
  const std::vector<CompileResult> results = compile_kernels(kernels, a.compile);
  if (a.json) {
    auto json = nlohmann::ordered_json::array();
    for (const CompileResult& result : results) json.push_back(to_json(result));
    print_json(json);
  } else {
    print_table(results);
  }
  return report_problems(results) ? kOk : kFailure;
}

}  // namespace

std::vector<std::string> kernel_names() { return names_of(known_kernels()); }

RegisteredKernel find_kernel(const std::vector<RegisteredKernel>& kernels, const std::string& name) {
  const auto found = std::find_if(kernels.begin(), kernels.end(), [&](const RegisteredKernel& kernel) { return kernel.spec.name == name; });
  if (found != kernels.end()) return *found;
  throw UsageError(
      tw::format("kernels: there is no kernel \"{}\"{}; `tilewave kernels list` shows all", name, did_you_mean(name, names_of(kernels))));
}

void add_kernels(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("kernels", "List, print, draw, compile and analyse the registered kernels");
  command->require_subcommand(1);
  static KernelsArguments a;

  CLI::App* list_command = command->add_subcommand("list", "List families, names, C++ types and source files");
  list_command->add_flag("--json", a.json, "Print JSON");
  list_command->callback([&exit_code] {
    list(a);
    exit_code = kOk;
  });

  CLI::App* source_command = command->add_subcommand("source", "Print the tile code of a kernel");
  completes_with(source_command->add_option("NAME", a.name, "A name that `tilewave kernels list` shows")->required(), kernel_names);
  source_command->add_flag("--program", a.program, "Print the generated program for the run-time compiler instead");
  source_command->callback([&exit_code] {
    source(a);
    exit_code = kOk;
  });

  CLI::App* layout_command =
      command->add_subcommand("layout", "Draw where the elements of a kernel's tiles are: banks, threads, registers");
  completes_with(layout_command->add_option("NAME", a.name, "A name that `tilewave kernels list` shows"), kernel_names);
  layout_command->add_option("--shared", a.layout.shared, "Draw this tile of shared memory: bf16, f16, f32, fp8_e4m3, fp8_e5m2 or i8")
      ->delimiter(',')
      ->expected(3)
      ->type_name("DTYPE,ROWS,COLS");
  layout_command->add_option("--contract", a.layout.contract, "The contracted dimension, with --shared: columns or rows")
      ->check(CLI::IsMember({"columns", "rows"}))
      ->needs("--shared")
      ->type_name("WHAT");
  layout_command->add_option("--fragment", a.layout.fragment, "Draw this Fragment: accumulators of products")
      ->delimiter(',')
      ->expected(2)
      ->type_name("ROWS,COLS");
  layout_command->add_option("--rows", a.layout.rows, "Draw these Rows: a tile for kernels without products, in a block of WARPS warps (4)")
      ->delimiter(',')
      ->expected(2, 3)
      ->type_name("ROWS,COLS[,WARPS]");
  layout_command->add_option("--tile", a.layout.tile, "Draw only the tile with this number; 0: all")->capture_default_str()->type_name("N");
  layout_command->add_flag("--all", a.layout.all, "Draw whole tiles instead of 16 rows of 16 cells");
  layout_command->add_option("--svg", a.layout.svg, "Write a picture to this file instead")->type_name("FILE");
  layout_command->footer("Shared memory has 32 banks of 4 bytes. Accesses to different words of one bank are serialised.");
  layout_command->callback([&exit_code] {
    layout(a);
    exit_code = kOk;
  });

  CLI::App* compile_command = command->add_subcommand("compile", "Compile for a GPU; needs NVRTC, but no GPU and no driver");
  completes_with(compile_command->add_option("NAME", a.names, "Kernels or families that `tilewave kernels list` shows; default: all"),
                 kernel_names);
  compile_command->add_option("--arch", a.compile.arch, "The GPU's architecture: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120")
      ->capture_default_str()
      ->type_name("ARCH");
  compile_command->add_option("--target", a.target, "auto, sm_90a or cuda; auto is cuda for every architecture except sm_90a")
      ->type_name("TARGET");
  compile_command->add_option("--output", a.compile.output, "Also write the compiled kernels to this folder, for use as $TILEWAVE_PACK")
      ->type_name("DIR");
  compile_command->add_option("--threads", a.compile.threads, "Number of kernels to compile at the same time; 0: one per core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  compile_command->add_flag("--no-cache", a.compile.no_cache, "Neither read nor write the cache");
  compile_command->add_flag("--json", a.json, "Print JSON");
  compile_command->footer(
      "Fails if a kernel does not compile, spills registers or does not use the intended tensor-core instruction, or if the assembler\n"
      "reports a loss of performance (C75xx).");
  compile_command->callback([&exit_code] { exit_code = compile(a); });

  add_warm(*command, exit_code);
  add_analyze(*command, exit_code);
}

}  // namespace tw::cli
