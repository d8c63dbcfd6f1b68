#include "tilewave/tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>

#include "runtime/format.hpp"
#include "runtime/stream.hpp"
#include "runtime/strided.hpp"
#include "tilewave/detail/parallel.hpp"

namespace tw {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 62;

/// The number of elements. Throws InvalidArgument for a negative extent, or if the size in bytes overflows.
std::int64_t count_elements(const Shape& shape, DType dtype) {
  for (std::int64_t extent : shape) {
    if (extent < 0) throw InvalidArgument(tw::format("shape is [{}]; allowed: extents of 0 or more", tw::join(shape, ", ")));
  }
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  const std::int64_t limit = kMaxBytes / static_cast<std::int64_t>(size_of(dtype));
  std::int64_t count = 1;
  for (std::int64_t extent : shape) {
    if (extent > limit / count) {
      throw InvalidArgument(tw::format("shape is [{}] of {}; allowed: at most 2^62 bytes", tw::join(shape, ", "), name_of(dtype)));
    }
    count *= extent;
  }
  return count;
}

std::vector<std::int64_t> row_major(const Shape& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    // Extents this large are possible only if another one is 0, and then there are no elements.
    std::int64_t next = 0;
    if (!__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[i], 1), &next)) stride = next;
  }
  return strides;
}

/// The range of offsets that a view reaches, relative to its first element: [lowest, highest].
struct Span {
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
};

/// Throws InvalidArgument if the offsets overflow.
Span span_of(const Shape& shape, const std::vector<std::int64_t>& strides, DType dtype) {
  const std::int64_t limit = kMaxBytes / static_cast<std::int64_t>(size_of(dtype));
  Span span;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    std::int64_t reach = 0;
    std::int64_t& end = strides[i] < 0 ? span.lowest : span.highest;
    if (__builtin_mul_overflow(shape[i] - 1, strides[i], &reach) || __builtin_add_overflow(end, reach, &end) || end > limit ||
        end < -limit) {
      throw InvalidArgument(tw::format("strides are [{}] for shape [{}]; allowed: a span of at most 2^62 bytes", tw::join(strides, ", "),
                                       tw::join(shape, ", ")));
    }
  }
  return span;
}

struct Bytes {
  char* begin;
  std::size_t size;
};

/// The bytes from a non-empty view's lowest to its highest element.
Bytes bytes_of(const Tensor& t) {
  const auto size = static_cast<std::int64_t>(size_of(t.dtype()));
  const Span span = span_of(t.shape(), t.strides(), t.dtype());
  return {static_cast<char*>(t.data()) + span.lowest * size, static_cast<std::size_t>((span.highest - span.lowest + 1) * size)};
}

bool overlap(const Tensor& a, const Tensor& b) {
  const Bytes x = bytes_of(a);
  const Bytes y = bytes_of(b);
  return x.begin < y.begin + y.size && y.begin < x.begin + x.size;
}

cuda::Address address(const void* pointer) { return reinterpret_cast<cuda::Address>(pointer); }

/// Enqueues a copy between the stream's GPU and the CPU, or on the GPU.
void enqueue_copy(void* to, bool to_gpu, const void* from, bool from_gpu, std::size_t bytes, const Stream& stream) {
  const cuda::Driver& d = cuda::driver();
  const CurrentContext current(Gpu::get(stream.device().index));
  const cuda::Stream native = StreamAccess::native(stream);
  if (!from_gpu)  // the driver has taken pageable memory's bytes when it returns
    cuda::check(d.memcpy_htod_async(address(to), from, bytes, native), "cuMemcpyHtoDAsync");
  else if (!to_gpu)
    cuda::check(d.memcpy_dtoh_async(to, address(from), bytes, native), "cuMemcpyDtoHAsync");
  else
    cuda::check(d.memcpy_async(address(to), address(from), bytes, native), "cuMemcpyAsync");
}

/// Copies bytes if at least one side is on a GPU, and waits.
void copy_bytes(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) {
  const Stream stream = Stream::standard(to_device.is_cuda() ? to_device : from_device);
  // Work on the source's standard stream may still write to it.
  if (from_device.is_cuda() && from_device != stream.device()) Stream::standard(from_device).synchronize();
  if (to_device.is_cuda() && from_device.is_cuda() && to_device != from_device) {
    Gpu& gpu = Gpu::get(stream.device().index);
    const CurrentContext current(gpu);
    cuda::check(cuda::driver().memcpy_peer_async(address(to), gpu.context(), address(from), Gpu::get(from_device.index).context(), bytes,
                                                 StreamAccess::native(stream)),
                "cuMemcpyPeerAsync");
  } else {
    enqueue_copy(to, to_device.is_cuda(), from, from_device.is_cuda(), bytes, stream);
  }
  stream.synchronize();
}

Tensor filled(Shape shape, DType dtype, const Stream& stream, unsigned char byte) {
  Tensor t = Tensor::empty(std::move(shape), dtype, stream);
  const std::size_t bytes = static_cast<std::size_t>(t.numel()) * size_of(dtype);
  if (bytes > 0) fill_bytes(t.data(), bytes, byte, stream);
  return t;
}

/// A number in the open interval (0, 1): the `index`-th of SplitMix64 (Steele, Lea and Flood 2014).
double uniform(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (static_cast<double>((x ^ (x >> 31)) >> 12) + 0.5) * 0x1p-52;
}

void require_cpu(const char* call, const Tensor& t) {
  if (t.device().is_cuda()) throw InvalidArgument(tw::format("{}: the tensor is {}; allowed: a tensor on cpu", call, t.describe()));
}

}  // namespace

Tensor Tensor::empty(Shape shape, DType dtype, const Stream& stream) {
  Tensor t;
  const std::int64_t count = count_elements(shape, dtype);
  t.strides_ = row_major(shape);
  t.shape_ = std::move(shape);
  t.dtype_ = dtype;
  t.device_ = stream.device();
  t.owner_ = allocate(static_cast<std::size_t>(count) * size_of(dtype), stream);
  t.data_ = t.owner_.get();
  return t;
}

Tensor Tensor::zeros(Shape shape, DType dtype, const Stream& stream) { return filled(std::move(shape), dtype, stream, 0); }

Tensor Tensor::poisoned(Shape shape, DType dtype, const Stream& stream) { return filled(std::move(shape), dtype, stream, 0xff); }

Tensor Tensor::random(Shape shape, DType dtype, std::uint64_t seed, const Stream& stream) {
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16) {
    throw InvalidArgument(tw::format("random: dtype is {}; allowed: f32, f16, bf16", name_of(dtype)));
  }
  const Tensor values = empty(shape, DType::f32);
  const std::int64_t count = values.numel();
  const std::uint64_t first = (seed + 1) * 0xd1342543de82ef95u;  // neighbouring seeds begin far apart
  constexpr std::int64_t kChunk = 16 * 1024;
  detail::parallel_for((count + kChunk - 1) / kChunk, [&](long chunk) {
    const std::int64_t end = std::min(count, (chunk + 1) * kChunk);
    for (std::int64_t i = chunk * kChunk; i < end; ++i) {  // Box and Muller 1958
      const auto pair = static_cast<std::uint64_t>(i) * 2;
      const double radius = std::sqrt(-2 * std::log(uniform(first, pair)));
      values.data<float>()[i] = static_cast<float>(radius * std::cos(2 * std::numbers::pi * uniform(first, pair + 1)));
    }
  });
  const Tensor converted = dtype == DType::f32 ? values : values.to(dtype);
  if (!stream.device().is_cuda()) return converted;
  Tensor result = empty(std::move(shape), dtype, stream);
  stream.synchronize();  // the copy runs on another stream
  result.copy_from(converted);
  return result;
}

Tensor Tensor::borrow(void* data, Shape shape, DType dtype, Device device, std::vector<std::int64_t> strides, std::shared_ptr<void> owner) {
  const std::int64_t count = count_elements(shape, dtype);
  if (strides.empty()) strides = row_major(shape);
  if (strides.size() != shape.size()) {
    throw InvalidArgument(
        tw::format("strides are [{}]; allowed: one for each extent of [{}]", tw::join(strides, ", "), tw::join(shape, ", ")));
  }
  if (count > 0) {
    if (data == nullptr) throw InvalidArgument(tw::format("data is null; allowed: the memory of [{}] elements", tw::join(shape, ", ")));
    if (reinterpret_cast<std::uintptr_t>(data) % size_of(dtype) != 0) {
      throw InvalidArgument(tw::format("data is {}; allowed for {}: a multiple of {}", data, name_of(dtype), size_of(dtype)));
    }
    span_of(shape, strides, dtype);
  }
  Tensor t;
  t.owner_ = std::move(owner);
  t.data_ = data;
  t.shape_ = std::move(shape);
  t.strides_ = std::move(strides);
  t.dtype_ = dtype;
  t.device_ = device;
  return t;
}

int Tensor::front_dim_of_last(const char* argument, int dim) const {
  if (dim < -rank() || dim >= rank()) {
    throw InvalidArgument(tw::format("{} is {}; allowed for {}: {} to {}", argument, dim, describe(), -rank(), rank() - 1));
  }
  return dim + rank();
}

std::int64_t Tensor::numel() const {
  std::int64_t count = 1;
  for (std::int64_t extent : shape_) {
    if (extent == 0) return 0;
  }
  for (std::int64_t extent : shape_) count *= extent;
  return count;
}

bool Tensor::is_contiguous() const {
  if (numel() == 0) return true;
  const std::vector<std::int64_t> wanted = row_major(shape_);
  for (std::size_t i = 0; i < shape_.size(); ++i) {
    if (shape_[i] != 1 && strides_[i] != wanted[i]) return false;
  }
  return true;
}

double Tensor::at(std::span<const std::int64_t> index) const {
  require_cpu("at", *this);
  bool inside = index.size() == shape_.size();
  std::int64_t offset = 0;
  for (std::size_t i = 0; inside && i < index.size(); ++i) {
    inside = index[i] >= 0 && index[i] < shape_[i];
    offset += inside ? index[i] * strides_[i] : 0;
  }
  if (!inside) throw InvalidArgument(tw::format("at: index is [{}]; allowed: inside {}", tw::join(index, ", "), describe()));
  return element_as_double(static_cast<const char*>(data_) + offset * static_cast<std::int64_t>(size_of(dtype_)), dtype_);
}

Tensor Tensor::slice(int dim, std::int64_t begin, std::int64_t end) const {
  dim = front_dim("slice: dim", dim);
  const auto d = static_cast<std::size_t>(dim);
  if (begin < 0 || begin > end || end > shape_[d]) {
    throw InvalidArgument(tw::format("slice: [{}, {}) of dimension {}; allowed for {}: 0 to {}", begin, end, dim, describe(), shape_[d]));
  }
  Tensor t = *this;
  t.shape_[d] = end - begin;
  // An empty view has no first element, and its offset may be outside the memory.
  if (t.numel() > 0) t.data_ = static_cast<char*>(data_) + begin * strides_[d] * static_cast<std::int64_t>(size_of(dtype_));
  return t;
}

Tensor Tensor::select(int dim, std::int64_t index) const {
  dim = front_dim("select: dim", dim);
  const std::int64_t extent = shape_[static_cast<std::size_t>(dim)];
  if (index < 0 || index >= extent) {
    throw InvalidArgument(tw::format("select: index {} of dimension {}; allowed for {}: 0 to {}", index, dim, describe(), extent - 1));
  }
  Tensor t = slice(dim, index, index + 1);
  t.shape_.erase(t.shape_.begin() + dim);
  t.strides_.erase(t.strides_.begin() + dim);
  return t;
}

Tensor Tensor::transpose(int dim0, int dim1) const {
  dim0 = front_dim("transpose: dim0", dim0);
  dim1 = front_dim("transpose: dim1", dim1);
  Tensor t = *this;
  std::swap(t.shape_[static_cast<std::size_t>(dim0)], t.shape_[static_cast<std::size_t>(dim1)]);
  std::swap(t.strides_[static_cast<std::size_t>(dim0)], t.strides_[static_cast<std::size_t>(dim1)]);
  return t;
}

Tensor Tensor::reshape(Shape shape) const {
  const std::int64_t count = count_elements(shape, dtype_);
  if (count != numel()) {
    throw InvalidArgument(
        tw::format("reshape: shape is [{}]; allowed for {}: shapes of {} elements", tw::join(shape, ", "), describe(), numel()));
  }
  if (!is_contiguous()) throw InvalidArgument(tw::format("reshape: the tensor is {}; allowed: row-major tensors", describe()));
  Tensor t = *this;
  t.strides_ = row_major(shape);
  t.shape_ = std::move(shape);
  return t;
}

Tensor Tensor::to(Device device) const {
  Tensor result = empty(shape_, dtype_, Stream::standard(device));
  if (numel() == 0) return result;
  if (is_contiguous() || !(device_.is_cuda() || device.is_cuda())) {
    result.copy_from(*this);
    return result;
  }
  // Strided with a GPU on one side: copy through row-major memory on the CPU.
  if (!device_.is_cuda()) {
    result.copy_from(to(Device::cpu()));
    return result;
  }
  const Bytes source = bytes_of(*this);
  Tensor raw = empty({static_cast<std::int64_t>(source.size)}, DType::u8);
  copy_bytes(raw.data(), Device::cpu(), source.begin, device_, source.size);
  Tensor view = *this;
  view.owner_ = raw.owner_;
  view.data_ = static_cast<char*>(raw.data()) + (static_cast<char*>(data_) - source.begin);
  view.device_ = Device::cpu();
  if (!device.is_cuda()) {
    result.copy_from(view);
  } else {
    result.copy_from(view.to(Device::cpu()));
  }
  return result;
}

Tensor Tensor::to(DType dtype) const {
  require_cpu("to(dtype)", *this);
  const Tensor source = is_contiguous() ? *this : to(Device::cpu());
  Tensor result = empty(shape_, dtype);
  if (numel() > 0) convert_elements(result.data_, dtype, source.data_, dtype_, numel());
  return result;
}

void Tensor::copy_from(const Tensor& source) const {
  if (source.shape_ != shape_ || source.dtype_ != dtype_) {
    throw InvalidArgument(tw::format("copy_from: source is {}; allowed: shape and dtype of {}", source.describe(), describe()));
  }
  if (numel() == 0) return;
  for (std::size_t i = 0; i < shape_.size(); ++i) {
    if (shape_[i] > 1 && strides_[i] == 0) {
      throw InvalidArgument(tw::format("copy_from: the destination is {}; allowed: elements of their own, no stride 0", describe()));
    }
  }
  if (device_.is_cuda() || source.device_.is_cuda()) {
    for (const Tensor* side : {this, &source}) {
      if (!side->is_contiguous()) {
        throw InvalidArgument(tw::format("copy_from: {} is {}; allowed between devices: row-major tensors",
                                         side == this ? "the destination" : "source", side->describe()));
      }
    }
    copy_bytes(data_, device_, source.data_, source.device_, static_cast<std::size_t>(numel()) * size_of(dtype_));
    return;
  }
  if (overlap(*this, source)) {
    const Tensor copy = source.to(Device::cpu());
    copy_strided(data_, strides_, copy.data_, copy.strides_, shape_, size_of(dtype_));
    return;
  }
  copy_strided(data_, strides_, source.data_, source.strides_, shape_, size_of(dtype_));
}

void Tensor::copy_from(const Tensor& source, const Stream& stream) const {
  for (const Tensor* side : {this, &source}) {
    if (side->device_.is_cuda() && side->device_ != stream.device())
      throw InvalidArgument(tw::format("copy_from: {} is {}; allowed: on {}, the stream's device, or the CPU",
                                       side == this ? "the destination" : "source", side->describe(), stream.device().name()));
  }
  if (!device_.is_cuda() && !source.device_.is_cuda()) return copy_from(source);
  if (source.shape_ != shape_ || source.dtype_ != dtype_ || !is_contiguous() || !source.is_contiguous())
    throw InvalidArgument(
        tw::format("copy_from: source is {}; allowed: shape and dtype of {}, both row-major", source.describe(), describe()));
  if (numel() > 0)
    enqueue_copy(data_, device_.is_cuda(), source.data_, source.device_.is_cuda(), static_cast<std::size_t>(numel()) * size_of(dtype_),
                 stream);
}

std::string Tensor::describe() const {
  std::string text = tw::format("{}[{}] on {}", name_of(dtype_), tw::join(shape_, ", "), device_.name());
  if (!is_contiguous()) text += tw::format(" (strides {})", tw::join(strides_, ", "));
  return text;
}

void Tensor::require_dtype(DType dtype) const {
  if (dtype != dtype_)
    throw InvalidArgument(tw::format("data: {} was asked for; allowed for {}: {}", name_of(dtype), describe(), name_of(dtype_)));
}

void Tensor::fill_bytes(const void* source, std::size_t bytes) const {
  const std::size_t wanted = static_cast<std::size_t>(numel()) * size_of(dtype_);
  if (bytes != wanted) {
    throw InvalidArgument(tw::format("values: {} elements are given; allowed for {}: {}", bytes / size_of(dtype_), describe(), numel()));
  }
  if (bytes > 0) std::memcpy(data_, source, bytes);
}

double max_difference(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape())
    throw InvalidArgument(tw::format("max_difference: b is {}; allowed: shape of {}", b.describe(), a.describe()));
  const auto on_cpu = [](const Tensor& t) { return t.is_contiguous() && !t.device().is_cuda() ? t : t.to(Device::cpu()); };
  const Tensor x = on_cpu(a);
  const Tensor y = on_cpu(b);
  const auto* x_bytes = static_cast<const char*>(x.data());
  const auto* y_bytes = static_cast<const char*>(y.data());
  double largest = 0;
  for (std::int64_t i = x.numel(); i > 0; --i) {
    const double p = element_as_double(x_bytes, x.dtype());
    const double q = element_as_double(y_bytes, y.dtype());
    if (std::isnan(p) || std::isnan(q)) return std::numeric_limits<double>::quiet_NaN();
    if (p != q) largest = std::max(largest, std::abs(p - q));  // equal infinities do not differ
    x_bytes += size_of(x.dtype());
    y_bytes += size_of(y.dtype());
  }
  return largest;
}

}  // namespace tw
