#pragma once

#include "tilewave/tile/grid.tile.hpp"

// The requirements on targets and kernels. Both are checked where a kernel is compiled for a target, so that a member that is missing,
// misspelled or takes other arguments is an error that names it. language.tile.hpp explains each member.

namespace tw {

namespace detail {

// Calls with these arguments are checked but not compiled, so any type may stand for a kernel's `auto&`.
struct AnyBlock {};
struct AnyProducer {};
struct AnyState {};
/// Argument of DividedScales: see packed.tile.hpp.
struct AnyFormat {
  using Codes = u4x2;
  using Scale = f16;
  static constexpr int group = 32;
  static constexpr bool zeros = true;
};
template <class T>
T& any();
template <class A, class B>
concept SameAs = is_same<A, B>;

/// What a kernel's roles take as their tile, and what compute() leaves for finish().
template <class On>
struct RolesOf {
  using Work = Tile;
};
template <class On>
requires requires { typename On::Work; }
struct RolesOf<On> {
  using Work = typename On::Work;
};
template <class On>
struct StateTypeOf {
  using Type = AnyState;
};
template <class On>
requires requires { typename On::State; }
struct StateTypeOf<On> {
  using Type = typename On::State;
};
template <class On>
using WorkArgument = const typename RolesOf<On>::Work;
template <class On>
using ParamsArgument = const typename On::Params;

template <class On>
concept HasParams = requires {
  typename On::Params;
};
template <class On>
concept HasMemory = requires {
  typename On::Memory;
};
template <class On>
concept HasWork = !requires {
  typename On::Work;
}
|| requires {
  { On::work(any<ParamsArgument<On>>(), any<const Tile>()) } -> SameAs<typename RolesOf<On>::Work>;
};
template <class On>
concept HasSteps = requires {
  { On::steps(any<ParamsArgument<On>>(), any<WorkArgument<On>>()) } -> SameAs<int>;
};
template <class On>
concept HasLoad = requires {
  On::load(any<AnyProducer>(), any<ParamsArgument<On>>(), any<WorkArgument<On>>(), 0, any<typename On::Memory>());
};
template <class On>
concept HasCompute = requires {
  On::compute(any<AnyBlock>(), any<ParamsArgument<On>>(), any<WorkArgument<On>>(), any<typename On::Memory>(),
              any<typename StateTypeOf<On>::Type>());
};
template <class On>
concept HasFinish = requires {
  On::finish(any<AnyBlock>(), any<ParamsArgument<On>>(), any<WorkArgument<On>>(), any<typename On::Memory>(),
             any<typename StateTypeOf<On>::Type>());
};
template <class On>
concept HasRing = !requires {
  On::teams;
}
|| requires { On::ring(any<typename On::Memory>()); };
template <class On>
concept HasOutbox = requires {
  On::outbox(any<typename On::Memory>());
};
template <class On>
concept HasComputeAlone = requires {
  On::compute(any<AnyBlock>(), any<ParamsArgument<On>>(), any<const Tile>());
}
|| requires { On::compute(any<AnyBlock>(), any<ParamsArgument<On>>(), any<const Tile>(), any<typename On::Memory>()); };

}  // namespace detail

/// A kernel on a target: Kernel::On<Target>. A kernel with steps() has rings, which load() fills and compute() empties. Any other kernel
/// only has compute().
template <class On>
concept KernelWithRings = detail::HasParams<On> && detail::HasMemory<On> && detail::HasWork<On> && detail::HasSteps<On> &&
    detail::HasLoad<On> && detail::HasCompute<On> && detail::HasFinish<On> && detail::HasRing<On>;
template <class On>
concept Kernel = KernelWithRings<On> ||(detail::HasParams<On>&& detail::HasComputeAlone<On>);

/// The types that a target provides to kernels. A target's blocks must also have the members listed in docs/language.md.
template <class T>
concept Target = requires {
  T::whole_pieces;
  typename T::template Global<const float, void, 1>;
  typename T::template Pointer<const float>;
  typename T::template Shared<float, 64, 64, Contract::columns>;
  typename T::template Ring<int, 2>;
  typename T::template Widened<fp8_e4m3, 64, 128>;
  typename T::template GatherRing<int, 2>;
  typename T::template Fragment<float, 64, 64>;
  typename T::template TeamFragment<float, 128, 64, 2>;
  typename T::template SoloFragment<float, 64, 64, 2>;
  typename T::template Operand<float, 64, 64>;
  typename T::template DividedSums<16, 8, 4>;
  typename T::template DividedSquares<8, 4>;
  typename T::template DividedOperand<bf16, 8, 128, 4>;
  typename T::template DividedRow<bf16, 1024, 4>;
  typename T::template DigitScales<8, 4>;
  typename T::template DividedScales<16, 128, detail::AnyFormat, 4>;
  typename T::template Rows<float, 4, 32, 4, 0>;
  typename T::template RowVector<float, void>;
  typename T::template ColumnVector<float, void>;
  typename T::template Staging<float, 64, 64>;
  typename T::template Outbox<64, 64>;
  typename T::template Scratch<float, 64, 64>;
  typename T::template Buffer<float, 64, 64, Contract::columns>;
  typename T::template SharedStrip<float, 64>;
  typename T::template SharedVector<float, 64>;
  typename T::template VectorBuffer<float, 64>;
  typename T::template RowExchange<float, typename T::template Fragment<float, 64, 64>>;
  typename T::template Histogram<256>;
  typename T::template List<float, 64>;
};

namespace detail {

/// Reports what a kernel lacks.
template <class On>
constexpr void require_kernel() {
  static_assert(HasParams<On>, "a kernel has a struct Params: what the host fills in");
  if constexpr (requires { &On::steps; }) {
    static_assert(HasWork<On>, "a kernel with a struct Work has Work work(const Params&, Tile)");
    static_assert(HasSteps<On>, "a kernel's steps are int steps(const Params&, Tile), or of its Work");
    static_assert(HasMemory<On>, "a kernel with steps() has a struct Memory: its rings");
    if constexpr (HasMemory<On> && HasWork<On>) {
      static_assert(HasLoad<On>, "a kernel with steps() has load(auto& producer, const Params&, Tile, int step, Memory&), or of its Work");
      static_assert(HasCompute<On>, "a kernel with steps() has compute(auto& block, const Params&, Tile, Memory&, State&), or of its Work");
      static_assert(HasFinish<On>, "a kernel with steps() has finish(auto& block, const Params&, Tile, Memory&, State&), or of its Work");
      static_assert(HasRing<On>, "a kernel with teams has auto& ring(Memory&): its only ring");
    }
  } else {
    static_assert(HasComputeAlone<On>,
                  "a kernel without steps() has compute(auto& block, const Params&, Tile), and Memory& where it has one");
  }
}

}  // namespace detail
}  // namespace tw
