#include "kernels/check.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

namespace tw {

namespace {

/// A dimension of the search for common bytes: a multiple of `step` bytes, 0 to `most` times. Steps are positive.
struct Term {
  std::int64_t step, most;
};

/// Terms in ascending order of their steps. Terms that overlap the reach of the smaller ones are merged with them, so that the usual
/// layouts leave one or two.
class Terms {
 public:
  static constexpr std::size_t kMost = 16;

  /// False if there are too many.
  bool add(std::int64_t step, std::int64_t most) {
    if (step == 0 || most == 0) return true;
    if (count_ == kMost) return false;
    terms_[count_++] = {step, most};
    return true;
  }
  bool add(const Tensor& tensor) {
    const auto size = static_cast<std::int64_t>(size_of(tensor.dtype()));
    bool fits = true;
    for (std::size_t dim = 0; dim < tensor.shape().size(); ++dim)
      fits = add(std::abs(tensor.strides()[dim]) * size, tensor.shape()[dim] - 1) && fits;
    return fits;
  }
  std::span<const Term> joined() {
    std::sort(terms_.begin(), terms_.begin() + static_cast<std::ptrdiff_t>(count_), [](Term a, Term b) { return a.step < b.step; });
    std::size_t kept = 0;
    for (std::size_t n = 0; n < count_; ++n) {
      const Term term = terms_[n];
      // Sums of the smaller term and this one are then all multiples of the smaller step up to the sum of both reaches.
      if (kept > 0 && term.step % terms_[kept - 1].step == 0 && term.step / terms_[kept - 1].step <= terms_[kept - 1].most + 1)
        terms_[kept - 1].most += term.step / terms_[kept - 1].step * term.most;
      else
        terms_[kept++] = term;
    }
    count_ = kept;
    return {terms_.data(), count_};
  }

 private:
  std::array<Term, kMost> terms_;
  std::size_t count_ = 0;
};

std::int64_t divided_up(std::int64_t a, std::int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

/// Whether some sum of the terms lies in [low, high]. A bounded search from the largest step down; also true if `budget` runs out.
bool has_sum(std::span<const Term> terms, std::int64_t low, std::int64_t high, int& budget) {
  if (low <= 0 && high >= 0) return true;
  if (high < 0 || terms.empty()) return false;
  if (--budget < 0) return true;
  std::int64_t reach = 0, divisor = 0;  // of the smaller terms; of all
  for (const Term& term : terms.first(terms.size() - 1)) {
    reach += term.step * term.most;
    divisor = std::gcd(divisor, term.step);
  }
  const auto [step, most] = terms.back();
  divisor = std::gcd(divisor, step);
  if (high / divisor * divisor < low) return false;
  const std::int64_t last = std::min(most, high / step);
  for (std::int64_t n = std::max<std::int64_t>(divided_up(low - reach, step), 0); n <= last; ++n)
    if (has_sum(terms.first(terms.size() - 1), low - n * step, high - n * step, budget)) return true;
  return false;
}
/// Steps of the search: some tens of microseconds.
constexpr int kBudget = 4096;
/// Longer than any memory. Longer views are not searched, so that sums do not overflow.
constexpr std::int64_t kLongest = std::int64_t{1} << 56;

/// The bytes from a tensor's lowest element to the end of its highest.
struct ByteRange {
  std::int64_t begin = 0, end = 0;
};
ByteRange range_of(const Tensor& tensor) {
  std::int64_t lowest = 0, highest = 1;
  for (std::size_t dim = 0; dim < tensor.shape().size(); ++dim) {
    if (tensor.shape()[dim] == 0) return {};
    const std::int64_t reach = (tensor.shape()[dim] - 1) * tensor.strides()[dim];
    (reach < 0 ? lowest : highest) += reach;
  }
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype()));
  const auto base = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data()));
  return {base + lowest * size, base + highest * size};
}
bool cross(ByteRange a, ByteRange b) { return a.begin < b.end && b.begin < a.end; }

/// Whether elements overlap, for overlapping ranges.
bool elements_cross(const Tensor& a, ByteRange of_a, const Tensor& b, ByteRange of_b) {
  const auto size_a = static_cast<std::int64_t>(size_of(a.dtype())), size_b = static_cast<std::int64_t>(size_of(b.dtype()));
  Terms terms;
  if (of_a.end - of_a.begin > kLongest || of_b.end - of_b.begin > kLongest || !terms.add(a) || !terms.add(b)) return true;
  // Let an element of a be x bytes after a's lowest element, and an element of b be y bytes before b's highest. They overlap if the
  // difference of their addresses, a.begin + x - (b.end - size_b - y), is between -size_a and size_b. So look for a sum x + y of steps in
  // the corresponding interval.
  const std::int64_t distance = of_b.end - size_b - of_a.begin;
  int budget = kBudget;
  return has_sum(terms.joined(), distance - size_a + 1, distance + size_b - 1, budget);
}

/// Whether two elements of the tensor have a byte in common.
bool crosses_itself(const Tensor& tensor) {
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype()));
  std::array<Term, Terms::kMost> dims;
  std::size_t count = 0;
  for (std::size_t dim = 0; dim < tensor.shape().size(); ++dim) {
    if (tensor.shape()[dim] <= 1) continue;
    if (count == dims.size()) return true;
    dims[count++] = {std::abs(tensor.strides()[dim]) * size, tensor.shape()[dim] - 1};
  }
  std::sort(dims.begin(), dims.begin() + static_cast<std::ptrdiff_t>(count), [](Term a, Term b) { return a.step < b.step; });
  bool nested = true;  // each step is larger than the reach of the smaller ones
  std::int64_t reach = size;
  for (std::size_t n = 0; n < count; ++n) {
    nested = nested && dims[n].step >= reach;
    reach += dims[n].step * dims[n].most;
  }
  if (nested) return false;
  if (reach > kLongest) return true;
  // Two elements differ in some dimension: by 1 to `most` steps in dimension n, by -most to most in those after it.
  int budget = kBudget;
  for (std::size_t n = 0; n < count; ++n) {
    Terms terms;
    std::int64_t shift = -dims[n].step;
    bool fits = terms.add(dims[n].step, dims[n].most - 1);
    for (std::size_t k = n + 1; k < count; ++k) {
      fits = fits && terms.add(dims[k].step, 2 * dims[k].most);
      shift += dims[k].step * dims[k].most;
    }
    if (!fits || has_sum(terms.joined(), shift - size + 1, shift + size - 1, budget)) return true;
  }
  return false;
}

}  // namespace

void check_operand(const char* op, const char* argument, const Tensor& tensor, DType dtype, Device device) {
  require(tensor.device() == device, "{}: {} is {}, but the call runs on {}", op, argument, tensor, device.name());
  require(tensor.dtype() == dtype, "{}: {} is {}, but must be {} like the other operands", op, argument, tensor, name_of(dtype));
  if (tensor.numel() == 0) return;
  require(tensor.data() != nullptr, "{}: {} is {} with a null pointer", op, argument, tensor);
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data());
  require(address % size_of(dtype) == 0, "{}: {} is {} at address {:#x}, which is not aligned to its element of {} bytes", op, argument,
          tensor, address, size_of(dtype));
}

void check_bias(const char* op, const Tensor* bias, std::int64_t count, DType dtype, Device device) {
  if (bias == nullptr) return;
  check_operand(op, "bias", *bias, dtype, device);
  require(bias->shape() == Shape{count} && bias->is_contiguous(), "{}: bias is {}; it must be contiguous, [{}]", op, *bias, count);
}

Stream checked_stream(const char* op, const std::optional<Stream>& given, Device device) {
  const Stream stream = given ? *given : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, stream.device().name(), device.name());
  return stream;
}

void check_output(const char* op, const char* argument, const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  for (int dim = 0; dim < tensor.rank(); ++dim)
    require(tensor.shape(dim) <= 1 || tensor.stride(dim) != 0,
            "{}: {} is {} with stride 0 in dimension {}; an output's elements must be distinct", op, argument, tensor, dim);
  require(!crosses_itself(tensor), "{}: {} is {}, whose elements overlap; an output's elements must be distinct", op, argument, tensor);
}

bool share_memory(const Tensor& a, const Tensor& b) {
  const ByteRange of_a = range_of(a), of_b = range_of(b);
  return cross(of_a, of_b) && elements_cross(a, of_a, b, of_b);
}

void check_disjoint(const char* op, NamedTensor output, std::initializer_list<NamedTensor> others) {
  if (!output.tensor) return;
  const ByteRange written = range_of(*output.tensor);
  for (const auto& [name, tensor] : others) {
    if (!tensor) continue;
    const ByteRange range = range_of(*tensor);
    require(!cross(written, range) || !elements_cross(*output.tensor, written, *tensor, range),
            "{}: {} is {} and shares memory with {}, {}; they must not overlap", op, output.name, *output.tensor, name, *tensor);
  }
}

void check_in_place(const char* op, NamedTensor output, NamedTensor input) {
  const Tensor &y = *output.tensor, &x = *input.tensor;
  bool same = y.data() == x.data() && size_of(y.dtype()) == size_of(x.dtype()) && y.shape() == x.shape();
  for (int dim = 0; same && dim < y.rank(); ++dim) same = y.shape(dim) <= 1 || y.stride(dim) == x.stride(dim);
  require(same || !share_memory(y, x),
          "{}: {} is {} and shares memory with {}, {}; allowed: the same memory with the same shape, strides and element size (in place), "
          "or no overlap",
          op, output.name, y, input.name, x);
}

}  // namespace tw
