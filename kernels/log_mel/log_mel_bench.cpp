// `tilewave bench log_mel`: windows of 30 s, against an empty kernel and the time of their bytes.

#include <vector>

#include "benchmarks/memory_bound.hpp"
#include "runtime/format.hpp"
#include "tilewave/log_mel.hpp"

namespace tw::kernels::log_mel {
namespace {

using namespace tw::bench;

constexpr int kFrames = 3000, kBins = 128, kPowers = 201, kHop = 160;

/// Filters of GLM-ASR's width: 1 to 10 weights, more for higher bins.
Tensor filters() {
  const Tensor all = Tensor::zeros({kBins, kPowers}, DType::f32, Stream::standard(Device::cpu()));
  for (int bin = 0; bin < kBins; ++bin) {
    const int taps = 1 + bin * 10 / kBins, first = bin * (kPowers - 10) / kBins;
    for (int n = 0; n < taps; ++n) all.data<float>()[bin * kPowers + first + n] = 0.02f;
  }
  return all;
}

const Family family{"log_mel", "log-mel of windows of 30 s", [](Run& run) {
                      for (const std::int64_t windows : {1, 8}) {
                        const std::string name = tw::format("log_mel-{}x3000x128", windows);
                        if (!run.wants("log_mel", name, DType::f32)) continue;
                        const Stream stream = run.stream();
                        const LogMelTables tables = LogMelTables::make(filters(), stream);
                        const Tensor x = random_normal({windows, kFrames * kHop}, DType::f32, stream.device(), 1);
                        const Tensor y = Tensor::poisoned({windows, kFrames, kBins}, DType::f32, stream);
                        // The features are written, read to be scaled, and written again.
                        run_small(run, {.family = "log_mel",
                                        .case_name = name,
                                        .dtype = DType::f32,
                                        .bytes = bytes_of({x, y, y, y}),
                                        .launch = [=] { tw::log_mel(x, tables, y, {.hop = kHop, .stream = stream}); },
                                        .variant = {}});
                      }
                    }};

}  // namespace
}  // namespace tw::kernels::log_mel
