#pragma once

#include "tilewave/tile/language.tile.hpp"

// Kernels that use one part of the tile language each, without rings. language_test.cpp runs them on both targets.

namespace tw::test {

inline constexpr const char* kLanguageKernels = "tests/language_kernels.tile.hpp";

/// out = in, rounded to Out, tile by tile through Rows; the batch is the outer dimension.
template <class In, class Out, int R, int C>
struct CopyRows {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    struct Params {
      Global<Target, const In> in;
      Global<Target, Out> out;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Rows<Target, float, R, C> x;
      block.load(x, p.in, t.m * R, t.n * C, t.batch);
      block.store(x, p.out, t.m * R, t.n * C, t.batch);
    }
  };
};

/// Row n of out = row 3 n - 2 of `in`, 7 outside it. Both are bound with the tile that is copied: whole pieces or none.
template <class In, class Out, int R, int C, int Width>
struct GatherRows {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    using X = Rows<Target, float, R, C, 4, Width>;
    struct Params {
      Global<Target, const In, X> in;
      Global<Target, Out, X> out;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X x;
      const int row0 = t.m * R;
      block.gather(
          x, p.in, [row0](int row) { return 3 * (row0 + row) - 2; }, t.n * C, t.batch, 0, Fill{7});
      block.store(x, p.out, row0, t.n * C, t.batch);
    }
  };
};

/// out = in through a Fragment.
template <class In, class Out, int R, int C>
struct CopyFragment {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int rows = R;
    struct Params {
      Global<Target, const In> in;
      Global<Target, Out> out;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Fragment<Target, float, R, C> x;
      block.load(x, p.in, t.m * R, t.n * C, t.batch);
      block.store(x, p.out, t.m * R, t.n * C, t.batch);
    }
  };
};

/// out = softmax of each row of `in`, which has at most C columns: largest and sum of a row of Rows, and a value for each row.
template <class T, int R, int C, int Warps = 4>
struct RowSoftmax {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    struct Params {
      Global<Target, const T> in;
      Global<Target, float> out;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Rows<Target, float, R, C, Warps> x;
      RowVector<Target, float, Rows<Target, float, R, C, Warps>> largest, factor;
      block.load(x, p.in, t.m * R, 0, Fill{-kInfinity});
      block.rows(x, [&](int i, auto row) { largest[i] = row.max(); });
      block.map(x, largest, [](float value, float m) { return exp2((value - m) * kLog2E); });
      block.rows(x, [&](int i, auto row) { factor[i] = reciprocal(row.sum()); });
      block.map(x, factor, [](float value, float f) { return value * f; });
      block.store(x, p.out, t.m * R, 0);
    }
  };
};

/// out = in, with each run of `Span` columns replaced by its Walsh-Hadamard transform.
template <class T, int R, int C, int Span, int Warps, int Width>
struct RowHadamard {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    struct Params {
      Global<Target, const T> in;
      Global<Target, float> out;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Rows<Target, float, R, C, Warps, Width> x;
      block.load(x, p.in, t.m * R, 0);
      block.template row_hadamard<Span>(x);
      block.store(x, p.out, t.m * R, 0);
    }
  };
};

/// out = in * by_column + the largest magnitude of its row + in, by one map(): a value for each column and for each row, and a tile.
template <class T, int R, int C, int Warps, int Width = 0>
struct Broadcasts {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    struct Params {
      Global<Target, const T> in;
      Global<Target, const T> by_column;
      Global<Target, float> out;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      using X = Rows<Target, float, R, C, Warps, Width>;
      X x;
      ColumnVector<Target, float, X> factor;
      RowVector<Target, float, X> largest;
      block.load(x, p.in, t.m * R, 0);
      block.load(factor, p.by_column, 0, 0, Fill{1});
      const X copy = x;
      block.rows(x, [&](int i, auto row) { largest[i] = row.max([](float value) { return abs(value); }); });
      block.map(x, factor, largest, copy, [](float value, float f, float m, float y) { return value * f + m + y; });
      block.store(x, p.out, t.m * R, 0);
    }
  };
};

/// Two matrices of `in`, part by part: out = in, but only of the rows of a tile's part. Rows outside of a part are read as `fill`.
template <class T, int R, int C, int Warps, int Width>
struct Parts {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using X = Rows<Target, float, R, C, Warps, Width>;
    struct Params {
      Global<Target, const T, X> in;
      Global<Target, T, X> out;
      Global<Target, float, X> all;  ///< what was read: [2, tiles * R, C]
      int first, count;              ///< the part of tile n is rows first + n R to first + n R + count - 1
      float fill;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const int first = p.first + t.m * R, count = max(min(p.count, p.in.rows - first), 0);
      X x;
      block.load(x, p.in.part(first, count, t.batch), 0, 0, 0, 0, Fill{p.fill});
      block.store(x, p.all, t.m * R, 0, t.batch);
      block.store(x, p.out.part(first, count, t.batch), 0, 0);
    }
  };
};

/// From rows of a tensor to values of a tile's rows and back: `out` = `in`, R columns at a time, and
/// spread(row, col) = in(row) of the tile's row, for the tensor's row t.batch of matrix 1.
template <class T, int R, int C, int Warps, int Width>
struct VectorsFromRows {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using X = Rows<Target, float, R, C, Warps, Width>;
    using Piece = Rows<Target, float, Warps, 128, Warps, 4>;
    struct Params {
      Global<Target, const T, Piece> in;
      Global<Target, const T> in_any;  ///< the same, of any strides
      Global<Target, T, Piece> out;
      Global<Target, T> out_any;
      Global<Target, float> spread;  ///< [in's rows, in's columns, C]
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X x;
      RowVector<Target, float, X> v, w;
      block.load_from_row(v, p.in, t.batch, t.m * R, 1);
      block.load_from_row(w, p.in_any, t.batch, t.m * R, 1);
      block.fill(x, 0.0f);
      block.map(x, v, w, [](auto, auto a, auto b) { return 0.5f * a + 0.5f * b; });
      block.store(x, p.spread, t.m * R, 0, t.batch);
      block.store_to_row(v, p.out, t.batch, t.m * R, 1);
      block.store_to_row(v, p.out_any, t.batch, t.m * R, 1);
    }
  };
};

/// The columns' sums of x and of y, R rows each, with one exchange: rows 0 and 1 of `sums` for each tile.
template <int R, int C, int Warps>
struct PairOfFolds {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    using X = Rows<Target, float, R, C, Warps>;
    struct Params {
      Global<Target, const float, X> x, y;
      Global<Target, float, X> sums;  ///< [tiles, R, C], all rows the same: those of x plus 1000 times those of y
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X tiles[2];
      ColumnVector<Target, float, X> sums[2];
      block.load(tiles[0], p.x, t.m * R, 0);
      block.load(tiles[1], p.y, t.m * R, 0);
      block.column_fold(tiles, sums, [](auto a, auto b) { return a + b; });
      block.map(tiles[0], sums[0], sums[1], [](auto, auto a, auto b) { return a + 1000.0f * b; });
      block.store(tiles[0], p.sums, 0, 0, t.m);
    }
  };
};

/// A tile as Rows or as a Fragment, for kernels that do not mind which.
template <int R, int C>
struct InRows {
  static constexpr int block_rows = 64;  // one warpgroup
  template <class Target>
  using Of = Rows<Target, float, R, C>;
};
template <int R, int C>
struct InFragment {
  static constexpr int block_rows = R;
  template <class Target>
  using Of = Fragment<Target, float, R, C>;
};

/// Of each row: the largest element, the sum, and the sum of squares, added up from the threads' shares. All three have p.in.rows elements.
template <class T, class Tiles>
struct RowStatistics {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    using X = typename Tiles::template Of<Target>;
    static constexpr int rows = Tiles::block_rows;
    struct Params {
      Global<Target, const T> in;
      float* largest;
      float* sum;
      float* squares;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X x;
      RowVector<Target, float, X> largest, sum, squares;
      const int row0 = t.m * X::rows;
      block.load(x, p.in, row0, 0);
      block.rows(x, [&](int i, auto row) {
        largest[i] = row.max();
        sum[i] = row.sum();
        squares[i] = row.map_partial_sum([](float value) { return value * value; });
      });
      block.complete(squares);
      block.for_rows(largest, [&](int row, int i, float& value) {
        if (row0 + row >= p.in.rows || !block.owns_rows(largest)) return;
        p.largest[row0 + row] = value;
        p.sum[row0 + row] = sum[i];
        p.squares[row0 + row] = squares[i];
      });
    }
  };
};

/// Of each row: the column of its largest element, the first one, and how many elements are larger than the limit. Integers in Rows;
/// elements are not negative.
template <int R, int C, int Warps>
struct LargestColumn {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    struct Params {
      Global<Target, const float> in;
      int* columns;
      int* above;
      float limit;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      using Keys = Rows<Target, u64, R, C, Warps>;
      Rows<Target, float, R, C, Warps> x;
      Keys keys;
      RowVector<Target, u64, Keys> largest;
      RowVector<Target, int, Keys> above;
      block.load(x, p.in, t.m * R, 0);
      block.for_each(x, keys, [](int, int col, float& value, u64& key) {
        key = static_cast<u64>(bit_cast<u32>(value)) << 32 | static_cast<u32>(C - col);
      });
      block.rows(keys, [&](int i, auto row) {
        largest[i] = row.max();
        above[i] = row.sum([&](u64 key) { return key >> 32 > bit_cast<u32>(p.limit) ? 1 : 0; });
      });
      block.for_rows(largest, [&](int row, int i, u64& key) {
        if (t.m * R + row >= p.in.rows || !block.owns_rows(largest)) return;
        p.columns[t.m * R + row] = C - static_cast<int>(key & 0xffffffffu);
        p.above[t.m * R + row] = above[i];
      });
    }
  };
};

/// For every row of `in`, numbers from 0 to Counters - 1, one after another: in which counter its n-th largest number is, and its numbers
/// from there on, sorted.
template <int Warps, int Counters, int Capacity>
struct LargestNumbers {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    static constexpr int C = Warps * 32;
    struct Params {
      Global<Target, const float> in;
      Global<Target, i32> located;  ///< [rows, 4]: the counter, how many are above it, how many are in it, how many numbers follow
      Global<Target, i64> numbers;  ///< [rows, Capacity]: number << 32 | column, zeros behind the first `sorted`
      int n;
      int sorted;
    };
    struct Memory {
      Histogram<Target, Counters> counters;
      List<Target, u64, Capacity> list;
      explicit constexpr Memory(auto& block) : counters(block), list(block) {}
    };
    TW_INLINE static void for_numbers(auto& block, const Params& p, int row, auto f) {
      for (int col = 0; col < p.in.cols; col += C) {
        Rows<Target, float, 1, C, Warps> x;
        block.load(x, p.in, row, col);
        block.for_each(x, [&](int, int c, float& value) {
          if (col + c < p.in.cols) f(static_cast<int>(value), col + c);
        });
      }
    }
    TW_INLINE static void compute(auto& block, const Params& p, Tile, Memory& memory) {
      block.clear(memory.counters);
      for (int row = 0; row < p.in.rows; ++row) {
        for_numbers(block, p, row, [&](int number, int) { block.count(memory.counters, number); });
        const Located found = block.locate(memory.counters, p.n);
        block.clear(memory.list);
        for_numbers(block, p, row, [&](int number, int col) {
          if (number >= found.counter) block.append(memory.list, static_cast<u64>(number) << 32 | static_cast<u32>(col));
        });
        const int size = block.size(memory.list);
        block.sort(memory.list, p.sorted);
        block.parallel(Capacity, [&](int i) {
          *p.numbers.template at<i64>(row, i, 0, 0) = i < min(size, p.sorted) ? static_cast<i64>(memory.list[i]) : 0;
        });
        const int results[] = {found.counter, found.above, found.count, size};
        block.parallel(4, [&](int i) { *p.located.template at<i32>(row, i, 0, 0) = results[i]; });
      }
    }
  };
};

/// For every row of `in`: its elements of at least 0, and 2 * column + 1 of those below 0, both in the order of columns.
template <int Warps, int Columns, int Capacity>
struct PartedRows {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int warps = Warps;
    struct Params {
      Global<Target, const float> in;
      Global<Target, float> elements;  ///< [rows, Capacity]
      Global<Target, i32> columns;     ///< [rows, Capacity]: as many as fit
      Global<Target, i32> counts;      ///< [rows, 2]
    };
    struct Memory {
      List<Target, float, Capacity> elements;
      List<Target, u32, Capacity> columns;
      explicit constexpr Memory(auto& block) : elements(block), columns(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      block.clear(memory.elements);
      block.clear(memory.columns);
      for (int first = 0; first < p.in.cols; first += Columns) {
        Rows<Target, float, 1, Columns, Warps> x;
        block.load(x, p.in, t.m, first);
        block.append_in_order(memory.elements, x, [&](int col, auto value) { return first + col < p.in.cols && value >= 0; });
        block.append_few(
            memory.columns, x, [&](int col, auto value) { return first + col < p.in.cols && value < 0; },
            [&](int col, auto value) { return static_cast<u32>(2 * (first + col)) + (value < 0 ? 1u : 0u); });
      }
      const int sizes[] = {block.size(memory.elements), block.size(memory.columns)};
      block.parallel(2, [&](int i) { *p.counts.template at<i32>(t.m, i, 0, 0) = sizes[i]; });
      block.parallel(sizes[0], [&](int i) { *p.elements.template at<float>(t.m, i, 0, 0) = memory.elements[i]; });
      block.parallel(sizes[1], [&](int i) { *p.columns.template at<i32>(t.m, i, 0, 0) = static_cast<i32>(memory.columns[i]); });
    }
  };
};

/// flags[row] = 1 where any of the rows that the thread looks at has an element above the limit.
template <int R, int C>
struct AnyAbove {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int rows = R;
    struct Params {
      Global<Target, const float> in;
      float* flags;
      float limit;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Fragment<Target, float, R, C> x;
      RowVector<Target, float, Fragment<Target, float, R, C>> largest;
      block.load(x, p.in, t.m * R, 0);
      block.rows(x, [&](int i, auto row) { largest[i] = row.max(); });
      const float flag = block.any(largest, [&](float value) { return value > p.limit; }) ? 1.0f : 0.0f;
      block.for_rows(largest, [&](int row, int, float&) {
        if (block.owns_rows(largest)) p.flags[t.m * R + row] = flag;
      });
    }
  };
};

/// minus_sum = x - the sum of its column, minus_max = x - the largest of its column, each over the R rows of a tile.
template <int R, int C>
struct ColumnReductions {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int rows = R;
    struct Params {
      Global<Target, const float> in;
      Global<Target, float> minus_sum;
      Global<Target, float> minus_max;
    };
    struct Memory {
      Scratch<Target, float, R, C> scratch;
      explicit constexpr Memory(auto& block) : scratch(block) {}
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory) {
      Fragment<Target, float, R, C> x;
      ColumnVector<Target, float, Fragment<Target, float, R, C>> sum, largest;
      block.load(x, p.in, t.m * R, t.n * C);
      block.column_sum(x, sum, memory.scratch);
      block.column_max(x, largest, memory.scratch);
      Fragment<Target, float, R, C> y = x;
      block.map(x, sum, [](float value, float s) { return value - s; });
      block.map(y, largest, [](float value, float m) { return value - m; });
      block.store(x, p.minus_sum, t.m * R, t.n * C);
      block.store(y, p.minus_max, t.m * R, t.n * C);
    }
  };
};

/// out(row, col) = 1000 row + col + 2 other(row, col), by way of everything that visits elements. row and col count from the tile's first
/// element.
template <class Tiles>
struct Indices {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    using X = typename Tiles::template Of<Target>;
    static constexpr int rows = Tiles::block_rows;
    struct Params {
      Global<Target, const float> other;
      Global<Target, float> out;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      X x, y;
      block.fill(x, 0.5f);
      block.fill(y, -1.0f);
      block.for_each(x, [](int row, int col, float& value) { value += static_cast<float>(row * 1000 + col); });
      block.for_each(x, y, [](int row, int, float& a, float& b) { b = row < 0 ? b : a + b + 0.5f; });
      block.for_each_with(y, p.other, t.m * X::rows, t.n * X::cols, 0, 0, [](int, int, float& value, float z) { value += 2 * z; });
      block.store(y, p.out, t.m * X::rows, t.n * X::cols);
    }
  };
};
/// out += in, all batches onto one tensor.
template <int R, int C>
struct AddUp {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int rows = R;
    struct Params {
      Global<Target, const float> in;
      Global<Target, float> out;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Fragment<Target, float, R, C> x;
      block.load(x, p.in, t.m * R, t.n * C, t.batch);
      block.atomic_add(x, p.out, t.m * R, t.n * C);
    }
  };
};

/// Prints 100 row + col, in the first tile.
struct Printed {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    static constexpr int rows = 64;
    struct Params {};
    TW_INLINE static void compute(auto& block, const Params&, Tile) {
      Fragment<Target, float, 64, 8> x;
      block.for_each(x, [](int row, int col, float& value) { value = static_cast<float>(100 * row + col); });
      block.print("x", x);
    }
  };
};

/// The element functions, by number.
enum class Function { exp2, log2, exp, sqrt, rsqrt, reciprocal, tanh, erf, sin, cos, sigmoid, relu, silu, gelu_erf, gelu_tanh, count };

TW_INLINE float apply(Function function, float x) {
  switch (function) {
    case Function::exp2:
      return exp2(x);
    case Function::log2:
      return log2(x);
    case Function::exp:
      return exp(x);
    case Function::sqrt:
      return sqrt(x);
    case Function::rsqrt:
      return rsqrt(x);
    case Function::reciprocal:
      return reciprocal(x);
    case Function::tanh:
      return tanh(x);
    case Function::erf:
      return erf(x);
    case Function::sin:
      return sin(x);
    case Function::cos:
      return cos(x);
    case Function::sigmoid:
      return sigmoid(x);
    case Function::relu:
      return Relu::apply(x);
    case Function::silu:
      return Silu::apply(x);
    case Function::gelu_erf:
      return GeluErf::apply(x);
    case Function::gelu_tanh:
      return GeluTanh::apply(x);
    case Function::count:
      break;
  }
  return x;
}

/// out = function(in)
template <int R, int C>
struct ElementFunction {
  static constexpr const char* source = kLanguageKernels;
  template <class Target>
  struct On {
    struct Params {
      Global<Target, const float> in;
      Global<Target, float> out;
      Function function;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Rows<Target, float, R, C> x;
      block.load(x, p.in, t.m * R, t.n * C);
      block.for_each(x, [&](int, int, float& value) { value = apply(p.function, value); });
      block.store(x, p.out, t.m * R, t.n * C);
    }
  };
};

}  // namespace tw::test
