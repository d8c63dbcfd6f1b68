#pragma once

#include <cstdint>
#include <vector>

#include "kernels/variant.hpp"

namespace tw::kernels::topk {

/// Which blocks process rows.
enum class Width {
  narrow,  ///< short rows
  middle,  ///< many long rows: a GPU's SM has several at once, so that one works while others wait
  wide     ///< few
};

/// How rows are distributed over blocks.
struct Plan {
  Width width;
  int parts;       ///< parts per row; 1: a block processes a whole row
  int part;        ///< columns per part, if there are several
  int part_limit;  ///< candidates per part
  std::int64_t workspace(std::int64_t rows) const { return parts == 1 ? 0 : rows * parts * part_limit; }
};

/// `units`: SMs, or threads of the CPU pool.
Plan plan_argmax(std::int64_t rows, std::int64_t cols, int units);
Plan plan_topk(std::int64_t rows, std::int64_t cols, int k, int units);

inline constexpr ShapeKey kShape[] = {{"rows", "rows of x"},
                                      {"cols", "elements of a row"},
                                      {"k", "number of elements that topk returns", 64},
                                      {"units", "SMs; they determine the number of splits of a row", 132}};

/// The instantiations that are compiled ahead of time.
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::topk
