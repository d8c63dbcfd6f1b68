#pragma once

// What `tilewave kernels layout` does.

#include <string>
#include <vector>

#include "tilewave/layout.hpp"

namespace tw::cli {

struct LayoutOptions {
  std::vector<std::string> shared;  ///< DTYPE, ROWS, COLS
  std::vector<int> fragment;        ///< ROWS, COLS
  std::vector<int> rows;            ///< ROWS, COLS, the block's warps (4 when left out)
  std::string contract = "columns";
  int tile = 0;  ///< the only one to draw, from 1; 0: all
  bool all = false;
  std::string svg;  ///< file; empty: text
};

/// The one tile that --shared, --fragment or --rows describes. Throws UsageError for what the language does not have.
KernelTile described_tile(const LayoutOptions& options);

/// Prints the tiles; or writes their picture to options.svg and prints what it holds. Throws UsageError for a tile that is not there, Error
/// for a file that cannot be written.
void draw_tiles(const std::string& title, const std::vector<KernelTile>& tiles, const LayoutOptions& options);

}  // namespace tw::cli
