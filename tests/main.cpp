#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/gpu_lock.hpp"
#include "tests/support.hpp"
#include "tilewave/device.hpp"
#include "tilewave/error.hpp"

namespace tw::test {

std::uint64_t seed() {
  static const std::uint64_t value = [] {
    if (const char* given = std::getenv("TILEWAVE_TEST_SEED")) return static_cast<std::uint64_t>(std::stoull(given));
    return static_cast<std::uint64_t>(std::random_device{}());
  }();
  return value;
}

std::mt19937_64 random_engine() {
  std::string name;
  if (const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info()) {
    name = std::string(test->test_suite_name()) + "." + test->name();
  }
  std::vector<std::uint32_t> words = {static_cast<std::uint32_t>(seed()), static_cast<std::uint32_t>(seed() >> 32)};
  words.insert(words.end(), name.begin(), name.end());
  std::seed_seq sequence(words.begin(), words.end());
  return std::mt19937_64(sequence);
}

namespace {
const DeviceReport& devices() {
  static const DeviceReport report = find_devices();
  return report;
}
}  // namespace

const DeviceInfo* cuda_device() {
  static const DeviceInfo* const found = []() -> const DeviceInfo* {
    for (const DeviceInfo& device : devices().devices) {
      if (!device.device.is_cuda() || !device.usable) continue;
      gpu_lock().share();
      return &device;
    }
    return nullptr;
  }();
  return found;
}

const std::string& nvrtc_problem() { return devices().nvrtc_problem; }

namespace {
/// The macro returns, but only from here.
void mark_as_skipped(const char* reason) { GTEST_SKIP() << "skipped: a case: " << reason; }
}  // namespace

bool launched(const std::function<void()>& launch) {
  try {
    launch();
    return true;
  } catch (const DeviceError& error) {
    if (std::getenv("TILEWAVE_REQUIRE_CUDA") != nullptr || nvrtc_problem().empty() ||
        std::string(error.what()).find(nvrtc_problem()) == std::string::npos)
      throw;
    mark_as_skipped(error.what());
    return false;
  }
}

}  // namespace tw::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!testing::GTEST_FLAG(list_tests))
    std::printf("Random inputs: TILEWAVE_TEST_SEED=%llu repeats them\n", static_cast<unsigned long long>(tw::test::seed()));
  if (const char* target = std::getenv("TILEWAVE_TEST_TARGET")) tw::set_gpu_target(tw::parse_gpu_target(target));
  return RUN_ALL_TESTS();
}
