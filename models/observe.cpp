#include "models/observe.hpp"

namespace tw::models {

namespace {

double byte_count(const Tensor& tensor) { return static_cast<double>(tensor.numel()) * static_cast<double>(size_of(tensor.dtype())); }

Operator describe(std::string_view name, int layer, const Tensor& output, const Work& work) {
  Operator op{name, layer, OperatorKind::other, 0, byte_count(output) + work.other_bytes};
  for (const Tensor* tensor : work.reads)
    if (tensor != nullptr) op.bytes += byte_count(*tensor);
  if (work.linear != nullptr) {
    const Linear& linear = *work.linear;
    op.kind = OperatorKind::linear;
    const double rows = static_cast<double>(output.numel()) / static_cast<double>(output.shape(output.rank() - 1));
    op.flops = 2 * rows * static_cast<double>(linear.elements());
    op.bytes += static_cast<double>(linear.bytes());
  } else if (work.keys > 0) {
    op.kind = OperatorKind::attention;
    op.flops = 4 * static_cast<double>(output.numel()) * work.keys;  // Q K^T and P V
  }
  return op;
}

}  // namespace

void Operators::observed(std::string_view name, const Tensor& output, const Work& work, const std::function<void()>& run) const {
  observer_->operator_begin(name, layer_, stream_);
  try {
    run();
  } catch (...) {
    observer_->operator_end({name, layer_, OperatorKind::other, 0, 0}, nullptr, stream_);
    throw;
  }
  observer_->operator_end(describe(name, layer_, output, work), &output, stream_);
}

}  // namespace tw::models
