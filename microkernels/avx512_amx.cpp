#include "microkernels/isa.hpp"

#if defined(__AVX512F__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

// GCC 12 takes the deliberately undefined operands inside its own header for mistakes of ours.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "microkernels/microkernel.hpp"

// Every product of these types runs on tiles, however small. By the rates of a Sapphire Rapids core a tile product (16 cycles) costs less
// than the vector instructions for a single row of it (32), and even 1 x 16 x 64 loses only the 300 cycles or so that its call takes to
// configure tiles and to arrange a panel of a. In return a sum depends neither on the number of rows or columns nor on zeros after the
// depth.

namespace tw::cpu {
namespace {

constexpr int kTileRows = kPanelRows;   ///< a tile has 16 rows of 64 bytes, as a panel's line has
constexpr int kTileGroups = kTileRows;  ///< groups of k that one instruction contracts: rows of its right operand
constexpr long kTileBytes = kTileRows * 64;

// The accumulators are tiles 0 to 3, row by row of 2 x 2; tiles 4 and 5 are two panels of a, 6 and 7 two panels of b. So each operand that
// is loaded takes part in two products. A tile's number is part of the instruction.

struct Bf16 {
  using Element = unsigned short;
  using Sum = float;
  static void add_upper_left() { _tile_dpbf16ps(0, 4, 6); }
  static void add_upper_right() { _tile_dpbf16ps(1, 4, 7); }
  static void add_lower_left() { _tile_dpbf16ps(2, 5, 6); }
  static void add_lower_right() { _tile_dpbf16ps(3, 5, 7); }
};

struct Int8 {
  using Element = signed char;
  using Sum = int;
  static void add_upper_left() { _tile_dpbssd(0, 4, 6); }
  static void add_upper_right() { _tile_dpbssd(1, 4, 7); }
  static void add_lower_left() { _tile_dpbssd(2, 5, 6); }
  static void add_lower_right() { _tile_dpbssd(3, 5, 7); }
};

/// Before tiles are loaded from memory that this file wrote: GCC 12 does not know that its intrinsics read it.
void complete_stores() { __asm__ volatile("" ::: "memory"); }

/// The sizes of tiles: rows of the upper and of the lower panel of a, 0 if there is none, and groups of k.
struct Shape {
  int upper = 0, lower = 0, groups = 0;
  bool operator==(const Shape&) const = default;
};

/// The operand of ldtilecfg.
struct alignas(64) Configuration {
  unsigned char palette = 1, start_row = 0, reserved[14] = {};
  unsigned short row_bytes[16] = {};
  unsigned char rows[16] = {};

  void set(int tile, int tile_rows, int bytes) {
    rows[tile] = static_cast<unsigned char>(tile_rows);
    row_bytes[tile] = static_cast<unsigned short>(tile_rows == 0 ? 0 : bytes);
  }
};
static_assert(sizeof(Configuration) == 64);

void configure(const Shape& shape) {
  Configuration configuration;
  for (int half = 0; half < 2; ++half) {
    const int rows = half == 0 ? shape.upper : shape.lower;
    configuration.set(2 * half, rows, 64);
    configuration.set(2 * half + 1, rows, 64);
    configuration.set(4 + half, rows, 4 * shape.groups);
    configuration.set(6 + half, shape.groups, 64);
  }
  complete_stores();
  _tile_loadconfig(&configuration);
}

/// Sixteen lines of a panel to a tile of a left operand, whose rows are consecutive in k: a transposition of 16 x 16 groups. The loads
/// place four lines in the lanes of a vector, so only half of it is shuffling.
void transpose_lines(char* tile, const char* lines) {
  const auto piece = [&](int line, int quarter) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(lines + line * 64 + quarter * 16));
  };
  TILEWAVE_UNROLL(4)
  for (int quarter = 0; quarter < 4; ++quarter) {
    __m512i v[4];  // v[c]: in lane l, four rows of line 4 l + c
    TILEWAVE_UNROLL(4)
    for (int c = 0; c < 4; ++c) {
      v[c] = _mm512_broadcast_i32x4(piece(c, quarter));
      v[c] = _mm512_mask_broadcast_i32x4(v[c], 0x00f0, piece(4 + c, quarter));
      v[c] = _mm512_mask_broadcast_i32x4(v[c], 0x0f00, piece(8 + c, quarter));
      v[c] = _mm512_mask_broadcast_i32x4(v[c], 0xf000, piece(12 + c, quarter));
    }
    const __m512i low0 = _mm512_unpacklo_epi32(v[0], v[1]), high0 = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i low1 = _mm512_unpacklo_epi32(v[2], v[3]), high1 = _mm512_unpackhi_epi32(v[2], v[3]);
    char* const rows = tile + quarter * 4 * 64;
    _mm512_store_si512(rows, _mm512_unpacklo_epi64(low0, low1));
    _mm512_store_si512(rows + 64, _mm512_unpackhi_epi64(low0, low1));
    _mm512_store_si512(rows + 128, _mm512_unpacklo_epi64(high0, high1));
    _mm512_store_si512(rows + 192, _mm512_unpackhi_epi64(high0, high1));
  }
}

/// `groups` lines of a panel, kTileGroups of them or fewer in each of the tiles that follow each other.
void arrange(char* tiles, const char* lines, int steps, int groups) {
  for (int step = 0; step < steps; ++step) {
    if (groups == kTileGroups) {
      transpose_lines(tiles + step * kTileBytes, lines + step * kTileBytes);
    } else {
      alignas(64) char padded[kTileBytes] = {};  // a tile's row is read up to its last group only, but lines after the depth may not exist
      __builtin_memcpy(padded, lines, static_cast<unsigned long>(groups) * 64);
      transpose_lines(tiles, padded);
    }
  }
}

/// A left operand as tiles are loaded from it. Distances are in bytes.
struct Left {
  const char* first;
  long row, step, panel;  ///< from one row, one step of k or one panel to the next
};

/// Up to two panels of a by up to two of b, which are b_panel apart.
template <class P, int kPanelsOfA, int kPanelsOfB>
void multiply_panels(char* acc, long acc_stride, const Left& a, const char* b, long b_panel, int steps, bool overwrite) {
  char* const lower = acc + kTileRows * acc_stride;
  if (overwrite) {
    _tile_zero(0);
    if constexpr (kPanelsOfB == 2) _tile_zero(1);
    if constexpr (kPanelsOfA == 2) _tile_zero(2);
    if constexpr (kPanelsOfA == 2 && kPanelsOfB == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, acc, acc_stride);
    if constexpr (kPanelsOfB == 2) _tile_loadd(1, acc + 64, acc_stride);
    if constexpr (kPanelsOfA == 2) _tile_loadd(2, lower, acc_stride);
    if constexpr (kPanelsOfA == 2 && kPanelsOfB == 2) _tile_loadd(3, lower + 64, acc_stride);
  }
  const char* from_a = a.first;
  for (int step = 0; step < steps; ++step, from_a += a.step, b += kTileBytes) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, from_a, a.row);
    P::add_upper_left();
    if constexpr (kPanelsOfA == 2) {
      _tile_loadd(5, from_a + a.panel, a.row);
      P::add_lower_left();
    }
    if constexpr (kPanelsOfB == 2) {
      _tile_loadd(7, b + b_panel, 64);
      P::add_upper_right();
    }
    if constexpr (kPanelsOfA == 2 && kPanelsOfB == 2) P::add_lower_right();
  }
  _tile_stored(0, acc, acc_stride);
  if constexpr (kPanelsOfB == 2) _tile_stored(1, acc + 64, acc_stride);
  if constexpr (kPanelsOfA == 2) _tile_stored(2, lower, acc_stride);
  if constexpr (kPanelsOfA == 2 && kPanelsOfB == 2) _tile_stored(3, lower + 64, acc_stride);
}

/// Two panels of a, or one, against all of b.
template <class P, int kPanelsOfA>
void multiply_rows(char* acc, long acc_stride, const Left& a, const char* b, long b_panel, int cols, int steps, bool overwrite) {
  int col = 0;
  for (; col + kPanelRows < cols; col += 2 * kPanelRows, acc += 2 * 64, b += 2 * b_panel)
    multiply_panels<P, kPanelsOfA, 2>(acc, acc_stride, a, b, b_panel, steps, overwrite);
  if (col < cols) multiply_panels<P, kPanelsOfA, 1>(acc, acc_stride, a, b, b_panel, steps, overwrite);
}

/// Two panels of a at a time, or 32 of its rows, are 24 of the 48 KB of first-level cache; b comes from the second level. Panels are
/// arranged first; rows, with kByRows, are read where they lie.
template <class P, bool kByRows>
void mma_on_tiles(typename P::Sum* acc, long acc_stride, const typename P::Element* a, const typename P::Element* b, int rows, int cols,
                  int depth, int panel_depth, bool overwrite) {
  constexpr int kSteps = 12;
  const int groups = groups_of<typename P::Element>(depth);
  const auto* const lines_b = reinterpret_cast<const char*>(b);
  auto* const sums = reinterpret_cast<char*>(acc);
  const long stride = acc_stride * static_cast<long>(sizeof *acc), row_bytes = panel_depth * static_cast<long>(sizeof *a);
  const long panel = kPanelRows * row_bytes;
  if (groups == 0 || rows <= 0 || cols <= 0) {
    const int written = (cols + kPanelRows - 1) / kPanelRows * 64;
    for (int row = 0; overwrite && row < rows; ++row) __builtin_memset(sums + row * stride, 0, static_cast<unsigned long>(written));
    return;
  }
  const int whole_steps = groups / kTileGroups, chunks = (whole_steps + kSteps - 1) / kSteps;
  const int most_steps = chunks == 0 ? 0 : (whole_steps + chunks - 1) / chunks;
  alignas(64) char arranged[kByRows ? 1 : 2 * kSteps * kTileBytes];
  // Configured anew by every call, because another library of the process may use tiles in the meantime.
  Shape configured;
  for (int first = 0, steps, in_step; first < groups; first += steps * in_step) {
    const int remaining = groups - first;
    steps = remaining < kTileGroups ? 1 : least(remaining / kTileGroups, most_steps);
    in_step = least(remaining, kTileGroups);
    for (int row = 0; row < rows; row += 2 * kTileRows) {
      const Shape shape{least(rows - row, kTileRows), rows - row > kTileRows ? least(rows - row - kTileRows, kTileRows) : 0, in_step};
      if (shape != configured) configure(configured = shape);
      const char* const from = reinterpret_cast<const char*>(a) + row * row_bytes;
      Left left;
      if constexpr (kByRows) {
        left = {from + first * 4L, row_bytes, 64, panel};
      } else {
        left = {arranged, 64, kTileBytes, steps * kTileBytes};
        arrange(arranged, from + first * 64L, steps, in_step);
        if (shape.lower > 0) arrange(arranged + left.panel, from + panel + first * 64L, steps, in_step);
      }
      complete_stores();
      (shape.lower > 0 ? multiply_rows<P, 2> : multiply_rows<P, 1>)(sums + row * stride, stride, left, lines_b + first * 64L, panel, cols,
                                                                    steps, overwrite && first == 0);
    }
  }
  // Tiles in use would be saved at every switch of threads (8 KB), and keep an idle core from its deeper sleep states.
  _tile_release();
}

}  // namespace

Mma<float, unsigned short> avx512_amx_mma_bf16() { return mma_on_tiles<Bf16, false>; }
Mma<float, unsigned short> avx512_amx_mma_bf16_by_rows() { return mma_on_tiles<Bf16, true>; }
Mma<int, signed char> avx512_amx_mma_i8() { return mma_on_tiles<Int8, false>; }

}  // namespace tw::cpu

#else

namespace tw::cpu {

Mma<float, unsigned short> avx512_amx_mma_bf16() { return nullptr; }
Mma<float, unsigned short> avx512_amx_mma_bf16_by_rows() { return nullptr; }
Mma<int, signed char> avx512_amx_mma_i8() { return nullptr; }

}  // namespace tw::cpu

#endif
