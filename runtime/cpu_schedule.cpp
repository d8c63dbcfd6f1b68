#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "tilewave/device.hpp"
#include "tilewave/error.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::cpu {

namespace {
#ifdef NDEBUG
std::atomic<bool> poison{false};
#else
std::atomic<bool> poison{true};
#endif
}  // namespace

void schedule_error(const char* what) { throw Error(std::string("the kernel's schedule is wrong: ") + what); }

void wait_for_others(Waiting& waiting, const char* wrong) {
  constexpr auto kLongest = std::chrono::minutes(5);  // a tile under a sanitizer takes seconds
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  if (waiting.since == 0) waiting.since = now.count();
  if (cpu_threads() == 1 || now - decltype(now)(waiting.since) > kLongest) schedule_error(wrong);
  std::this_thread::yield();
}

void await_turn(const u32* counter, u32 value) {
  Waiting waiting;
  while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) != value)
    wait_for_others(waiting, "wait_turn() or wait_for() waits for what no block passes or announces");
}

bool poison_released_slots() { return poison.load(std::memory_order_relaxed); }
void set_poison_released_slots(bool on) { poison.store(on, std::memory_order_relaxed); }

void* operand_memory(int which, long bytes) {
  constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* memory) const { operator delete(memory, kAlignment); }
  };
  struct Memory {
    std::unique_ptr<void, Free> start;
    long bytes = 0;
  };
  thread_local Memory memories[3];
  Memory& memory = memories[which];
  if (memory.bytes < bytes) {
    memory.start.reset(operator new(static_cast<std::size_t>(bytes), kAlignment));
    memory.bytes = bytes;
  }
  return memory.start.get();
}

}  // namespace tw::cpu
