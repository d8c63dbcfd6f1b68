#include "runtime/stream.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

using Clock = std::chrono::steady_clock;

/// Counters of borrowed queues, whose end is unknown. There is one set per handle.
unsigned* counter_of_queue(Gpu& gpu, cuda::Stream stream) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<int, cuda::Stream>, unsigned*>;
  const std::lock_guard lock(mutex);
  unsigned*& counter = known[{gpu.index(), stream}];
  if (counter == nullptr) counter = gpu.take_counter();
  return counter;
}

void require_same(Device a, Device b, const char* call) {
  if (a != b) throw InvalidArgument(tw::format("{}: the stream is on {}; allowed: {}", call, b.name(), a.name()));
}

}  // namespace

Captured*& captured() {
  thread_local Captured* of_thread = nullptr;
  return of_thread;
}

std::shared_ptr<void> allocate_workspace(std::size_t bytes, const Stream& stream) {
  const cuda::Stream native = StreamAccess::native(stream);
  if (!stream.device().is_cuda() || !is_capturing(native)) return allocate(bytes, stream);
  if (captured() != nullptr) {
    // Reuses the memory of earlier launches in this queue. Otherwise a graph of many launches holds the memory of all of them, and none of
    // it is in the cache.
    for (const Captured::Workspace& known : captured()->memory)
      if (known.stream == native && known.bytes >= bytes && known.memory.use_count() == 1) return known.memory;
  }
  static std::mutex mutex;
  static auto& aside = *new std::map<int, Stream>;  // a queue that is never captured
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  auto found = aside.find(stream.device().index);
  const RelaxedCapture relaxed;
  if (found == aside.end()) found = aside.emplace(stream.device().index, Stream(stream.device())).first;
  std::shared_ptr<void> memory = allocate(bytes, found->second);
  found->second.synchronize();
  // When a graph of another library is destroyed is unknown, so its memory stays reserved.
  if (captured() != nullptr)
    captured()->memory.push_back({memory, bytes, native});
  else
    kept.push_back(memory);
  return memory;
}

unsigned* StreamAccess::counter_for_launch(const Stream& stream) {
  const Stream::State& state = *stream.state_;
  if (!is_capturing(state.native)) return state.counter;
  unsigned* counter = state.gpu->take_counter();
  // When a graph of another library is destroyed is unknown, so its counters stay reserved.
  if (captured() != nullptr) captured()->counters.push_back(counter);
  return counter;
}

// --- Stream

Stream::State::~State() {
  if (!owned) return;
  // Errors are ignored: a destructor cannot report them, least of all at the end of the process.
  try {
    const cuda::Driver& d = cuda::driver();
    const CurrentContext current(*gpu);
    if (counter != nullptr) d.mem_free_async(reinterpret_cast<cuda::Address>(counter), native);  // after the kernels in the queue
    d.stream_destroy(native);
  } catch (const Error&) {
  }
}

Stream::Stream(Device device, std::shared_ptr<State> state) : device_(device), state_(std::move(state)) {}

Stream::Stream(Device device) : device_(device), state_(std::make_shared<State>()) {
  if (!device.is_cuda()) return;
  const cuda::Driver& d = cuda::driver();
  state_->gpu = &Gpu::get(device.index);
  const RelaxedCapture relaxed;
  const CurrentContext current(*state_->gpu);
  cuda::check(d.stream_create(&state_->native, cuda::kStreamNonBlocking), "cuStreamCreate");
  state_->owned = true;
  cuda::Address counter = 0;
  constexpr std::size_t kCounterBytes = kLaunchCounters * sizeof(unsigned);
  cuda::check(d.mem_alloc_from_pool_async(&counter, kCounterBytes, state_->gpu->pool(), state_->native), "cuMemAllocFromPoolAsync");
  state_->counter = reinterpret_cast<unsigned*>(counter);
  cuda::check(d.memset_d8_async(counter, 0, kCounterBytes, state_->native), "cuMemsetD8Async");
}

Stream Stream::standard(Device device) {
  if (!device.is_cuda()) {
    static const Stream& cpu = *new Stream(Device::cpu());
    return cpu;
  }
  static std::mutex mutex;
  static auto& known = *new std::map<int, Stream>;
  const std::lock_guard lock(mutex);
  auto found = known.find(device.index);
  if (found == known.end()) found = known.emplace(device.index, Stream(device)).first;
  return found->second;
}

Stream Stream::borrow(Device device, void* cu_stream) {
  if (!device.is_cuda()) {
    if (cu_stream != nullptr) throw InvalidArgument("Stream::borrow: cu_stream is given for the CPU; allowed: null");
    return standard(device);
  }
  auto state = std::make_shared<State>();
  state->gpu = &Gpu::get(device.index);
  state->native = static_cast<cuda::Stream>(cu_stream);
  state->counter = counter_of_queue(*state->gpu, state->native);
  return Stream(device, std::move(state));
}

Stream Stream::with_target(GpuTarget target) const {
  if (state_->gpu != nullptr) require_target(target, device_, state_->gpu->compute_capability());
  Stream stream = *this;
  stream.target_ = target;
  return stream;
}

GpuTarget Stream::target() const {
  if (state_->gpu == nullptr) return GpuTarget::automatic;
  if (target_ != GpuTarget::automatic) return target_;
  const GpuTarget standard = standard_gpu_target();
  if (standard == GpuTarget::automatic) return best_target(state_->gpu->compute_capability());
  require_target(standard, device_, state_->gpu->compute_capability());
  return standard;
}

void* Stream::native() const { return state_->native; }

void Stream::synchronize() const {
  if (state_->gpu == nullptr) return;
  const CurrentContext current(*state_->gpu);
  cuda::check(cuda::driver().stream_synchronize(state_->native), "cuStreamSynchronize");
}

// --- Event

struct Event::State {
  Device device;
  bool recorded = false;
  Clock::time_point time;
  Gpu* gpu = nullptr;
  cuda::Event native = nullptr;

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    if (native == nullptr) return;
    try {
      const CurrentContext current(*gpu);
      cuda::driver().event_destroy(native);
    } catch (const Error&) {
    }
  }
};

Event::Event(Device device) : state_(std::make_shared<State>()) {
  state_->device = device;
  if (!device.is_cuda()) return;
  state_->gpu = &Gpu::get(device.index);
  const CurrentContext current(*state_->gpu);
  cuda::check(cuda::driver().event_create(&state_->native, cuda::kEventDefault), "cuEventCreate");
}

void Event::record(const Stream& stream) {
  require_same(state_->device, stream.device(), "Event::record");
  if (state_->gpu == nullptr) {
    state_->time = Clock::now();
  } else {
    const CurrentContext current(*state_->gpu);
    cuda::check(cuda::driver().event_record(state_->native, StreamAccess::native(stream)), "cuEventRecord");
  }
  state_->recorded = true;
}

void Event::synchronize() const {
  if (state_->gpu == nullptr) return;
  const CurrentContext current(*state_->gpu);
  cuda::check(cuda::driver().event_synchronize(state_->native), "cuEventSynchronize");
}

float Event::milliseconds(const Event& begin, const Event& end) {
  require_same(begin.state_->device, end.state_->device, "Event::milliseconds");
  if (!begin.state_->recorded || !end.state_->recorded) {
    throw InvalidArgument(tw::format("Event::milliseconds: {} was not recorded", begin.state_->recorded ? "end" : "begin"));
  }
  if (begin.state_->gpu == nullptr) return std::chrono::duration<float, std::milli>(end.state_->time - begin.state_->time).count();
  end.synchronize();
  const CurrentContext current(*begin.state_->gpu);
  float result = 0;
  cuda::check(cuda::driver().event_elapsed_time(&result, begin.state_->native, end.state_->native), "cuEventElapsedTime");
  return result;
}

float milliseconds(const Stream& stream, const std::function<void()>& work) {
  if (!work) throw InvalidArgument("milliseconds: work is empty; allowed: a function");
  work();
  stream.synchronize();
  std::array<float, 7> times{};
  Event begin(stream.device());
  Event end(stream.device());
  for (float& time : times) {
    begin.record(stream);
    work();
    end.record(stream);
    time = Event::milliseconds(begin, end);
  }
  const auto middle = times.begin() + times.size() / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

// --- Graph

struct Graph::State {
  Device device;
  std::function<void()> work;  // CPU
  Gpu* gpu = nullptr;
  cuda::GraphExec exec = nullptr;
  Captured kept;
  mutable std::mutex mutex;
  mutable std::optional<Stream> last;  // the queue of the latest replay

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    if (gpu == nullptr) return;
    try {
      // Replays of a graph run one after another: when the last one is done, no kernel uses these resources.
      if (last && (!kept.counters.empty() || !kept.memory.empty())) last->synchronize();
      for (unsigned* counter : kept.counters) gpu->give_back_counter(counter);
      const CurrentContext current(*gpu);
      if (exec != nullptr) cuda::driver().graph_exec_destroy(exec);
    } catch (const Error&) {
    }
  }
};

Graph Graph::capture(const Stream& stream, std::function<void()> work) {
  if (!work) throw InvalidArgument("Graph::capture: work is empty; allowed: a function");
  Graph graph;
  graph.state_ = std::make_shared<State>();
  State& state = *graph.state_;
  state.device = stream.device();
  if (!stream.device().is_cuda()) {
    state.work = std::move(work);
    return graph;
  }
  const cuda::Driver& d = cuda::driver();
  const cuda::Stream native = StreamAccess::native(stream);
  state.gpu = &Gpu::get(stream.device().index);
  const CurrentContext current(*state.gpu);
  cuda::check(d.stream_begin_capture(native, cuda::CaptureMode::thread_local_), "cuStreamBeginCapture");

  cuda::Graph native_graph = nullptr;
  Captured* const outer = std::exchange(captured(), &state.kept);
  try {
    work();
  } catch (...) {
    captured() = outer;
    d.stream_end_capture(native, &native_graph);  // leaves the stream usable
    if (native_graph != nullptr) d.graph_destroy(native_graph);
    throw;
  }
  captured() = outer;
  cuda::check(d.stream_end_capture(native, &native_graph), "cuStreamEndCapture");
  const cuda::Result result = d.graph_instantiate(&state.exec, native_graph, 0);
  d.graph_destroy(native_graph);
  cuda::check(result, "cuGraphInstantiate");
  return graph;
}

void Graph::replay(const Stream& stream) const {
  if (state_ == nullptr) throw InvalidArgument("Graph::replay: the graph is empty; allowed: one that Graph::capture made");
  require_same(state_->device, stream.device(), "Graph::replay");
  if (state_->gpu == nullptr) {
    state_->work();
    return;
  }
  const CurrentContext current(*state_->gpu);
  cuda::check(cuda::driver().graph_launch(state_->exec, StreamAccess::native(stream)), "cuGraphLaunch");
  if (!state_->kept.counters.empty() || !state_->kept.memory.empty()) {
    const std::lock_guard lock(state_->mutex);
    state_->last = stream;
  }
}

void fill_bytes(void* memory, std::size_t bytes, unsigned char value, const Stream& stream) {
  if (bytes == 0) return;  // there may be no memory
  if (!stream.device().is_cuda()) return void(std::memset(memory, value, bytes));
  const CurrentContext current(Gpu::get(stream.device().index));
  cuda::check(cuda::driver().memset_d8_async(reinterpret_cast<cuda::Address>(memory), value, bytes, StreamAccess::native(stream)),
              "cuMemsetD8Async");
}

}  // namespace tw
