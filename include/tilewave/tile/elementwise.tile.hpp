#pragma once

#include "tilewave/tile/language.tile.hpp"

// Functions of one element of each of up to four tensors, and the kernel that applies one to whole tensors. A function is a type F with
// F::apply(float...) of one to four arguments: one from this file, an activation from math.tile.hpp, a Chain of others, or a user-defined
// one. The latter is in an embedded file that includes this one; F::source names it.

namespace tw {

struct Add {
  template <class X>
  TW_INLINE static X apply(X a, X b) {
    return a + b;
  }
};
struct Mul {
  template <class X>
  TW_INLINE static X apply(X a, X b) {
    return a * b;
  }
};
/// x * Numerator / Denominator.
template <int Numerator, int Denominator = 1>
struct Scale {
  static constexpr float factor = static_cast<float>(Numerator) / static_cast<float>(Denominator);
  template <class X>
  TW_INLINE static X apply(X x) {
    return x * factor;
  }
};

namespace detail {

/// The number of arguments of F::apply.
template <class F>
constexpr int arity() {
  if constexpr (requires { F::arity; })
    return F::arity;
  else if constexpr (requires { F::apply(0.0f); })
    return 1;
  else if constexpr (requires { F::apply(0.0f, 0.0f); })
    return 2;
  else if constexpr (requires { F::apply(0.0f, 0.0f, 0.0f); })
    return 3;
  else
    return 4;
}

template <class First, class... Rest>
struct ChainFrom {
  template <class A, class... X>
  TW_INLINE static A apply(A a, X... x) {
    return first(Constant<arity<First>()>{}, a, x...);
  }

 private:
  /// `First` takes as many arguments as it has. Its result and the remaining arguments go to the rest.
  template <class A, class... X>
  TW_INLINE static A first(Constant<1>, A a, X... x) {
    return rest(First::apply(a), x...);
  }
  template <class A, class... X>
  TW_INLINE static A first(Constant<2>, A a, A b, X... x) {
    return rest(First::apply(a, b), x...);
  }
  template <class A, class... X>
  TW_INLINE static A first(Constant<3>, A a, A b, A c, X... x) {
    return rest(First::apply(a, b, c), x...);
  }
  template <class A, class... X>
  TW_INLINE static A first(Constant<4>, A a, A b, A c, A d, X... x) {
    return rest(First::apply(a, b, c, d), x...);
  }
  template <class A, class... X>
  TW_INLINE static A rest(A a, X... x) {
    if constexpr (sizeof...(Rest) == 0)
      return a;
    else
      return ChainFrom<Rest...>::apply(a, x...);
  }
};

}  // namespace detail

/// Function composition: Chain<F, G, H> is h(g(f(...))). F takes the first inputs. Each later function takes the result so far as its first
/// argument, and the next inputs as the others. Chain<Silu, Mul> of (gate, up) is silu(gate) * up.
template <class... F>
struct Chain {
  static constexpr int arity = (detail::arity<F>() + ...) - static_cast<int>(sizeof...(F)) + 1;
  template <class... X>
  TW_INLINE static auto apply(X... x) {
    return detail::ChainFrom<F...>::apply(x...);
  }
};

namespace detail {

/// The file that defines F, or null if this file or the language does. All functions of a chain come from one such file or its includes.
template <class F>
struct SourceOf {
  static constexpr const char* get() {
    if constexpr (requires { F::source; }) return F::source;
    return nullptr;
  }
};
template <class... F>
struct SourceOf<Chain<F...>> {
  static constexpr const char* get() {
    const char* found = nullptr;
    ((found = found ? found : SourceOf<F>::get()), ...);
    return found;
  }
};

}  // namespace detail

/// out = F::apply(in[0], ...) on tensors of one shape, computed in f32. A tile is R x C elements. A warp's lanes hold neighbouring 16-byte
/// pieces, and a thread has about four loads in flight.
template <class F, class T>
struct Elementwise {
  static constexpr const char* source = detail::SourceOf<F>::get() ? detail::SourceOf<F>::get() : "tilewave/tile/elementwise.tile.hpp";
  using Function = F;
  static constexpr int inputs = detail::arity<F>();
  static_assert(inputs >= 1 && inputs <= 4, "an element function has one to four arguments");
  static constexpr int width = 16 / static_cast<int>(sizeof(T));
  static constexpr int tile_rows = 4 * ceil_div(4, inputs);
  static constexpr int tile_cols = 32 * width;

  template <class Target>
  struct On {
    static constexpr int min_blocks = 8;
    static constexpr int vector_bytes = 64;
    using X = Rows<Target, float, tile_rows, tile_cols, 4, width>;
    struct Part {
      Global<Target, const T, X> in[inputs];
      Global<Target, T, X> out;
    };
    struct Params {
      Part parts[2];  ///< the part made of whole rows of tile_cols elements, and the remaining elements
      int tiles;      ///< tiles of the first part along m; the second part has one more
    };

    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      const Part& part = p.parts[t.m < p.tiles ? 0 : 1];
      const int row = t.m < p.tiles ? t.m * tile_rows : 0, col = t.n * tile_cols;
      const int j = part.out.size_j == 1 ? 0 : t.batch / part.out.size_i, i = t.batch - j * part.out.size_i;
      X x[inputs];
      TW_UNROLL
      for (int n = 0; n < inputs; ++n) block.load(x[n], part.in[n], row, col, i, j);
      const auto f = [](auto... values) { return F::apply(values...); };
      if constexpr (inputs == 1) block.map(x[0], f);
      if constexpr (inputs == 2) block.map(x[0], x[1], f);
      if constexpr (inputs == 3) block.map(x[0], x[1], x[2], f);
      if constexpr (inputs == 4) block.map(x[0], x[1], x[2], x[3], f);
      block.store(x[0], part.out, row, col, i, j);
    }
  };
};

}  // namespace tw
