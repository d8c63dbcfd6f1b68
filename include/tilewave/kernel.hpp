#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/device.hpp"

// The library reads these environment variables and no others:
//   TILEWAVE_CACHE   the folder for compiled kernels. Default: $XDG_CACHE_HOME/tilewave, or else $HOME/.cache/tilewave; no cache if none of
//                    these is set. The folder is created with mode 0700. It is ignored if it belongs to another user or others can write to
//                    it, and `tilewave devices` says so. To share kernels between users, use a pack.
//   TILEWAVE_PACK    a read-only folder of kernels compiled ahead of time (write_pack), searched after the cache and before compiling. The
//                    folder share/tilewave/kernels next to the library's folder, or to that of the program it is linked into, comes next.
//   CUDA_HOME, VIRTUAL_ENV, HOME    where to look for NVRTC, in addition to /usr/local/cuda*, the loader's path and Python's site-packages
//   NVTX_INJECTION64_PATH    a profiler's library, which receives the stages and operators of speech models as NVTX ranges
//   TILEWAVE_ISA     the most that the cpu target uses: baseline, avx2, avx512 (no VNNI, BF16, AMX) or avx512+vnni+bf16 (no AMX)

namespace tw {

/// Text of a *.tile.hpp file that the library or a user embedded with tilewave_embed(), under the name that #include uses.
struct EmbeddedFile {
  const char* name;
  const char* text;
  std::size_t size;
};

/// Makes files known to the run-time compiler; the code that tilewave_embed() generates calls it before main(). Names and texts are not
/// copied and must stay valid until the process ends. If two files have the same name, the first one counts. Returns true.
bool register_embedded(const EmbeddedFile* files, std::size_t count);

/// The file with that name, or null.
const EmbeddedFile* find_embedded(std::string_view name);

/// The names of all embedded files, sorted.
std::vector<std::string> embedded_names();

namespace detail {
class TileRecorder;
}

/// A kernel by its C++ type; kernel_info<Kernel> in tilewave/launch.hpp.
struct KernelInfo {
  std::string_view type;                        ///< as the run-time compiler reads it
  std::string_view source;                      ///< the embedded file that defines it
  void (*record_tiles)(detail::TileRecorder&);  ///< for tiles_of() in tilewave/layout.hpp; may be null
};

/// What the run-time compiler needs to build a kernel. Everything else is read from the compiled module.
struct KernelSpec {
  std::string name;                                       ///< for people: "gemm_bf16_nt_128x256"
  std::string type;                                       ///< the C++ type that is instantiated: "tw::Gemm<tw::bf16, 128, 256, 64, 4>"
  std::string target;                                     ///< "tw::sm_90a::Target<true, true>"
  std::string source;                                     ///< the embedded file that defines `type`: "tilewave/tile/gemm.tile.hpp"
  void (*record_tiles)(detail::TileRecorder&) = nullptr;  ///< as in KernelInfo
};

/// The spec of the kernel's sm_90a variant with or without TMA loads and TMA stores. `name` is for people; empty: the type.
KernelSpec make_spec(const KernelInfo& info, bool tma_load, bool tma_store, std::string name = "");

/// The same kernel for another target. Throws InvalidArgument if the spec's target was not set by make_spec().
KernelSpec for_target(KernelSpec spec, GpuTarget target);

/// What a compiled module says about its kernel.
struct ModuleInfo {
  int threads = 0;          ///< per block
  int shared_bytes = 0;     ///< dynamic shared memory per block
  int cluster = 1;          ///< blocks per cluster
  int min_blocks = 1;       ///< blocks that an SM must hold at once
  bool persistent = false;  ///< as many blocks as fit at once, each taking tiles in turn; otherwise one block per tile
  bool loads = false;       ///< the kernel has load(): tiles are copied to shared memory
  bool waits = false;       ///< tiles wait for others, so all blocks must run at once
  std::string params;       ///< the bytes of default-constructed Params
};

/// The tiles of a launch, and the scheduler's counter. Passed to the kernel by value.
struct TileGrid;

/// What the compiler says about a kernel.
struct CompiledKernel {
  std::string cubin;  ///< the machine code
  ModuleInfo module;
  std::string log;
  int registers = 0;
  int spill_bytes = 0;  ///< stores plus loads
  int static_shared_bytes = 0;
  double compile_ms = 0;                        ///< time NVRTC took when it was compiled
  bool from_cache = false;                      ///< from the cache or a pack; the other members are those of the original compilation
  std::string compiler;                         ///< "NVRTC 13.0"
  std::string tensor_core_instruction;          ///< "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", empty if none
  std::vector<std::string> performance_losses;  ///< the C75xx messages in the log
};

/// Compiles `spec` for `arch` ("sm_90a"), or loads it from the cache or a pack on disk. Needs no GPU and no driver. A cache that cannot be
/// read or written only costs time. Throws CompileError, InvalidArgument for an invalid spec, and DeviceError if NVRTC is needed but
/// missing. With `use_cache` false it compiles again and neither reads nor writes the cache.
CompiledKernel compile(const KernelSpec& spec, std::string_view arch = "sm_90a", bool use_cache = true);

/// Compiles all specs for `arch` on `threads` threads (0: one per core), so that later launches find them in the cache. Calls
/// `done(i, kernel)` as each one completes, never concurrently. The first failure is thrown after the others have completed.
void compile_all(const std::vector<KernelSpec>& specs, int threads = 0,
                 const std::function<void(std::size_t index, const CompiledKernel& kernel)>& done = {}, std::string_view arch = "sm_90a");

/// Writes `kernel`, the result of compile(spec, arch), to a folder that can serve as $TILEWAVE_PACK on machines with or without NVRTC.
/// Throws Error with the system's message.
void write_pack(const std::string& folder, const KernelSpec& spec, const CompiledKernel& kernel, std::string_view arch = "sm_90a");

/// The program text that NVRTC compiles for `spec`: the generated entry point, which includes embedded files.
std::string kernel_source(const KernelSpec& spec);

/// Enqueues `spec` on a CUDA stream, compiling it at first use. `params`: the kernel's Params. Throws CompileError, DeviceError.
void launch_on_gpu(const KernelSpec& spec, const void* params, const TileGrid& grid, const Stream& stream);

/// The folder for compiled kernels (TILEWAVE_CACHE above); empty if there is none.
std::string cache_directory();

}  // namespace tw
