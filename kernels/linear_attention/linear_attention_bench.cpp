// `tilewave bench linear-attention`: forward and backward passes and steps, against the time that their bytes take.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/memory_bound.hpp"
#include "runtime/format.hpp"
#include "tilewave/linear_attention.hpp"

namespace tw::kernels::linear_attention {
namespace {

using namespace tw::bench;

struct RecurrenceCase {
  std::int64_t batch, seqlen, heads, dim;
};
constexpr RecurrenceCase kRecurrences[] = {
    {8, 4096, 32, 128}, {8, 2048, 64, 64}, {8, 4096, 16, 256}, {1, 16384, 32, 128}, {1, 65536, 16, 128}};
/// Decoding: sequences, and one step of each.
constexpr RecurrenceCase kSteps[] = {{128, 1, 32, 128}, {16, 1, 32, 128}, {64, 4, 16, 256}};

enum class Direction { forward, backward, step };

/// Bytes that the operation must read and write: q, k, v and o; with gradients those, and q, k and v again; states of a step twice.
std::int64_t least_bytes(const RecurrenceCase& c, Direction direction) {
  const std::int64_t elements = c.batch * c.seqlen * c.heads * c.dim, gates = 4 * c.batch * c.seqlen * c.heads;
  if (direction == Direction::forward) return 4 * 2 * elements + gates;
  if (direction == Direction::backward) return 7 * 2 * elements + 2 * gates;
  return 4 * 2 * elements + gates + 2 * 4 * c.batch * c.heads * c.dim * c.dim;
}

void run_recurrence_case(Run& run, const RecurrenceCase& c, Direction direction) {
  constexpr const char* kNames[] = {"forward", "backward", "step"};
  const std::string name = tw::format("{}-b{}-s{}-h{}-d{}", kNames[static_cast<int>(direction)], c.batch, c.seqlen, c.heads, c.dim);
  const DType dtype = DType::bf16;
  if (!run.wants("linear-attention", name, dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const Shape shape{c.batch, c.seqlen, c.heads, c.dim};
  const Tensor q = random_normal(shape, dtype, device, 1), k = random_normal(shape, dtype, device, 2);
  const Tensor v = random_normal(shape, dtype, device, 3), o = Tensor::poisoned(shape, dtype, stream);
  const Tensor g = Tensor::zeros({c.batch, c.seqlen, c.heads}, DType::f32, stream);  // its values do not change the time
  std::vector<Contender> contenders;
  const bool both = run.options().all_configs && c.dim <= 128;
  if (direction == Direction::forward) {
    const auto add = [&](const char* contender, int config) {
      contenders.push_back({contender, [=] { tw::linear_attention(q, k, v, o, {.g = &g, .stream = stream, .config = config}); }});
    };
    add("tilewave", -1);
    if (both) add("states, then outputs", 0), add("walk", 1);
  } else if (direction == Direction::backward) {
    const Tensor d_o = random_normal(shape, dtype, device, 4), dq = Tensor::poisoned(shape, dtype, stream);
    const Tensor dk = Tensor::poisoned(shape, dtype, stream), dv = Tensor::poisoned(shape, dtype, stream);
    const Tensor dg = Tensor::poisoned(g.shape(), DType::f32, stream);
    const auto add = [&](const char* contender, int config) {
      contenders.push_back(
          {contender,
           [=] { tw::linear_attention_backward(q, k, v, d_o, dq, dk, dv, {.g = &g, .dg = &dg, .stream = stream, .config = config}); }});
    };
    add("tilewave", -1);
    if (both) add("states, then outputs", 0), add("walk", 1);
  } else {
    const Tensor state = Tensor::zeros({c.batch, c.heads, c.dim, c.dim}, DType::f32, stream);
    contenders.push_back({"tilewave", [=] { tw::linear_attention_step(q, k, v, o, state, {.g = &g, .stream = stream}); }});
  }
  for (const Contender& contender : contenders) contender.launch();
  stream.synchronize();
  const Mode mode = device.is_cuda() ? Mode::graph : Mode::hot;
  const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
  Record record;
  record.family = "linear-attention";
  record.case_name = name;
  record.dtype = dtype;
  record.mode = mode;
  record.unit = "GB/s";
  record.work = static_cast<double>(least_bytes(c, direction)) * 1e-9;
  record.ours = times[0];
  record.limit = run.read_bandwidth() * 1e-9;
  run.add(record);
  for (std::size_t i = 1; i < contenders.size(); ++i)
    tw::print(run.options().table, "  {:<32} {:<24} {:8.2f} us\n", name, contenders[i].name, times[i].median * 1e3);
}

const Family family{"linear-attention", "recurrences with a decay: chunked passes and decoding steps, against the time of their bytes",
                    [](Run& run) {
                      const bool cuda = run.options().device.is_cuda();
                      for (const Direction direction : {Direction::forward, Direction::backward, Direction::step}) {
                        if (cuda) {
                          const auto run_all = [&](const auto& cases) {
                            for (const RecurrenceCase& c : cases) run_recurrence_case(run, c, direction);
                          };
                          direction == Direction::step ? run_all(kSteps) : run_all(kRecurrences);
                        } else {
                          run_recurrence_case(run, {1, direction == Direction::step ? 1 : 1024, 8, 128}, direction);
                        }
                      }
                    }};

}  // namespace
}  // namespace tw::kernels::linear_attention
