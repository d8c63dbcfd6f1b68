#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tilewave/device.hpp"

namespace tw::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// The run's seed: $TILEWAVE_TEST_SEED, else different in every run. A failing test's output shows it.
std::uint64_t seed();

/// A generator for the current test: its stream depends on seed() and on the test's name alone, not on which tests ran before.
std::mt19937_64 random_engine();

/// The number of random cases to draw: `count`, or a quarter of it under the address sanitizer, where a case takes about ten times as long.
/// Every loop over many random cases asks for its count here.
constexpr int random_cases(int count) {
#if defined(__SANITIZE_ADDRESS__)
  return (count + 3) / 4;
#else
  return count;
#endif
}

/// The first usable GPU's report, or null.
const DeviceInfo* cuda_device();

/// Why NVRTC cannot be used; empty where it can.
const std::string& nvrtc_problem();

/// Calls `launch` and is true; false, and the test is marked as skipped with the reason, where the kernel is in no pack and NVRTC is
/// missing, as on a machine that has a driver only. The caller then leaves the case out; the test's other cases still run, and may fail.
/// Throws under `make gpu-test`.
bool launched(const std::function<void()>& launch);

/// Devices to run an operation's tests on: use with testing::ValuesIn and device_name. The GPU's tests skip where there is none.
inline const std::vector<Device> kDevices = {Device::cpu(), Device::cuda()};

/// "cpu" or "cuda". A test with "cuda" in its name has the label gpu: only `make gpu-test` runs it.
inline std::string device_name(const testing::TestParamInfo<Device>& info) { return info.param.is_cuda() ? "cuda" : "cpu"; }

}  // namespace tw::test

/// Ends the current test as skipped where there is no usable GPU; under `make gpu-test` (which sets TILEWAVE_REQUIRE_CUDA) as failed.
#define skip_without_cuda()                                                                            \
  do {                                                                                                 \
    if (::tw::test::cuda_device() == nullptr) {                                                        \
      if (std::getenv("TILEWAVE_REQUIRE_CUDA") != nullptr) GTEST_FAIL() << "no CUDA device is usable"; \
      GTEST_SKIP() << "skipped: no CUDA device";                                                       \
    }                                                                                                  \
  } while (false)

/// The same if `device` is a GPU; nothing on the CPU.
#define skip_unless_present(device)              \
  do {                                           \
    if ((device).is_cuda()) skip_without_cuda(); \
  } while (false)

/// Ends the current test as skipped, with the reason, where NVRTC is missing; in CI as failed.
#define skip_without_nvrtc()                                                                          \
  do {                                                                                                \
    if (const std::string& tw_problem = ::tw::test::nvrtc_problem(); !tw_problem.empty()) {           \
      if (std::getenv("CI") != nullptr) GTEST_FAIL() << "kernels cannot be compiled: " << tw_problem; \
      GTEST_SKIP() << "skipped: kernels cannot be compiled: " << tw_problem;                          \
    }                                                                                                 \
  } while (false)
