#pragma once

#include "kernels/attention/backward.hpp"

namespace tw::kernels::attention {

/// On the CPU, what attention_backward() and attention_varlen_backward() do on a Hopper GPU up to 128 columns and without softcap: dQ is
/// added up. `call` is checked, and the CPU's.
void run_adding_up(BackwardCall& call);

}  // namespace tw::kernels::attention
