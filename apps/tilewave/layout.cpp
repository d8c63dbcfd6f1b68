#include "layout.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "command.hpp"
#include "draw_layout.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {
namespace {

/// The part that fits a terminal.
constexpr DrawnPart kExcerpt{16, 16};
constexpr DrawnPart kAll{std::numeric_limits<int>::max(), std::numeric_limits<int>::max()};

/// Shared memory of a block on a Hopper GPU.
constexpr int kSharedBytes = 227 * 1024;

/// Elements of tiles that --shared describes.
constexpr DType kSharedTypes[] = {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3, DType::fp8_e5m2, DType::i8};

[[noreturn]] void refuse(const char* option, const std::string& given, const std::string& allowed) {
  throw UsageError(tw::format("kernels layout: {} is {}; allowed: {}", option, given, allowed));
}

int parse_extent(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) refuse("--shared", text, "DTYPE,ROWS,COLS with numbers for ROWS and COLS");
  return value;
}

/// Calls f<n>() for the n of first, first + step, ..., last that `value` is; false when it is none of them.
template <int first, int last, int step, class F>
bool with_constant(int value, F f) {
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return ((value == first + i * step && (f.template operator()<first + i * step>(), true)) || ...);
  }
  (std::make_integer_sequence<int, (last - first) / step + 1>{});
}

/// A tile's layout depends on its elements only by their size, and on its columns only by their number of panels.
template <class T, Contract contract>
TileLayout shared_layout(DType dtype, int rows, int cols) {
  constexpr int bytes = static_cast<int>(sizeof(T)), panel = sm_90a::kPanelBytes / bytes, step = 32 / bytes;
  TileLayout layout{};
  if (!with_constant<8, 256, 8>(rows, [&]<int R>() { layout = layout_of<sm_90a::Shared<T, R, panel, contract>>; }))
    refuse("--shared", tw::format("{} rows", rows), "8 to 256 rows, a multiple of 8");
  if (cols <= 0 || cols % step != 0)
    refuse("--shared", tw::format("{} columns", cols), tw::format("a multiple of {} columns of {}, 32 bytes", step, name_of(dtype)));
  const int most_panels = kSharedBytes / (rows * sm_90a::kPanelBytes);
  if (cols > most_panels * panel)
    refuse("--shared", tw::format("{} x {}", rows, cols), "what fits a block's 227 KiB of shared memory, rows rounded up to 128 bytes");
  layout.dtype = dtype;
  layout.cols = cols;
  return layout;
}

TileLayout shared_layout(const std::vector<std::string>& given, const std::string& contract) {
  const int rows = parse_extent(given[1]), cols = parse_extent(given[2]);
  const auto type = std::ranges::find(kSharedTypes, given[0], [](DType t) { return name_of(t); });
  if (type == std::end(kSharedTypes)) refuse("--shared", '"' + given[0] + '"', "bf16, f16, f32, fp8_e4m3, fp8_e5m2, i8");
  const bool by_rows = contract == "rows";
  const std::size_t bytes = size_of(*type);
  if (by_rows && bytes != 2) refuse("--contract", "rows with " + given[0], "columns: wgmma transposes only 16-bit operands");
  if (by_rows) return shared_layout<bf16, Contract::rows>(*type, rows, cols);
  if (bytes == 1) return shared_layout<i8, Contract::columns>(*type, rows, cols);
  if (bytes == 2) return shared_layout<bf16, Contract::columns>(*type, rows, cols);
  return shared_layout<float, Contract::columns>(*type, rows, cols);
}

/// More rows mean more warpgroups, and more columns more registers, all laid out like the first ones.
TileLayout fragment_layout(int rows, int cols) {
  if (rows <= 0 || rows % sm_90a::kWarpgroupRows != 0 || rows > 7 * sm_90a::kWarpgroupRows)
    refuse("--fragment", tw::format("{} rows", rows), "64 to 448 rows, a multiple of 64");
  if (cols <= 0 || cols % 8 != 0 || cols > 256) refuse("--fragment", tw::format("{} columns", cols), "8 to 256 columns, a multiple of 8");
  TileLayout layout = layout_of<sm_90a::Fragment<float, sm_90a::kWarpgroupRows, 8>>;
  layout.threads *= rows / layout.rows;
  layout.size *= cols / layout.cols;
  layout.rows = rows;
  layout.cols = cols;
  return layout;
}

/// Each group of `RowWarps` of the block's `Warps` holds a row. Further rows mean more registers, laid out like the first ones.
template <int Warps, int RowWarps>
TileLayout rows_layout(int rows, int cols) {
  constexpr int kRows = Warps / RowWarps, kThreads = 32 * RowWarps;
  TileLayout layout{};
  const auto set = [&]<int share>() { layout = layout_of<sm_90a::Rows<float, kRows, share * kThreads, Warps, 0>>; };
  const bool even = cols % kThreads == 0;
  if (!even || !(with_constant<1, 16, 1>(cols / kThreads, set) || with_constant<24, 128, 8>(cols / kThreads, set))) {
    refuse("--rows", tw::format("{} columns", cols),
           tw::format("{} (the threads of a row) times 1 to 16, or times a multiple of 8 up to 128", kThreads));
  }
  if (rows / kRows > 255 / layout.size) refuse("--rows", tw::format("{} x {}", rows, cols), "what fits a thread's 255 registers");
  layout.size *= rows / kRows;
  layout.rows = rows;
  return layout;
}

template <int Warps>
TileLayout rows_layout(int rows, int cols) {
  if (rows > 0 && rows % Warps == 0) return rows_layout<Warps, 1>(rows, cols);
  TileLayout layout{};
  const auto set = [&]<int power>() { layout = rows_layout<Warps, (Warps >> power)>(rows, cols); };
  constexpr int kPowers = std::bit_width(static_cast<unsigned>(Warps)) - 1;
  const bool power_of_two = rows > 0 && std::has_single_bit(static_cast<unsigned>(rows));
  if (!power_of_two || !with_constant<0, kPowers - 1, 1>(std::countr_zero(static_cast<unsigned>(rows)), set))
    refuse("--rows", tw::format("{} rows", rows), tw::format("a multiple or a divisor of the block's {} warps", Warps));
  return layout;
}

TileLayout rows_layout(int rows, int cols, int warps) {
  TileLayout layout{};
  const auto set = [&]<int power>() { layout = rows_layout<(1 << power)>(rows, cols); };
  const bool power_of_two = warps > 0 && std::has_single_bit(static_cast<unsigned>(warps));
  if (!power_of_two || !with_constant<2, 5, 1>(std::countr_zero(static_cast<unsigned>(warps)), set))
    refuse("--rows", tw::format("{} warps", warps), "4, 8, 16, 32");
  return layout;
}

void write(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  bool ok = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int reason = errno;
  if (file != nullptr) ok = std::fclose(file) == 0 && ok;
  if (!ok) throw Error(tw::format("{}: {}", path, std::strerror(reason != 0 ? reason : errno)));
}

}  // namespace

KernelTile described_tile(const LayoutOptions& options) {
  if (!options.shared.empty()) return {shared_layout(options.shared, options.contract), ""};
  if (!options.fragment.empty()) return {fragment_layout(options.fragment[0], options.fragment[1]), ""};
  return {rows_layout(options.rows[0], options.rows[1], options.rows.size() > 2 ? options.rows[2] : 4), ""};
}

void draw_tiles(const std::string& title, const std::vector<KernelTile>& tiles, const LayoutOptions& options) {
  const int count = static_cast<int>(tiles.size());
  if (options.tile < 0 || options.tile > count) refuse("--tile", std::to_string(options.tile), tw::format("1 to {}, or 0 for all", count));
  std::vector<Picture> pictures;
  for (int i = 0; i < count; ++i) {
    if (options.tile != 0 && options.tile != i + 1) continue;
    Picture picture = picture_of(tiles[static_cast<std::size_t>(i)], options.all ? kAll : kExcerpt);
    if (count > 1) picture.title = tw::format("{}: {}", i + 1, picture.title);
    pictures.push_back(std::move(picture));
  }
  if (pictures.empty()) {
    tw::print("{}: no tiles in shared memory or in State\n", title);
    return;
  }
  if (!options.svg.empty()) {
    write(options.svg, to_svg(title, pictures));
    for (const Picture& picture : pictures) tw::print("{}\n", picture.title);
    return;
  }
  for (std::size_t i = 0; i < pictures.size(); ++i) tw::print("{}{}", i == 0 ? "" : "\n", to_text(pictures[i]));
}

}  // namespace tw::cli
