#pragma once

#include "tilewave/tile/language.tile.hpp"
#include "tilewave/tile/math.tile.hpp"

// An Epilogue defines what happens to the accumulators of a product. The kernels of matrix products (gemm, its sums over splits of K, its
// product with one row) and of convolution take one, which may be user-defined (tilewave/gemm_with.hpp):
//
//   struct MyEpilogue {
//     template <class Target, class Acc>
//     struct On {
//       struct Params { ... };  // Globals and numbers that the host fills in
//       struct Memory {         // shared memory for results on their way out, or nothing
//         Staging<Target, bf16, Acc::rows, Acc::cols> out;
//         explicit constexpr Memory(auto& block) : out(block) {}
//       };
//       TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory& memory, const Place& at);
//     };
//   };
//
// `Acc` is the tile of accumulators: a Fragment in a product, Rows in the sum of splits, a RowVector in the product with one row. An
// epilogue that treats each accumulator separately may declare `static constexpr bool elementwise = true;`. On the generic GPU target warps
// then share rows, which is faster. Otherwise each warp holds whole rows, so that the epilogue can reduce them.

namespace tw {

/// The position of a tile in D.
struct Place {
  int row, col;  ///< of its first element
  int batch;
};

/// The position of a tile whose rows are a window of pixels: its first pixel and its first channel.
struct WindowPlace {
  int pixel_col;
  int col;  ///< channel
  int pixel_row, image;
};

/// An epilogue that needs no shared memory.
struct NoMemory {
  explicit constexpr NoMemory(auto&) {}
};

namespace epilogue {

/// How an epilogue accesses tensors.
enum class Meeting {
  fragment,  ///< element by element; results are stored through Staging
  rows,      ///< as Rows of the same layout
  vector     ///< the product has one row, and D is transposed: a RowVector holds a part of it
};
template <class Acc>
constexpr Meeting meeting() {
  if constexpr (requires { Acc::kind; })
    return Acc::kind == TileKind::fragment ? Meeting::fragment : Meeting::rows;
  else
    return Meeting::vector;
}

/// x = f(x) for every accumulator.
template <class Acc, class Fn>
TW_INLINE void map(auto& block, Acc& acc, Fn f) {
  if constexpr (meeting<Acc>() == Meeting::fragment)
    block.for_each(acc, [&](int, int, auto& x) { x = f(x); });
  else if constexpr (meeting<Acc>() == Meeting::rows)
    block.map(acc, f);
  else
    block.for_rows(acc, [&](int, int, auto& x) { x = f(x); });
}

/// x = f(x, y) for every accumulator and the tensor's element y at its place.
template <class Acc, class G, class Fn>
TW_INLINE void map_with(auto& block, Acc& acc, const G& tensor, const Place& at, Fn f) {
  if constexpr (meeting<Acc>() == Meeting::fragment) {
    block.for_each_with(acc, tensor, at.row, at.col, at.batch, 0, [&](int, int, auto& x, auto y) { x = f(x, y); });
  } else {
    Acc values;
    block.load(values, tensor, at.row, meeting<Acc>() == Meeting::rows ? at.col : 0, at.batch);
    if constexpr (meeting<Acc>() == Meeting::rows)
      block.map(acc, values, f);
    else
      block.for_rows(acc, [&](int, int i, auto& x) { x = f(x, values[i]); });
  }
}

/// The tile type that D's Global is bound with, the Global of a tensor that is added, and that of a bias.
template <class Target, class T, class Acc, bool kPairs = false, Meeting = meeting<Acc>()>
struct Ends {  // for a Fragment
  static constexpr int cols = kPairs ? Acc::cols / 2 : Acc::cols;
  using Pairs = Fragment<Target, float, Acc::rows, Acc::cols / 2>;
  using Out = Staging<Target, T, Acc::rows, cols>;
  using Added = Global<Target, const T>;
  using Bias = Pointer<Target, const T>;
  struct Memory {
    Out out;
    explicit constexpr Memory(auto& block) : out(block) {}
  };
};
template <class Target, class T, class Acc>
struct Ends<Target, T, Acc, false, Meeting::rows> {
  using Out = Acc;
  using Added = Global<Target, const T, Acc>;
  using Bias = Global<Target, const T, Acc>;
  using Memory = NoMemory;
};
/// Rows for the results of pairs of columns. Each thread keeps its pairs; Rows of targets without threads do not say how these share them.
template <class Target, class Acc>
struct HalfRows {
  using Type = Rows<Target, float, Acc::rows, Acc::cols / 2, 1, 1>;
};
template <class Target, class Acc>
requires requires { Acc::row_lanes; }
struct HalfRows<Target, Acc> {
  using Type = Rows<Target, float, Acc::rows, Acc::cols / 2, Acc::warps, Acc::width / 2>;
};
template <class Target, class T, class Acc>
struct Ends<Target, T, Acc, true, Meeting::rows> {
  using Pairs = typename HalfRows<Target, Acc>::Type;
  using Out = Pairs;
  using Added = Global<Target, const T, Acc>;
  using Bias = Global<Target, const T, Acc>;
  using Memory = NoMemory;
};
template <class Target, class T, class Acc>
struct Ends<Target, T, Acc, false, Meeting::vector> {
  using Out = void;
  using Added = Global<Target, const T>;
  using Bias = Global<Target, const T>;
  using Memory = NoMemory;
};

/// acc += bias. Columns from `cols` on have no bias.
template <class Target, class Acc, class Bias, class At>
TW_INLINE void add_bias(auto& block, Acc& acc, const Bias& bias, const At& at, int cols) {
  if constexpr (meeting<Acc>() == Meeting::fragment) {
    // Without branches loads are in flight together, for which wide tiles have no registers.
    constexpr bool together = Acc::rows <= 128 && Acc::cols <= 192;
    block.for_each(acc, [&](int, int col, auto& x) {
      if constexpr (together)
        x += static_cast<float>(bias[min(at.col + col, cols - 1)]);
      else if (at.col + col < cols)
        x += static_cast<float>(bias[at.col + col]);
    });
  } else if constexpr (meeting<Acc>() == Meeting::rows) {
    ColumnVector<Target, float, Acc> values;
    block.load(values, bias, 0, at.col);
    block.map(acc, values, [](auto x, auto b) { return x + b; });
  } else {
    map_with(block, acc, bias, Place{at.row, 0, 0}, [](auto x, auto b) { return x + b; });
  }
}

template <class Acc, class G, class Memory>
TW_INLINE void store(auto& block, const Acc& acc, const G& d, Memory& memory, const Place& at) {
  if constexpr (meeting<Acc>() == Meeting::fragment)
    block.store(acc, memory.out, d, at.row, at.col, at.batch);
  else
    block.store(acc, d, at.row, meeting<Acc>() == Meeting::rows ? at.col : 0, at.batch);
}
template <class Acc, class G, class Memory>
TW_INLINE void store(auto& block, const Acc& acc, const G& d, Memory& memory, const WindowPlace& at) {
  block.store_window(acc, memory.out, d, at.pixel_col, at.col, at.pixel_row, at.image);
}

/// acc += bias, which has a value for each row. Rows from `rows` on have none.
template <class Acc, class Bias>
TW_INLINE void add_row_bias(auto& block, Acc& acc, const Bias& bias, int row0, int rows) {
  block.for_each(acc, [&](int row, int, auto& x) {
    if (row0 + row < rows) x += static_cast<float>(bias[row0 + row]);
  });
}

/// Whether the epilogue reads tensors as large as D, as its constant `addends` says.
template <class Epilogue>
constexpr bool reads_addends_of() {
  if constexpr (requires { Epilogue::addends; }) return Epilogue::addends;
  return false;
}
template <class Epilogue>
inline constexpr bool reads_addends = reads_addends_of<Epilogue>();

/// Whether the sums begin with what the epilogue's begin() loads, as its constant `begins` says. See LinearOptions.
template <class Epilogue>
constexpr bool begins_of() {
  if constexpr (requires { Epilogue::begins; }) return Epilogue::begins;
  return false;
}
template <class Epilogue>
inline constexpr bool begins = begins_of<Epilogue>();

/// Whether the epilogue treats each accumulator separately, as its constant `elementwise` says.
template <class Epilogue>
constexpr bool is_elementwise() {
  if constexpr (requires { Epilogue::elementwise; }) return Epilogue::elementwise;
  return false;
}

}  // namespace epilogue

/// D = acc: for splits of K, which another kernel adds up, and for integer products.
template <class T>
struct StoreSums {
  static constexpr bool elementwise = true;
  template <class Target, class Acc>
  struct On {
    struct Params {
      Global<Target, T, typename epilogue::Ends<Target, T, Acc>::Out> d;
    };
    using Memory = NoMemory;
    TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory&, const Place& at) {
      block.store(acc, p.d, at.row, at.col, at.batch);
    }
  };
};

/// An activation chosen at run time by Params::activation: for the CPU, one instantiation instead of five.
struct AnyActivation {
  enum Kind { identity, relu, silu, gelu_erf, gelu_tanh };

  template <class Acc>
  TW_INLINE static void apply(auto& block, Acc& acc, int kind) {
    const auto map = [&]<class Act>(Act) { epilogue::map(block, acc, [](auto x) { return Act::apply(x); }); };
    if (kind == relu) map(Relu{});
    if (kind == silu) map(Silu{});
    if (kind == gelu_erf) map(GeluErf{});
    if (kind == gelu_tanh) map(GeluTanh{});
  }
};

/// What a Linear epilogue does in addition to alpha, bias and activation.
struct LinearOptions {
  bool addends = false;   ///< reads C or a residual, which costs registers
  bool scales = false;    ///< reads the scales of fp8 operands, one number for each operand
  bool windowed = false;  ///< stores D in windows: a convolution
  /// Stores D transposed, [N, M]. The bias has M values. C and the residual are read as [M, N].
  bool transposed = false;
  /// The sums begin with the residual and the bias, which are loaded while the first operands arrive and need no registers but those of the
  /// accumulators. For alpha = 1, beta = 0 and no activation.
  bool begins = false;
  bool row_scales = false;  ///< reads a scale for each row of A and each column of B, instead of one number for each
};

/// D = activation(alpha acc + beta C + bias) + residual. The SwiGlu activation turns each pair of columns into one.
template <class T, class Activation, LinearOptions options = LinearOptions{}>
struct Linear {
  static constexpr bool addends = options.addends, begins = options.begins, elementwise = true;
  static constexpr bool pairs = is_same<Activation, SwiGlu>;  ///< whether D has half of the product's columns
  static_assert(!begins || (is_same<Activation, Identity> && !addends && !options.scales && !options.windowed && !options.transposed &&
                            !options.row_scales),
                "sums begin with a residual where nothing but that and a bias is added to them");
  template <class Target, class Acc>
  struct On {
    static_assert(!options.transposed || !pairs,
                  "SwiGLU takes pairs of D's columns, which are not neighbours where D is stored transposed");
    using Ends = epilogue::Ends<Target, T, Acc, pairs>;
    using Memory = typename Ends::Memory;

    struct Params {
      typename Ends::Added c;         ///< read if beta is not 0
      typename Ends::Added residual;  ///< read if has_residual
      conditional<options.windowed, Windowed<Target, T, typename Ends::Out>, Global<Target, T, typename Ends::Out>> d;
      typename Ends::Bias bias;        ///< N values
      const float* a_scale;            ///< one number, one for each row of D, or null
      const float* b_scale;            ///< the same for columns of the product
      i64 a_scale_step, b_scale_step;  ///< from a row's or a column's scale to the next: 0 if all have one
      float alpha, beta;
      bool has_bias, has_residual;
      int activation;  ///< an AnyActivation::Kind, if the activation is AnyActivation
    };

    TW_INLINE static void begin(auto& block, Acc& acc, const Params& p, const Place& at) {
      block.load(acc, p.residual, at.row, at.col, at.batch);
      if (p.has_bias) epilogue::add_bias<Target>(block, acc, p.bias, at, p.d.cols);
    }

    TW_INLINE static void apply(auto& block, Acc& acc, const Params& p, Memory& memory, const auto& at) {
      if constexpr (begins) {
        epilogue::store(block, acc, p.d, memory, at);
      } else {
        add_and_store(block, acc, p, memory, at);
      }
    }

   private:
    TW_INLINE static void add_and_store(auto& block, Acc& acc, const Params& p, Memory& memory, const auto& at) {
      float alpha = p.alpha;
      if constexpr (options.scales) {
        if (p.a_scale) alpha *= *p.a_scale;
        if (p.b_scale) alpha *= *p.b_scale;
      }
      epilogue::map(block, acc, [alpha](auto x) { return x * alpha; });
      if constexpr (options.row_scales) {
        const int last_row = p.d.rows - 1, last_col = (pairs ? 2 * p.d.cols : p.d.cols) - 1;
        block.for_each(acc, [&](int row, int col, auto& x) {
          x *= p.a_scale[min(at.row + row, last_row) * p.a_scale_step] * p.b_scale[min(at.col + col, last_col) * p.b_scale_step];
        });
      }
      if constexpr (options.addends) {
        if (p.beta != 0.0f) epilogue::map_with(block, acc, p.c, at, [beta = p.beta](auto x, auto c) { return x + beta * c; });
      }
      if (p.has_bias) {
        if constexpr (options.transposed)
          epilogue::add_row_bias(block, acc, p.bias, at.row, p.d.cols);
        else
          epilogue::add_bias<Target>(block, acc, p.bias, at, pairs ? 2 * p.d.cols : p.d.cols);
      }
      if constexpr (pairs) {
        typename Ends::Pairs out;
        block.pairs(out, acc, [](auto gate, auto up) { return SwiGlu::apply(gate, up); });
        epilogue::store(block, out, p.d, memory, Place{at.row, at.col / 2, at.batch});
      } else {
        if constexpr (is_same<Activation, AnyActivation>)
          AnyActivation::apply(block, acc, p.activation);
        else
          epilogue::map(block, acc, [](auto x) { return Activation::apply(x); });
        if constexpr (options.addends) {
          if (p.has_residual) epilogue::map_with(block, acc, p.residual, at, [](auto x, auto r) { return x + r; });
        }
        if constexpr (options.transposed)
          block.store_transposed(acc, memory.out, p.d, at.col, at.row, at.batch);
        else
          epilogue::store(block, acc, p.d, memory, at);
      }
    }
  };
};

}  // namespace tw
