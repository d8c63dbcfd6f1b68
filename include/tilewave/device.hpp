#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tw {

/// The device of a tensor or a kernel: the CPU, or one CUDA GPU.
struct Device {
  enum class Kind { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  static constexpr Device cpu() { return {Kind::cpu, 0}; }
  static constexpr Device cuda(int index = 0) { return {Kind::cuda, index}; }

  /// "cpu", "cuda" (index 0) or "cuda:N"; "auto" is best_device(). Throws InvalidArgument for anything else.
  static Device parse(std::string_view text);

  bool is_cuda() const { return kind == Kind::cuda; }
  std::string name() const;
  friend bool operator==(const Device&, const Device&) = default;
};

/// The target that kernels are compiled for on a GPU.
enum class GpuTarget {
  automatic,  ///< sm_90a on GPUs of compute capability 9.0, otherwise cuda
  sm_90a,     ///< Hopper: copies by TMA, products by wgmma
  cuda        ///< any NVIDIA GPU since compute capability 8.0: cp.async and mma.sync
};
/// The target named "auto", "sm_90a" or "cuda". Throws InvalidArgument for any other text.
GpuTarget parse_gpu_target(std::string_view text);
std::string_view name_of(GpuTarget target);

/// Sets the target of all streams without one of their own (Stream::with_target), for future launches. Kernels of both targets may be in
/// use at the same time. Thread-safe.
void set_gpu_target(GpuTarget target);

/// One device as found on this machine.
struct DeviceInfo {
  Device device;
  std::string name;                  ///< "NVIDIA H200", or the CPU's model name
  std::string isa;                   ///< "sm_90"; on the CPU the instruction set in use: "baseline", "avx2", "avx512",
                                     ///< or with int8 and bf16 instructions "avx512+vnni", "avx512+bf16", "avx512+vnni+bf16"
  int units = 0;                     ///< SMs, or threads of the CPU pool
  std::size_t total_memory = 0;      ///< bytes
  std::size_t free_memory = 0;       ///< bytes
  std::size_t l2_bytes = 0;          ///< bytes of the last-level cache (CPU: L3), 0 if unknown
  std::size_t shared_per_block = 0;  ///< bytes of shared memory that one block may use (GPU only)
  GpuTarget target = {};             ///< the default target of kernels (GPU only)
  bool usable = false;               ///< kernels can run here
  std::string problem;               ///< the reason if not usable: "sm_75 (Tesla T4): Tilewave's GPU kernels need ..."
};

/// The devices and compilers found on this machine.
struct DeviceReport {
  std::vector<DeviceInfo> devices;  ///< the CPU first
  std::string cuda_problem;         ///< why there is no CUDA device ("libcuda.so.1: cannot open shared object file"), else empty
  std::string cuda_driver;          ///< "13.0", empty without a driver
  std::string nvrtc;                ///< "13.0 (/usr/local/cuda/lib64/libnvrtc.so.13)", else empty
  std::string nvrtc_problem;        ///< why NVRTC cannot be used, with the places searched, else empty

  /// The devices on which kernels can run: the CPU, and the usable GPUs if NVRTC can compile for them.
  std::vector<Device> usable() const;
  /// One line for each device or compiler that cannot be used, with the reason; empty if there is none.
  std::string problems() const;
};

/// Searches again at each call. Never throws for a missing driver, GPU or NVRTC.
DeviceReport find_devices();

/// The first usable GPU, else the CPU.
Device best_device();

/// Properties of one device, found once. Throws DeviceError when there is no such device.
const DeviceInfo& device_info(Device device);

/// An ordered queue of work on a device. Copies share the queue. On the CPU each call returns when its work is complete.
class Stream {
 public:
  /// A new queue on `device`.
  explicit Stream(Device device);
  /// The default queue of all functions: one per device and process.
  static Stream standard(Device device);
  /// Uses a queue that the caller owns, such as PyTorch's current stream (a CUstream; null is the legacy default stream).
  static Stream borrow(Device device, void* cu_stream);

  Device device() const { return device_; }
  /// The same queue with kernels compiled for `target`. Throws InvalidArgument if the device cannot run it.
  Stream with_target(GpuTarget target) const;
  /// The target of kernels in this queue: sm_90a or cuda on a GPU, `automatic` on the CPU. Throws InvalidArgument if set_gpu_target() chose
  /// one that the device cannot run.
  GpuTarget target() const;
  /// The CUstream, or null on the CPU.
  void* native() const;
  /// Waits until everything enqueued so far is done. Throws DeviceError with the driver's text if a kernel failed.
  void synchronize() const;

 private:
  friend struct StreamAccess;  // the runtime
  struct State;
  Stream(Device device, std::shared_ptr<State> state);
  Device device_;
  std::shared_ptr<State> state_;
  GpuTarget target_ = GpuTarget::automatic;
};

/// A point in a stream's work, for timing. On the CPU the wall clock.
class Event {
 public:
  explicit Event(Device device);
  void record(const Stream& stream);
  void synchronize() const;
  /// Waits for `end`, then returns the milliseconds from `begin` to `end`.
  static float milliseconds(const Event& begin, const Event& end);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Milliseconds that `work` takes on `stream`: the median of a few calls after one warm-up call.
float milliseconds(const Stream& stream, const std::function<void()>& work);

/// Launches that are captured once and replayed together: a CUDA graph on a GPU; on the CPU the function is called again.
class Graph {
 public:
  /// Runs `work` on `stream` in capture mode, in which nothing executes on a GPU. On the CPU `work` is only stored. Memory that `work` uses
  /// must outlive the graph; `work` must not allocate, free or synchronise. Kernels used for the first time are compiled during the
  /// capture, which is slow but allowed.
  static Graph capture(const Stream& stream, std::function<void()> work);
  void replay(const Stream& stream) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Stream-ordered, pooled memory: returned to the pool in the order of `stream` when the last owner is destroyed. 256-byte aligned; null
/// for 0 bytes. A borrowed stream must outlive the memory. Throws OutOfMemory, and DeviceError while `stream` is being captured into a
/// graph.
std::shared_ptr<void> allocate(std::size_t bytes, const Stream& stream);

/// Gives the system back what the CPU keeps of freed memory for later tensors. For a program that becomes idle: the next tensors take
/// longer. Thread-safe.
void release_host_memory();

/// Sets the number of threads of the CPU target (default: the cores that this process may use), from the next launch on. The calling thread
/// is one of them if it has 4 MiB of stack left, because tiles are on the stack. Otherwise it only waits.
void set_cpu_threads(int threads);
int cpu_threads();

}  // namespace tw
