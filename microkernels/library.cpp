#include "tilewave/tile/cpu/library.tile.hpp"

#include <cstdlib>
#include <string_view>

#include "microkernels/isa.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace tw::cpu {

#if defined(__x86_64__)

namespace {

// Asked of the processor itself: not every supported compiler knows this name in __builtin_cpu_supports. That the operating system
// saves the registers is what its answer for avx2 says.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// Tiles have more to ask for than other registers: the operating system must save them (XCR0), and Linux does so only for processes that
// request it, since they make a thread's saved state and its signal frames 8 KB larger.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kAll) != kAll) return false;
  constexpr unsigned kTileConfiguration = 1u << 17, kTileData = 1u << 18, kBoth = kTileConfiguration | kTileData;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kBoth) != kBoth) return false;
  constexpr long kRequestPermission = 0x1023, kFeature = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return ::syscall(SYS_arch_prctl, kRequestPermission, kFeature) == 0;
#else
  return false;
#endif
}

}  // namespace

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_avx512_amx() {
  static const bool has = has_avx512_vnni() && has_avx512_bf16() && may_use_tiles();
  return has;
}

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_vnni() { return false; }
bool has_avx512_bf16() { return false; }
bool has_avx512_amx() { return false; }

#endif

const Library* extended_avx512_library() {
  static const Library extended = [] {
    const bool vnni = has_avx512_vnni() && avx512_vnni_mma() != nullptr, bf16 = has_avx512_bf16() && avx512_bf16_mma() != nullptr;
    Library library = *avx512_library();
    if (vnni) library.mma_i8 = avx512_vnni_mma();
    if (bf16) {
      library.mma_bf16 = avx512_bf16_mma();
      library.stream_bf16 = avx512_bf16_stream();
      library.narrow_bf16 = avx512_bf16_narrow();
    }
    if (vnni || bf16) library.isa = !bf16 ? "avx512+vnni" : !vnni ? "avx512+bf16" : "avx512+vnni+bf16";
    return library;
  }();
  return &extended;
}

const Library* amx_avx512_library() {
  if (avx512_amx_mma_bf16() == nullptr) return nullptr;
  static const Library amx = [] {
    Library library = *extended_avx512_library();
    library.isa = "avx512+vnni+bf16+amx";
    library.mma_bf16 = avx512_amx_mma_bf16();
    library.mma_bf16_by_rows = avx512_amx_mma_bf16_by_rows();
    library.mma_i8 = avx512_amx_mma_i8();
    return library;
  }();
  return &amx;
}

namespace {

// TILEWAVE_ISA names the most that may be used, so it can only lower the choice: asking for a set that the processor lacks gives the best
// that it has, and so does a value that names no set.
const Library& choose() {
  const char* wanted = std::getenv("TILEWAVE_ISA");
  const std::string_view most = wanted == nullptr ? "" : wanted;
  if (most == "baseline") return *baseline_library();
  if (most != "avx2" && has_avx512() && avx512_library() != nullptr) {
    if (most == "avx512") return *avx512_library();
    const Library& extended = *extended_avx512_library();
    if (most == extended.isa || !has_avx512_amx() || amx_avx512_library() == nullptr) return extended;
    return *amx_avx512_library();
  }
  if (has_avx2() && avx2_library() != nullptr) return *avx2_library();
  return *baseline_library();
}

}  // namespace

const Library& library() {
  static const Library& chosen = choose();
  return chosen;
}

const QuantizedLibrary& quantized_library() {
  static const QuantizedLibrary chosen = [] {
    const std::string_view isa = library().isa;
    QuantizedLibrary result = *(isa.starts_with("avx512") ? avx512_quantized_library()
                                : isa == "avx2"           ? avx2_quantized_library()
                                                          : baseline_quantized_library());
    if (isa != "baseline") {  // AVX-512 has no such products of its own without VNNI
      result.round_for_i8 = avx2_round_for_i8();
      result.round_for_u4 = avx2_round_for_u4();
      result.rounded_dots_i8 = avx2_rounded_dots_i8();
      result.rounded_dots_u4 = avx2_rounded_dots_u4();
    }
    if (isa.find("vnni") != std::string_view::npos) {
      result.round_for_i8 = avx512_vnni_round_for_i8();
      result.round_for_u4 = avx512_vnni_round_for_u4();
      result.round_to_i8 = avx512_vnni_round_to_i8();
      result.rounded_dots_i8 = avx512_vnni_rounded_dots_i8();
      result.rounded_dots_u4 = avx512_vnni_rounded_dots_u4();
    }
    return result;
  }();
  return chosen;
}

int vector_bytes() {
  static const int bytes = [] {
    const std::string_view isa = library().isa;
    return isa.starts_with("avx512") ? 64 : isa == "avx2" ? 32 : 16;
  }();
  return bytes;
}

}  // namespace tw::cpu
