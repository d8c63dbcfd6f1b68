#include "kernels/tuner.hpp"

#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

constexpr std::int64_t kPeriod = 1048573;  // prime, so that the rows of an operand differ

/// kPeriod normally distributed numbers, rounded to `dtype`. Made once for each dtype and seed.
Tensor numbers(DType dtype, std::uint64_t seed) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<DType, std::uint64_t>, Tensor>;
  const std::lock_guard lock(mutex);
  Tensor& made = known[{dtype, seed}];
  if (made.numel() == 0) made = Tensor::random({kPeriod}, DType::f32, seed).to(dtype);
  return made;
}

/// Compares the results of candidates with those of the first one.
class ResultCheck {
 public:
  explicit ResultCheck(TuneOperands operands) : operands_(std::move(operands)) {}

  std::string operator()(const TunePoint& point, const Stream& stream) {
    const Tensor& result = operands_.result;
    result.copy_from(Tensor::poisoned(result.shape(), result.dtype(), stream));
    operands_.launch(point);
    stream.synchronize();
    const Tensor flat = result.reshape({result.numel()});
    const std::int64_t piece = std::min<std::int64_t>(flat.numel(), 1 << 18);
    const bool first = expected_.empty();
    std::size_t i = 0;
    for (const std::int64_t at : {std::int64_t{0}, (flat.numel() - piece) / 2, flat.numel() - piece}) {
      const Tensor values = flat.slice(0, at, at + piece).to(Device::cpu());
      if (first) {
        expected_.push_back(values);
        largest_ = std::max(largest_, max_difference(values, Tensor::zeros(values.shape(), values.dtype())));
        continue;
      }
      const double difference = max_difference(values, expected_[i++]);
      if (!(difference <= tolerance()))
        return tw::format("its results differ from the standard's by {:.3g}; the largest of those is {:.3g}", difference, largest_);
    }
    return "";
  }

 private:
  /// Allows for rounding, and for sums in another order.
  double tolerance() const {
    const DType dtype = operands_.result.dtype();
    return dtype == DType::i32 ? 0 : largest_ / (dtype == DType::f32 ? 1024 : 64);
  }

  TuneOperands operands_;
  std::vector<Tensor> expected_;
  double largest_ = 0;
};

}  // namespace

Tensor random_operand(Shape shape, DType dtype, std::uint64_t seed, const Stream& stream) {
  const Tensor result = Tensor::empty(std::move(shape), dtype, stream);
  const Tensor flat = result.reshape({result.numel()});
  std::int64_t filled = std::min(kPeriod, flat.numel());
  flat.slice(0, 0, filled).copy_from(numbers(dtype, seed).slice(0, 0, filled));
  for (std::int64_t more; filled < flat.numel(); filled += more) {  // copies on the device double the part that is filled
    more = std::min(filled, flat.numel() - filled);
    flat.slice(0, filled, filled + more).copy_from(flat.slice(0, 0, more));
  }
  return result;
}

std::int64_t bytes_of(std::initializer_list<const Tensor*> tensors) {
  std::int64_t bytes = 0;
  for (const Tensor* t : tensors) bytes += t->numel() * static_cast<std::int64_t>(size_of(t->dtype()));
  return bytes;
}

int units_of(Device device) {
  for (const DeviceInfo& info : find_devices().devices)
    if (info.device == device) return info.units;
  return find_device_model("H200")->units;
}

TuneProblem without_operands(const FamilyProblem& problem) {
  return {.name = problem.name, .launch = {}, .predict = problem.predict, .standard = problem.standard};
}

TuneProblem with_operands(const FamilyProblem& problem, const Stream& stream, std::uint64_t seed, TuneMemory memory) {
  constexpr std::int64_t kMostSets = 64;
  const auto sets = std::make_shared<std::vector<TuneOperands>>();
  sets->push_back(problem.prepare(stream, seed));
  if (stream.device().is_cuda() && memory == TuneMemory::cold) {
    const auto cache = static_cast<std::int64_t>(device_info(stream.device()).l2_bytes);
    const std::int64_t wanted = std::min(2 * cache / std::max<std::int64_t>(sets->front().bytes, 1) + 1, kMostSets);
    while (static_cast<std::int64_t>(sets->size()) < wanted) sets->push_back(problem.prepare(stream, seed));
  }
  TuneProblem ready = without_operands(problem);
  ready.launch = [sets, next = std::make_shared<std::size_t>(0)](const TunePoint& point) {
    (*sets)[*next].launch(point);
    *next = (*next + 1) % sets->size();
  };
  ready.check = [check = std::make_shared<ResultCheck>(sets->front()), stream](const TunePoint& point) { return (*check)(point, stream); };
  return ready;
}

TuneSpace space_of(const std::vector<std::string>& names, const std::vector<std::vector<int>>& points) {
  std::vector<TuneRange> ranges;
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::set<int> values;
    for (const std::vector<int>& point : points) values.insert(point[i]);
    ranges.push_back({names[i], {values.begin(), values.end()}});
  }
  return TuneSpace(std::move(ranges),
                   [points](const TunePoint& p) { return std::find(points.begin(), points.end(), p.values()) != points.end(); });
}

TunePoint point_of(const TuneSpace& space, const std::vector<int>& values) {
  const std::optional<TunePoint> point = space.find(values);
  if (!point) throw Error(tw::format("tune: {} is not a valid point of {}", tw::join(values, ", "), space.text()));
  return *point;
}

}  // namespace tw
