#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/device.hpp"

// Environment variables that the library reads, all of them:
//   TILEWAVE_CACHE   the folder of compiled kernels; else $XDG_CACHE_HOME/tilewave, else $HOME/.cache/tilewave (none set: no cache). It is
//                    created with mode 0700, and not used if it is another user's or others can write it: `tilewave devices` says so. To
//                    share kernels between users, let them read a pack
//   TILEWAVE_PACK    a read-only folder of kernels compiled ahead (write_pack); looked at after the cache, before compiling
//                    (share/tilewave/kernels beside the folder of the library, or of the program it is linked into, is looked at next)
//   CUDA_HOME, VIRTUAL_ENV, HOME    where NVRTC is looked for, besides /usr/local/cuda*, the loader's path and Python's usual site-packages
//   TILEWAVE_ISA     baseline, avx2 or avx512: lowers the instruction set of the cpu target (avx512: without VNNI and BF16)

namespace tw {

/// Text of a *.tile.hpp file that the library or a user embedded with tilewave_embed(), under the name that #include uses.
struct EmbeddedFile {
  const char* name;
  const char* text;
  std::size_t size;
};

/// Makes files known to the run-time compiler; the code that tilewave_embed() generates calls it before main(). Names and texts stay the
/// caller's and must last; of two files of one name the first counts. Returns true.
bool register_embedded(const EmbeddedFile* files, std::size_t count);

/// The file of that name, or null.
const EmbeddedFile* find_embedded(std::string_view name);

/// The names of all of them, sorted.
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

/// What the run-time compiler needs to make one kernel. All else follows from these and is read from the compiled module.
struct KernelSpec {
  std::string name;                                       ///< for people: "gemm_bf16_nt_128x256"
  std::string type;                                       ///< the C++ type that is instantiated: "tw::Gemm<tw::bf16, 128, 256, 64, 4>"
  std::string target;                                     ///< "tw::sm_90a::Target<true, true>"
  std::string source;                                     ///< the embedded file that defines `type`: "tilewave/tile/gemm.tile.hpp"
  void (*record_tiles)(detail::TileRecorder&) = nullptr;  ///< as in KernelInfo
};

/// The spec of a kernel's variant with or without TMA for its loads and its stores. `name` for people; empty: the type.
KernelSpec make_spec(const KernelInfo& info, bool tma_load, bool tma_store, std::string name = "");

/// The same kernel for another target. Throws InvalidArgument for a spec whose target make_spec() did not write.
KernelSpec for_target(KernelSpec spec, GpuTarget target);

/// What a compiled module says of its kernel.
struct ModuleInfo {
  int threads = 0;          ///< per block
  int shared_bytes = 0;     ///< dynamic shared memory per block
  int cluster = 1;          ///< blocks per cluster
  int min_blocks = 1;       ///< that an SM holds at once, at least
  bool persistent = false;  ///< as many blocks as fit at once, each takes tiles in turn; else one block per tile
  bool loads = false;       ///< the kernel has load(): one role loads tiles, the other multiplies them
  std::string params;       ///< the bytes of default-constructed Params
};

/// Tiles of one launch, and the state of the scheduler. Passed to the kernel by value.
struct TileGrid;

/// What the compiler says of one kernel.
struct CompiledKernel {
  std::string cubin;  ///< the machine code
  ModuleInfo module;
  std::string log;
  int registers = 0;
  int spill_bytes = 0;  ///< stores plus loads
  int static_shared_bytes = 0;
  double compile_ms = 0;                        ///< time NVRTC took when it was compiled
  bool from_cache = false;                      ///< from the cache or a pack; the other members are as when it was compiled
  std::string compiler;                         ///< "NVRTC 13.0"
  std::string tensor_core_instruction;          ///< "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", empty if none
  std::vector<std::string> performance_losses;  ///< the log's C75xx messages
};

/// Compiles `spec` for `arch` ("sm_90a"), or loads it from the cache or a pack on disk. Needs no GPU and no driver. A cache that cannot be
/// read or written only costs time. Throws CompileError, InvalidArgument for a spec that cannot be, DeviceError where NVRTC is needed and
/// missing. `use_cache` false compiles afresh and leaves the cache alone.
CompiledKernel compile(const KernelSpec& spec, std::string_view arch = "sm_90a", bool use_cache = true);

/// Compiles all of them with `threads` threads (0: one per core), so that later launches find them in the cache. `done(i, kernel)` after
/// each, one at a time, in the order in which they are ready. The first failure is thrown when the others are done.
void compile_all(const std::vector<KernelSpec>& specs, int threads = 0,
                 const std::function<void(std::size_t index, const CompiledKernel& kernel)>& done = {});

/// Writes `kernel`, which compile(spec, arch) gave, into a folder that can serve as $TILEWAVE_PACK on machines with or without NVRTC.
/// Throws Error with the system's reason.
void write_pack(const std::string& folder, const KernelSpec& spec, const CompiledKernel& kernel, std::string_view arch = "sm_90a");

/// The whole program text that NVRTC is given for `spec`: the generated entry point; headers are those embedded.
std::string kernel_source(const KernelSpec& spec);

/// Enqueues `spec` on a CUDA stream, compiling it at first use. `params`: the kernel's Params. Throws CompileError, DeviceError.
void launch_on_gpu(const KernelSpec& spec, const void* params, const TileGrid& grid, const Stream& stream);

/// The folder of compiled kernels: $TILEWAVE_CACHE, else $XDG_CACHE_HOME/tilewave, else ~/.cache/tilewave; empty if none of these is set.
std::string cache_directory();

}  // namespace tw
