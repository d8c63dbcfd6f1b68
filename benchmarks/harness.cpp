#include "benchmarks/harness.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>
#include <random>
#include <thread>

#include "benchmarks/commit.hpp"
#include "benchmarks/yardsticks.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::bench {
namespace {

// The card's power limit acts over tens of milliseconds; after this long a pause the next few launches run at the highest clock.
constexpr auto kCoolPause = std::chrono::milliseconds(40);
constexpr int kCoolBurst = 3;
constexpr int kGraphLaunches = 20;
// Rounds between waits. Without them the host would run ahead until the queue is full; with one per burst the device would idle in between.
constexpr int kRoundsInFlight = 4;

std::vector<const Family*>& families() {
  static std::vector<const Family*> list;
  return list;
}

double at_fraction(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

Timing summary(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {at_fraction(samples, 0.5), at_fraction(samples, 0.1), at_fraction(samples, 0.9)};
}

/// Two events around a burst.
struct Burst {
  Burst(Device device, int launches) : begin(device), end(device), launches(launches) {}
  Event begin, end;
  int launches;
  double milliseconds() const { return Event::milliseconds(begin, end) / launches; }
};

Burst run_burst(const Contender& contender, const Stream& stream, int launches) {
  Burst burst(stream.device(), launches);
  burst.begin.record(stream);
  for (int i = 0; i < launches; ++i) contender.launch();
  burst.end.record(stream);
  return burst;
}

/// Compiles, loads and warms up; then how many launches make a burst.
int burst_length(const Contender& contender, const Stream& stream, double burst_ms) {
  contender.launch();
  stream.synchronize();
  const double one = run_burst(contender, stream, 3).milliseconds();
  return std::clamp(static_cast<int>(std::ceil(burst_ms / std::max(one, 1e-4))), 1, 2000);
}

using Samples = std::vector<std::vector<double>>;

void warm_up(const std::vector<Contender>& contenders, const std::vector<int>& lengths, const Stream& stream, double milliseconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double, std::milli>(milliseconds);
  do {
    for (std::size_t i = 0; i < contenders.size(); ++i) run_burst(contenders[i], stream, lengths[i]);
    stream.synchronize();
  } while (Clock::now() < deadline);
}

Samples sample_hot(const std::vector<Contender>& contenders, const Stream& stream, const Effort& effort, std::mt19937& random) {
  std::vector<int> lengths;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    lengths.push_back(burst_length(contenders[i], stream, effort.burst_ms));
    order.push_back(i);
  }
  warm_up(contenders, lengths, stream, effort.warm_up_ms);
  Samples samples(contenders.size());
  std::vector<std::pair<std::size_t, Burst>> in_flight;
  for (int round = 0; round < effort.samples; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::pair<std::size_t, Burst>> next;
    for (const std::size_t i : order) next.emplace_back(i, run_burst(contenders[i], stream, lengths[i]));
    in_flight.insert(in_flight.end(), std::make_move_iterator(next.begin()), std::make_move_iterator(next.end()));
    // Waits only for the oldest round; younger ones are already enqueued after it.
    while (in_flight.size() > kRoundsInFlight * contenders.size()) {
      samples[in_flight.front().first].push_back(in_flight.front().second.milliseconds());
      in_flight.erase(in_flight.begin());
    }
  }
  for (const auto& [i, burst] : in_flight) samples[i].push_back(burst.milliseconds());
  return samples;
}

Samples sample_cool(const std::vector<Contender>& contenders, const Stream& stream, const Effort& effort, std::mt19937& random) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    contenders[i].launch();
    order.push_back(i);
  }
  stream.synchronize();
  Samples samples(contenders.size());
  for (int round = 0; round < effort.samples; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      stream.synchronize();
      std::this_thread::sleep_for(kCoolPause);
      contenders[i].launch();  // not timed: the host enqueues the burst after it, and the latency after the pause is not counted
      samples[i].push_back(run_burst(contenders[i], stream, kCoolBurst).milliseconds());
    }
  }
  return samples;
}

Samples sample_graph(const std::vector<Contender>& contenders, const Stream& stream, const Effort& effort, std::mt19937& random) {
  std::vector<Graph> graphs;
  std::vector<Contender> replays;
  graphs.reserve(contenders.size());
  for (const Contender& contender : contenders) {
    contender.launch();  // compiles and loads outside the capture
    stream.synchronize();
    graphs.push_back(Graph::capture(stream, [&contender] {
      for (int i = 0; i < kGraphLaunches; ++i) contender.launch();
    }));
    const Graph& graph = graphs.back();
    replays.push_back({contender.name, [&graph, &stream] { graph.replay(stream); }});
  }
  Samples samples = sample_hot(replays, stream, effort, random);
  for (auto& list : samples) {
    for (double& sample : list) sample /= kGraphLaunches;
  }
  stream.synchronize();
  return samples;
}

double rate(double work, double milliseconds) { return milliseconds > 0 ? work / (milliseconds * 1e-3) : 0; }

nlohmann::ordered_json or_null(double value) { return value > 0 ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr); }

/// Five digits are more than any of this is worth.
double rounded(double value) {
  if (!(value > 0) || !std::isfinite(value)) return 0;
  const double scale = std::pow(10.0, 4 - std::floor(std::log10(value)));
  return std::round(value * scale) / scale;
}

/// Milliseconds as the record's figure: a rate of its unit, or microseconds.
double figure(const Record& record, double milliseconds) {
  return record.unit == kMicroseconds ? milliseconds * 1e3 : rate(record.work, milliseconds);
}

/// Ours by the peer's. Of times there is none: their peer is the part of the limit that has nothing to do with the op.
double ratio(const Record& record) {
  const bool known = record.unit != kMicroseconds && record.ours.median > 0 && record.peer_time.median > 0;
  return known ? record.peer_time.median / record.ours.median : 0;
}

/// [p10, p90] of the figures, low to high.
nlohmann::ordered_json spread(const Record& record, const Timing& time) {
  if (!(time.median > 0)) return nullptr;
  const auto [low, high] = std::minmax({figure(record, time.p10), figure(record, time.p90)});
  return nlohmann::ordered_json::array({rounded(low), rounded(high)});
}

/// What one of the contenders reaches at best, as bytes per second.
double best_rate(double bytes, const std::vector<Contender>& contenders, const Stream& stream, const Effort& effort, Mode mode) {
  double best = 0;
  for (const Timing& time : measure(mode, contenders, stream, effort)) best = std::max(best, rate(bytes, time.median));
  return best;
}

}  // namespace

std::string_view name_of(Mode mode) {
  switch (mode) {
    case Mode::hot:
      return "hot";
    case Mode::cool:
      return "cool";
    case Mode::graph:
      return "graph";
    case Mode::one_thread:
      return "one-thread";
  }
  return "";
}

Effort Effort::standard(Mode mode) {
  if (mode == Mode::cool) return {.samples = 40, .burst_ms = 0, .warm_up_ms = 0};
  if (mode == Mode::one_thread) return {.samples = 25, .burst_ms = 50, .warm_up_ms = 500};
  return {};
}

Effort Effort::quick(Mode mode) {
  if (mode == Mode::cool) return {.samples = 9, .burst_ms = 0, .warm_up_ms = 0};
  if (mode == Mode::one_thread) return {.samples = 5, .burst_ms = 20, .warm_up_ms = 50};
  return {.samples = 11, .burst_ms = 2, .warm_up_ms = 100};
}

std::vector<Timing> measure(Mode mode, const std::vector<Contender>& contenders, const Stream& stream, const Effort& effort) {
  std::mt19937 random(std::random_device{}());
  Samples samples;
  switch (mode) {
    case Mode::hot:
    case Mode::one_thread:
      samples = sample_hot(contenders, stream, effort, random);
      break;
    case Mode::cool:
      samples = sample_cool(contenders, stream, effort, random);
      break;
    case Mode::graph:
      samples = sample_graph(contenders, stream, effort, random);
      break;
  }
  stream.synchronize();
  std::vector<Timing> result;
  for (auto& list : samples) result.push_back(summary(std::move(list)));
  return result;
}

// --- Run

Run::Run(Options options)
    : options_(std::move(options)), stream_(Stream::standard(options_.list ? Device::cpu() : options_.device)) {  // listing needs no device
  const DeviceReport report = find_devices();
  if (!report.cuda_driver.empty()) versions_["driver"] = report.cuda_driver;
  if (!report.nvrtc.empty()) versions_["nvrtc"] = report.nvrtc.substr(0, report.nvrtc.find(' '));
  versions_["tilewave"] = kVersion;
  versions_["compiler"] = kCompiler;
  char date[] = "2000-01-01T00:00:00Z";
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  date_ = date;
}

bool Run::wants(const std::string& family, const std::string& case_name, DType dtype) {
  const auto& cases = options_.cases;
  const auto& dtypes = options_.dtypes;
  if (!dtypes.empty() && std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) return false;
  const auto contained = [&](const std::string& part) { return case_name.find(part) != std::string::npos; };
  if (!cases.empty() && std::none_of(cases.begin(), cases.end(), contained)) return false;
  if (options_.list) listed_.push_back({family, case_name, dtype});
  return !options_.list;
}

void Run::print(const std::string& line) {
  tw::print(options_.table, "{}\n", line);
  ++lines_;
}

void Run::note(const std::string& text) const { tw::print(stderr, "tilewave bench: {}\n", text); }

double Run::copy_bandwidth() {
  if (copy_bandwidth_ > 0) return copy_bandwidth_;
  const bool cuda = stream_.device().is_cuda();
  const Mode mode = cuda ? Mode::hot : Mode::one_thread;
  const CopyYardstick copy(cuda ? 1e9 : 128e6, stream_);
  copy_bandwidth_ = best_rate(copy.bytes(), copy.contenders(), stream_, effort(mode), mode);
  return copy_bandwidth_;
}

double Run::read_bandwidth() {
  if (read_bandwidth_ > 0) return read_bandwidth_;
  const Mode mode = stream_.device().is_cuda() ? Mode::hot : Mode::one_thread;
  const OneThread one;
  const ReadYardstick read(1e9, stream_);
  read_bandwidth_ = best_rate(read.bytes(), {read.contender()}, stream_, effort(mode), mode);
  return read_bandwidth_;
}

void Run::add(const Record& r) {
  constexpr const char* kLine = "{:<11} {:<30} {:<5} {:<10} {:>9} {:>9} {:>9} {:>9}  {:<8} {:>6} {:>6}  {:<14} {}\n";
  if (!header_printed_) {
    tw::print(options_.table, fmt::runtime(kLine), "family", "case", "dtype", "mode", "us", "ours", "peer", "limit", "unit", "/peer",
              "/limit", "peer", "variant");
    header_printed_ = true;
  }
  const double ours = figure(r, r.ours.median);
  const double peer = figure(r, r.peer_time.median);
  const auto number = [](double value, const char* format) {
    return value > 0 ? tw::format(fmt::runtime(format), value) : std::string("-");
  };
  const std::string by = !r.peer_config.empty() ? r.peer_config : !r.peer.empty() ? r.peer : !r.bound.empty() ? "(" + r.bound + ")" : "-";
  tw::print(options_.table, fmt::runtime(kLine), r.family, r.case_name, tw::name_of(r.dtype), name_of(r.mode),
            number(r.ours.median * 1e3, "{:.1f}"), number(ours, "{:.1f}"), number(peer, "{:.1f}"), number(r.limit, "{:.1f}"), r.unit,
            number(ratio(r), "{:.3f}"), number(r.limit > 0 ? ours / r.limit : 0, "{:.3f}"), by, r.config);
  std::fflush(options_.table);
  records_.push_back(r);
}

nlohmann::ordered_json Run::json() const {
  const std::string device = device_info(options_.device).name;
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Record& r : records_) {
    const double ours = figure(r, r.ours.median);
    const double peer = figure(r, r.peer_time.median);
    nlohmann::ordered_json json;
    json["family"] = r.family;
    json["case"] = r.case_name;
    json["dtype"] = std::string(tw::name_of(r.dtype));
    json["mode"] = std::string(name_of(r.mode));
    json["unit"] = r.unit;
    json["ours"] = or_null(rounded(ours));
    json["peer"] = r.peer.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(r.peer);
    json["peer_value"] = or_null(rounded(peer));
    json["limit"] = or_null(rounded(r.limit));
    json["ratio"] = or_null(std::round(ratio(r) * 1e4) / 1e4);
    json["spread"] = {{"ours", spread(r, r.ours)}, {"peer", spread(r, r.peer_time)}};
    json["time_us"] = or_null(rounded(r.ours.median * 1e3));
    if (!r.bound.empty()) json["bound"] = r.bound;
    if (!r.group.empty()) json["group"] = r.group;
    if (!r.config.empty()) json["variant"] = r.config;
    if (!r.peer_config.empty()) json["peer_variant"] = r.peer_config;
    json["commit"] = options_.commit.empty() ? kCommit : options_.commit;
    json["date"] = date_;
    json["versions"] = versions_;
    json["device"] = device;
    list.push_back(std::move(json));
  }
  return list;
}

// --- Family

Family::Family(std::string name, std::string what, std::function<void(Run&)> run, std::function<void(Run&)> ladder)
    : name_(std::move(name)), what_(std::move(what)), run_(std::move(run)), ladder_(std::move(ladder)) {
  families().push_back(this);
}

const std::vector<const Family*>& Family::all() { return families(); }

const Family* Family::find(const std::string& name) {
  const auto found = std::find_if(families().begin(), families().end(), [&](const Family* family) { return family->name() == name; });
  return found == families().end() ? nullptr : *found;
}

// --- Inputs and limits

namespace {

/// At least `count` normal numbers on the CPU, kept for the next tensor of that dtype and seed.
const Tensor& normal_numbers(std::int64_t count, DType dtype, std::uint64_t seed) {
  static std::map<std::pair<DType, std::uint64_t>, Tensor> known;
  Tensor& numbers = known[{dtype, seed}];
  if (numbers.numel() >= count) return numbers;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return numbers = Tensor::from<float>(values, {count}).to(dtype);
}

}  // namespace

Tensor random_normal(Shape shape, DType dtype, Device device, std::uint64_t seed) {
  constexpr std::int64_t kPeriod = 4194301;  // prime: no two rows of a matrix are alike
  Tensor result = Tensor::empty(std::move(shape), dtype, Stream::standard(device));
  const std::int64_t numel = result.numel();
  if (numel == 0) return result;
  const std::int64_t period = std::min(kPeriod, numel);
  const Tensor flat = result.reshape({numel});
  flat.slice(0, 0, period).copy_from(normal_numbers(period, dtype, seed).slice(0, 0, period));
  // Repeated on the device, twice as many each time.
  for (std::int64_t filled = period; filled < numel;) {
    const std::int64_t more = std::min(filled, numel - filled);
    flat.slice(0, filled, filled + more).copy_from(flat.slice(0, 0, more));
    filled += more;
  }
  return result;
}

std::optional<GpuLimits> gpu_limits(const std::string& device_name) {
  struct Entry {
    const char* name;
    GpuLimits limits;
  };
  // NVIDIA's data sheets. The SXM parts share one chip and boost clock and differ in memory.
  static constexpr Entry kTable[] = {
      {"GH200", {989, 495, 4.0e12}},
      {"H200", {989, 495, 4.8e12}},
      {"H100 PCIe", {756, 378, 2.0e12}},
      {"H100 80GB HBM3", {989, 495, 3.35e12}},
  };
  for (const Entry& entry : kTable) {
    if (device_name.find(entry.name) != std::string::npos) return entry.limits;
  }
  return {};
}

}  // namespace tw::bench
