#pragma once

#include <cstddef>
#include <cstdint>

#include "tilewave/analyze.hpp"

namespace tw::test {

/// What an analysis counted of one operand type: of whole tiles, and of that what lies inside the tensors.
inline std::uint64_t products(const Analysis& a, OperandType type) { return a.operations.products[static_cast<std::size_t>(type)]; }
inline std::uint64_t inside(const Analysis& a, OperandType type) { return a.operations.inside[static_cast<std::size_t>(type)]; }

}  // namespace tw::test
