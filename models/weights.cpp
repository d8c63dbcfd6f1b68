#include "models/weights.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "models/one_line.hpp"
#include "runtime/dry_run.hpp"
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

bool is_scale(std::string_view name) { return name.ends_with("weight_scale"); }

QuantizedMatrix::Layout for_role(QuantizedMatrix::Layout layout, Weights::Role role) {
  if (role == Weights::Role::head && layout.format == WeightFormat::int4) layout = {.format = WeightFormat::int8};
  return layout;
}

/// Throws FileError for values that no conversion writes and that products do not expect.
void check_values(const std::string& file, const std::string& name, const QuantizedMatrix& m) {
  const auto fail = [&](std::string_view suffix, const char* what) {
    throw FileError(tw::format("{}: {}{} holds {}", file, one_line(name), suffix, what));
  };
  const auto finite = [](const auto* x, std::int64_t n) {
    return std::all_of(x, x + n, [](auto scale) { return std::isfinite(static_cast<float>(scale)); });
  };
  const Tensor& scales = m.scales;
  if (scales.dtype() == DType::f32 ? !finite(scales.data<float>(), scales.numel()) : !finite(scales.data<f16>(), scales.numel()))
    fail("_scale", "a number that is not finite");
  const auto* bytes = static_cast<const u8*>(m.values.data());
  if (m.format == WeightFormat::fp8 && std::any_of(bytes, bytes + m.values.numel(), [](u8 x) { return (x & 0x7f) == 0x7f; }))
    fail("", "NaN");
  if (m.zeros.numel() > 0 && std::any_of(m.zeros.data<u8>(), m.zeros.data<u8>() + m.zeros.numel(), [](u8 x) { return x > 15; }))
    fail("_zero", "a zero point above 15");
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

void Weights::set_layouts(const QuantizedMatrix::Layout& stored, const QuantizedMatrix::Layout& wanted) {
  if (stored.format != WeightFormat::plain && wanted != stored)
    throw InvalidArgument(
        tw::format("{}: the weights are in {}; for {} convert the original checkpoint", name_, text_of(stored), text_of(wanted)));
  if (wanted.format > WeightFormat::int4)
    throw InvalidArgument(tw::format("{}: weights are wanted in {}; models take int8, fp8 and int4", name_, text_of(wanted)));
  stored_ = stored;
  wanted_ = wanted;
}

void Weights::check(const std::function<void(Weights&)>& build) {
  checking_ = true;
  problems_.clear();
  asked_.clear();
  linear_layouts_.clear();
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
    if (const auto dtype = files_->element_dtype(name); dtype && !is_scale(name)) counts[*dtype] += elements(files_->shape(name));
  DType best = DType::f32;
  std::int64_t most = 0;
  for (const auto& [dtype, count] : counts) {
    if (count > most) best = dtype, most = count;
  }
  return best;
}

void Weights::check_stored(const std::string& name, const Shape& shape, const std::string& dtype) {
  asked_.insert(name);
  const auto found = names_.find(name);
  if (found == names_.end()) {
    problems_.push_back(tw::format("{} [{}] is missing", spelling_.stored ? spelling_.stored(name) : name, tw::join(shape, ", ")));
    return;
  }
  const Shape given = files_->shape(found->second);
  if (given != shape)
    problems_.push_back(tw::format("{} is [{}], which must be [{}]", found->second, tw::join(given, ", "), tw::join(shape, ", ")));
  const std::string& given_dtype = files_->dtype_name(found->second);
  if (dtype.empty() && !files_->element_dtype(found->second))
    problems_.push_back(tw::format("{} is {}; BF16, F16 and F32 are read", found->second, one_line(given_dtype)));
  if (!dtype.empty() && given_dtype != dtype)
    problems_.push_back(tw::format("{} is {}; {}it must be {}", found->second, one_line(given_dtype),
                                   stored_.format == WeightFormat::plain ? "" : tw::format("for weights in {} ", text_of(stored_)), dtype));
  bytes_wanted_ += static_cast<std::int64_t>(files_->bytes(found->second));
}

void Weights::read(const std::string& name, const Shape& shape, const Tensor& target) {
  if (checking_) return check_stored(name, shape, "");
  if (is_dry_run(target.device())) return;
  const std::string& stored = names_.at(name);
  const DType from = *files_->element_dtype(stored);
  const Tensor flat = target.reshape({target.numel()});
  const DType dtype = target.dtype();
  if (from == dtype && !target.device().is_cuda()) {
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
      } else if (from == dtype) {
        place.copy_from(chunk);
      } else {
        const Tensor converted = Tensor::empty(chunk.shape(), dtype);
        cast(chunk, converted);
        place.copy_from(converted);
      }
    }
  }
  bytes_read_ += static_cast<std::int64_t>(files_->bytes(stored));
  if (progress_) progress_(bytes_read_, bytes_wanted_);
}

Tensor Weights::room(const Shape& shape) const { return checking_ ? Tensor() : Tensor::empty(shape, dtype_, stream_); }

Tensor Weights::take(const std::string& name, const Shape& shape, const Tensor& into) {
  const Tensor tensor = checking_ || into.numel() > 0 ? into : Tensor::empty(shape, dtype_, stream_);
  if (!checking_) stream_.synchronize();  // copies below run on another stream
  read(name, shape, tensor);
  return tensor;
}

Tensor Weights::stack(std::span<const Part> parts, std::int64_t columns, const Tensor& into) {
  std::int64_t rows = 0;
  for (const Part& part : parts) rows += part.rows;
  const auto shape_of = [&](std::int64_t n) { return columns > 0 ? Shape{n, columns} : Shape{n}; };
  const Tensor all = checking_ || into.numel() > 0 ? into : Tensor::zeros(shape_of(rows), dtype_, stream_);
  if (!checking_) stream_.synchronize();
  std::int64_t row = 0;
  for (const Part& part : parts) {
    if (!part.name.empty()) read(part.name, shape_of(part.rows), checking_ ? Tensor() : all.slice(0, row, row + part.rows));
    row += part.rows;
  }
  return all;
}

Linear Weights::linear_room(std::int64_t rows, std::int64_t columns) const {
  Linear room;
  if (checking_) return room;
  if (wanted_.format == WeightFormat::plain)
    room.weight = this->room({rows, columns});
  else
    room.quantized = QuantizedMatrix::allocate(rows, columns, wanted_, stream_);
  return room;
}

Linear Weights::linear(std::span<const Part> parts, std::int64_t columns, Role role, const Linear& into) {
  Linear linear;
  const QuantizedMatrix::Layout layout = for_role(wanted_, role);
  if (layout.format == WeightFormat::plain)
    linear.weight = stack(parts, columns, into.weight);
  else
    linear.quantized = take_quantized(parts, columns, layout, into.quantized);
  return linear;
}

Linear Weights::linear(const std::string& name, std::int64_t out, std::int64_t in, bool bias, Role role) {
  const Part whole{name + ".weight", out};
  Linear linear = this->linear(std::span(&whole, 1), in, role);
  if (bias) linear.bias = take(name + ".bias", {out});
  return linear;
}

Linear Weights::ternary(std::span<const Part> parts, std::int64_t columns, Ternary stored) {
  std::int64_t rows = 0;
  for (const Part& part : parts) rows += part.rows;
  if (checking_) {
    for (const Part& part : parts) {
      if (stored == Ternary::rounded_here) {
        check_stored(part.name, {part.rows, columns}, "");
        continue;
      }
      check_stored(part.name, {part.rows / 4, columns}, "U8");
      check_stored(part.name + "_scale", {1}, "");
    }
    return {};
  }
  Linear linear;
  linear.ternary = TernaryMatrix::allocate(rows, columns);
  std::int64_t row = 0;
  for (const Part& part : parts) {
    if (is_dry_run(stream_.device())) break;
    const TernaryMatrix target = linear.ternary.slice(row, row + part.rows);
    row += part.rows;
    if (stored == Ternary::rounded_here) {
      const Tensor exact = Tensor::empty({part.rows, columns}, DType::f32);
      read(part.name, exact.shape(), exact);
      quantize_ternary(exact, target);
      if (!std::isfinite(target.scales.data<float>()[0]))
        throw FileError(tw::format("{}: {} holds a number that is not finite", name_, one_line(names_.at(part.name))));
      continue;
    }
    const Tensor scale = Tensor::empty({1}, DType::f32), packed = Tensor::empty({part.rows / 4, columns}, DType::u8);
    read(part.name + "_scale", {1}, scale);
    const std::string& name = names_.at(part.name);
    files_->read_elements(name, 0, packed);
    bytes_read_ += packed.numel();
    const float given = scale.data<float>()[0];
    try {
      const TernaryMatrix converted = convert_bitnet(packed, stored == Ternary::divided ? 1 / given : given);
      target.values.copy_from(converted.values);
      target.scales.copy_from(converted.scales);
    } catch (const InvalidArgument& error) {
      throw FileError(tw::format("{}: {}: {}", name_, one_line(name), error.what()));
    }
    if (progress_) progress_(bytes_read_, bytes_wanted_);
  }
  if (stream_.device().is_cuda()) linear.ternary = linear.ternary.to(stream_.device());
  return linear;
}

QuantizedMatrix Weights::take_quantized(std::span<const Part> parts, std::int64_t columns, const QuantizedMatrix::Layout& layout,
                                        const QuantizedMatrix& into) {
  const bool stored = stored_.format != WeightFormat::plain;
  if (checking_) {
    for (const Part& part : parts) {
      if (const auto found = names_.find(part.name); found != names_.end()) linear_layouts_[found->second] = layout;
      if (layout.format == WeightFormat::int4 && columns % layout.group != 0)
        throw InvalidArgument(tw::format("{}: {} has {} columns; for weights in {} they must be a multiple of {}", name_, part.name,
                                         columns, text_of(layout), layout.group));
      if (!stored)
        check_stored(part.name, {part.rows, columns}, "");
      else
        for_tensors(part.name, QuantizedMatrix::allocate(0, columns, layout),
                    [&](const std::string& name, const char* dtype, const Tensor& t) {
                      Shape shape = t.shape();
                      shape[0] = part.rows;
                      check_stored(name, shape, dtype);
                    });
    }
    return {};
  }
  std::int64_t rows = 0;
  for (const Part& part : parts) rows += part.rows;
  QuantizedMatrix all;
  if (is_dry_run(stream_.device())) {
    all = QuantizedMatrix::allocate(rows, columns, layout);
  } else if (stored) {
    all = QuantizedMatrix::allocate(rows, columns, layout);
    std::int64_t row = 0;
    for (const Part& part : parts) {
      read_quantized(part.name, all.slice(row, row + part.rows));
      row += part.rows;
    }
  } else {
    const Tensor exact = Tensor::empty({rows, columns}, DType::f32);
    std::int64_t row = 0;
    for (const Part& part : parts) {
      read(part.name, {part.rows, columns}, exact.slice(0, row, row + part.rows));
      row += part.rows;
    }
    try {
      all = quantize(exact, layout);
    } catch (const InvalidArgument& error) {
      throw FileError(tw::format("{}: {}: {}", name_, one_line(names_.at(parts.front().name)), error.what()));
    }
  }
  if (into.empty()) return stream_.device().is_cuda() ? all.to(stream_.device()) : all;
  stream_.synchronize();  // copies below run on another stream
  into.values.copy_from(all.values);
  into.scales.copy_from(all.scales);
  if (all.zeros.numel() > 0) into.zeros.copy_from(all.zeros);
  return into;
}

void Weights::read_quantized(const std::string& name, const QuantizedMatrix& target) {
  for_tensors(name, target, [&](const std::string& tensor, const char*, const Tensor& t) {
    const std::string& stored = names_.at(tensor);
    files_->read_elements(stored, 0, t);
    bytes_read_ += static_cast<std::int64_t>(files_->bytes(stored));
  });
  check_values(name_, names_.at(name), target);
  if (progress_) progress_(bytes_read_, bytes_wanted_);
}

}  // namespace tw::models
