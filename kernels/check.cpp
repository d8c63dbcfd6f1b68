#include "kernels/check.hpp"

#include <cstdint>

namespace tw {

void check_operand(const char* op, const char* argument, const Tensor& tensor, DType dtype, Device device) {
  require(tensor.device() == device, "{}: {} is {}, but the call runs on {}", op, argument, tensor, device.name());
  require(tensor.dtype() == dtype, "{}: {} is {}, but must be {} like the other operands", op, argument, tensor, name_of(dtype));
  if (tensor.numel() == 0) return;
  require(tensor.data() != nullptr, "{}: {} is {} with a null pointer", op, argument, tensor);
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data());
  require(address % size_of(dtype) == 0, "{}: {} is {} at address {:#x}, which is not aligned to its element of {} bytes", op, argument,
          tensor, address, size_of(dtype));
}

void check_output(const char* op, const char* argument, const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  for (int dim = 0; dim < tensor.rank(); ++dim)
    require(tensor.shape(dim) <= 1 || tensor.stride(dim) != 0,
            "{}: {} is {} with stride 0 in dimension {}; an output's elements must be distinct", op, argument, tensor, dim);
}

}  // namespace tw
