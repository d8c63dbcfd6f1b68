#pragma once

namespace tw {

/// A target as a device and the tensors of a launch ask for it.
struct TargetVariant {
  int index;         ///< less than kTargetVariants: tells variants apart
  const char* text;  ///< the C++ type: "tw::sm_90a::Target<true, true>"
};
inline constexpr int kTargetVariants = 4;

/// `tma_load`, `tma_store`: TMA can take every tensor that is loaded, or stored.
TargetVariant target_variant(bool tma_load, bool tma_store);

}  // namespace tw
