#include "models/nvtx_ranges.hpp"

#include <string>

#include "runtime/format.hpp"

namespace tw::models {

void NvtxRanges::stage_begin(std::string_view name, const Stream& stream) {
  if (next_ != nullptr) next_->stage_begin(name, stream);
  nvtx_.push(std::string(name).c_str());
}

void NvtxRanges::stage_end(std::string_view name, const Stream& stream) {
  nvtx_.pop();
  if (next_ != nullptr) next_->stage_end(name, stream);
}

void NvtxRanges::operator_begin(std::string_view name, int layer, const Stream& stream) {
  if (next_ != nullptr) next_->operator_begin(name, layer, stream);
  nvtx_.push((layer < 0 ? std::string(name) : tw::format("layer {}: {}", layer, name)).c_str());
}

void NvtxRanges::operator_end(const Operator& op, const Tensor* output, const Stream& stream) {
  nvtx_.pop();
  if (next_ != nullptr) next_->operator_end(op, output, stream);
}

}  // namespace tw::models
