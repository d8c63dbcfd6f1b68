#include "kernels/tuner.hpp"

#include <algorithm>
#include <limits>

#include "runtime/format.hpp"

namespace tw {

Tensor random_operand(Shape shape, DType dtype, std::uint64_t seed, const Stream& stream) {
  const bool plain = dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
  return plain ? Tensor::random(std::move(shape), dtype, seed, stream)
               : Tensor::random(std::move(shape), DType::f32, seed).to(dtype).to(stream.device());
}

std::vector<Prospect> prospects(const TuneProblem& problem, const DeviceModel& device) {
  constexpr double most = 2;  // measured times are within that of their rooflines, where the roofline tells candidates apart at all
  std::vector<Prospect> result;
  double best = std::numeric_limits<double>::infinity();
  for (const TuneCandidate& candidate : problem.candidates) {
    Prospect prospect{roofline(candidate.analysis, device).seconds, ""};
    if (device.shared_per_block > 0 && candidate.shared_bytes > device.shared_per_block)
      prospect.dropped = tw::format("needs {} bytes of shared memory, a block has {}", candidate.shared_bytes, device.shared_per_block);
    else
      best = std::min(best, prospect.seconds);
    result.push_back(std::move(prospect));
  }
  for (Prospect& prospect : result) {
    if (prospect.dropped.empty() && prospect.seconds > most * best)
      prospect.dropped = tw::format("at best {:.1f} times the best one's least time", prospect.seconds / best);
  }
  return result;
}

}  // namespace tw
