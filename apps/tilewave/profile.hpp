#pragma once

#include <exception>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/yardsticks.hpp"
#include "models/observe.hpp"
#include "runtime/launch_observer.hpp"

namespace tw::cli {

/// All calls of one operator in one stage.
struct OperatorTimes {
  std::string stage, name;
  models::OperatorKind kind = models::OperatorKind::other;
  Device device;
  std::int64_t calls = 0;
  double seconds = 0;
  double bytes = 0, flops = 0;  ///< of all calls
};

/// Times every operator: by events around it on a GPU, by the clock on the CPU. On a GPU a large read goes before each operator, so that
/// the host has enqueued all of the operator by the time it starts: otherwise short operators would be as long as the host takes. It also
/// clears the L2 cache, so inputs come from memory.
class OperatorTimer : public models::Observer {
 public:
  void stage_begin(std::string_view name, const Stream& stream) override;
  void stage_end(std::string_view name, const Stream& stream) override;
  void operator_begin(std::string_view name, int layer, const Stream& stream) override;
  void operator_end(const models::Operator& op, const Tensor* output, const Stream& stream) override;

  /// In the order of their first calls. Throws what went wrong at the end of a stage.
  const std::vector<OperatorTimes>& times() const;
  void clear();

 private:
  struct Call {
    std::size_t row;
    Event begin, end;
  };
  std::size_t row_of(const models::Operator& op, Device device);

  std::optional<bench::ReadYardstick> read_;
  std::string stage_;
  std::optional<Event> begin_, end_;  ///< of the current operator
  std::vector<Call> calls_;           ///< of the current stage
  std::vector<OperatorTimes> times_;
  std::map<std::pair<std::string, std::string>, std::size_t> rows_;
  std::exception_ptr problem_;
};

/// Records when stages, operators and, on a GPU, kernels run, for chrome://tracing and Perfetto.
class Trace : public models::Observer, public LaunchObserver {
 public:
  Trace();

  void stage_begin(std::string_view name, const Stream& stream) override;
  void stage_end(std::string_view name, const Stream& stream) override;
  void operator_begin(std::string_view name, int layer, const Stream& stream) override;
  void operator_end(const models::Operator& op, const Tensor* output, const Stream& stream) override;
  void launch_begin(const KernelSpec& kernel, const Stream& stream) override;
  void launch_end(const KernelSpec& kernel, const Stream& stream) override;

  /// A JSON array of complete events. Throws what went wrong at the end of a stage.
  std::string json() const;

 private:
  enum Row { stages = 1, operators, kernels };  ///< "threads" of the trace
  struct Span {
    Row row;
    std::string name;
    Event begin, end;
    int layer = -1;
    double bytes = 0, flops = 0;
  };
  struct Finished {
    Row row;
    std::string name;
    double begin_us, us;
    int layer;
    double bytes, flops;
  };
  Span start(Row row, std::string_view name, const Stream& stream);
  void finish(Span& span, const Stream& stream);
  /// A device's clock: an event, and when it was in microseconds after the trace began.
  struct Origin {
    Event event;
    double us;
  };
  const Origin& origin(const Stream& stream);

  Event began_{Device::cpu()};
  std::map<std::string, Origin> origins_;  ///< by device
  std::optional<Span> stage_, operator_, kernel_;
  std::vector<Span> spans_;  ///< of the current stage
  std::vector<Finished> finished_;
  std::exception_ptr problem_;
};

}  // namespace tw::cli
