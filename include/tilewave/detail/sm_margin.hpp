#pragma once

namespace tw::detail {

/// While it exists, the calling thread's launches leave `sm_margin` SMs of a GPU free: those of kernels whose blocks take one tile after
/// the other have as many blocks as fit on the other SMs at once, on one at least. Launches with a block for each tile are as always.
class ScopedSmMargin {
 public:
  explicit ScopedSmMargin(int sm_margin);
  ~ScopedSmMargin();
  ScopedSmMargin(const ScopedSmMargin&) = delete;
  ScopedSmMargin& operator=(const ScopedSmMargin&) = delete;

 private:
  int before_;
};

}  // namespace tw::detail
