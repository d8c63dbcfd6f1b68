// `tilewave bench mamba2`: scans, their gradients and decoding steps, against the time that their bytes take.

#include <cstdint>
#include <string>

#include "benchmarks/harness.hpp"
#include "runtime/format.hpp"
#include "tilewave/mamba2.hpp"
#include "tilewave/mamba2_chunks.hpp"

namespace tw::kernels::mamba2 {
namespace {

using namespace tw::bench;

struct ScanCase {
  std::int64_t batch, seqlen, heads, groups, dim, state;
};
/// Layers of Mamba-2 2.7B and of Codestral Mamba, and one long sequence.
constexpr ScanCase kScans[] = {{8, 4096, 80, 1, 64, 128}, {8, 4096, 128, 8, 64, 128}, {1, 65536, 80, 1, 64, 128}};
/// Decoding: sequences, and one step of each.
constexpr ScanCase kSteps[] = {{128, 1, 80, 1, 64, 128}, {16, 1, 80, 1, 64, 128}, {128, 1, 128, 8, 64, 128}};

enum class Direction { forward, chunks, backward, chunks_backward, step };  // chunks: in five steps with chunks of 256

constexpr Direction kScanDirections[] = {Direction::forward, Direction::chunks, Direction::backward, Direction::chunks_backward};

/// Bytes that the operation must read and write, each tensor counted once. With gradients, those of x, z, dt, B and C again, and dy; of a
/// step also the states, twice.
std::int64_t least_bytes(const ScanCase& c, Direction direction, DType states) {
  const std::int64_t x = 2 * c.batch * c.seqlen * c.heads * c.dim, dt = 2 * c.batch * c.seqlen * c.heads;
  const std::int64_t keys = 2 * 2 * c.batch * c.seqlen * c.groups * c.state;
  if (direction == Direction::backward || direction == Direction::chunks_backward) return 5 * x + 2 * dt + 2 * keys;
  const std::int64_t of_states = c.batch * c.heads * c.dim * c.state * static_cast<std::int64_t>(size_of(states));
  return 3 * x + dt + keys + (direction == Direction::step ? 2 * of_states : 0);
}

void run_case(Run& run, const ScanCase& c, Direction direction, DType states = DType::f32) {
  constexpr const char* kNames[] = {"forward", "chunks", "backward", "chunks-backward", "step"};
  const std::string name = tw::format("{}-b{}-s{}-h{}-g{}-p{}-n{}{}", kNames[static_cast<int>(direction)], c.batch, c.seqlen, c.heads,
                                      c.groups, c.dim, c.state, states == DType::f32 ? "" : "-states-bf16");
  const DType dtype = DType::bf16;
  if (!run.wants("mamba2", name, dtype)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const Shape of_x{c.batch, c.seqlen, c.heads, c.dim}, of_keys{c.batch, c.seqlen, c.groups, c.state}, of_dt{c.batch, c.seqlen, c.heads};
  const Tensor x = random_normal(of_x, dtype, device, 1), z = random_normal(of_x, dtype, device, 2);
  const Tensor b = random_normal(of_keys, dtype, device, 3), keys = random_normal(of_keys, dtype, device, 4);
  const Tensor dt = random_normal(of_dt, dtype, device, 5), y = Tensor::poisoned(of_x, dtype, stream);
  // Values do not change the time; with A = -1 states stay finite.
  std::vector<float> rates(static_cast<std::size_t>(c.heads), -1);
  const Tensor a = Tensor::from<float>(rates, {c.heads}).to(device);
  const Tensor d = random_normal({c.heads}, DType::f32, device, 6), bias = random_normal({c.heads}, DType::f32, device, 7);
  Contender contender{"tilewave", {}};
  if (direction == Direction::forward) {
    contender.launch = [=] {
      tw::mamba2(x, dt, a, b, keys, y, {.d = &d, .z = &z, .dt_bias = &bias, .dt_softplus = true, .stream = stream});
    };
  } else if (direction == Direction::chunks || direction == Direction::chunks_backward) {
    constexpr std::int64_t kSize = 256;
    const bool backward = direction == Direction::chunks_backward;
    const std::int64_t chunks = ceil_div(c.seqlen, kSize);
    const auto room = [&](const Shape& shape, DType of) { return Tensor::poisoned(shape, of, stream); };
    const auto f32 = [&](const Shape& shape) { return room(shape, DType::f32); };
    const Shape of_steps{c.batch, c.heads, chunks, kSize}, of_states{c.batch, chunks, c.heads, c.dim, c.state};
    const Tensor sums = f32(of_steps), sizes = f32(of_steps), added = f32(of_states), decays = sums.select(3, kSize - 1);
    const Tensor passed = room(of_states, dtype), cb = f32({c.batch, chunks, c.groups, kSize, kSize});
    const Tensor ungated = room(backward ? of_x : Shape{0}, dtype);
    contender.launch = [=] {
      tw::mamba2_chunk_cumsum(dt, a, sums, sizes, {.dt_bias = &bias, .dt_softplus = true, .stream = stream});
      tw::mamba2_chunk_state(b, x, sizes, sums, added, stream);
      tw::mamba2_state_passing(added, decays, passed, {.stream = stream});
      tw::mamba2_bmm_chunk(keys, b, cb, {.causal = true, .stream = stream});
      tw::mamba2_chunk_scan(cb, x, sizes, sums, keys, passed, y,
                            {.d = &d, .z = &z, .ungated = backward ? &ungated : nullptr, .stream = stream});
    };
    if (backward) {
      contender.launch();
      const Tensor dy = random_normal(of_x, dtype, device, 8), dx = room(of_x, dtype), dz = room(of_x, dtype), d_dt = room(of_dt, dtype);
      const Tensor db = room(of_keys, dtype), dc = room(of_keys, dtype), da = f32({c.heads}), dd = f32({c.heads}), d_bias = f32({c.heads});
      const Tensor d_cb = f32(cb.shape()), d_sums = f32(of_steps), d_sizes = f32(of_steps), d_passed = f32(of_states);
      const Tensor d_decays = f32({c.batch, c.heads, chunks});
      contender.launch = [=] {
        tw::mamba2_chunk_scan_backward(cb, x, sizes, sums, keys, passed, dy, d_cb, dx, d_sizes, d_sums, dc, d_passed,
                                       {.d = &d, .z = &z, .ungated = &ungated, .dd = &dd, .dz = &dz, .stream = stream});
        tw::mamba2_bmm_chunk_backward(keys, b, d_cb, dc, db, {.causal = true, .stream = stream});
        tw::mamba2_state_passing_backward(passed, decays, d_passed, added, d_decays, {.stream = stream});
        tw::mamba2_chunk_state_backward(b, x, sizes, sums, added, db, dx, d_sizes, d_sums, stream);
        tw::mamba2_chunk_cumsum_backward(dt, a, d_sums, d_sizes, d_dt,
                                         {.dt_bias = &bias, .dt_softplus = true, .da = &da, .d_dt_bias = &d_bias, .stream = stream});
      };
    }
  } else if (direction == Direction::backward) {
    const Tensor dy = random_normal(of_x, dtype, device, 8), dx = Tensor::poisoned(of_x, dtype, stream);
    const Tensor dz = Tensor::poisoned(of_x, dtype, stream), d_dt = Tensor::poisoned(of_dt, dtype, stream);
    const Tensor db = Tensor::poisoned(of_keys, dtype, stream), dc = Tensor::poisoned(of_keys, dtype, stream);
    const Tensor da = Tensor::poisoned({c.heads}, DType::f32, stream), dd = Tensor::poisoned({c.heads}, DType::f32, stream);
    const Tensor d_bias = Tensor::poisoned({c.heads}, DType::f32, stream);
    contender.launch = [=] {
      tw::mamba2_backward(x, dt, a, b, keys, dy, dx, d_dt, db, dc,
                          {.d = &d,
                           .z = &z,
                           .dt_bias = &bias,
                           .dt_softplus = true,
                           .da = &da,
                           .dd = &dd,
                           .dz = &dz,
                           .d_dt_bias = &d_bias,
                           .stream = stream});
    };
  } else {
    const Tensor state = Tensor::zeros({c.batch, c.heads, c.dim, c.state}, states, stream);
    contender.launch = [=] {
      tw::mamba2_step(x, dt, a, b, keys, state, y, {.d = &d, .z = &z, .dt_bias = &bias, .dt_softplus = true, .stream = stream});
    };
  }
  contender.launch();
  stream.synchronize();
  const Mode mode = device.is_cuda() ? Mode::graph : Mode::hot;
  Record record;
  record.family = "mamba2";
  record.case_name = name;
  record.dtype = dtype;
  record.mode = mode;
  record.unit = "GB/s";
  record.work = static_cast<double>(least_bytes(c, direction, states)) * 1e-9;
  record.ours = measure(mode, {contender}, stream, run.effort(mode))[0];
  record.limit = run.read_bandwidth() * 1e-9;
  run.add(record);
}

const Family family{"mamba2", "Mamba-2: scans in chunks, their gradients and decoding steps, against the time of their bytes",
                    [](Run& run) {
                      if (!run.options().device.is_cuda()) {
                        for (const Direction direction : kScanDirections) run_case(run, {1, 1024, 8, 1, 64, 128}, direction);
                        return run_case(run, {4, 1, 80, 1, 64, 128}, Direction::step);
                      }
                      for (const Direction direction : kScanDirections)
                        for (const ScanCase& c : kScans) run_case(run, c, direction);
                      for (const ScanCase& c : kSteps)
                        for (const DType states : {DType::f32, DType::bf16}) run_case(run, c, Direction::step, states);
                    }};

}  // namespace
}  // namespace tw::kernels::mamba2
