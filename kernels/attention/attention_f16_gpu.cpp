#include "kernels/attention/run.hpp"

namespace tw::kernels::attention {

void run_gpu_f16(const detail::AttentionCall& call) { run_gpu<f16>(call); }

}  // namespace tw::kernels::attention
