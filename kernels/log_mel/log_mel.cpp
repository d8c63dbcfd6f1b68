#include "tilewave/log_mel.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "kernels/check.hpp"
#include "kernels/log_mel/log_mel.tile.hpp"
#include "kernels/log_mel/variants.hpp"
#include "runtime/format.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using namespace kernels::log_mel;

constexpr const char* kOp = "log_mel";
constexpr int kMostBins = 1024;
constexpr std::int64_t kMostSamples = 1 << 30;  // of a window: positions stay ints beyond its end

// A step of radix 8 would not fit the registers of 1024 threads on an SM.
using Frames400 = Frames<Radices<4, 2, 5, 5>>;
using Frames512 = Frames<Radices<4, 4, 4, 4>>;

struct Call {
  Tensor samples, features, largest;
  const LogMelTables& tables;
  int hop;
};

template <class Kernel>
TileGrid grid_of(const Call& call) {
  return {.m = ceil_div(static_cast<int>(call.features.shape(1)), Kernel::frames), .batch = static_cast<int>(call.features.shape(0))};
}

void bind_frames(auto& bind, auto& p, const Call& call) {
  p.samples = call.samples.data<float>();
  p.sample_stride = call.samples.stride(0);
  p.sample_count = static_cast<int>(call.samples.shape(1));
  p.window = static_cast<int>(call.features.shape(1)) * call.hop;
  p.hop = call.hop;
  p.roots = call.tables.roots.data<float>();
  p.hann = call.tables.hann.data<float>();
  p.first = call.tables.first.data<std::int32_t>();
  p.weights = call.tables.weights.data<float>();
  p.taps = static_cast<int>(call.tables.weights.shape(0));
  p.bins = call.tables.mel_bins();
  bind(p.features, call.features);
  bind(p.largest, call.largest.reshape({call.largest.shape(0), call.largest.shape(1), 1}));
}

TileGrid scale_grid(const Call& call) {
  constexpr int columns = Scale::On<cpu::Target>::Values::cols;
  const std::int64_t of_window = call.features.shape(1) * call.features.shape(2);
  return {.m = static_cast<int>((of_window + columns - 1) / columns), .batch = static_cast<int>(call.features.shape(0))};
}

void bind_scale(auto& bind, auto& p, const Call& call) {
  const Tensor flat = call.features.reshape({call.features.shape(0), call.features.shape(1) * call.features.shape(2)});
  bind(p.largest, call.largest);
  bind(p.mel, flat);
  bind(p.features, flat);
}

template <class Kernel>
void run(const Call& call, const Stream& stream) {
  launch<Kernel>(stream, grid_of<Kernel>(call), [&](auto& bind, auto& p) { bind_frames(bind, p, call); });
  launch<Scale>(stream, scale_grid(call), [&](auto& bind, auto& p) { bind_scale(bind, p, call); });
}

void check_tables(const LogMelTables& tables, Device device) {
  check_operand(kOp, "tables.roots", tables.roots, DType::f32, device);
  check_operand(kOp, "tables.hann", tables.hann, DType::f32, device);
  check_operand(kOp, "tables.first", tables.first, DType::i32, device);
  check_operand(kOp, "tables.weights", tables.weights, DType::f32, device);
}

}  // namespace

bool supports_log_mel(int n_fft) { return n_fft == Frames400::n_fft || n_fft == Frames512::n_fft; }

LogMelTables LogMelTables::make(const Tensor& filters, const Stream& stream) {
  check_operand(kOp, "filters", filters, DType::f32, Device::cpu());
  require(filters.rank() == 2 && filters.is_contiguous() && filters.shape(0) >= 1 && filters.shape(0) <= kMostBins,
          "{}: filters is {}; it must be contiguous, [mel_bins, n_fft / 2 + 1] with 1 to {} bins", kOp, filters, kMostBins);
  const std::int64_t bins = filters.shape(0), powers = filters.shape(1), n_fft = 2 * (powers - 1);
  require(n_fft <= 1 << 20 && supports_log_mel(static_cast<int>(n_fft)), "{}: filters is {}, for an n_fft of {}; 400 and 512 are supported",
          kOp, filters, n_fft);
  std::vector<float> roots, hann;
  for (std::int64_t n = 0; n < n_fft; ++n) {
    const double angle = 2 * std::numbers::pi * static_cast<double>(n) / static_cast<double>(n_fft);
    roots.push_back(static_cast<float>(std::cos(angle)));
    roots.push_back(static_cast<float>(-std::sin(angle)));
    hann.push_back(static_cast<float>((1 - std::cos(angle)) / 2));
  }
  std::vector<std::int64_t> begins;
  std::int64_t taps = 1;
  const float* const values = filters.data<float>();
  for (std::int64_t bin = 0; bin < bins; ++bin) {
    std::int64_t begin = 0, end = powers;
    while (end > 0 && values[bin * powers + end - 1] == 0) --end;
    while (begin < end && values[bin * powers + begin] == 0) ++begin;
    begins.push_back(begin);
    taps = std::max(taps, end - begin);
  }
  std::vector<std::int32_t> first;
  std::vector<float> weights(static_cast<std::size_t>(taps * bins));
  for (std::int64_t bin = 0; bin < bins; ++bin) {
    const std::int64_t begin = std::min(begins[bin], powers - taps);  // all taps are bins that exist
    first.push_back(static_cast<std::int32_t>(begin));
    for (std::int64_t n = 0; n < taps; ++n) weights[n * bins + bin] = values[bin * powers + begin + n];
  }
  const Device device = stream.device();
  return {Tensor::from<float>(roots, {n_fft, 2}).to(device), Tensor::from<float>(hann, {n_fft}).to(device),
          Tensor::from<std::int32_t>(first, {bins}).to(device), Tensor::from<float>(weights, {taps, bins}).to(device)};
}

void log_mel(const Tensor& samples, const LogMelTables& tables, const Tensor& features, const LogMelOptions& options) {
  const Device device = features.device();
  check_operand(kOp, "samples", samples, DType::f32, device);
  check_operand(kOp, "features", features, DType::f32, device);
  check_tables(tables, device);
  const int n_fft = tables.n_fft(), hop = options.hop;
  require(hop >= 1 && hop <= n_fft, "{}: hop is {}; it must be from 1 to n_fft, {}", kOp, hop, n_fft);
  require(features.rank() == 3 && features.is_contiguous() && features.shape(2) == tables.mel_bins(),
          "{}: features is {}; it must be contiguous, [windows, frames, {}]", kOp, features, tables.mel_bins());
  const std::int64_t windows = features.shape(0), frames = features.shape(1), window = frames * hop;
  require(windows <= 65535 && frames <= kMostSamples && window <= kMostSamples,
          "{}: features is {}; windows are limited to 65535, frames * hop to {}", kOp, features, kMostSamples);
  require(frames == 0 || window > n_fft / 2, "{}: features is {}; its {} frames of {} samples must be longer than n_fft / 2, {}", kOp,
          features, frames, hop, n_fft / 2);
  require(
      samples.rank() == 2 && samples.shape(0) == windows && samples.shape(1) <= window && (samples.shape(1) <= 1 || samples.stride(1) == 1),
      "{}: samples is {}; it must be [{}, up to {}] with contiguous rows", kOp, samples, windows, window);
  check_disjoint(kOp, {"features", &features}, {{"samples", &samples}});
  const Stream stream = checked_stream(kOp, options.stream, device);
  if (features.numel() == 0) return;
  const Call call{samples, features, Tensor::empty({windows, frames}, DType::f32, stream), tables, hop};
  n_fft == Frames400::n_fft ? run<Frames400>(call, stream) : run<Frames512>(call, stream);
}

namespace kernels::log_mel {

namespace {

/// Filters that weigh `taps` neighbouring bins each.
LogMelTables tables_of(const ShapeValues& shape, int powers) {
  const int bins = shape.integer("mel_bins"), taps = shape.integer("taps");
  require(taps >= 1 && taps <= powers, "shape: taps is {}; it must be 1 to {}", taps, powers);
  const Tensor filters = Tensor::zeros({bins, powers}, DType::f32, Stream::standard(Device::cpu()));
  for (int bin = 0; bin < bins; ++bin)
    for (int n = 0; n < taps; ++n) filters.data<float>()[bin * powers + bin % (powers - taps + 1) + n] = 1;
  return LogMelTables::make(filters, Stream::standard(Device::cpu()));
}

template <class Kernel>
Analysis analyze_shape(const ShapeValues& shape) {
  const std::int64_t windows = shape["windows"], frames = shape["frames"], bins = shape["mel_bins"], hop = shape["hop"];
  require(hop >= 1 && hop <= Frames400::n_fft && frames * hop <= kMostSamples && windows <= 65535,
          "shape: windows is {}, frames {}, hop {}; windows are limited to 65535, hop to {}, frames * hop to {}", windows, frames, hop,
          Frames400::n_fft, kMostSamples);
  const LogMelTables tables = tables_of(shape, Frames400::half + 1);
  const Call call{placeholder({windows, frames * hop}, DType::f32), placeholder({windows, frames, bins}, DType::f32),
                  placeholder({windows, frames}, DType::f32), tables, static_cast<int>(hop)};
  if constexpr (is_same<Kernel, Scale>)
    return analyze<Kernel>(scale_grid(call), [&](auto& bind, auto& p) { bind_scale(bind, p, call); });
  else
    return analyze<Kernel>(grid_of<Kernel>(call), [&](auto& bind, auto& p) { bind_frames(bind, p, call); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  return {{make_spec(kernel_info<Frames400>, true, true, "log_mel_frames_400"), analyze_shape<Frames400>},
          {make_spec(kernel_info<Scale>, true, true, "log_mel_scale"), analyze_shape<Scale>}};
}

}  // namespace kernels::log_mel
}  // namespace tw
