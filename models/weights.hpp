#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "models/linear.hpp"
#include "models/safetensors.hpp"
#include "tilewave/tensor.hpp"

namespace tw::models {

/// Hands a checkpoint's tensors to a model: converted to one dtype, on one device, each once.
///
/// A model asks for its tensors by name and shape, twice: while check() runs nothing is read, and what is missing or misshapen is noted, so
/// that one error names all of it; while load() runs the tensors are read in parts and converted.
class Weights {
 public:
  /// `name` begins the messages. `canonical` turns a name in the file into the one that the model asks for. Throws FileError when two names
  /// become one.
  Weights(std::string name, SafeTensors files, const std::function<std::string(const std::string&)>& canonical);

  /// Runs `build`, which asks for every tensor of the model. Throws FileError that names each tensor (at most 100) that is missing,
  /// surplus, misshapen or of a dtype other than bf16, f16 and f32.
  void check(const std::function<void(Weights&)>& build);
  /// Runs `build` again. `progress`, if any, is called with the bytes read so far and those of all.
  void load(const std::function<void(Weights&)>& build, DType dtype, const Stream& stream,
            const std::function<void(std::int64_t, std::int64_t)>& progress);

  bool checking() const { return checking_; }
  const Stream& stream() const { return stream_; }
  bool contains(const std::string& name) const { return names_.contains(name); }
  /// The extents in the file, or an empty list when it is not there or does not have `rank` dimensions: take() then reports it.
  Shape shape(const std::string& name, int rank) const;
  /// That which most of the elements have, of bf16, f16 and f32; f32 when none has.
  DType main_dtype() const;

  Tensor take(const std::string& name, const Shape& shape);

  /// Tensors of one width beneath each other: [sum of rows, columns], or [sum of rows] for columns 0. A part whose name is empty is zeros.
  struct Part {
    std::string name;
    std::int64_t rows;
  };
  Tensor stack(std::span<const Part> parts, std::int64_t columns);

  /// "<name>.weight" [out, in] and, where `bias`, "<name>.bias".
  Linear linear(const std::string& name, std::int64_t out, std::int64_t in, bool bias);

 private:
  /// Reads `name` into `target`; while check() runs only looks at it.
  void read(const std::string& name, const Shape& shape, const Tensor& target);

  std::string name_;
  SafeTensors files_;
  std::map<std::string, std::string> names_;  ///< canonical to the file's
  std::set<std::string> asked_;
  std::vector<std::string> problems_;
  bool checking_ = false;
  DType dtype_ = DType::f32;
  Stream stream_ = Stream::standard(Device::cpu());
  std::function<void(std::int64_t, std::int64_t)> progress_;
  std::int64_t bytes_read_ = 0, bytes_wanted_ = 0;
};

}  // namespace tw::models
