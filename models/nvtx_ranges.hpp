#pragma once

#include "models/observe.hpp"
#include "runtime/nvtx.hpp"

namespace tw::models {

/// Passes stages and operators to NVIDIA's profilers as NVTX ranges, and to another observer, which may be null.
class NvtxRanges : public Observer {
 public:
  NvtxRanges(const Nvtx& nvtx, Observer* next) : nvtx_(nvtx), next_(next) {}

  void stage_begin(std::string_view name, const Stream& stream) override;
  void stage_end(std::string_view name, const Stream& stream) override;
  void operator_begin(std::string_view name, int layer, const Stream& stream) override;
  void operator_end(const Operator& op, const Tensor* output, const Stream& stream) override;
  bool needs_operators() const override { return next_ != nullptr && next_->needs_operators(); }

 private:
  const Nvtx& nvtx_;
  Observer* next_;
};

}  // namespace tw::models
