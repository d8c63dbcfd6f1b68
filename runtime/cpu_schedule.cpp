#include <atomic>
#include <string>

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

bool poison_released_slots() { return poison.load(std::memory_order_relaxed); }
void set_poison_released_slots(bool on) { poison.store(on, std::memory_order_relaxed); }

}  // namespace tw::cpu
