// `tilewave bench gemm`: against cuBLASLt on a GPU, against OpenBLAS with one thread on the CPU.

#include <algorithm>
#include <cmath>
#include <random>

#include "benchmarks/harness.hpp"
#include "benchmarks/peers/cublaslt.hpp"
#include "benchmarks/peers/openblas.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/gemm.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::bench;

enum class Stored { nt, nn, tn };

struct Case {
  Stored layout;
  std::int64_t m, n, k;
  DType dtype;
  std::vector<Mode> modes;

  std::string name() const {
    const char* prefix = layout == Stored::nt ? "nt" : layout == Stored::nn ? "nn" : "tn";
    return m == n && n == k ? tw::format("{}-{}", prefix, m) : tw::format("{}-{}x{}x{}", prefix, m, n, k);
  }
  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
  double bytes() const { return static_cast<double>(m * k + k * n + m * n) * static_cast<double>(size_of(dtype)); }
};

struct Matrices {
  Tensor a, b;  ///< [M, K] and [K, N], views where the layout is transposed

  Matrices(const Case& c, Device device)
      : a(c.layout == Stored::tn ? random_normal({c.k, c.m}, c.dtype, device, 1).transpose(0, 1)
                                 : random_normal({c.m, c.k}, c.dtype, device, 1)),
        b(c.layout == Stored::nt ? random_normal({c.n, c.k}, c.dtype, device, 2).transpose(0, 1)
                                 : random_normal({c.k, c.n}, c.dtype, device, 2)) {}
};

/// Figures of products that disagree would compare different work. Looks at a few rows; the tests look at all of it.
void require_alike(const Tensor& ours, const Tensor& peer, const std::string& case_name) {
  std::mt19937_64 random(std::random_device{}());
  double difference = 0;
  double norm = 0;
  for (int i = 0; i < 8; ++i) {
    const auto row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(ours.shape(0)));
    const Tensor x = ours.slice(0, row, row + 1).to(Device::cpu()).to(DType::f32);
    const Tensor y = peer.slice(0, row, row + 1).to(Device::cpu()).to(DType::f32);
    for (std::int64_t col = 0; col < x.numel(); ++col) {
      const double p = x.data<float>()[col];
      const double q = y.data<float>()[col];
      difference += (p - q) * (p - q);
      norm += q * q;
    }
  }
  const double relative = std::sqrt(difference / norm);
  if (!(relative < 1e-2))
    throw Error(tw::format("bench gemm {}: our result and the peer's differ by {:.2g} (relative, allowed: 0.01)", case_name, relative));
}

std::string describe(const Config& c) {
  return tw::format("{}x{} stages {} cluster {}{}", c.bm, c.bn, c.stages, c.cluster, c.teams > 1 ? " teams" : "");
}

// --- GPU

std::vector<Case> gpu_cases() {
  const std::vector<Mode> both = {Mode::hot, Mode::cool};
  std::vector<Case> cases;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t size : {2048, 4096, 8192, 16384}) cases.push_back({Stored::nt, size, size, size, dtype, both});
  }
  for (const Stored layout : {Stored::nn, Stored::tn}) {
    for (const std::int64_t size : {4096, 8192}) cases.push_back({layout, size, size, size, DType::bf16, both});
  }
  // The projections of a Whisper-size encoder over 30 s of audio. Matrices and result stay in the L2 cache from one launch to the next.
  cases.push_back({Stored::nt, 1500, 5120, 1280, DType::bf16, {Mode::graph}});
  cases.push_back({Stored::nt, 1500, 1280, 5120, DType::bf16, {Mode::graph}});
  cases.push_back({Stored::nt, 1500, 3840, 1280, DType::bf16, {Mode::graph}});
  for (const auto& [n, k] : {std::pair{5120, 1280}, {1280, 5120}, {3840, 1280}})  // of eight windows
    cases.push_back({Stored::nt, 12000, n, k, DType::bf16, {Mode::hot, Mode::cool}});
  cases.push_back({Stored::nt, 4096, 4096, 4096, DType::f32, both});
  return cases;
}

/// TFLOP/s that the tensor cores or the memory allow, whichever is less; 0 for a GPU that is not in the table.
double gpu_limit(const Case& c, const std::optional<GpuLimits>& limits) {
  if (!limits) return 0;
  const double compute = c.flops() / ((c.dtype == DType::f32 ? limits->tf32_tflops : limits->bf16_tflops) * 1e12);
  return c.flops() / std::max(compute, c.bytes() / limits->bytes_per_second) * 1e-12;
}

/// The index of the fastest, measured as the comparison itself is.
int fastest(const std::vector<Contender>& contenders, Mode mode, const Stream& stream) {
  const std::vector<Timing> times = measure(mode, contenders, stream, {.samples = 9, .burst_ms = 1, .warm_up_ms = 20});
  const auto least = std::min_element(times.begin(), times.end(), [](const Timing& x, const Timing& y) { return x.median < y.median; });
  return static_cast<int>(least - times.begin());
}
/// The fastest of the heuristic's proposals.
int fastest(const CublasLtProduct& product, Mode mode, const Stream& stream) {
  std::vector<Contender> contenders;
  for (int i = 0; i < product.algorithms(); ++i) contenders.push_back({std::to_string(i), [&product, i] { product.launch(i); }});
  return fastest(contenders, mode, stream);
}

/// Adds every configuration that this case can run with to the contenders; gives their indices.
std::vector<int> add_configs(std::vector<Contender>& contenders, const std::vector<Config>& known, const Case& c, const Matrices& x,
                             const Tensor& d, const Stream& stream) {
  std::vector<int> added;
  for (int i = 0; i < static_cast<int>(known.size()); ++i) {
    const auto launch = [&x, &d, &stream, i] { tw::gemm(x.a, x.b, d, {.stream = stream, .config = i}); };
    try {
      launch();
    } catch (const InvalidArgument& error) {
      tw::print(stderr, "tilewave bench: {} config {}: {}\n", c.name(), i, error.what());
      continue;
    }
    contenders.push_back({describe(known[static_cast<std::size_t>(i)]), launch});
    added.push_back(i);
  }
  return added;
}

/// fp8 with block scales: without a peer here (benchmarks/gemm_peer.py has one), and with --all-configs every tile.
void run_block_scaled(Run& run, std::int64_t m, std::int64_t n, std::int64_t k) {
  const std::string name = m == n && n == k ? tw::format("fp8-block-scales-{}", m) : tw::format("fp8-block-scales-{}x{}x{}", m, n, k);
  if (!run.wants("gemm", name, DType::fp8_e4m3)) return;
  const Stream& stream = run.stream();
  const Device device = stream.device();
  const auto codes = [&](std::int64_t rows, std::uint64_t seed) {
    return random_normal({rows, k}, DType::f32, Device::cpu(), seed).to(DType::fp8_e4m3).to(device);
  };
  const Tensor a = codes(m, 1), b = codes(n, 2).transpose(0, 1), d = Tensor::poisoned({m, n}, DType::bf16, stream);
  const Tensor a_scale = random_normal({k / 128, m}, DType::f32, device, 3).transpose(0, 1);
  const Tensor b_scale = random_normal({n / 128, k / 128}, DType::f32, device, 4).transpose(0, 1);
  const auto launch = [&](int config) {
    tw::gemm(a, b, d, {.a_scale = &a_scale, .b_scale = &b_scale, .stream = stream, .config = config});
  };
  std::vector<Contender> contenders = {{"tilewave", [&] { launch(run.options().config); }}};
  const int tiles = run.options().all_configs && generic_shared_bytes(stream) == 0 ? static_cast<int>(kBlockScaledTiles.size()) : 0;
  for (int i = 0; i < tiles; ++i) contenders.push_back({describe(kBlockScaledTiles[static_cast<std::size_t>(i)]), [&, i] { launch(i); }});
  for (const Contender& c : contenders) c.launch();
  stream.synchronize();
  const double tflop = 2e-12 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  for (const Mode mode : tflop < 0.03 ? std::vector{Mode::graph} : std::vector{Mode::hot, Mode::cool}) {
    const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
    Record record;
    record.family = "gemm";
    record.case_name = name;
    record.dtype = DType::fp8_e4m3;
    record.mode = mode;
    record.unit = "TFLOP/s";
    record.work = tflop;
    record.ours = times[0];
    run.add(record);
    for (std::size_t i = 1; i < contenders.size(); ++i)
      tw::print(run.options().table, "  {:<24} {:<32} {:8.1f} us {:8.1f} TFLOP/s\n", name, contenders[i].name, times[i].median * 1e3,
                tflop / (times[i].median * 1e-3));
  }
}

void run_gpu_case(Run& run, const Case& c, const CublasLt* cublaslt) {
  const Stream& stream = run.stream();
  const DeviceInfo& gpu = device_info(run.options().device);
  const Matrices x(c, run.options().device);
  const Tensor d = Tensor::poisoned({c.m, c.n}, c.dtype, stream);
  const int forced = run.options().config;
  const Problem problem{.m = c.m,
                        .n = c.n,
                        .k = c.k,
                        .batch = 1,
                        .element_bytes = static_cast<int>(size_of(c.dtype)),
                        .addends = false,
                        .b_rows = x.b.stride(1) == 1,
                        .units = gpu.units,
                        .generic_shared = generic_shared_bytes(stream)};
  const std::vector<Config> known = configs(problem.generic_shared);
  const int chosen = forced >= 0 ? forced : choose_config(problem);

  std::vector<Contender> contenders = {{"tilewave", [&] { tw::gemm(x.a, x.b, d, {.stream = stream, .config = forced}); }}};
  contenders[0].launch();
  std::vector<int> tried;
  if (run.options().all_configs) tried = add_configs(contenders, known, c, x, d, stream);
  stream.synchronize();

  std::unique_ptr<CublasLtProduct> product;
  Tensor peer_d;
  if (cublaslt != nullptr) {
    peer_d = Tensor::poisoned({c.m, c.n}, c.dtype, stream);
    product = cublaslt->prepare(x.a, x.b, peer_d, stream);
  }
  for (const Mode mode : c.modes) {
    std::vector<Contender> all = contenders;
    if (product) {
      const int best = fastest(*product, mode == Mode::graph ? Mode::graph : Mode::hot, stream);
      all.push_back({"cublasLt", [&product, best] { product->launch(best); }});
    }
    const std::vector<Timing> times = measure(mode, all, stream, run.effort(mode));
    if (product) require_alike(d, peer_d, c.name());
    Record record;
    record.family = "gemm";
    record.case_name = c.name();
    record.dtype = c.dtype;
    record.mode = mode;
    record.unit = "TFLOP/s";
    record.work = c.flops() * 1e-12;
    record.ours = times.front();
    record.config = describe(known[static_cast<std::size_t>(chosen)]);
    if (product) {
      record.peer = "cublasLt";
      record.peer_time = times.back();
    }
    record.limit = gpu_limit(c, gpu_limits(gpu.name));
    run.add(record);
    for (std::size_t i = 0; i < tried.size(); ++i) {
      const double rate = record.work / (times[i + 1].median * 1e-3);
      tw::print(run.options().table, "  config {} {:<28} {:9.1f} TFLOP/s{}{}\n", tried[i], contenders[i + 1].name, rate,
                product ? tw::format("  {:.3f} of the peer", times.back().median / times[i + 1].median) : "",
                tried[i] == chosen ? "  (the heuristic's)" : "");
    }
  }
}

/// A product whose tiles of 128 x 256 fill 132 SMs once and then leave half of them or more idle. Compares what gemm() chooses with the
/// fastest of all tiles, and of K in splits, without shares of K. Adds the speed-up to `ratios`.
void run_shares_case(Run& run, std::int64_t m, std::int64_t n, std::int64_t k, std::vector<double>& ratios) {
  const std::string name = tw::format("shares-{}x{}x{}", m, n, k);
  const Case c{Stored::nt, m, n, k, DType::bf16, {}};
  if (!run.wants("gemm", name, c.dtype)) return;
  const Stream& stream = run.stream();
  const Matrices x(c, run.options().device);
  const Tensor d = Tensor::poisoned({m, n}, c.dtype, stream);
  const auto contender = [&](std::string what, int config, int splits) {
    return Contender{std::move(what),
                     [&x, &d, &stream, config, splits] { tw::gemm(x.a, x.b, d, {.stream = stream, .config = config, .splits = splits}); }};
  };
  const Problem problem{.m = m,
                        .n = n,
                        .k = k,
                        .batch = 1,
                        .element_bytes = 2,
                        .addends = false,
                        .b_rows = false,
                        .units = device_info(run.options().device).units,
                        .generic_shared = generic_shared_bytes(stream)};
  const std::vector<Config> known = configs(problem.generic_shared);
  std::vector<Contender> without, shared;
  for (int i = 0; i < static_cast<int>(known.size()); ++i) {
    const Config& tile = known[static_cast<std::size_t>(i)];
    if (valid(tile, problem)) without.push_back(contender(describe(tile), i, 1));
    if (valid_stream_k(tile, problem)) shared.push_back(contender(tw::format("{} in shares", describe(tile)), i, kStreamK));
  }
  for (const int splits : {2, 3, 4}) without.push_back(contender(tw::format("{} splits", splits), -1, splits));
  for (const std::vector<Contender>* all : {&without, &shared})
    for (const Contender& one : *all) one.launch();
  stream.synchronize();
  const Mode mode = c.flops() < 6e10 ? Mode::graph : Mode::hot;
  const Contender peer = without[static_cast<std::size_t>(fastest(without, mode, stream))];
  std::vector<Contender> all = {contender("tilewave", -1, 0), peer};
  if (run.options().all_configs) all.insert(all.end(), shared.begin(), shared.end());
  const std::vector<Timing> times = measure(mode, all, stream, run.effort(mode));
  const Choice chosen = choose(problem, true);
  Record record;
  record.family = "gemm";
  record.group = "rounds of tiles that leave SMs idle";
  record.case_name = name;
  record.dtype = c.dtype;
  record.mode = mode;
  record.unit = "TFLOP/s";
  record.work = c.flops() * 1e-12;
  record.ours = times[0];
  record.config = describe(chosen.tile) + (chosen.splits == kStreamK ? " in shares" : "");
  record.peer = "best without shares";
  record.peer_time = times[1];
  record.peer_config = peer.name;
  record.limit = gpu_limit(c, gpu_limits(device_info(run.options().device).name));
  run.add(record);
  ratios.push_back(times[1].median / times[0].median);
  for (std::size_t i = 2; i < all.size(); ++i)
    tw::print(run.options().table, "  {:<40} {:9.1f} TFLOP/s  {:.3f} of the best without\n", all[i].name,
              record.work / (times[i].median * 1e-3), times[1].median / times[i].median);
}

void run_shares(Run& run) {
  constexpr std::pair<std::int64_t, std::int64_t> kTiles[] = {{10, 14}, {12, 12}, {9, 16},  {9, 17}, {16, 10},
                                                              {13, 13}, {11, 16}, {12, 15}, {24, 8}, {14, 14}};
  std::vector<double> ratios;
  for (const auto& [rows, cols] : kTiles)
    for (const std::int64_t k : {2048, 4096, 8192}) run_shares_case(run, 128 * rows, 256 * cols, k, ratios);
  if (ratios.empty()) return;
  double logarithms = 0;
  for (const double ratio : ratios) logarithms += std::log(ratio);
  run.print(tw::format("  gemm: {} products with idle SMs: {:.3f} times the best without shares of K (geometric mean), {:.3f} at least",
                       ratios.size(), std::exp(logarithms / static_cast<double>(ratios.size())),
                       *std::min_element(ratios.begin(), ratios.end())));
}

/// fp8 numbers from N(0, 1).
Tensor random_fp8(const Shape& shape, Device device, std::uint64_t seed) {
  return random_normal(shape, DType::f32, Device::cpu(), seed).to(DType::fp8_e4m3).to(device);
}

/// fp8 operands stored [M, K] and [N, K] into bf16, held against cuBLASLt's product with one scale for
/// each and sums in the tensor cores.
void run_fp8_case(Run& run, std::int64_t size, const CublasLt* cublaslt) {
  const std::string name = tw::format("fp8-{}", size);
  if (!run.wants("gemm", name, DType::fp8_e4m3)) return;
  const Stream& stream = run.stream();
  const Device device = run.options().device;
  const Tensor a = random_fp8({size, size}, device, 1), b = random_fp8({size, size}, device, 2).transpose(0, 1);
  const Tensor d = Tensor::poisoned({size, size}, DType::bf16, stream), peer_d = Tensor::poisoned({size, size}, DType::bf16, stream);
  const std::vector<float> numbers{1};
  const Tensor one = Tensor::from(std::span<const float>(numbers), {1}).to(device);
  const GemmOptions options{.a_scale = &one, .b_scale = &one, .stream = stream, .config = run.options().config};
  std::vector<Contender> contenders = {{"tilewave", [&] { tw::gemm(a, b, d, options); }}};
  contenders[0].launch();
  stream.synchronize();
  std::unique_ptr<CublasLtProduct> product;
  if (cublaslt != nullptr) {
    product = cublaslt->prepare(a, b, peer_d, stream);
    const int best = fastest(*product, Mode::hot, stream);
    contenders.push_back({"cublasLt", [&product, best] { product->launch(best); }});
  }
  for (const Mode mode : {Mode::hot, Mode::cool}) {
    const std::vector<Timing> times = measure(mode, contenders, stream, run.effort(mode));
    if (product) require_alike(d, peer_d, name);
    Record record;
    record.family = "gemm";
    record.case_name = name;
    record.dtype = DType::fp8_e4m3;
    record.mode = mode;
    record.unit = "TFLOP/s";
    record.work = 2e-12 * static_cast<double>(size) * static_cast<double>(size) * static_cast<double>(size);
    record.ours = times.front();
    if (product) {
      record.peer = "cublasLt";
      record.peer_time = times.back();
    }
    if (const auto limits = gpu_limits(device_info(device).name)) record.limit = 2 * limits->bf16_tflops;
    run.add(record);
  }
}

/// A few rows against weights stored [N, K]: the time is that of reading the weights, which are so many copies that no cache holds them.
void run_few_rows_case(Run& run, std::int64_t m, std::int64_t n, std::int64_t k, const CublasLt* cublaslt) {
  const std::string name = tw::format("few-rows-{}x{}x{}", m, n, k);
  const DType dtype = DType::bf16;
  if (!run.wants("gemm", name, dtype)) return;
  const Stream& stream = run.stream();
  const Device device = run.options().device;
  const double bytes = static_cast<double>(n * k) * static_cast<double>(size_of(dtype));
  const auto copies = static_cast<std::size_t>(std::max(2.0, std::ceil(512e6 / bytes)));
  const Tensor a = random_normal({m, k}, dtype, device, 1);
  std::vector<Tensor> weights;
  for (std::size_t i = 0; i < copies; ++i) weights.push_back(random_normal({n, k}, dtype, device, 2).transpose(0, 1));
  const Tensor d = Tensor::poisoned({m, n}, dtype, stream), peer_d = Tensor::poisoned({m, n}, dtype, stream);
  std::size_t next = 0, peer_next = 0;
  std::vector<Contender> contenders = {
      {"tilewave", [&] { tw::gemm(a, weights[next++ % copies], d, {.stream = stream, .config = run.options().config}); }}};
  contenders[0].launch();
  stream.synchronize();
  std::vector<std::unique_ptr<CublasLtProduct>> products;
  if (cublaslt != nullptr) {
    for (const Tensor& w : weights) products.push_back(cublaslt->prepare(a, w, peer_d, stream));
    const int best = fastest(*products[0], Mode::graph, stream);
    contenders.push_back({"cublasLt", [&products, &peer_next, best] { products[peer_next++ % products.size()]->launch(best); }});
  }
  const std::vector<Timing> times = measure(Mode::graph, contenders, stream, run.effort(Mode::graph));
  if (!products.empty()) require_alike(d, peer_d, name);
  Record record;
  record.family = "gemm";
  record.case_name = name;
  record.dtype = dtype;
  record.mode = Mode::graph;
  record.unit = "GB/s";
  record.work = bytes * 1e-9;
  record.ours = times.front();
  if (!products.empty()) {
    record.peer = "cublasLt";
    record.peer_time = times.back();
  }
  record.limit = run.read_bandwidth() * 1e-9;
  run.add(record);
}

void run_on_gpu(Run& run) {
  std::string problem;
  std::shared_ptr<const CublasLt> cublaslt;
  if (!run.options().list) {
    cublaslt = CublasLt::find(problem);
    if (cublaslt) run.set_version("cublasLt", cublaslt->version());
    if (!cublaslt) run.note("no peer: " + problem);
  }
  for (const Case& c : gpu_cases()) {
    if (run.wants("gemm", c.name(), c.dtype)) run_gpu_case(run, c, cublaslt.get());
  }
  run_shares(run);
  run_fp8_case(run, 8192, cublaslt.get());
  for (const std::int64_t m : {1, 4, 8, 16}) {
    run_few_rows_case(run, m, 6144, 2048, cublaslt.get());
    run_few_rows_case(run, m, 2048, 6144, cublaslt.get());
    run_few_rows_case(run, m, 59264, 2048, cublaslt.get());
  }
  run_block_scaled(run, 8192, 8192, 8192);
  run_block_scaled(run, 4096, 4096, 7168);
  run_block_scaled(run, 64, 7168, 2048);
}

// --- CPU

std::vector<Case> cpu_cases() {
  std::vector<Case> cases;
  for (const Stored layout : {Stored::nn, Stored::nt}) {
    for (const std::int64_t size : {1024, 2048}) cases.push_back({layout, size, size, size, DType::f32, {Mode::one_thread}});
  }
  for (const DType dtype : {DType::bf16, DType::i8}) cases.push_back({Stored::nt, 2048, 2048, 2048, dtype, {Mode::one_thread}});
  return cases;
}

/// bf16 and int8, whose instructions a CPU may have, against our own f32.
void run_narrow_cpu_case(Run& run, const Case& c) {
  const auto operand = [&](std::uint64_t seed, DType dtype) {
    const Tensor wide = random_normal({c.m, c.k}, DType::f32, Device::cpu(), seed);
    if (dtype == DType::i8) {
      for (std::int64_t i = 0; i < wide.numel(); ++i) wide.data<float>()[i] *= 40;
    }
    return dtype == DType::f32 ? wide : wide.to(dtype);
  };
  const Tensor a = operand(1, c.dtype), b = operand(2, c.dtype).transpose(0, 1), a32 = operand(1, DType::f32);
  const Tensor b32 = operand(2, DType::f32).transpose(0, 1), d32 = Tensor::poisoned({c.m, c.n}, DType::f32);
  const Tensor d = Tensor::poisoned({c.m, c.n}, c.dtype == DType::i8 ? DType::i32 : c.dtype);
  const std::vector<Timing> times =
      measure(Mode::one_thread, {{"tilewave", [&] { tw::gemm(a, b, d); }}, {"tilewave f32", [&] { tw::gemm(a32, b32, d32); }}},
              run.stream(), run.effort(Mode::one_thread));
  Record record;
  record.family = "gemm";
  record.case_name = c.name();
  record.dtype = c.dtype;
  record.mode = Mode::one_thread;
  record.unit = "GFLOP/s";
  record.work = c.flops() * 1e-9;
  record.ours = times.front();
  record.config = device_info(Device::cpu()).isa;
  record.peer = "tilewave f32";
  record.peer_time = times.back();
  run.add(record);
}

void run_cpu_case(Run& run, const Case& c, const OpenBlas* openblas, double limit) {
  const Matrices x(c, Device::cpu());
  const Tensor d = Tensor::poisoned({c.m, c.n}, c.dtype);
  const Tensor peer_d = Tensor::poisoned({c.m, c.n}, c.dtype);
  std::vector<Contender> contenders = {{"tilewave", [&] { tw::gemm(x.a, x.b, d); }}};
  if (openblas != nullptr) contenders.push_back({"openblas", [&] { openblas->sgemm(x.a, x.b, peer_d); }});
  const std::vector<Timing> times = measure(Mode::one_thread, contenders, run.stream(), run.effort(Mode::one_thread));
  Record record;
  record.family = "gemm";
  record.case_name = c.name();
  record.dtype = c.dtype;
  record.mode = Mode::one_thread;
  record.unit = "GFLOP/s";
  record.work = c.flops() * 1e-9;
  record.ours = times.front();
  record.config = device_info(Device::cpu()).isa;
  if (openblas != nullptr) {
    require_alike(d, peer_d, c.name());
    record.peer = "openblas";
    record.peer_time = times.back();
  }
  record.limit = limit;
  run.add(record);
}

void run_on_cpu(Run& run) {
  std::vector<Case> wanted;
  for (const Case& c : cpu_cases()) {
    if (run.wants("gemm", c.name(), c.dtype)) wanted.push_back(c);
  }
  if (wanted.empty()) return;
  OpenBlas openblas;
  std::string problem;
  const bool found = openblas.open(problem);
  if (found) run.set_version("openblas", openblas.version());
  if (!found) run.note("no peer: " + problem);
  const double limit = measure_fma_peak();
  const int threads = cpu_threads();
  set_cpu_threads(1);
  for (const Case& c : wanted) {
    if (c.dtype == DType::f32)
      run_cpu_case(run, c, found ? &openblas : nullptr, limit);
    else
      run_narrow_cpu_case(run, c);
  }
  set_cpu_threads(threads);
}

const Family family{"gemm", "matrix products: cuBLASLt on a GPU; on the CPU OpenBLAS, one thread each",
                    [](Run& run) { run.options().device.is_cuda() ? run_on_gpu(run) : run_on_cpu(run); }};

}  // namespace
}  // namespace tw::kernels::gemm
