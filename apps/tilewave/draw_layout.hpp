#pragma once

// Pictures of tile layouts, as text and as SVG.

#include <string>
#include <vector>

#include "tilewave/layout.hpp"

namespace tw::cli {

/// How many rows of a tile are drawn, and how many cells of each. A cell is 16 bytes of shared memory, or the neighbouring columns that a
/// thread holds.
struct DrawnPart {
  int rows;
  int cells;
};

struct Cell {
  std::string label;
  int color;  ///< index of the picture's legend
};

/// A tile as a table of cells, with an explanation. Text and SVG are made from it.
struct Picture {
  std::string title;
  std::vector<std::string> notes;
  std::string cell;  ///< explains a cell's label
  int cell_cols;     ///< columns of the tile in one cell
  std::vector<std::vector<Cell>> rows;
  std::vector<std::string> legend;  ///< of the colours
};

/// "Shared bf16 128 x 64".
std::string describe(const TileLayout& layout);

Picture picture_of(const KernelTile& tile, const DrawnPart& part);

std::string to_text(const Picture& picture);

/// One image with all pictures, one below the other.
std::string to_svg(const std::string& title, const std::vector<Picture>& pictures);

}  // namespace tw::cli
