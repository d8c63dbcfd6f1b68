#include "runtime/jit.hpp"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <charconv>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "runtime/cache.hpp"
#include "runtime/format.hpp"
#include "runtime/module.hpp"
#include "runtime/nvrtc.hpp"
#include "runtime/sha256.hpp"
#include "runtime/target.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

// Changes when the same inputs must give another cache entry.
constexpr std::string_view kKeyVersion = "tilewave kernel 2";

void require(bool condition, const KernelSpec& spec, const char* argument, const std::string& given, const char* allowed) {
  if (!condition) throw InvalidArgument(tw::format("kernel {}: {} is {}; allowed: {}", spec.name, argument, given, allowed));
}

/// Throws InvalidArgument if the kernel needs more shared memory than a block of the architecture has. The compiler adds
/// static_shared_bytes for operations that keep a few values there.
void require_shared_bytes(const KernelSpec& spec, const CompiledKernel& kernel, std::string_view arch) {
  const int bytes = kernel.module.shared_bytes + kernel.static_shared_bytes, most = max_shared_bytes(arch);
  if (bytes > most) {
    throw InvalidArgument(
        tw::format("kernel {} needs {} bytes of shared memory; allowed: {} on {}. Give its rings fewer stages or smaller tiles", spec.name,
                   bytes, most, arch));
  }
}

/// "sm_90a" of "tw::sm_90a::Target<true, true>": the namespace and the folder of the target. Empty if the text is not a target.
std::string_view target_name(std::string_view target) {
  constexpr std::string_view kBefore = "tw::", kAfter = "::Target";
  const std::size_t end = target.find(kAfter);
  return target.starts_with(kBefore) && end != std::string_view::npos ? target.substr(kBefore.size(), end - kBefore.size())
                                                                      : std::string_view();
}

std::string run_header(std::string_view target) { return tw::format("tilewave/tile/{}/run.tile.hpp", target_name(target)); }

void validate(const KernelSpec& spec) {
  require(!spec.type.empty(), spec, "type", "empty", "a C++ type");
  require(find_embedded(run_header(spec.target)) != nullptr, spec, "target", '"' + spec.target + '"',
          "a target such as tw::sm_90a::Target<>");
  require(!spec.source.empty() && spec.source.find_first_of("\"\n") == std::string::npos, spec, "source", '"' + spec.source + '"',
          "the name of an embedded file");
  if (find_embedded(spec.source) == nullptr) {
    throw InvalidArgument(tw::format(
        "kernel {}: source is \"{}\", which is not embedded in this program; tilewave_embed() in CMake embeds a file. Embedded: {}",
        spec.name, spec.source, tw::join(embedded_names(), ", ")));
  }
}

void require_arch(std::string_view arch) {
  const std::string_view prefix = "sm_";
  std::string_view rest = arch.substr(0, prefix.size()) == prefix ? arch.substr(prefix.size()) : std::string_view();
  const bool ok = !rest.empty() && std::all_of(rest.begin(), rest.end(), [](unsigned char c) { return std::isalnum(c) != 0; });
  if (!ok) throw InvalidArgument(tw::format("compile: arch is \"{}\"; allowed: a real architecture such as \"sm_90a\"", arch));
}

std::string_view trim_left(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin);
}

/// Calls visit(line) for each line.
template <class Visit>
void for_each_line(std::string_view text, Visit visit) {
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    visit(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
}

/// The file that a line includes, `"name"` or `<name>`, or nothing. Lines that the preprocessor would skip also count: an extra header does
/// no harm.
std::string_view included_text(std::string_view line) {
  line = trim_left(line);
  if (line.empty() || line.front() != '#') return {};
  line = trim_left(line.substr(1));
  constexpr std::string_view kWord = "include";
  if (line.substr(0, kWord.size()) != kWord) return {};
  line = trim_left(line.substr(kWord.size()));
  if (line.empty() || (line.front() != '"' && line.front() != '<')) return {};
  const std::size_t end = line.find(line.front() == '"' ? '"' : '>', 1);
  return end == std::string_view::npos ? std::string_view() : line.substr(0, end + 1);
}

/// The name in a line `#include "name"`, or nothing.
std::string_view included_name(std::string_view line) {
  const std::string_view text = included_text(line);
  return text.empty() || text.front() != '"' ? std::string_view() : text.substr(1, text.size() - 2);
}

void collect_headers(std::string_view text, std::set<std::string_view>& seen, std::vector<const EmbeddedFile*>& headers) {
  for_each_line(text, [&](std::string_view line) {
    const std::string_view name = included_name(line);
    if (name.empty()) return;
    const EmbeddedFile* file = find_embedded(name);
    if (file == nullptr || !seen.insert(file->name).second) return;
    headers.push_back(file);
    collect_headers({file->text, file->size}, seen, headers);
  });
}

/// The number before `word` in `line`, or nothing: number_before("0 bytes spill stores", " bytes spill stores") is 0.
std::optional<int> number_before(std::string_view line, std::string_view word) {
  const std::size_t at = line.find(word);
  if (at == std::string_view::npos) return {};
  std::size_t begin = at;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(line[begin - 1])) != 0) --begin;
  int value = 0;
  if (std::from_chars(line.data() + begin, line.data() + at, value).ec != std::errc()) return {};
  return value;
}

/// A hint why a program that compiles for the CPU does not compile here: a tile file includes a header that only the host has. Empty if
/// none does.
std::string foreign_includes(const ProgramText& program) {
  std::string found;
  for (const EmbeddedFile* file : program.headers) {
    for_each_line({file->text, file->size}, [&](std::string_view line) {
      const std::string_view included = included_text(line);
      if (included.empty() || (included.front() == '"' && find_embedded(included_name(line)) != nullptr)) return;
      found += tw::format(
          "  {} includes {}, which the GPU's compiler does not have. Tile files include only other embedded tile files; "
          "tilewave/tile/math.tile.hpp has the functions of <cmath>\n",
          file->name, included);
    });
  }
  return found;
}

std::string compiler_name(const Nvrtc& nvrtc) { return "NVRTC " + nvrtc.version_text(); }

/// Each compiler version has its own folder, so that the old one can be deleted after an upgrade.
std::string compiler_folder(const Nvrtc& nvrtc) { return cache_folder("nvrtc-" + nvrtc.version_text()); }

CompiledKernel build(const KernelSpec& spec, const ProgramText& program, std::string_view arch, const Nvrtc& nvrtc) {
  std::vector<NvrtcHeader> headers;
  for (const EmbeddedFile* file : program.headers) headers.push_back({file->name, file->text});
  NvrtcOutput output = compile_with(nvrtc, program.text, headers, compile_options(arch));
  if (!output.ok) {
    throw CompileError(tw::format("kernel {} did not compile for {} with {}\n{}  type: {}\n  target: {}\n  source: {}\n{}", spec.name, arch,
                                  compiler_name(nvrtc), foreign_includes(program), spec.type, spec.target, spec.source, output.log));
  }
  CompiledKernel kernel;
  kernel.cubin = std::move(output.cubin);
  kernel.log = std::move(output.log);
  kernel.compiler = compiler_name(nvrtc);
  kernel.compile_ms = output.milliseconds;
  kernel.tensor_core_instruction = find_tensor_core_instruction(output.ptx);
  read_log(kernel.log, kernel);
  return kernel;
}

}  // namespace

ProgramText assemble(const KernelSpec& spec) {
  validate(spec);
  ProgramText program;
  program.text = tw::format(
      "#include \"{header}\"\n"
      "#include \"tilewave/tile/module.tile.hpp\"\n"
      "#include \"{source}\"\n"
      "\n"
      "namespace tilewave_entry {{\n"
      "using Kernel = {type};\n"
      "using Target = {target};\n"
      "using Code = Kernel::On<Target>;\n"
      "using Shape = tw::{name}::Shape<Code, Target>;\n"
      "\n"
      "extern \"C\" {{\n"
      "extern __device__ const tw::Module<Code, Shape> {module};\n"
      "__device__ const tw::Module<Code, Shape> {module}{{}};\n"
      "\n"
      "__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)\n"
      "{entry}(const __grid_constant__ Code::Params params, const __grid_constant__ tw::TileGrid grid) {{\n"
      "  tw::{name}::run<Code, Target>(params, grid);\n"
      "}}\n"
      "}}\n"
      "}}  // namespace tilewave_entry\n",
      fmt::arg("header", run_header(spec.target)), fmt::arg("source", spec.source), fmt::arg("type", spec.type),
      fmt::arg("target", spec.target), fmt::arg("name", target_name(spec.target)), fmt::arg("module", kModuleSymbol),
      fmt::arg("entry", kEntryPoint));
  std::set<std::string_view> seen;
  collect_headers(program.text, seen, program.headers);
  return program;
}

std::vector<std::string> compile_options(std::string_view arch) {
  return {tw::format("--gpu-architecture={}", arch), "-std=c++20", "-default-device", "--ptxas-options=-v"};
}

std::string cache_key(const ProgramText& program, std::string_view arch, std::string_view compiler) {
  Sha256 hash;
  hash.add_field(kKeyVersion).add_field(compiler).add_field(arch);
  for (const std::string& option : compile_options(arch)) hash.add_field(option);
  hash.add_field(program.text);
  for (const EmbeddedFile* file : program.headers) hash.add_field(file->name).add_field({file->text, file->size});
  return hex(hash.finish());
}

void read_log(std::string_view log, CompiledKernel& kernel) {
  for_each_line(log, [&](std::string_view line) {
    // Functions that were not inlined have lines of their own, and their spills count like the kernel's.
    if (std::optional<int> n = number_before(line, " bytes spill stores")) kernel.spill_bytes += *n;
    if (std::optional<int> n = number_before(line, " bytes spill loads")) kernel.spill_bytes += *n;
    if (std::optional<int> n = number_before(line, " registers")) kernel.registers = std::max(kernel.registers, *n);
    if (std::optional<int> n = number_before(line, " bytes smem")) kernel.static_shared_bytes = std::max(kernel.static_shared_bytes, *n);
    if (const std::size_t at = line.find("C75");
        at != std::string_view::npos && at + 5 <= line.size() && std::isdigit(static_cast<unsigned char>(line[at + 3])) != 0) {
      kernel.performance_losses.emplace_back(line);
    }
  });
}

std::string find_tensor_core_instruction(std::string_view ptx) {
  std::map<std::string_view, int> counts;
  for (const std::string_view prefix : {"wgmma.mma_async", "mma.sync", "mma.sp"}) {
    for (std::size_t at = ptx.find(prefix); at != std::string_view::npos; at = ptx.find(prefix, at + 1)) {
      const std::size_t end = ptx.find_first_of(" \t\r\n;{", at);
      ++counts[ptx.substr(at, end == std::string_view::npos ? end : end - at)];
    }
  }
  auto most = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == counts.end() ? "" : std::string(most->first);
}

namespace {

/// A kernel's program, and where its machine code is kept.
struct Place {
  ProgramText program;
  NvrtcSearch search;
  std::string arch;
  std::string folder, key;  ///< in the cache; empty if it is not used, or without NVRTC, whose version belongs to the key
};

Place place_of(const KernelSpec& spec, std::string_view arch, bool use_cache = true) {
  require_arch(arch);
  Place place{assemble(spec), find_nvrtc(), std::string(arch), {}, {}};
  if (place.search.nvrtc == nullptr || !use_cache) return place;
  place.folder = compiler_folder(*place.search.nvrtc);
  place.key = cache_key(place.program, arch, compiler_name(*place.search.nvrtc));
  return place;
}

std::optional<CompiledKernel> find_in_cache_or_packs(const Place& place) {
  const auto look = [](const std::string& where, const std::string& name) {
    std::optional<CompiledKernel> kernel = read_entry(where, name);
    std::optional<ModuleInfo> module = kernel ? read_module(kernel->cubin) : std::nullopt;
    if (!module) return std::optional<CompiledKernel>();
    kernel->module = *std::move(module);
    return kernel;
  };
  if (!place.key.empty()) {
    if (std::optional<CompiledKernel> kernel = look(place.folder, place.key)) return kernel;
  }
  const std::string pack_key = cache_key(place.program, place.arch, "");
  for (const std::string& pack : pack_directories()) {
    if (std::optional<CompiledKernel> kernel = look(pack, pack_key)) return kernel;
  }
  return {};
}

/// Loads the kernel from the cache or a pack, or compiles it.
CompiledKernel find_or_build(const KernelSpec& spec, std::string_view arch, bool use_cache) {
  const Place place = place_of(spec, arch, use_cache);
  if (use_cache) {
    if (std::optional<CompiledKernel> kernel = find_in_cache_or_packs(place)) return *std::move(kernel);
  }
  if (place.search.nvrtc == nullptr) throw DeviceError(tw::format("kernel {} cannot be compiled: {}", spec.name, place.search.problem));
  CompiledKernel kernel = build(spec, place.program, arch, *place.search.nvrtc);
  std::optional<ModuleInfo> module = read_module(kernel.cubin);
  if (!module) throw CompileError(tw::format("kernel {}: the machine code from {} has no {}", spec.name, kernel.compiler, kModuleSymbol));
  kernel.module = *std::move(module);
  if (use_cache) write_entry(place.folder, place.key, kernel);  // a kernel that cannot be stored is compiled again next time
  return kernel;
}

}  // namespace

CompiledKernel compile(const KernelSpec& spec, std::string_view arch, bool use_cache) {
  CompiledKernel kernel = find_or_build(spec, arch, use_cache);
  require_shared_bytes(spec, kernel, arch);
  return kernel;
}

void for_each_in_parallel(std::size_t count, int threads, const std::function<void(std::size_t)>& work) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  const auto run = [&] {
    for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        work(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  std::vector<std::jthread> team;  // joins even if a thread cannot be started
  for (std::size_t i = 1; i < std::min(static_cast<std::size_t>(threads), count); ++i) team.emplace_back(run);
  run();
  team.clear();
  if (failure) std::rethrow_exception(failure);
}

void compile_all(const std::vector<KernelSpec>& specs, int threads,
                 const std::function<void(std::size_t index, const CompiledKernel& kernel)>& done, std::string_view arch) {
  std::mutex mutex;
  for_each_in_parallel(specs.size(), threads, [&](std::size_t i) {
    const CompiledKernel kernel = compile(specs[i], arch);
    const std::lock_guard lock(mutex);
    if (done) done(i, kernel);
  });
}

void compile_ahead(const std::vector<KernelSpec>& specs, std::string_view arch, const CompileProgress& progress,
                   const std::stop_token& stop) {
  if (find_nvrtc().nvrtc == nullptr) return;
  std::vector<char> found(specs.size());
  for_each_in_parallel(specs.size(), 0, [&](std::size_t i) { found[i] = find_in_cache_or_packs(place_of(specs[i], arch)).has_value(); });
  std::vector<KernelSpec> missing;
  for (std::size_t i = 0; i < specs.size(); ++i)
    if (!found[i]) missing.push_back(specs[i]);
  if (missing.empty()) return;
  std::mutex mutex;
  std::size_t done = 0;
  if (progress) progress(0, missing.size());
  for_each_in_parallel(missing.size(), 0, [&](std::size_t i) {
    if (stop.stop_requested()) return;
    try {
      compile(missing[i], arch);
    } catch (const Error&) {  // if the kernel is ever launched, the launch says why
    }
    const std::lock_guard lock(mutex);
    if (progress) progress(++done, missing.size());
  });
}

void write_pack(const std::string& folder, const KernelSpec& spec, const CompiledKernel& kernel, std::string_view arch) {
  require_arch(arch);
  std::string problem;
  if (!write_entry(folder, cache_key(assemble(spec), arch, ""), kernel, &problem)) {
    throw Error(tw::format("kernel {} cannot be written: {}", spec.name, problem));
  }
}

std::string kernel_source(const KernelSpec& spec) { return assemble(spec).text; }

}  // namespace tw
