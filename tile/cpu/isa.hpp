#pragma once

#include "tilewave/tile/cpu/library.tile.hpp"

// What library() chooses from, apart for the tests.

namespace tw::cpu {

const Library* baseline_library();
const Library* avx2_library();    ///< null when not compiled in; to be called only where has_avx2()
const Library* avx512_library();  ///< null when not compiled in; to be called only where has_avx512()

/// Whether this processor, under this operating system, runs the set (every extension that its source file is compiled with).
bool has_avx2();
bool has_avx512();

}  // namespace tw::cpu
