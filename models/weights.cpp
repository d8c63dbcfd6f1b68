#include "models/weights.hpp"

#include <algorithm>

#include "models/one_line.hpp"
#include "runtime/format.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

namespace {

std::int64_t elements(const Shape& shape) {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

}  // namespace

Weights::Weights(std::string name, std::shared_ptr<const TensorSource> files, Names names)
    : name_(std::move(name)), files_(std::move(files)), spelling_(std::move(names)) {
  for (const std::string& tensor : files_->names()) {
    const auto [other, fresh] = names_.try_emplace(spelling_.canonical(tensor), tensor);
    if (!fresh)
      throw FileError(tw::format("{}: {} and {} are the same tensor in two spellings", name_, one_line(other->second), one_line(tensor)));
  }
}

void Weights::check(const std::function<void(Weights&)>& build) {
  checking_ = true;
  problems_.clear();
  asked_.clear();
  bytes_wanted_ = 0;
  build(*this);
  checking_ = false;
  for (const auto& [canonical, name] : names_)
    if (!asked_.contains(canonical)) problems_.push_back(tw::format("{} is not part of this model", one_line(name)));
  if (problems_.empty()) return;
  constexpr std::size_t kMost = 100;  // in a message
  std::string more;
  if (problems_.size() > kMost) {
    more = tw::format("; and {} more", problems_.size() - kMost);
    problems_.resize(kMost);
  }
  throw FileError(tw::format("{}: the weights do not fit {}: {}{}", name_, spelling_.configuration, tw::join(problems_, "; "), more));
}

void Weights::load(const std::function<void(Weights&)>& build, DType dtype, const Stream& stream,
                   const std::function<void(std::int64_t, std::int64_t)>& progress) {
  dtype_ = dtype;
  stream_ = stream;
  progress_ = progress;
  bytes_read_ = 0;
  build(*this);
}

Shape Weights::shape(const std::string& name, int rank) const {
  const auto found = names_.find(name);
  if (found == names_.end()) return {};
  const Shape shape = files_->shape(found->second);
  return static_cast<int>(shape.size()) == rank ? shape : Shape{};
}

DType Weights::main_dtype() const {
  std::map<DType, std::int64_t> counts;
  for (const auto& [canonical, name] : names_)
    if (const auto dtype = files_->element_dtype(name)) counts[*dtype] += elements(files_->shape(name));
  DType best = DType::f32;
  std::int64_t most = 0;
  for (const auto& [dtype, count] : counts) {
    if (count > most) best = dtype, most = count;
  }
  return best;
}

void Weights::read(const std::string& name, const Shape& shape, const Tensor& target) {
  const auto found = names_.find(name);
  if (checking_) {
    asked_.insert(name);
    if (found == names_.end()) {
      problems_.push_back(tw::format("{} [{}] is missing", spelling_.stored ? spelling_.stored(name) : name, tw::join(shape, ", ")));
      return;
    }
    const Shape given = files_->shape(found->second);
    if (given != shape)
      problems_.push_back(tw::format("{} is [{}], which must be [{}]", found->second, tw::join(given, ", "), tw::join(shape, ", ")));
    if (!files_->element_dtype(found->second))
      problems_.push_back(tw::format("{} is {}; BF16, F16 and F32 are read", found->second, one_line(files_->dtype_name(found->second))));
    bytes_wanted_ += static_cast<std::int64_t>(files_->bytes(found->second));
    return;
  }
  const std::string& stored = found->second;
  const DType from = *files_->element_dtype(stored);
  const Tensor flat = target.reshape({target.numel()});
  if (from == dtype_ && !target.device().is_cuda()) {
    files_->read_elements(stored, 0, flat);
  } else {
    constexpr std::int64_t kChunk = 1 << 21;  // elements: few enough to stay in the cache between reading and converting
    const Tensor raw = Tensor::empty({std::min(flat.numel(), kChunk)}, from);
    for (std::int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
      const std::int64_t end = std::min(flat.numel(), begin + kChunk);
      const Tensor chunk = raw.slice(0, 0, end - begin), place = flat.slice(0, begin, end);
      files_->read_elements(stored, begin, chunk);
      if (!target.device().is_cuda()) {
        cast(chunk, place);
      } else if (from == dtype_) {
        place.copy_from(chunk);
      } else {
        const Tensor converted = Tensor::empty(chunk.shape(), dtype_);
        cast(chunk, converted);
        place.copy_from(converted);
      }
    }
  }
  bytes_read_ += static_cast<std::int64_t>(files_->bytes(stored));
  if (progress_) progress_(bytes_read_, bytes_wanted_);
}

Tensor Weights::take(const std::string& name, const Shape& shape) {
  const Tensor tensor = checking_ ? Tensor() : Tensor::empty(shape, dtype_, stream_);
  if (!checking_) stream_.synchronize();  // copies below run on another stream
  read(name, shape, tensor);
  return tensor;
}

Tensor Weights::stack(std::span<const Part> parts, std::int64_t columns) {
  std::int64_t rows = 0;
  for (const Part& part : parts) rows += part.rows;
  const auto shape_of = [&](std::int64_t n) { return columns > 0 ? Shape{n, columns} : Shape{n}; };
  const Tensor all = checking_ ? Tensor() : Tensor::zeros(shape_of(rows), dtype_, stream_);
  if (!checking_) stream_.synchronize();
  std::int64_t row = 0;
  for (const Part& part : parts) {
    if (!part.name.empty()) read(part.name, shape_of(part.rows), checking_ ? Tensor() : all.slice(0, row, row + part.rows));
    row += part.rows;
  }
  return all;
}

Linear Weights::linear(const std::string& name, std::int64_t out, std::int64_t in, bool bias) {
  Linear linear;
  linear.weight = take(name + ".weight", {out, in});
  if (bias) linear.bias = take(name + ".bias", {out});
  return linear;
}

}  // namespace tw::models
