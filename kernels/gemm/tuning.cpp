#include "kernels/gemm/tuning.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "kernels/check.hpp"
#include "kernels/gemm/kernels.hpp"
#include "kernels/product_tuning.hpp"

namespace tw::kernels::gemm {

namespace {

/// One row has a kernel of its own on a GPU, few rows on the CPU, and so have block scales.
bool has_choice(const Call& call, Device device) {
  return !call.block_scaled() && (device.is_cuda() ? !call.is_gemv() : call.m > kMostSkinnyRows);
}

/// Whether so many splits of K, each of at least 4 steps, are so many, or these tiles can be done in shares of K.
bool valid_splits(const Call& call, const Problem& problem, const Config& tile, int splits) {
  if (splits == 1) return true;
  if (splits == kStreamK) return call.splittable() && valid_stream_k(tile, problem);
  const auto bytes = static_cast<std::int64_t>(size_of(call.a.dtype()));
  return call.splittable() && (call.k * bytes + 127) / 128 / splits >= 4 && used_splits(call.k, size_of(call.a.dtype()), splits) == splits;
}

constexpr int kBands[] = {4, 8, 16, 32};

/// Of bands that hold all rows of tiles, which do the same, one is valid: the heuristic's, or else the narrowest.
bool valid_band(int band, int standard, std::int64_t tile_rows) {
  if (band < tile_rows) return true;
  const int same =
      standard >= tile_rows ? standard : *std::find_if(std::begin(kBands), std::end(kBands), [&](int b) { return b >= tile_rows; });
  return band == same;
}

TuneSpace cpu_space() {
  std::vector<std::vector<int>> points;
  for (const Config& c : kCpuConfigs) points.push_back(values_of(c, 1));
  return space_of({"bm", "bn", "stages", "cluster", "band", "splits", "teams"}, points);
}

int cpu_config_of(const std::vector<int>& values) {
  return find_config(kCpuConfigs, values, [](const Config& c) { return values_of(c, 1); });
}

/// What the heuristic chooses.
std::vector<int> standard_values(const Call& call, Device device, int units) {
  if (!device.is_cuda()) return values_of(kCpuConfigs[static_cast<std::size_t>(choose_cpu_config(call))], 1);
  const Problem p = problem_of(call, units);
  if (call.is_skinny()) return values_of(skinny_tile(call.m), 1);
  const auto [tile, splits] = choose(p, call.splittable());
  return values_of(tile, splits > 1 ? used_splits(call.k, size_of(call.a.dtype()), splits) : splits);
}

std::string key_on(Device device, const Call& call) {
  std::string key = tw::format("gemm {} {}{} M={},N={},K={},batch={}", name_of(call.a.dtype()), call.stored.a_rows ? 't' : 'n',
                               call.stored.b_rows ? 'n' : 't', call.m, call.n, call.k, call.batch);
  if (call.addends()) key += " addends";
  if (!device.is_cuda()) key += tw::format(" threads={}", cpu_threads());
  return key;
}

/// Predicted time of few rows of A, in the heuristic's unit: reading B, or the SM that has most tiles.
double skinny_time(const Problem& p, const Config& c) {
  constexpr double read = 0.8, chain = 0.3, start = 4;  // of 128 rows of B and 64 of K, on an H200
  const double tiles = std::ceil(static_cast<double>(p.n) / c.bm) * static_cast<double>(p.batch);
  const double tile = c.bm / 128.0 * static_cast<double>(p.k) / kSkinnyPanel;
  return std::max(read * tile * tiles / p.units, std::ceil(tiles / p.units) * (chain * tile + start));
}

}  // namespace

std::vector<int> values_of(const Config& c, int splits) { return {c.bm, c.bn, c.stages, c.cluster, c.band, splits, c.teams}; }

TuneSpace gpu_space(const Call& call, int units) {
  if (call.is_skinny()) {
    return TuneSpace(
        {{"bm", {16, 32}}, {"bn", {8, 16}}, {"stages", every(2, 10)}, {"cluster", {1}}, {"band", {1}}, {"splits", {1}}, {"teams", {1}}},
        [m = call.m](const TunePoint& point) { return valid_skinny(tile_of(point.values()), m); });
  }
  const Problem p = problem_of(call, units);
  const int standard_band = standard_values(call, Device::cuda(), units)[4];
  const auto rule = [=](const TunePoint& point) {
    const Config c = tile_of(point.values());
    const std::int64_t clusters = ceil_div(ceil_div(static_cast<int>(p.m), c.bm), c.cluster);
    return valid(c, p) && valid_splits(call, p, c, point["splits"]) && valid_band(c.band, standard_band, clusters);
  };
  std::vector<TuneRange> ranges = product_ranges();
  ranges.push_back({"band", {std::begin(kBands), std::end(kBands)}});
  std::vector<int> splits = every(1, 16);
  splits.push_back(kStreamK);
  ranges.push_back({"splits", splits});
  ranges.push_back({"teams", {1, 2}});
  return TuneSpace(std::move(ranges), rule);
}

std::string problem_key(const Call& call) { return key_on(call.stream.device(), call); }

void use_tuned(Call& call) {
  const Device device = call.stream.device();
  if (call.config >= 0 || call.splits != 0 || !has_choice(call, device)) return;
  const std::vector<int>* const values = tuned_values(device, [&] { return problem_key(call); });
  if (values == nullptr || values->size() != 7) return;
  if (!device.is_cuda()) {
    call.config = cpu_config_of(*values);
    return;
  }
  const Config tile = tile_of(*values);
  if (call.is_skinny() ? !valid_skinny(tile, call.m) : !valid(tile, problem_of(call, 1))) return;
  call.tile = tile;
  const int splits = (*values)[5];
  call.splits = splits == kStreamK ? splits : std::max(splits, 0);
}

FamilyProblem tune_problem(const ShapeValues& shape, DType dtype, Device device) {
  const bool a_rows = shape["a_rows"] != 0, b_rows = shape["b_rows"] != 0, residual = shape["residual"] != 0;
  const std::int64_t m = shape["M"], n = shape["N"], k = shape["K"], batch = shape["batch"];
  require(m > 0 && n > 0 && k > 0 && batch > 0, "shape: M, N, K and batch must be positive");
  const bool gpu = device.is_cuda();
  const bool is_16bit = dtype == DType::f16 || dtype == DType::bf16;
  require(!gpu || is_16bit || (!a_rows && !b_rows), "shape: a_rows and b_rows have kernels for f16 and bf16 only");
  require(!gpu || !a_rows || b_rows, "shape: there are no kernels for a_rows without b_rows");
  require(dtype != DType::i8 || !residual, "shape: residual is 1; i8 takes no residual");
  const DType out = result_of(dtype);

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
    return Operands{stored(a_rows, m, k), stored(!b_rows, k, n), tensor(result, out), residual ? tensor(result, out) : Tensor()};
  };

  const Operands shapes = make([](Shape s, DType type) { return placeholder(std::move(s), type); });
  const Call call = make_call(shapes.a, shapes.b, shapes.d, {.residual = residual ? &shapes.residual : nullptr});
  require(has_choice(call, device), "shape: M is {}; there is no choice {}", m, gpu ? "for one row" : "up to 16 rows on the CPU");

  const auto prepare = [=](const Stream& stream, std::uint64_t seed) {
    const auto random = [&](Shape s, DType type) { return random_operand(std::move(s), type, seed, stream); };
    const auto operands = std::make_shared<const Operands>(make(random));
    const auto launch = [=](const TunePoint& point) {
      GemmOptions options{.stream = stream};
      if (residual) options.residual = &operands->residual;
      Call timed = make_call(operands->a, operands->b, operands->d, options);
      if (!gpu) {
        timed.config = cpu_config_of(point.values());
        return run_on_cpu(timed);
      }
      timed.tile = tile_of(point.values());
      timed.splits = point["splits"];
      run_on_gpu(timed);
    };
    return TuneOperands{launch, operands->d, bytes_of({&operands->a, &operands->b, &operands->d, &operands->residual})};
  };
  const int units = units_of(device);
  TuneSpace space = gpu ? gpu_space(call, units) : cpu_space();
  TunePoint standard = point_of(space, standard_values(call, device, units));
  const auto predict = [product = problem_of(call, units), skinny = call.is_skinny(), standard, gpu](const TunePoint& point) {
    const Config c = tile_of(point.values());
    if (!gpu) return predicted_time(product, cpu_cost(c), 1);
    if (skinny) return skinny_time(product, c);
    const double band = c.band == standard["band"] ? 1 : 1.03, time = predicted_time(product, costed(c), point["splits"]);
    return time * stages_cost(c, product.element_bytes) * band;
  };
  return {key_on(device, call), std::move(space), std::move(standard), predict, prepare};
}

}  // namespace tw::kernels::gemm
