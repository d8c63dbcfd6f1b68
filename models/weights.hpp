#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "models/linear.hpp"
#include "models/safetensors.hpp"
#include "models/tensor_source.hpp"
#include "tilewave/tensor.hpp"

namespace tw::models {

/// Calls f(name, dtype in a file's spelling, tensor) for the tensors of the weight `name` in fewer bits, in the order of a file.
template <class F>
void for_tensors(const std::string& name, const QuantizedMatrix& matrix, F f) {
  const bool int4 = matrix.format == WeightFormat::int4;
  f(name, int4 ? "U8" : matrix.format == WeightFormat::int8 ? "I8" : "F8_E4M3", matrix.values);
  f(name + "_scale", int4 ? "F16" : "F32", matrix.scales);
  if (matrix.zeros.rank() == 2) f(name + "_zero", "U8", matrix.zeros);
}

/// Passes a checkpoint's tensors to a model, converted to one dtype on one device, each tensor once.
///
/// A model requests its tensors by name and shape, twice. During check() nothing is read, and missing or misshapen tensors are collected,
/// so that one error names all of them. During load() the tensors are read in chunks and converted.
class Weights {
 public:
  /// What a checkpoint calls things.
  struct Names {
    std::function<std::string(const std::string&)> canonical;    ///< maps a name in the file to the model's name
    std::function<std::string(const std::string&)> stored = {};  ///< the inverse, for missing tensors in messages; empty: the model's names
    std::string configuration = "config.json";                   ///< what the shapes come from
  };
  /// Messages begin with `name`. Throws FileError if two names in the file map to the same.
  Weights(std::string name, std::shared_ptr<const TensorSource> files, Names names);
  Weights(std::string name, SafeTensors files, const std::function<std::string(const std::string&)>& canonical)
      : Weights(std::move(name), std::make_shared<const SafeTensors>(std::move(files)), {.canonical = canonical}) {}

  /// How the weights of linear layers are in the file, and how they will be in memory; default: `plain` both. A file in fewer bits has
  /// "<name>.weight" in the layout's dtype, "<name>.weight_scale" and, with zero points, "<name>.weight_zero", as QuantizedMatrix has them.
  /// Throws InvalidArgument if `wanted` differs from a `stored` layout that is not plain; check() does if a weight's columns are not a
  /// multiple of the group.
  void set_layouts(const QuantizedMatrix::Layout& stored, const QuantizedMatrix::Layout& wanted);

  /// Runs `build`, which requests every tensor of the model. Throws FileError that names each tensor (at most 100) that is missing,
  /// surplus, misshapen or of a dtype other than bf16, f16 and f32 (or the stored layout's).
  void check(const std::function<void(Weights&)>& build);
  /// Runs `build` again. `progress`, if any, is called with the bytes read so far and the total.
  void load(const std::function<void(Weights&)>& build, DType dtype, const Stream& stream,
            const std::function<void(std::int64_t, std::int64_t)>& progress);

  bool checking() const { return checking_; }
  const Stream& stream() const { return stream_; }
  bool contains(const std::string& name) const { return names_.contains(name); }
  /// The extents in the file, or an empty list if it is missing or does not have `rank` dimensions: take() then reports it.
  Shape shape(const std::string& name, int rank) const;
  /// The dtype of most elements, among bf16, f16 and f32; f32 if there are none.
  DType main_dtype() const;

  /// The tensor `name`. With `into`, which has its shape, it is read there.
  Tensor take(const std::string& name, const Shape& shape, const Tensor& into = {});

  /// Concatenates tensors of one width along rows: [sum of rows, columns], or [sum of rows] for columns 0. An empty name stands for zeros.
  struct Part {
    std::string name;
    std::int64_t rows;
  };
  Tensor stack(std::span<const Part> parts, std::int64_t columns, const Tensor& into = {});

  /// Memory for tensors that are read into parts of it; nothing during check().
  Tensor room(const Shape& shape) const;
  /// The same for the weights of linear layers.
  Linear linear_room(std::int64_t rows, std::int64_t columns) const;

  /// What a linear layer is for. A head's results are the scores themselves, so its weight is in int8 where layers are in int4.
  enum class Role { layer, head };
  /// "<name>.weight" [out, in] and, with `bias`, "<name>.bias".
  Linear linear(const std::string& name, std::int64_t out, std::int64_t in, bool bias, Role role = Role::layer);
  /// One layer whose weight concatenates tensors along rows, as stack() does; without a bias. With `into`, which has its format and shape,
  /// the weight is read there.
  Linear linear(std::span<const Part> parts, std::int64_t columns, Role role = Role::layer, const Linear& into = {});

  /// How the weights of BitNet's layers are in the file.
  enum class Ternary {
    rounded_here,  ///< in f32, f16 or bf16, "<name>": rounded while they are loaded (transformers: "online")
    multiplied,    ///< packed, "<name>" of U8 [rows / 4, columns] and "<name>_scale" of one element, which sums are multiplied with
    divided        ///< the same, and sums are divided by it (transformers' class BitLinear)
  };
  /// One layer of weights of -1, 0 and 1 that concatenates tensors along rows. Each keeps its scale.
  Linear ternary(std::span<const Part> parts, std::int64_t columns, Ternary stored);

  /// The layouts in memory of the weights of linear layers, by the file's names of the tensors; known after check().
  const std::map<std::string, QuantizedMatrix::Layout>& linear_layouts() const { return linear_layouts_; }

 private:
  /// check() for a tensor in the file: its extents and its dtype, in the file's spelling; any of BF16, F16 and F32 if that is empty.
  void check_stored(const std::string& name, const Shape& shape, const std::string& dtype);
  /// The weight of a linear layer that is in fewer bits in memory.
  QuantizedMatrix take_quantized(std::span<const Part> parts, std::int64_t columns, const QuantizedMatrix::Layout& layout,
                                 const QuantizedMatrix& into);
  /// Reads one part that is in fewer bits in the file.
  void read_quantized(const std::string& name, const QuantizedMatrix& target);
  /// Reads `name` into `target`; during check() only checks it.
  void read(const std::string& name, const Shape& shape, const Tensor& target);

  std::string name_;
  std::shared_ptr<const TensorSource> files_;
  Names spelling_;
  std::map<std::string, std::string> names_;  ///< canonical to the file's
  std::set<std::string> asked_;
  std::vector<std::string> problems_;
  bool checking_ = false;
  QuantizedMatrix::Layout stored_ = {.format = WeightFormat::plain}, wanted_ = stored_;
  std::map<std::string, QuantizedMatrix::Layout> linear_layouts_;
  DType dtype_ = DType::f32;
  Stream stream_ = Stream::standard(Device::cpu());
  std::function<void(std::int64_t, std::int64_t)> progress_;
  std::int64_t bytes_read_ = 0, bytes_wanted_ = 0;
};

}  // namespace tw::models
