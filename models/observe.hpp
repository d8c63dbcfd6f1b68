#pragma once

#include <array>
#include <functional>
#include <string_view>
#include <utility>

#include "models/linear.hpp"
#include "tilewave/device.hpp"
#include "tilewave/tensor.hpp"

// A model tells the calling thread's observer, if there is one, which operators it runs: for profiles, traces, checks and dumps. Without an
// observer an operator costs one branch.

namespace tw::models {

/// What an operator reads, besides what it writes. An observer's figures are computed from it. Every tensor counts once and whole.
struct Work {
  std::array<const Tensor*, 4> reads = {};
  const Linear* linear = nullptr;  ///< the product: each row of the output with the weight, which is read, too
  double keys = 0;                 ///< attention: keys that a query sees, in the mean
  double other_bytes = 0;          ///< read and written in addition to the output and to what is given above
};

enum class OperatorKind { linear, attention, other };

/// An operator as observers see it. The views are valid during the call.
struct Operator {
  std::string_view name;
  int layer;  ///< -1: outside the layers
  OperatorKind kind;
  double flops;  ///< of products and attention, a multiply-add counting twice
  double bytes;  ///< read and written
};

/// Called by the thread that runs the model. Every begin has its end, also if the operator throws. Operators are inside stages, and neither
/// nest. Begins and operator_end() may throw, which stops the model; stage_end() must not.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void stage_begin(std::string_view /*name*/, const Stream&) {}
  virtual void stage_end(std::string_view /*name*/, const Stream&) {}
  virtual void operator_begin(std::string_view /*name*/, int /*layer*/, const Stream&) {}
  /// `output`: what the operator wrote, or null if it threw. On a GPU the operator is enqueued.
  virtual void operator_end(const Operator&, const Tensor* /*output*/, const Stream&) {}
  /// Whether operators must be enqueued one at a time, so not in a captured graph.
  virtual bool needs_operators() const { return true; }
};

/// The calling thread's observer, or null.
inline Observer*& observer() {
  static thread_local Observer* current = nullptr;
  return current;
}

/// Sets the thread's observer for its own lifetime.
class Observing {
 public:
  explicit Observing(Observer* observer) : before_(std::exchange(models::observer(), observer)) {}
  ~Observing() { observer() = before_; }
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;

 private:
  Observer* before_;
};

/// A stage of the model lasts as long as the object: "encoder", "prefill", "decode".
class Stage {
 public:
  Stage(std::string_view name, const Stream& stream) : observer_(observer()), name_(name), stream_(stream) {
    if (observer_ != nullptr) observer_->stage_begin(name_, stream_);
  }
  ~Stage() {
    if (observer_ != nullptr) observer_->stage_end(name_, stream_);
  }
  Stage(std::string_view, Stream&&) = delete;  // it is not copied
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

 private:
  Observer* observer_;
  std::string_view name_;
  const Stream& stream_;
};

/// Runs operators of one layer, each under a name that is unique within the layer:
///
///     const Operators run(stream, layer);
///     run("norm", normed, {.reads = {&x}}, [&] { rms_norm(x, normed, {.stream = stream}); });
///     run.linear("qkv", qkv_weights, normed, qkv);
class Operators {
 public:
  explicit Operators(const Stream& stream, int layer = -1) : observer_(observer()), stream_(stream), layer_(layer) {}
  explicit Operators(Stream&&, int = -1) = delete;  // it is not copied

  /// Calls `run`, which writes `output`.
  template <class Run>
  void operator()(std::string_view name, const Tensor& output, const Work& work, Run&& run) const {
    if (observer_ == nullptr) [[likely]]
      return run();
    observed(name, output, work, std::ref(run));
  }

  /// y = x W^T + b and so on, as in Linear.
  void linear(std::string_view name, const Linear& linear, const Tensor& x, const Tensor& y, const LinearOptions& options = {}) const {
    (*this)(name, y, {.reads = {&x, options.accumulate ? &y : nullptr}, .linear = &linear}, [&] { linear(x, y, stream_, options); });
  }

 private:
  void observed(std::string_view name, const Tensor& output, const Work& work, const std::function<void()>& run) const;

  Observer* observer_;
  const Stream& stream_;
  int layer_;
};

}  // namespace tw::models
