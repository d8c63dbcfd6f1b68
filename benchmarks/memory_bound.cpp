#include "benchmarks/memory_bound.hpp"

#include <algorithm>
#include <optional>

#include "benchmarks/yardsticks.hpp"
#include "runtime/format.hpp"

namespace tw::bench {
namespace {

struct Size {
  std::int64_t rows, cols;
};

constexpr Size kLarge[] = {{32768, 4096}, {8192, 16384}, {131072, 1280}};
constexpr Size kOfModels[] = {{1500, 1280}, {375, 2048}, {1, 2048}};

Record record_of(const MemoryCase& c, Mode mode, const Timing& ours) {
  Record record;
  record.family = c.family;
  record.case_name = c.case_name;
  record.dtype = c.dtype;
  record.mode = mode;
  record.ours = ours;
  record.config = c.variant;
  return record;
}

}  // namespace

void run_bandwidth(Run& run, const MemoryCase& c) {
  const Stream& stream = run.stream();
  const Mode mode = stream.device().is_cuda() ? Mode::hot : Mode::one_thread;
  const OneThread one;
  std::optional<CopyYardstick> copy;
  std::optional<ReadYardstick> read;
  std::vector<Contender> contenders;
  if (c.yardstick == Yardstick::copy)
    contenders = copy.emplace(c.bytes, stream).contenders();
  else
    contenders = {read.emplace(c.bytes, stream).contender()};
  contenders.push_back({"tilewave", c.launch});
  const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
  const auto fastest =
      std::min_element(times.begin(), times.end() - 1, [](const Timing& x, const Timing& y) { return x.median < y.median; });

  Record record = record_of(c, mode, times.back());
  record.unit = "GB/s";
  record.work = c.bytes * 1e-9;
  record.peer = copy ? "copy" : "read";
  record.peer_time = *fastest;
  record.peer_config = contenders[static_cast<std::size_t>(fastest - times.begin())].name;
  if (stream.device().is_cuda()) {
    if (const auto limits = gpu_limits(device_info(stream.device()).name)) record.limit = limits->bytes_per_second * 1e-9;
  }
  run.add(record);
}

void run_small(Run& run, const MemoryCase& c) {
  const Stream& stream = run.stream();
  const Mode mode = stream.device().is_cuda() ? Mode::graph : Mode::one_thread;
  const OneThread one;
  const double bandwidth = run.copy_bandwidth();
  const std::vector<Timing> times = measure(mode, {{"tilewave", c.launch}, empty_kernel(stream)}, stream, run.effort(mode));

  Record record = record_of(c, mode, times[0]);
  record.unit = kMicroseconds;
  record.peer = "empty kernel";
  record.peer_time = times[1];
  record.limit = times[1].median * 1e3 + c.bytes / bandwidth * 1e6;
  run.add(record);
}

double bytes_of(std::initializer_list<Tensor> tensors) {
  double bytes = 0;
  for (const Tensor& tensor : tensors) bytes += static_cast<double>(tensor.numel()) * static_cast<double>(size_of(tensor.dtype()));
  return bytes;
}

MemoryOp unary_op(std::string name, std::vector<DType> dtypes, void (*f)(const Tensor& x, const Tensor& y, const Stream& stream)) {
  const auto prepare = [f](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const Tensor x = random_normal({rows, cols}, dtype, stream.device(), 1);
    const Tensor y = Tensor::poisoned({rows, cols}, dtype, stream);
    return {bytes_of({x, y}), [=] { f(x, y, stream); }};
  };
  return {.name = std::move(name), .dtypes = std::move(dtypes), .prepare = prepare};
}

void run_memory_ops(Run& run, const std::string& family, const std::vector<MemoryOp>& ops) {
  const bool cuda = run.options().device.is_cuda();
  for (const MemoryOp& op : ops) {
    const auto run_size = [&](Size size, DType dtype, void (*run_case)(Run&, const MemoryCase&)) {
      MemoryCase c;
      c.family = family;
      c.case_name = tw::format("{}-{}x{}", op.name, size.rows, size.cols);
      c.dtype = dtype;
      if (!run.wants(family, c.case_name, dtype)) return;
      MemoryOp::Prepared prepared = op.prepare(size.rows, size.cols, dtype, run.stream());
      c.bytes = prepared.bytes;
      c.launch = std::move(prepared.launch);
      c.yardstick = op.yardstick;
      run_case(run, c);
    };
    for (const DType dtype : op.dtypes) {
      if (cuda) {
        for (const Size size : kLarge) run_size(size, dtype, run_bandwidth);
      } else {
        const auto row_bytes = static_cast<std::int64_t>(4096 * size_of(dtype));
        run_size({(std::int64_t{64} << 20) / row_bytes, 4096}, dtype, run_bandwidth);
      }
    }
    if (cuda) {
      for (const Size size : kOfModels) run_size(size, op.dtypes.front(), run_small);
    }
  }
}

}  // namespace tw::bench
