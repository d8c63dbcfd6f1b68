#include "runtime/host.hpp"

#include <sys/utsname.h>

#include <fstream>
#include <sstream>

namespace tw {
namespace {

std::string after_colon(const std::string& line) {
  const std::size_t colon = line.find(':');
  const std::size_t begin = colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
  return begin == std::string::npos ? "" : line.substr(begin);
}

}  // namespace

HostMemory host_memory() {
  HostMemory memory;
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::size_t kilobytes = 0;
    if (line.rfind("MemTotal:", 0) == 0 && std::istringstream(after_colon(line)) >> kilobytes) memory.total = kilobytes * 1024;
    if (line.rfind("MemAvailable:", 0) == 0 && std::istringstream(after_colon(line)) >> kilobytes) memory.available = kilobytes * 1024;
  }
  return memory;
}

std::string host_cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return after_colon(line);
  }
  utsname names{};
  return uname(&names) == 0 ? names.machine : "CPU";
}

std::size_t host_cache_bytes() {
  std::size_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    std::size_t size = 0;
    char unit = 0;
    if (!(file >> size)) break;
    if (file >> unit) size <<= unit == 'M' ? 20 : unit == 'K' ? 10 : 0;
    largest = size > largest ? size : largest;
  }
  return largest;
}

}  // namespace tw
