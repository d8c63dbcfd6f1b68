// `tilewave bench gated-delta`: against the time of the bytes that any implementation moves.

#include <vector>

#include "benchmarks/memory_bound.hpp"
#include "runtime/format.hpp"
#include "tilewave/gated_delta.hpp"

namespace tw::kernels::gated_delta {
namespace {

using namespace tw::bench;

enum class Pass { forward, backward, step };
enum class Gates { heads, channels };

/// Heads of 128. The step's bytes are mostly those of the states, read and written.
void measure(Run& run, std::int64_t batch, std::int64_t seqlen, std::int64_t heads, Pass pass, Gates gates = Gates::heads,
             std::int64_t dim = 128) {
  constexpr const char* kFamily = "gated-delta";
  constexpr const char* kNames[] = {"forward", "backward", "step"};
  const std::string name = tw::format("{}-b{}-s{}-h{}-d{}{}", kNames[static_cast<int>(pass)], batch, seqlen, heads, dim,
                                      gates == Gates::channels ? "-channels" : "");
  if (!run.wants(kFamily, name, DType::bf16)) return;
  const Stream stream = run.stream();
  const Shape shape{batch, seqlen, heads, dim}, of_tokens{batch, seqlen, heads};
  const Device device = stream.device();
  const Tensor q = random_normal(shape, DType::bf16, device, 1), k = random_normal(shape, DType::bf16, device, 2),
               v = random_normal(shape, DType::bf16, device, 3), o = Tensor::poisoned(shape, DType::bf16, stream);
  // The squared norm of a key is about `dim`: with a beta of 1 / 256 states neither vanish nor grow.
  const std::vector<float> betas(static_cast<std::size_t>(batch * seqlen * heads), 1.0f / 256);
  const Tensor beta = Tensor::from<float>(betas, of_tokens).to(device),
               g = Tensor::zeros(gates == Gates::channels ? shape : of_tokens, DType::f32, stream);
  const Tensor state = Tensor::zeros({batch, heads, dim, dim}, DType::f32, stream);
  MemoryCase c;
  c.family = kFamily;
  c.case_name = name;
  c.dtype = DType::bf16;
  c.bytes = bytes_of({q, k, v, o, beta, g});
  if (pass == Pass::backward) {
    // The operands, with o's gradient in the place of o, and the operands' gradients.
    c.bytes = 2 * bytes_of({q, k, v, beta, g}) + bytes_of({o});
    const Tensor d_o = random_normal(shape, DType::bf16, device, 4), dq = Tensor::poisoned(shape, DType::bf16, stream),
                 dk = Tensor::poisoned(shape, DType::bf16, stream), d_beta = Tensor::poisoned(of_tokens, DType::f32, stream),
                 dg = Tensor::poisoned(g.shape(), DType::f32, stream);
    c.launch = [=] { gated_delta_rule_backward(q, k, v, beta, d_o, dq, dk, o, d_beta, {.g = &g, .dg = &dg, .stream = stream}); };
  } else if (pass == Pass::step) {
    c.bytes += 2 * bytes_of({state});
    c.launch = [=] { gated_delta_rule_step(q, k, v, beta, state, o, {.g = &g, .normalise_qk = true, .stream = stream}); };
  } else {
    c.launch = [=] { gated_delta_rule(q, k, v, beta, o, {.g = &g, .stream = stream}); };
  }
  run_bandwidth(run, c);
}

const Family family{"gated-delta", "the gated delta rule, heads of 128 and 256: a copy of the bytes of its inputs and outputs",
                    [](Run& run) {
                      const bool gpu = run.stream().device().is_cuda();
                      if (gpu) {
                        for (const std::int64_t seqlen : {4096, 16384}) measure(run, 32768 / seqlen, seqlen, 32, Pass::forward);
                        measure(run, 1, 8192, 32, Pass::forward);
                        measure(run, 8, 4096, 32, Pass::backward);
                        for (const std::int64_t batch : {64, 256}) measure(run, batch, 1, 32, Pass::step);
                        measure(run, 8, 4096, 16, Pass::forward, Gates::heads, 256);
                        measure(run, 8, 4096, 16, Pass::backward, Gates::heads, 256);
                        measure(run, 64, 1, 16, Pass::step, Gates::heads, 256);
                        measure(run, 8, 4096, 32, Pass::forward, Gates::channels);
                        measure(run, 8, 4096, 32, Pass::backward, Gates::channels);
                        measure(run, 64, 1, 32, Pass::step, Gates::channels);
                      } else {
                        measure(run, 1, 512, 4, Pass::forward);
                        measure(run, 1, 512, 4, Pass::backward);
                        for (const Pass pass : {Pass::forward, Pass::backward}) measure(run, 1, 512, 2, pass, Gates::heads, 256);
                        measure(run, 8, 1, 4, Pass::step);
                        for (const Pass pass : {Pass::forward, Pass::backward}) measure(run, 1, 512, 4, pass, Gates::channels);
                      }
                    }};

}  // namespace
}  // namespace tw::kernels::gated_delta
