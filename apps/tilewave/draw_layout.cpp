#include "draw_layout.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <set>
#include <utility>

#include "runtime/format.hpp"

namespace tw::cli {
namespace {

// Shared memory has 32 banks of 4 bytes. Accesses of 16 bytes per thread are served 8 threads at a time.
constexpr int kBanks = 32;
constexpr int kBankBytes = 4;
constexpr int kPieceBytes = 16;
constexpr int kPieces = sm_90a::kPanelBytes / kPieceBytes;
constexpr int kLanes = 32;
constexpr int kColors = 8;

int bank_of(int offset) { return offset / kBankBytes % kBanks; }

/// The banks that threads use in one access, and how many times the busiest bank is accessed.
std::string conflicts(const std::vector<int>& offsets, int bytes) {
  std::array<std::set<int>, kBanks> words;
  for (const int offset : offsets) {
    for (int at = offset / kBankBytes; at * kBankBytes < offset + bytes; ++at) words[static_cast<std::size_t>(at % kBanks)].insert(at);
  }
  std::size_t used = 0, busiest = 0;
  for (const std::set<int>& bank : words) {
    used += bank.empty() ? 0 : 1;
    busiest = std::max(busiest, bank.size());
  }
  return tw::format("{} banks, {}", used, busiest == 1 ? "no conflict" : tw::format("{}-way conflict", busiest));
}

std::string place(const TileLayout& layout, const DrawnPart& drawn, int cell_cols) {
  const int rows = std::min(layout.rows, drawn.rows);
  const int cols = std::min(layout.cols / cell_cols, drawn.cells) * cell_cols;
  if (rows == layout.rows && cols == layout.cols) return "";
  return tw::format("Drawn: rows 0 to {} of {}, columns 0 to {} of {}; --all draws everything.", rows - 1, layout.rows, cols - 1,
                    layout.cols);
}

Picture draw_shared(const TileLayout& layout, const DrawnPart& part) {
  const int bytes = static_cast<int>(size_of(layout.dtype));
  Picture picture;
  picture.cell_cols = kPieceBytes / bytes;
  picture.cell =
      tw::format("{} elements of a row, 16 bytes: their position in the panel's row (0 to 7) and the four banks", picture.cell_cols);
  const int row_bytes = layout.cols * bytes, panels = (row_bytes + sm_90a::kPanelBytes - 1) / sm_90a::kPanelBytes;
  const int in_last_panel = row_bytes - (panels - 1) * sm_90a::kPanelBytes;
  picture.notes.push_back(tw::format(
      "{} bytes: {} panel{} of {} rows of 128 bytes{}.", panels * layout.rows * sm_90a::kPanelBytes, panels,
      panels == 1 ? "" : "s in sequence, each", layout.rows,
      in_last_panel == sm_90a::kPanelBytes ? "" : tw::format(", {} of them used{}", in_last_panel, panels == 1 ? "" : " in the last")));

  std::vector<int> rows_of_piece, row, column, quads;
  for (int r = 0; r < 8; ++r) rows_of_piece.push_back(layout.offset(r, 0));
  const int first_panel_bytes = std::min(row_bytes, sm_90a::kPanelBytes);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lane * kBankBytes < first_panel_bytes) row.push_back(layout.offset(0, lane * kBankBytes / bytes));
    if (lane < layout.rows) column.push_back(layout.offset(lane, 0));
    const auto [fragment_row, fragment_col] = layout_of<sm_90a::Fragment<float, 64, 8>>.element(lane, 0);
    quads.push_back(layout.offset(fragment_row, fragment_col));
  }
  picture.notes.push_back("A warp that accesses at once:");
  picture.notes.push_back(tw::format("  16 bytes of 8 rows (ldmatrix, stmatrix, wgmma)     {}", conflicts(rows_of_piece, kPieceBytes)));
  picture.notes.push_back(
      tw::format("  {:>3} bytes of a row                                 {}", first_panel_bytes, conflicts(row, kBankBytes)));
  picture.notes.push_back(tw::format("  a Fragment's first elements: 8 rows, 4 columns     {}", conflicts(quads, bytes)));
  picture.notes.push_back(
      tw::format("  an element of {:>2} rows, one column                  {}", column.size(), conflicts(column, bytes)));

  for (int r = 0; r < std::min(layout.rows, part.rows); ++r) {
    auto& cells = picture.rows.emplace_back();
    for (int c = 0; c < std::min(layout.cols / picture.cell_cols, part.cells); ++c) {
      const int offset = layout.offset(r, c * picture.cell_cols);
      const int piece = offset / kPieceBytes % kPieces;
      cells.push_back({tw::format("{}:{}-{}", piece, bank_of(offset), bank_of(offset) + 3), piece});
    }
  }
  for (int piece = 0; piece < kPieces; ++piece)
    picture.legend.push_back(tw::format("position {}, banks {}-{}", piece, 4 * piece, 4 * piece + 3));
  return picture;
}

Picture draw_registers(const TileLayout& layout, const DrawnPart& part) {
  Picture picture;
  picture.cell_cols = layout.width;
  const int registers = layout.size / layout.per_register;
  picture.notes.push_back(tw::format("{} computing threads with {} registers each.", layout.threads, registers));
  picture.cell = layout.width == 1                     ? "an element: thread:register"
                 : layout.width == layout.per_register ? tw::format("{} columns, packed: thread:register", layout.width)
                                                       : tw::format("{} columns of one thread: thread:register of the first", layout.width);

  const int rows = std::min(layout.rows, part.rows);
  const int cells = std::min(layout.cols / layout.width, part.cells);
  picture.rows.assign(static_cast<std::size_t>(rows), std::vector<Cell>(static_cast<std::size_t>(cells)));
  for (int thread = 0; thread < layout.threads; ++thread) {
    for (int i = 0; i < layout.size; i += layout.width) {
      const auto [row, col] = layout.element(thread, i);
      if (row >= rows || col / layout.width >= cells) continue;
      picture.rows[static_cast<std::size_t>(row)][static_cast<std::size_t>(col / layout.width)] = {
          tw::format("{}:{}", thread, i / layout.per_register), thread % kLanes / 4};
    }
  }
  for (int quad = 0; quad < kColors; ++quad) picture.legend.push_back(tw::format("lanes {}-{}", 4 * quad, 4 * quad + 3));
  return picture;
}

std::size_t widest(const Picture& picture) {
  std::size_t width = 4;
  for (const auto& row : picture.rows) {
    for (const Cell& cell : row) width = std::max(width, cell.label.size());
  }
  return width;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&')
      result += "&amp;";
    else if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else
      result += c;
  }
  return result;
}

}  // namespace

std::string describe(const TileLayout& layout) {
  return tw::format("{} {} {} x {}{}", layout.type, name_of(layout.dtype), layout.rows, layout.cols,
                    layout.contracts_rows ? ", products sum over rows" : "");
}

Picture picture_of(const KernelTile& tile, const DrawnPart& part) {
  Picture picture = tile.layout.offset != nullptr ? draw_shared(tile.layout, part) : draw_registers(tile.layout, part);
  picture.title = describe(tile.layout);
  if (!tile.where.empty()) picture.title += tw::format(" ({})", tile.where);
  if (std::string note = place(tile.layout, part, picture.cell_cols); !note.empty()) picture.notes.push_back(std::move(note));
  return picture;
}

std::string to_text(const Picture& picture) {
  const std::size_t width = widest(picture);
  std::string text = picture.title + "\n";
  for (const std::string& note : picture.notes) text += note + "\n";
  text += tw::format("Cell: {}.\n\nrow\\col", picture.cell);
  for (std::size_t c = 0; c < picture.rows.front().size(); ++c)
    text += tw::format(" {:>{}}", c * static_cast<std::size_t>(picture.cell_cols), width);
  text += "\n";
  for (std::size_t r = 0; r < picture.rows.size(); ++r) {
    text += tw::format("{:>7}", r);
    for (const Cell& cell : picture.rows[r]) text += tw::format(" {:>{}}", cell.label, width);
    text += "\n";
  }
  return text;
}

std::string to_svg(const std::string& title, const std::vector<Picture>& pictures) {
  // Pale enough for black labels, and different in hue and lightness.
  constexpr std::array<const char*, kColors> kPalette = {"#a6cee3", "#fdbf6f", "#b2df8a", "#fb9a99",
                                                         "#cab2d6", "#ffff99", "#e0c9a6", "#d9d9d9"};
  constexpr int kMargin = 24, kLine = 18, kCellHeight = 20, kCharacter = 7, kRowLabels = 56, kSwatch = 14;
  std::string body;
  int y = kMargin;
  int right = 720;
  const auto text = [&](int x, int at, const std::string& content, const char* attributes = "") {
    body += tw::format("<text x=\"{}\" y=\"{}\"{}>{}</text>\n", x, at, attributes, escaped(content));
    right = std::max(right, x + kCharacter * static_cast<int>(content.size()));
  };
  text(kMargin, y += kLine, title, " font-size=\"18\" font-weight=\"bold\"");
  for (const Picture& picture : pictures) {
    y += 2 * kLine;
    text(kMargin, y, picture.title, " font-size=\"14\" font-weight=\"bold\"");
    for (const std::string& note : picture.notes) text(kMargin, y += kLine, note, " xml:space=\"preserve\"");
    text(kMargin, y += kLine, tw::format("Cell: {}.", picture.cell));

    const int cell_width = static_cast<int>(widest(picture)) * kCharacter + 8;
    const int left = kMargin + kRowLabels;
    text(left, y += 2 * kLine, "column");
    y += kLine;
    text(kMargin, y, "row");
    for (std::size_t c = 0; c < picture.rows.front().size(); ++c)
      text(left + static_cast<int>(c) * cell_width + 4, y, std::to_string(c * static_cast<std::size_t>(picture.cell_cols)));
    y += 6;
    for (std::size_t r = 0; r < picture.rows.size(); ++r, y += kCellHeight) {
      text(kMargin, y + 14, std::to_string(r));
      for (std::size_t c = 0; c < picture.rows[r].size(); ++c) {
        const Cell& cell = picture.rows[r][c];
        const int x = left + static_cast<int>(c) * cell_width;
        body += tw::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\" stroke=\"#666666\"/>\n", x, y, cell_width,
                           kCellHeight, kPalette[static_cast<std::size_t>(cell.color)]);
        text(x + 4, y + 14, cell.label);
      }
    }
    right = std::max(right, left + static_cast<int>(picture.rows.front().size()) * cell_width);
    y += 10;
    const int legend_width = 2 * kSwatch + kCharacter * static_cast<int>(picture.legend.back().size());
    for (std::size_t i = 0; i < picture.legend.size(); ++i) {
      const int x = left + static_cast<int>(i % 4) * legend_width;
      if (i % 4 == 0 && i > 0) y += kLine + 4;
      body += tw::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\" stroke=\"#666666\"/>\n", x, y, kSwatch, kSwatch,
                         kPalette[i]);
      text(x + kSwatch + 6, y + 12, picture.legend[i]);
    }
    y += kLine;
  }
  return tw::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" font-family=\"monospace\" "
      "font-size=\"11\" fill=\"#000000\">\n<title>{2}</title>\n<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n{3}</svg>\n",
      right + kMargin, y + kMargin, escaped(title), body);
}

}  // namespace tw::cli
