#pragma once

// The CUDA driver, loaded at run time: libcuda.so.1 by dlopen, with our own declarations of the calls in use. So one binary works on
// machines with and without CUDA, and building needs no toolkit. tests/cuda_declarations_test.cpp holds these against <cuda.h>.

#include <cstddef>
#include <cstdint>
#include <string>

namespace tw::cuda {

/// CUresult; the values that the code distinguishes.
enum class Result : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  deinitialized = 4,
  stub_library = 34,
  device_unavailable = 46,
  no_device = 100,
  invalid_device = 101,
  invalid_image = 200,
  invalid_context = 201,
  no_binary_for_gpu = 209,
  invalid_ptx = 218,
  unsupported_ptx_version = 222,
  not_found = 500,
  not_ready = 600,
  not_supported = 801,
  unknown = 999,
};

using Device = int;                    // CUdevice
using Address = unsigned long long;    // CUdeviceptr
using Context = struct ContextTag*;    // CUcontext
using Module = struct ModuleTag*;      // CUmodule
using Function = struct FunctionTag*;  // CUfunction
using Stream = struct StreamTag*;      // CUstream
using Event = struct EventTag*;        // CUevent
using Graph = struct GraphTag*;        // CUgraph
using GraphExec = struct ExecTag*;     // CUgraphExec
using MemoryPool = struct PoolTag*;    // CUmemoryPool

/// CUdevice_attribute.
enum class DeviceAttribute : int {
  multiprocessor_count = 16,
  l2_cache_size = 38,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  max_shared_memory_per_block_optin = 97,
  memory_pools_supported = 115,
};

/// CUfunction_attribute.
enum class FunctionAttribute : int {
  shared_size_bytes = 1,
  local_size_bytes = 3,
  num_regs = 4,
  max_dynamic_shared_size_bytes = 8,
};

/// CUmemPool_attribute. The values behind them are u64.
enum class PoolAttribute : int { release_threshold = 4, reserved_mem_current = 5, used_mem_current = 7 };

/// CUstreamCaptureMode.
enum class CaptureMode : int { global = 0, thread_local_ = 1, relaxed = 2 };

/// CUstreamCaptureStatus.
enum class CaptureStatus : int { none = 0, active = 1, invalidated = 2 };

inline constexpr unsigned kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDefault = 0;       // CU_EVENT_DEFAULT

/// CUmemLocation. type 1: a device.
struct MemoryLocation {
  int type = 1;
  int id = 0;
};

/// CUmemPoolProps. allocation_type 1: pinned, the only one there is.
struct PoolProperties {
  int allocation_type = 1;
  int handle_types = 0;
  MemoryLocation location;
  void* win32_security_attributes = nullptr;
  std::size_t max_size = 0;
  unsigned short usage = 0;
  unsigned char reserved[54] = {};
};

/// CUlaunchAttribute.
struct LaunchAttribute {
  int id;
  int padding;
  unsigned value[16];

  /// CU_LAUNCH_ATTRIBUTE_COOPERATIVE: all blocks run at once, or the launch fails.
  static LaunchAttribute cooperative() { return {2, 0, {1}}; }
  /// CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: `blocks` x 1 x 1.
  static LaunchAttribute cluster(int blocks) { return {4, 0, {static_cast<unsigned>(blocks), 1, 1}}; }
  /// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start before the previous one in the stream has finished, and
  /// waits for it itself (griddepcontrol.wait).
  static LaunchAttribute overlap() { return {6, 0, {1}}; }
};

/// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1;
  unsigned block_x = 1, block_y = 1, block_z = 1;
  unsigned shared_bytes = 0;
  Stream stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  unsigned attribute_count = 0;
};

/// CUtensorMap: 128 bytes that only the driver writes and only the hardware reads. The driver requires 64-byte alignment.
struct alignas(128) TensorMap {
  std::uint64_t opaque[16];
};

/// CUtensorMapDataType.
enum class TensorMapType : int { u8 = 0, f16 = 6, f32 = 7, bf16 = 9 };
/// CUtensorMapInterleave.
enum class TensorMapInterleave : int { none = 0 };
/// CUtensorMapSwizzle.
enum class TensorMapSwizzle : int { none = 0, bytes32 = 1, bytes64 = 2, bytes128 = 3 };
/// CUtensorMapL2promotion.
enum class TensorMapPromotion : int { none = 0, bytes256 = 3 };
/// CUtensorMapFloatOOBfill.
enum class TensorMapFill : int { zeros = 0 };

// Each call: our name, the symbol in libcuda (the header's macros map many plain names to these versioned ones), parameters. All return
// Result.
#define TILEWAVE_CUDA_CALLS(X)                                                                                                           \
  X(init, cuInit, (unsigned flags))                                                                                                      \
  X(driver_get_version, cuDriverGetVersion, (int* version))                                                                              \
  X(get_error_name, cuGetErrorName, (Result result, const char** text))                                                                  \
  X(get_error_string, cuGetErrorString, (Result result, const char** text))                                                              \
  X(device_get_count, cuDeviceGetCount, (int* count))                                                                                    \
  X(device_get, cuDeviceGet, (Device * device, int ordinal))                                                                             \
  X(device_get_name, cuDeviceGetName, (char* name, int size, Device device))                                                             \
  X(device_get_attribute, cuDeviceGetAttribute, (int* value, DeviceAttribute attribute, Device device))                                  \
  X(device_total_mem, cuDeviceTotalMem_v2, (std::size_t * bytes, Device device))                                                         \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))                                                    \
  X(primary_ctx_release, cuDevicePrimaryCtxRelease_v2, (Device device))                                                                  \
  X(ctx_get_current, cuCtxGetCurrent, (Context * context))                                                                               \
  X(ctx_set_current, cuCtxSetCurrent, (Context context))                                                                                 \
  X(mem_get_info, cuMemGetInfo_v2, (std::size_t * free, std::size_t * total))                                                            \
  X(mem_pool_create, cuMemPoolCreate, (MemoryPool * pool, const PoolProperties* properties))                                             \
  X(mem_pool_set_attribute, cuMemPoolSetAttribute, (MemoryPool pool, PoolAttribute attribute, void* value))                              \
  X(mem_pool_get_attribute, cuMemPoolGetAttribute, (MemoryPool pool, PoolAttribute attribute, void* value))                              \
  X(mem_pool_trim_to, cuMemPoolTrimTo, (MemoryPool pool, std::size_t bytes))                                                             \
  X(mem_alloc_from_pool_async, cuMemAllocFromPoolAsync, (Address * address, std::size_t bytes, MemoryPool pool, Stream stream))          \
  X(mem_free_async, cuMemFreeAsync, (Address address, Stream stream))                                                                    \
  X(mem_host_alloc, cuMemHostAlloc, (void** memory, std::size_t bytes, unsigned flags))                                                  \
  X(mem_free_host, cuMemFreeHost, (void* memory))                                                                                        \
  X(memcpy_async, cuMemcpyAsync, (Address to, Address from, std::size_t bytes, Stream stream))                                           \
  X(memcpy_htod_async, cuMemcpyHtoDAsync_v2, (Address to, const void* from, std::size_t bytes, Stream stream))                           \
  X(memcpy_dtoh_async, cuMemcpyDtoHAsync_v2, (void* to, Address from, std::size_t bytes, Stream stream))                                 \
  X(memcpy_peer_async, cuMemcpyPeerAsync,                                                                                                \
    (Address to, Context to_context, Address from, Context from_context, std::size_t bytes, Stream stream))                              \
  X(memset_d8_async, cuMemsetD8Async, (Address address, unsigned char value, std::size_t count, Stream stream))                          \
  X(module_load_data, cuModuleLoadData, (Module * module, const void* image))                                                            \
  X(module_unload, cuModuleUnload, (Module module))                                                                                      \
  X(module_get_function, cuModuleGetFunction, (Function * function, Module module, const char* name))                                    \
  X(func_set_attribute, cuFuncSetAttribute, (Function function, FunctionAttribute attribute, int value))                                 \
  X(func_get_attribute, cuFuncGetAttribute, (int* value, FunctionAttribute attribute, Function function))                                \
  X(occupancy_blocks_per_sm, cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                                \
    (int* blocks, Function function, int threads, std::size_t shared_bytes))                                                             \
  X(occupancy_clusters, cuOccupancyMaxActiveClusters, (int* clusters, Function function, const LaunchConfig* config))                    \
  X(launch_kernel, cuLaunchKernelEx, (const LaunchConfig* config, Function function, void** params, void** extra))                       \
  X(stream_create, cuStreamCreate, (Stream * stream, unsigned flags))                                                                    \
  X(stream_destroy, cuStreamDestroy_v2, (Stream stream))                                                                                 \
  X(stream_synchronize, cuStreamSynchronize, (Stream stream))                                                                            \
  X(stream_is_capturing, cuStreamIsCapturing, (Stream stream, CaptureStatus * status))                                                   \
  X(stream_begin_capture, cuStreamBeginCapture_v2, (Stream stream, CaptureMode mode))                                                    \
  X(stream_end_capture, cuStreamEndCapture, (Stream stream, Graph * graph))                                                              \
  X(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (CaptureMode * mode))                                               \
  X(event_create, cuEventCreate, (Event * event, unsigned flags))                                                                        \
  X(event_record, cuEventRecord, (Event event, Stream stream))                                                                           \
  X(event_synchronize, cuEventSynchronize, (Event event))                                                                                \
  X(event_elapsed_time, cuEventElapsedTime, (float* milliseconds, Event begin, Event end))                                               \
  X(event_destroy, cuEventDestroy_v2, (Event event))                                                                                     \
  X(graph_instantiate, cuGraphInstantiateWithFlags, (GraphExec * exec, Graph graph, unsigned long long flags))                           \
  X(graph_launch, cuGraphLaunch, (GraphExec exec, Stream stream))                                                                        \
  X(graph_destroy, cuGraphDestroy, (Graph graph))                                                                                        \
  X(graph_exec_destroy, cuGraphExecDestroy, (GraphExec exec))                                                                            \
  X(tensor_map_encode_tiled, cuTensorMapEncodeTiled,                                                                                     \
    (TensorMap * map, TensorMapType type, std::uint32_t rank, void* address, const std::uint64_t* extents, const std::uint64_t* strides, \
     const std::uint32_t* box, const std::uint32_t* element_strides, TensorMapInterleave interleave, TensorMapSwizzle swizzle,           \
     TensorMapPromotion promotion, TensorMapFill fill))

/// The entry points.
struct Driver {
#define TILEWAVE_CUDA_MEMBER(name, symbol, parameters) Result(*name) parameters = nullptr;
  TILEWAVE_CUDA_CALLS(TILEWAVE_CUDA_MEMBER)
#undef TILEWAVE_CUDA_MEMBER
  int version = 0;  ///< CUDA version that the driver supports: 1000 * major + 10 * minor
};

/// The result of looking for the driver.
struct DriverSearch {
  const Driver* driver = nullptr;  ///< loaded and initialised, or null; then `problem` says why
  std::string problem;
  int version = 0;  ///< the driver's version, also when there is a driver but no GPU; 0 without one
};

/// Looks for the driver; success is cached for the life of the process, failure is not. Thread-safe, never throws
/// DeviceError.
DriverSearch find_driver();

/// The driver. Throws DeviceError with find_driver's problem.
const Driver& driver();

/// If not null, what driver() gives the calling thread: runtime/dry_run.hpp.
const Driver*& driver_of_thread();

/// "CUDA_ERROR_INVALID_VALUE (invalid argument)". For out-of-memory errors it includes the free memory of the current context's device.
std::string describe(Result result);
std::string describe(const Driver& calls, Result result);

/// Throws DeviceError "cuMemGetInfo: CUDA_ERROR_... (...)" unless `result` is success. `call` is the driver's name of the function.
void check(Result result, const char* call);

/// "13.0" of 13000.
std::string version_text(int version);

}  // namespace tw::cuda
