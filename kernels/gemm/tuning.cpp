#include "kernels/gemm/tuning.hpp"

#include <algorithm>
#include <memory>

#include "kernels/check.hpp"
#include "kernels/gemm/configs.hpp"

namespace tw::kernels::gemm {

namespace {

/// A configuration by its numbers, which mean the same whatever the list of configurations becomes, and the parts of K.
std::vector<int> values_of(const Config& c, int splits) { return {c.bm, c.bn, c.stages, c.cluster, c.band, splits}; }

/// Few rows have kernels of their own on a GPU, and so have block scales.
bool has_choice(const Call& call) { return !call.block_scaled() && (!call.stream.device().is_cuda() || call.m > kMostSkinnyRows); }

std::span<const Config> configs_of(Device device) { return device.is_cuda() ? configs() : cpu_configs(); }

}  // namespace

std::string problem_key(const Call& call) {
  std::string key = tw::format("gemm {} {}{} M={},N={},K={},batch={}", name_of(call.a.dtype()), stored_transposed(call.a) ? 't' : 'n',
                               stored_transposed(call.b) ? 'n' : 't', call.m, call.n, call.k, call.batch);
  if (call.addends()) key += " addends";
  if (!call.stream.device().is_cuda()) key += tw::format(" threads={}", cpu_threads());
  return key;
}

void use_tuned(Call& call) {
  if (call.config >= 0 || call.splits > 0 || !has_choice(call)) return;
  const Device device = call.stream.device();
  const std::vector<int>* const values = tuned_values(device, [&] { return problem_key(call); });
  if (values == nullptr || values->empty()) return;
  const int splits = values->back();
  if (!device.is_cuda()) {
    call.config = find_config(cpu_configs(), *values, [&](const Config& c) { return values_of(c, splits); });
  } else if (values->size() == 6) {
    const Config tile{(*values)[0], (*values)[1], (*values)[2], (*values)[3], (*values)[4]};
    if (!valid(tile, problem_of(call))) return;
    call.tile = tile;
    call.splits = std::max(splits, 0);
  }
}

TuneProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  const bool a_rows = shape["a_rows"] != 0, b_rows = shape["b_rows"] != 0, addends = shape["addends"] != 0;
  const std::int64_t m = shape["M"], n = shape["N"], k = shape["K"], batch = shape["batch"];
  require(m > 0 && n > 0 && k > 0 && batch > 0, "shape: M, N, K and batch must be positive");
  const bool gpu = device.is_cuda();
  const bool is_16bit = dtype == DType::f16 || dtype == DType::bf16;
  require(!gpu || m > kMostSkinnyRows, "shape: M is {}; there is no choice up to {} rows", m, kMostSkinnyRows);
  require(!gpu || is_16bit || (!a_rows && !b_rows), "shape: a_rows and b_rows have kernels for f16 and bf16 only");
  require(!gpu || !a_rows || b_rows, "shape: there are no kernels for a_rows without b_rows");
  require(dtype != DType::i8 || !addends, "shape: i8 takes no addends");
  const DType out = dtype == DType::i8 ? DType::i32 : dtype == DType::fp8_e4m3 ? DType::bf16 : dtype;

  // Operands as gemm() takes them: views of how they are stored.
  struct Operands {
    Tensor a, b, d, residual;
  };
  const auto make = [=](auto tensor) {
    const auto stored = [&](bool transposed, std::int64_t rows, std::int64_t cols) {
      const Tensor t = tensor(transposed ? Shape{batch, cols, rows} : Shape{batch, rows, cols}, dtype);
      return transposed ? t.transpose(1, 2) : t;
    };
    const Shape result{batch, m, n};
    return Operands{stored(a_rows, m, k), stored(!b_rows, k, n), tensor(result, out), addends ? tensor(result, out) : Tensor()};
  };

  TuneProblem problem;
  const Operands shapes = make([](Shape s, DType type) { return placeholder(std::move(s), type); });
  Call call = make_call(shapes.a, shapes.b, shapes.d, {.residual = addends ? &shapes.residual : nullptr});
  call.stream = Stream::standard(device);
  problem.key = problem_key(call);
  const std::span<const Config> all = configs_of(device);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Config& c = all[i];
    if (gpu && !valid(c, problem_of(call))) continue;
    const Analysis analysis = gpu ? Analysis() : analyze_cpu_config(call, static_cast<int>(i));
    const std::int64_t steps = k * static_cast<std::int64_t>(size_of(dtype)) / 128;
    for (int splits = 1; splits <= 8; splits *= 2) {  // of at least 8 steps
      if (splits > 1 && (!gpu || !is_16bit || a_rows || steps / splits < 8)) break;
      std::string name = tw::format("{}x{}{}", c.bm, c.bn, c.cluster > 1 ? " cluster" : "");
      if (splits > 1) name += tw::format(", {} splits", splits);
      problem.candidates.push_back({{std::move(name), values_of(c, splits)}, analysis, gpu ? analysis.shared_bytes : 0});
    }
  }
  problem.prepare = [=](const Stream& stream, std::uint64_t seed) {
    const auto random = [&](Shape s, DType type) { return random_operand(std::move(s), type, seed, stream); };
    const auto operands = std::make_shared<const Operands>(make(random));
    return [=](const TuneCandidate& candidate) {
      const int splits = candidate.choice.values.back();
      const int config = find_config(all, candidate.choice.values, [&](const Config& c) { return values_of(c, splits); });
      GemmOptions options{.stream = stream, .config = config, .splits = splits};
      if (addends) options.residual = &operands->residual;
      tw::gemm(operands->a, operands->b, operands->d, options);
    };
  };
  return problem;
}

}  // namespace tw::kernels::gemm
