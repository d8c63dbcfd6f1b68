#include "kernels/attention/run.hpp"

namespace tw::kernels::attention {

void run_gpu_bf16(const detail::AttentionCall& call) { run_gpu<bf16>(call); }

}  // namespace tw::kernels::attention
