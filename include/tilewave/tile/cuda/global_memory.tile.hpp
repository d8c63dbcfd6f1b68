#pragma once

#include "tilewave/tile/cuda/elements.tile.hpp"
#include "tilewave/tile/cuda/scatter.tile.hpp"

namespace tw::cuda {

/// A block's loads and stores between registers and global memory. `kPieceLoads`, `kPieceStores`: tensors bound with their Rows type are
/// copied in whole pieces.
template <int kWarps, bool kPieceLoads, bool kPieceStores>
struct GlobalMemory : Elements<kWarps> {
  using Base = Elements<kWarps>;
  using Base::for_each, Base::here, Base::owns_rows;

  /// Calls f(row, col, x, y), where y is element (row0 + row, col0 + col) of `other`, or 0 outside it.
  template <class F, class G, class Fn>
  TW_INLINE void for_each_with(F& fragment, const G& other, int row0, int col0, int i, int j, Fn f) const {
    Base::template own<F>();
    const Position at = here();
    // Two loops: one loop with a branch in it would need more registers for its conditions than are available.
    if (whole<F>(other, row0, col0)) {
      TW_UNROLL
      for (int e = 0; e < F::size; e += F::width) {
        const auto piece = *piece_at<F::width>(other, row0 + F::row(at, e), col0 + F::col(at, e), i, j);
        TW_UNROLL
        for (int k = 0; k < F::width; ++k) f(F::row(at, e), F::col(at, e + k), fragment.x[e + k], static_cast<float>(piece.x[k]));
      }
    } else if (other.rows > 0 && other.cols > 0) {
      TW_UNROLL
      for (int e = 0; e < F::size; ++e) {
        const int row = row0 + F::row(at, e);
        const int col = col0 + F::col(at, e);
        const bool inside = other.inside(row, col);
        const auto y = *other.template at<const typename G::Element>(inside ? row : 0, inside ? col : 0, i, j);
        f(row - row0, col - col0, fragment.x[e], inside ? static_cast<float>(y) : 0.0f);
      }
    } else {
      for_each(fragment, [&](int row, int col, auto& x) { f(row, col, x, 0.0f); });
    }
  }
  /// Loads the elements from (row, col) on.
  template <class F, class G>
  TW_INLINE void load(F& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    if constexpr (F::kind == TileKind::fragment && sizeof(typename G::Element) == 2) {
      if (from.template whole_pieces<typename G::Element, 8>() && col % 8 == 0) return load_by_quads(to, from, row, col, i, j);
    }
    for_each_with(to, from, row, col, i, j, [](int, int, auto& x, float y) { x = tw::to<remove_const_reference<decltype(x)>>(y); });
  }
  template <class T, int R, int C, int Warps, int Width, class G>
  TW_INLINE void load(Rows<T, R, C, Warps, Width>& to, const G& from, int row0, int col0, int i = 0, int j = 0, Fill fill = {}) const {
    using F = Rows<T, R, C, Warps, Width>;
    if constexpr (is_polled<G> || !moves_in_words<G, kPieceLoads>) {
      if (is_polled<G> || pieces<F, kPieceLoads>(from, col0)) {
        using E = typename G::Element;
        Base::template own<F>();
        Words<E, F::width> words[F::row_count][F::pieces];
        // Distances between a thread's rows are constants.
        constexpr int step = Warps * F::warp_rows;
        const Position at = here();
        const int row = row0 + F::row(at, 0), col = col0 + F::col(at, 0);
        const E* const first = from.template piece_at<const E>(row, col, i, j);
        TW_UNROLL
        for (int r = 0; r < F::row_count; ++r) {
          TW_UNROLL
          for (int n = 0; n < F::pieces; ++n)
            load_piece(words[r][n], from, from.inside(row + r * step, col + n * F::piece_step),
                       first + r * step * from.stride_row + n * F::piece_step, value_of<E>(fill));
        }
        return unpack<F>(words, to);
      }
    }
    gather(
        to, from, [row0](int row) { return row0 + row; }, col0, i, j, fill);
  }
  /// Loads row row_of(r) of the tensor into row r of the tile.
  template <class T, int R, int C, int Warps, int Width, class G, class RowOf>
  TW_INLINE void gather(Rows<T, R, C, Warps, Width>& to, const G& from, RowOf row_of, int col0, int i = 0, int j = 0,
                        Fill fill = {}) const {
    using F = Rows<T, R, C, Warps, Width>;
    Base::template own<F>();
    using E = typename G::Element;
    const Position at = here();
    Words<E, F::width> words[F::row_count][F::pieces];
    // All loads come first, without branches between them, so that they are in flight together.
    if constexpr (moves_in_words<G, kPieceLoads>) {
      gather_in_words<F>(words, from, row_of, col0, i, j, value_of<E>(fill));
    } else {
      TW_UNROLL
      for (int r = 0; r < F::row_count; ++r)
        load_row<F>(words[r], from, row_of(F::row(at, F::in_row(r, 0))), col0 + F::col(at, 0), i, j, value_of<E>(fill));
    }
    unpack<F>(words, to);
  }
  /// Loads the columns from `col` on of the tensor's row `row` (0 if the tensor is a vector), with `fill` outside the tensor.
  template <class T, class Tile, class G>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const G& from, int row, int col, int i = 0, int j = 0, Fill fill = {}) const {
    using E = typename G::Element;
    const Position at = here();
    Words<E, Tile::width> words[Tile::pieces];
    load_row<Tile>(words, from, row, col + to.col(at, 0), i, j, value_of<E>(fill));
    TW_UNROLL
    for (int n = 0; n < Tile::pieces; ++n) words[n].unpack(to.x + n * Tile::width);
  }
  /// Loads the rows from `row` on of the tensor's column `col`, with `fill` outside the tensor.
  template <class T, class Tile, class G>
  TW_INLINE void load(RowVector<T, Tile>& to, const G& from, int row, int col, int i = 0, int j = 0, Fill fill = {}) const {
    using E = typename G::Element;
    const Position at = here();
    constexpr int size = RowVector<T, Tile>::size;
    // All loads come first, without branches between them, so that they are in flight together. Distances between a thread's rows are
    // constants.
    Words<E, 1> words[size];
    const int first_row = row + to.row(at, 0);
    const E* const first = from.template at<const E>(first_row, col, i, j);
    TW_UNROLL
    for (int n = 0; n < size; ++n) {
      const int distance = to.row(at, n) - to.row(at, 0);
      words[n].load_if(from.inside(first_row + distance, col), first + distance * from.stride_row, value_of<E>(fill));
    }
    TW_UNROLL
    for (int n = 0; n < size; ++n) words[n].unpack(to.x + n);
  }
  /// Loads the columns from `col` on of the tensor's row `row` as the vector's rows: value r is element (row, col + r), or 0 outside.
  template <class T, class Tile, class G>
  TW_INLINE void load_from_row(RowVector<T, Tile>& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    using E = typename G::Element;
    const Position at = here();
    constexpr int size = RowVector<T, Tile>::size;
    Words<E, 1> words[size];
    const i64 step = kPieceLoads && moves_in_pieces<typename G::TileType> ? 1 : from.stride_col;
    const E* const first = from.template at<const E>(row, 0, i, j) + (col + to.row(at, 0)) * step;
    TW_UNROLL
    for (int n = 0; n < size; ++n) {
      const int distance = to.row(at, n) - to.row(at, 0);
      words[n].load_if(from.inside(row, col + to.row(at, 0) + distance), first + distance * step, E{});
    }
    TW_UNROLL
    for (int n = 0; n < size; ++n) words[n].unpack(to.x + n);
  }
  /// Stores the vector's values into column `col`, from row `row` on.
  template <class T, class Tile, class G>
  TW_INLINE void store(const RowVector<T, Tile>& from, const G& to, int row, int col, int i = 0, int j = 0) const {
    using E = typename G::Element;
    if (!owns_rows(from)) return;
    const Position at = here();
    TW_UNROLL
    for (int n = 0; n < from.size; ++n) {
      const int r = row + from.row(at, n);
      if constexpr (is_awaited<G>) {
        Words<E, 1> word;
        word.set(0, tw::to<E>(from.x[n]));
        word.store_awaited_if(to.inside(r, col), to.template at<E>(r, col, i, j));
      } else {
        if (to.inside(r, col)) *to.template at<E>(r, col, i, j) = tw::to<E>(from.x[n]);
      }
    }
  }
  /// Stores the vector's values into row `row`, from column `col` on.
  template <class T, class Tile, class G>
  TW_INLINE void store_to_row(const RowVector<T, Tile>& from, const G& to, int row, int col, int i = 0, int j = 0) const {
    using E = typename G::Element;
    if (!owns_rows(from)) return;
    const Position at = here();
    const i64 step = kPieceStores && moves_in_pieces<typename G::TileType> ? 1 : to.stride_col;
    E* const first = to.template at<E>(row, 0, i, j) + (col + from.row(at, 0)) * step;
    TW_UNROLL
    for (int n = 0; n < from.size; ++n) {
      const int distance = from.row(at, n) - from.row(at, 0);
      if (to.inside(row, col + from.row(at, 0) + distance)) first[distance * step] = tw::to<E>(from.x[n]);
    }
  }
  /// Returns one element as f32, in every thread, or 0 outside the tensor.
  template <class G>
  TW_INLINE float value(const G& from, int row, int col, int i = 0, int j = 0) const {
    using E = typename G::Element;
    Words<E, 1> word;
    word.load_if(from.inside(row, col), from.template at<const E>(row, col, i, j), E{});
    return static_cast<float>(word.get(0));
  }
  /// Stores the tile, rounded to the tensor's type. Elements outside the tensor are dropped.
  template <class F, class G>
  TW_INLINE void store(const F& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    store_rows(from, to, row0, col0, i, j, kAllRows);
  }
  /// Saves the sums in matrix i of `to`, whose contiguous matrices have as many elements, in the order in which threads hold them: 16 bytes
  /// of each thread, then the next 16 of each.
  template <class F, class G>
  TW_INLINE void save(const F& from, const G& to, int i) const {
    Saved* const first = saved<F>(to, i);
    TW_UNROLL
    for (int e = 0; e < F::size; e += 4) first[e / 4 * Base::threads] = {from.x[e], from.x[e + 1], from.x[e + 2], from.x[e + 3]};
  }
  /// Adds what a block saved to the Fragment's sums.
  template <class F, class G>
  TW_INLINE void add_saved(F& to, const G& from, int i) const {
    const Saved* const first = saved<F>(from, i);
    TW_UNROLL
    for (int e = 0; e < F::size; e += 4) {
      const Saved piece = first[e / 4 * Base::threads];
      TW_UNROLL
      for (int k = 0; k < 4; ++k) to.x[e + k] += piece.x[k];
    }
  }
  template <class T, int R, int C, int Warps, int Width, class G>
  TW_INLINE void store(const Rows<T, R, C, Warps, Width>& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    using F = Rows<T, R, C, Warps, Width>;
    Base::template own<F>();
    using E = typename G::Element;
    const Position at = here();
    if constexpr (!is_awaited<G> && moves_in_words<G, kPieceStores>) {
      const bool stored = in_widest_words<F::width>(to, col0, [&](auto size) {
        TW_UNROLL
        for (int r = 0; r < F::row_count; ++r) {
          const int row = row0 + F::row(at, F::in_row(r, 0));
          store_row_in_words<F, decltype(size)::value>(from.x + F::in_row(r, 0), to, row, col0 + F::col(at, 0), i, j);
        }
      });
      if (stored) return;
    }
    if (is_awaited<G> || pieces<F, kPieceStores>(to, col0)) {
      TW_UNROLL
      for (int r = 0; r < F::row_count; ++r) {
        const int row = row0 + F::row(at, F::in_row(r, 0)), col = col0 + F::col(at, 0);
        E* const first = to.template piece_at<E>(row, col, i, j);
        TW_UNROLL
        for (int n = 0; n < F::pieces; ++n) {
          Words<E, F::width> words;
          words.pack(from.x + F::in_row(r, n * F::width));
          const bool inside = to.inside(row, col + n * F::piece_step);
          // Behind branches the compiler may store many words one by one. Two rows it stores whole, and then a branch saves registers.
          if constexpr (is_awaited<G>) {
            words.store_awaited_if(inside, first + n * F::piece_step);
          } else if constexpr (F::row_count == 2 && sizeof(E) < 4) {
            if (inside) words.store(first + n * F::piece_step);
          } else {
            words.store_if(inside, first + n * F::piece_step);
          }
        }
      }
    } else {
      TW_UNROLL
      for (int r = 0; r < F::row_count; ++r) {
        const int row = row0 + F::row(at, F::in_row(r, 0)), col = col0 + F::col(at, 0);
        TW_UNROLL
        for (int n = 0; n < F::share; ++n) {
          const int c = ptx::opaque(col + n / F::width * F::piece_step + n % F::width);
          if (to.inside(row, c)) *to.template at<E>(row, c, i, j) = tw::to<E>(from.x[F::in_row(r, n)]);
        }
      }
    }
  }
  /// Stores row r of the tile to row row_of(r) of the tensor, from column `col0` on. Elements outside the tensor are dropped, so -1 drops a
  /// row.
  template <class F, class G, class RowOf>
  TW_INLINE void scatter(const F& from, const G& to, RowOf row_of, int col0, int i = 0, int j = 0) const {
    Base::template own<F>();
    scatter_rows<Replace>(here(), from, to, row_of, col0, i, j);
  }
  /// The same, but adds to the tensor's elements (f32, f16 or bf16), in no defined order. Each sum is rounded to the tensor's type.
  template <class F, class G, class RowOf>
  TW_INLINE void scatter_add(const F& from, const G& to, RowOf row_of, int col0, int i = 0, int j = 0) const {
    Base::template own<F>();
    scatter_rows<Add>(here(), from, to, row_of, col0, i, j);
  }

 protected:
  struct alignas(16) Saved {
    float x[4];
  };
  /// This thread's first piece of what is saved in matrix i.
  template <class F, class G>
  TW_INLINE Saved* saved(const G& sums, int i) const {
    Base::template own<F>();
    static_assert(is_same<typename F::Element, float> && F::size % 4 == 0, "f32 sums are saved, four of a thread at once");
    return reinterpret_cast<Saved*>(static_cast<float*>(sums.data) + i * sums.stride_i) + Base::thread();
  }
  /// The elements of loaded pieces.
  template <class F, class W>
  static TW_INLINE void unpack(const W (&words)[F::row_count][F::pieces], F& to) {
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      TW_UNROLL
      for (int n = 0; n < F::pieces; ++n) words[r][n].unpack(to.x + F::in_row(r, n * F::width));
    }
  }
  static constexpr int kAllRows = 0x7fffffff;  ///< rows_end for "all rows": the tensor's own bound applies
  template <class T, int width>
  using Piece = cuda::Piece<T, width>;
  /// Whether the tile's pieces from column `col0` on are aligned and none crosses the tensor's edge. The answer is the same in every
  /// thread. For a tensor bound with its Rows type it is a constant of the kernel's variant, `kWhole`.
  template <class F, bool kWhole, class G>
  static TW_INLINE bool pieces(const G& tensor, int col0) {
    if constexpr (moves_in_pieces<typename G::TileType>) {
      static_assert(!kWhole || G::TileType::width % F::width == 0, "a tensor is bound with the Rows that are copied, or wider ones");
      return kWhole;
    } else {
      return tensor.template whole_pieces<typename G::Element, F::width>() && col0 % F::width == 0;
    }
  }
  /// Avoids the conversion in the usual case, 0.
  template <class E>
  static TW_INLINE E value_of(Fill fill) {
    return fill.value == 0.0f ? E{} : tw::to<E>(fill.value);
  }
  /// Loads a piece, or fills it with `otherwise`; of a tensor that is polled, with zeros.
  template <class W, class G, class E>
  static TW_INLINE void load_piece(W& words, const G& from, bool inside, const E* first, E otherwise) {
    if constexpr (is_polled<G>) {
      words.load_awaited_if(inside, first);
      from.see(words.w);
    } else {
      words.load_if(inside, first, otherwise);
    }
  }
  /// Loads this thread's pieces of a row of F, from `col` on, with `otherwise` outside the tensor.
  template <class F, class E, class G>
  TW_INLINE void load_row(Words<E, F::width>* words, const G& from, int row, int col, int i, int j, E otherwise) const {
    if (is_polled<G> || pieces<F, kPieceLoads>(from, col)) {
      const E* const first = from.template piece_at<const E>(row, col, i, j);
      TW_UNROLL
      for (int n = 0; n < F::pieces; ++n)
        load_piece(words[n], from, from.inside(row, col + n * F::piece_step), first + n * F::piece_step, otherwise);
    } else {
      TW_UNROLL
      for (int n = 0; n < F::share; ++n) {
        const int c = ptx::opaque(col + n / F::width * F::piece_step + n % F::width);
        words[n / F::width].set(n % F::width, from.inside(row, c) ? *from.template at<const E>(row, c, i, j) : otherwise);
      }
    }
  }
  /// Loads a Fragment from a tensor of 16-bit elements in whole pieces of 16 bytes. A quad's lanes load four neighbouring pieces of a row,
  /// and exchange words. If each loaded its own pairs, a warp would use half of every sector, with four times the instructions.
  template <class F, class G>
  TW_INLINE void load_by_quads(F& to, const G& from, int row0, int col0, int i, int j) const {
    Base::template own<F>();
    using E = typename G::Element;
    constexpr int groups = (F::pieces + 3) / 4;  // of four pieces of 8 columns; the last may have fewer
    const Position at = here();
    Words<E, 8> words[F::row_count][groups];
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      const int row = row0 + F::row(at, F::in_row(r, 0)), col = col0 + F::warp_col(at) + at.lane % 4 * 8;
      const E* const first = from.template piece_at<const E>(row, col, i, j);
      TW_UNROLL
      for (int g = 0; g < groups; ++g) words[r][g].load_if(from.inside(row, col + g * 32), first + g * 32, E{});
    }
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      TW_UNROLL
      for (int n = 0; n < F::pieces; ++n) {
        u32(&w)[4] = words[r][n / 4].w;
        if (n % 4 == 0) transpose_quad(at.lane, w);
        const Words<E, 2> pair{{w[n % 4]}};
        pair.unpack(to.x + F::in_row(r, 2 * n));
      }
    }
  }
  /// Whether rows may have to be copied in words smaller than a piece: the row length is not a multiple of a piece, or rows have less than
  /// a piece's alignment.
  template <class G, bool kWhole>
  static constexpr bool moves_in_words = moves_in_pieces<typename G::TileType> && !kWhole;
  /// Calls f(Constant<S>) with the largest S for which S elements make a word of 4, 8 or 16 bytes and all rows are aligned from column
  /// `col` on. Returns false if there is no such S. The answer is the same in every thread.
  template <int S, class G, class Fn>
  static TW_INLINE bool in_widest_words(const G& tensor, int col, Fn f) {
    using T = typename G::Element;
    constexpr int bytes = S * static_cast<int>(sizeof(T));
    if constexpr (bytes > 16) {
      return in_widest_words<S / 2>(tensor, col, f);
    } else if constexpr (bytes >= 4) {
      if (!tensor.template vectors<T, S>() || col % S != 0) return in_widest_words<S / 2>(tensor, col, f);
      f(Constant<S>{});
      return true;
    } else {
      return false;
    }
  }
  /// The number of elements of row `row` from `col` on; 0 or negative if there are none.
  template <class G>
  static TW_INLINE int inside_row(const G& tensor, int row, int col) {
    return static_cast<u32>(row) < static_cast<u32>(tensor.rows) ? tensor.cols - col : 0;
  }
  /// load_row() in words of S elements. load_row_end() loads the word that crosses the tensor's edge.
  template <class F, int S, class E, class G>
  TW_INLINE void load_row_in_words(Words<E, F::width>* words, const G& from, int row, int col, int i, int j, E otherwise) const {
    const E* const first = from.template piece_at<const E>(row, col, i, j);
    const int count = inside_row(from, row, col);
    TW_UNROLL
    for (int n = 0; n < F::pieces; ++n) {
      words[n].fill(otherwise);
      TW_UNROLL
      for (int k = 0; k < F::width; k += S) {
        const int place = n * F::piece_step + k;
        words[n].template load_word_if<S>(place + S <= count, first + place, k);
      }
    }
  }
  /// Loads the piece that crosses the tensor's edge, if this thread holds it. Separate from the row's other loads, because its branch would
  /// delay them.
  template <class F, class E, class G>
  TW_INLINE void load_row_end(Words<E, F::width>* words, const G& from, int row, int col, int i, int j, E otherwise) const {
    const int count = inside_row(from, row, col);
    if (count % F::width == 0) return;
    TW_UNROLL
    for (int n = 0; n < F::pieces; ++n) {
      const int left = count - n * F::piece_step;
      if (left <= 0 || left >= F::width) continue;
      const E* const first = from.template piece_at<const E>(row, col, i, j) + n * F::piece_step;
      TW_UNROLL
      for (int k = 0; k < F::width; ++k) words[n].set(k, k < left ? first[k] : otherwise);
    }
  }
  /// gather() for such rows: in words if all rows are aligned for some word size.
  template <class F, class E, class G, class RowOf>
  TW_INLINE void gather_in_words(Words<E, F::width> (&words)[F::row_count][F::pieces], const G& from, RowOf row_of, int col0, int i, int j,
                                 E otherwise) const {
    const Position at = here();
    const auto row = [&](int r) { return row_of(F::row(at, F::in_row(r, 0))); };
    const int col = col0 + F::col(at, 0);
    const bool in_words = in_widest_words<F::width>(from, col0, [&](auto size) {
      TW_UNROLL
      for (int r = 0; r < F::row_count; ++r) load_row_in_words<F, decltype(size)::value>(words[r], from, row(r), col, i, j, otherwise);
    });
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      if (in_words)
        load_row_end<F>(words[r], from, row(r), col, i, j, otherwise);
      else
        load_row<F>(words[r], from, row(r), col, i, j, otherwise);
    }
  }
  /// Stores a row of a tile, x[F::share], in words of S elements, and single elements at the tensor's edge.
  template <class F, int S, class T, class G>
  TW_INLINE void store_row_in_words(const T* x, const G& to, int row, int col, int i, int j) const {
    using E = typename G::Element;
    E* const first = to.template piece_at<E>(row, col, i, j);
    const int count = inside_row(to, row, col);
    TW_UNROLL
    for (int n = 0; n < F::pieces; ++n) {
      Words<E, F::width> words;
      words.pack(x + n * F::width);
      TW_UNROLL
      for (int k = 0; k < F::width; k += S) {
        const int place = n * F::piece_step + k;
        if (place + S <= count) {
          words.template store_word<S>(first + place, k);
        } else {
          TW_UNROLL
          for (int e = 0; e < S - 1; ++e)
            if (place + e < count) first[place + e] = words.get(k + e);
        }
      }
    }
  }
  /// Whether the whole tile is inside the tensor and its pieces are aligned. The answer is the same in every thread.
  template <class F, class G>
  static TW_INLINE bool whole(const G& tensor, int row0, int col0) {
    return tensor.template vectors<typename G::Element, F::width>() && col0 % F::width == 0 && row0 + F::rows <= tensor.rows &&
           col0 + F::cols <= tensor.cols && F::cols % (F::width * F::row_threads) == 0;
  }
  /// Stores straight from registers.
  template <class F, class G>
  TW_INLINE void store_rows(const F& from, const G& to, int row0, int col0, int i, int j, int rows_end) const {
    Base::template own<F>();
    using T = typename G::Element;
    const Position at = here();
    const bool pieces = to.template whole_pieces<T, F::width>() && col0 % F::width == 0;
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      const int row = row0 + F::row(at, F::in_row(r, 0)), first_col = col0 + F::col(at, F::in_row(r, 0));
      if (static_cast<u32>(row) >= static_cast<u32>(min(rows_end, to.rows))) continue;
      T* const first = to.template at<T>(row, first_col, i, j);
      if (pieces) {
        TW_UNROLL
        for (int n = 0; n < F::share; n += F::width) {
          const int e = F::in_row(r, n), step = n / F::width * F::piece_step;
          Piece<T, F::width> piece;
          TW_UNROLL
          for (int k = 0; k < F::width; ++k) piece.x[k] = tw::to<T>(from.x[e + k]);
          if (first_col + step < to.cols) *reinterpret_cast<Piece<T, F::width>*>(first + step) = piece;
        }
      } else {
        TW_UNROLL
        for (int n = 0; n < F::share; ++n) {
          const int step = n / F::width * F::piece_step + n % F::width;
          if (first_col + step < to.cols) first[step * to.stride_col] = tw::to<T>(from.x[F::in_row(r, n)]);
        }
      }
    }
  }
  /// Stores the first `cols` columns of a panel in shared memory, with ordinary stores. Neighbouring threads store neighbouring words, the
  /// widest for which all rows of the tensor are aligned.
  template <class T, class G>
  TW_INLINE void copy_panel(const u8* panel, int cols, const G& to, int row0, int col0, int i, int j, int rows_end) const {
    constexpr int widest = 16 / static_cast<int>(sizeof(T));
    const auto copy = [&](auto size) { copy_panel_words<decltype(size)::value, T>(panel, cols, to, row0, col0, i, j, rows_end); };
    // A tensor that TMA can copy is aligned for the widest words, and its number of columns is a multiple of them.
    if (kPieceStores || (to.template vectors<T, widest>() && col0 % widest == 0)) return copy(Constant<widest>{});
    if (to.template vectors<T, widest / 2>() && col0 % (widest / 2) == 0) return copy(Constant<widest / 2>{});
    if (to.template vectors<T, widest / 4>() && col0 % (widest / 4) == 0) return copy(Constant<widest / 4>{});
    copy(Constant<1>{});
  }
  template <int S, class T, class G>
  TW_INLINE void copy_panel_words(const u8* panel, int cols, const G& to, int row0, int col0, int i, int j, int rows_end) const {
    constexpr int widest = 16 / static_cast<int>(sizeof(T));
    const int words = cols / S, end = min(rows_end, to.rows);
    TW_NO_UNROLL
    for (int n = static_cast<int>(ptx::thread_index()) % kWarpgroupThreads; n < kWarpgroupRows * words; n += kWarpgroupThreads) {
      const int r = n / words, c = n % words * S, row = row0 + r, col = col0 + c;
      if (row >= end) break;
      const T* const word = reinterpret_cast<const T*>(panel + r * kPanelBytes + (c / widest ^ (r & 7)) * 16) + c % widest;
      T* const first = to.template at<T>(row, col, i, j);
      if (col + S <= to.cols) {
        *reinterpret_cast<Piece<T, S>*>(first) = *reinterpret_cast<const Piece<T, S>*>(word);
      } else {
        TW_NO_UNROLL
        for (int k = 0; k < S - 1 && col + k < to.cols; ++k)
          first[k] = word[k];  // if columns are not contiguous, S is 1 and this loop is empty
      }
    }
  }
  /// Stores straight from registers, each row of the tile to place_of(row).
  template <class F, class G, class PlaceOf>
  TW_INLINE void store_places(const F& from, const G& to, int col0, PlaceOf place_of) const {
    Base::template own<F>();
    using T = typename G::Element;
    const Position at = here();
    const bool pieces = to.template whole_pieces<T, F::width>() && col0 % F::width == 0;
    TW_UNROLL
    for (int r = 0; r < F::row_count; ++r) {
      const Place place = place_of(F::row(at, F::in_row(r, 0)));
      if (!place.inside) continue;
      TW_UNROLL
      for (int n = 0; n < F::share; n += F::width) {
        const int e = F::in_row(r, n);
        const int col = col0 + F::col(at, e);
        if (pieces) {
          const Piece<T, F::width> piece{tw::to<T>(from.x[e]), tw::to<T>(from.x[e + 1])};
          if (to.inside(place.row, col)) *piece_at<F::width>(to, place.row, col, place.i, place.j) = piece;
        } else {
          TW_UNROLL
          for (int k = 0; k < F::width; ++k)
            if (to.inside(place.row, col + k)) *to.template at<T>(place.row, col + k, place.i, place.j) = tw::to<T>(from.x[e + k]);
        }
      }
    }
  }
  template <int width, class G>
  static TW_INLINE auto* piece_at(const G& tensor, int row, int col, int i, int j) {
    using T = typename G::Element;
    if constexpr (G::readable)
      return reinterpret_cast<const Piece<T, width>*>(tensor.template at<const T>(row, col, i, j));
    else
      return reinterpret_cast<Piece<T, width>*>(tensor.template at<T>(row, col, i, j));
  }
};

}  // namespace tw::cuda
