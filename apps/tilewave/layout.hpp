#pragma once

// The implementation of `tilewave kernels layout`.

#include <string>
#include <vector>

#include "tilewave/layout.hpp"

namespace tw::cli {

struct LayoutOptions {
  std::vector<std::string> shared;  ///< DTYPE, ROWS, COLS
  std::vector<int> fragment;        ///< ROWS, COLS
  std::vector<int> rows;            ///< ROWS, COLS, the block's warps (4 when left out)
  std::string contract = "columns";
  int tile = 0;  ///< number of the tile to draw, from 1; 0: all
  bool all = false;
  std::string svg;  ///< file; empty: text
};

/// The tile that --shared, --fragment or --rows describes. Throws UsageError for a tile that the language does not allow.
KernelTile described_tile(const LayoutOptions& options);

/// Prints the tiles, or writes a picture to options.svg and prints its titles. Throws UsageError if options.tile does not exist, and Error
/// if the file cannot be written.
void draw_tiles(const std::string& title, const std::vector<KernelTile>& tiles, const LayoutOptions& options);

}  // namespace tw::cli
