#pragma once

#include "tilewave/tile/cpu/block.tile.hpp"

#if !TW_ON_GPU

namespace tw::cpu {

/// Called at the end of a tile. Every step must have been loaded, and every slot taken and released, because on a GPU the next tile
/// continues with the same rings.
inline void require_nothing_left(int steps_left, const RingState* last_ring) {
  if (steps_left != 0) schedule_error("the tile ends before its last step was loaded: on a GPU the next tile would take this one's slots");
  for (const RingState* ring = last_ring; ring != nullptr; ring = ring->previous) {
    if (ring->filled != 0)
      schedule_error("the tile ends with a slot that was filled and never taken: on a GPU the next tile would take it");
    if (ring->taken != 0)
      schedule_error("the tile ends with a slot that was taken and never released: on a GPU the kernel would wait forever");
  }
}

/// The kernel's Outbox is what its outbox() returns: on a GPU run() only knows that one.
template <class On>
void require_outbox(typename On::Memory& memory, const void* outbox) {
  const void* named = nullptr;
  if constexpr (tw::detail::HasOutbox<On>) named = &On::outbox(memory);
  if (named != outbox) schedule_error("a kernel's outbox() does not return the last Outbox of its Memory: on a GPU nothing would be added");
}

/// The slots filled and not taken, of all rings.
inline int slots_filled(const RingState* last_ring) {
  int count = 0;
  for (const RingState* ring = last_ring; ring != nullptr; ring = ring->previous) count += ring->filled;
  return count;
}

/// Throws unless all blocks of the tile's cluster take `steps` steps: in every step they load parts of each other's tiles.
template <class On>
void require_equal_steps(const typename On::Params& params, const Tile& tile, int steps) {
  constexpr int cluster = tw::detail::cluster_of<On>();
  Tile neighbour = tile;
  for (int rank = 0; rank < cluster; ++rank) {
    neighbour.m = tile.m / cluster * cluster + rank;
    if (On::steps(params, On::work(params, neighbour)) != steps)
      schedule_error("the blocks of a cluster take different numbers of steps: on a GPU one would wait forever for what the other loads");
  }
}

/// Bytes of tile memory that a thread needs to run the kernel.
template <class On>
i64 memory_bytes() {
  return tw::detail::memory_bytes_of<On, Allocator>();
}

template <class On>
TW_INLINE void run_here(const typename On::Params& params, const TileGrid& grid, int index, u8* arena) {
  const Tile place = tw::detail::ScheduleOf<On>::Type::at(grid, index);
  const auto tile = tw::detail::work_of<On>(params, place);
  Allocator allocator{arena};
  constexpr bool persistent = tw::detail::ScheduleOf<On>::Type::dispatch != Dispatch::plain;
  if constexpr (tw::detail::has_load<On>) {
    struct Loads {
      const typename On::Params& params;
      const decltype(tile)& work;
      typename On::Memory memory;
      int step = 0;
      int steps;
      const RingState* last_ring;
    } loads{params, tile, typename On::Memory(allocator), 0, On::steps(params, tile), nullptr};
    loads.last_ring = allocator.last_ring;
    require_outbox<On>(loads.memory, allocator.last_outbox);
    if constexpr (tw::detail::cluster_of<On>() > 1 && requires { typename On::Work; }) require_equal_steps<On>(params, place, loads.steps);
    const auto pull = [](void* context) {
      Loads& l = *static_cast<Loads*>(context);
      if (l.step == l.steps) return false;
      const Producer producer;
      [[maybe_unused]] const int before = slots_filled(l.last_ring);
      On::load(producer, l.params, l.work, l.step++, l.memory);
      if constexpr (tw::detail::teams_of<On>() > 1) {
        if (slots_filled(l.last_ring) != before + 1)
          schedule_error("a step fills another number of slots than one: on a GPU a team would take slots of another's tile");
      }
      return true;
    };
    Block<tw::detail::fragment_rows_of<On>()> block(index == 0, pull, &loads, allocator.last_buffer);
    typename tw::detail::StateOf<On>::Type state;
    On::compute(block, params, tile, loads.memory, state);
    On::finish(block, params, tile, loads.memory, state);
    require_nothing_left(loads.steps - loads.step, allocator.last_ring);
    block.end(persistent);
  } else {
    using Block = Block<tw::detail::fragment_rows_of<On>()>;
    if constexpr (requires { typename On::Memory; }) {
      typename On::Memory memory(allocator);
      Block block(
          index == 0, [](void*) { return false; }, nullptr, allocator.last_buffer);
      On::compute(block, params, tile, memory);
      block.end(persistent);
    } else {
      Block block(index == 0);
      On::compute(block, params, tile);
    }
  }
}

#if defined(__x86_64__)
#if defined(__clang__)
#define TW_FLAT gnu::flatten
#else
// g++ may clone a function to specialise it for its arguments. The clone would call the functions that it should inline, and these are
// compiled without vector instructions.
#define TW_FLAT gnu::flatten, gnu::noclone
#endif
/// Element functions and loops over tiles are compiled with the flags of the kernel's own file. This function compiles them again for AVX2,
/// inlined into one function.
template <class On>
[[gnu::target("avx2,fma,f16c"), TW_FLAT]] void run_avx2(const void* params, const TileGrid& grid, int index, u8* arena) {
  run_here<On>(*static_cast<const typename On::Params*>(params), grid, index, arena);
}

#if defined(__clang__)
#define TW_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#else
#define TW_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#endif
/// The same for AVX-512, for kernels that spend their time in such loops. Products are library calls anyway.
template <class On>
[[gnu::target(TW_AVX512), TW_FLAT]] void run_avx512(const void* params, const TileGrid& grid, int index, u8* arena) {
  run_here<On>(*static_cast<const typename On::Params*>(params), grid, index, arena);
}
#undef TW_AVX512
#undef TW_FLAT
#endif

/// For processors without AVX2. These are rare, so it is compiled for size and compile time.
template <class On>
[[gnu::cold, gnu::noinline]] void run_baseline(const void* params, const TileGrid& grid, int index, u8* arena) {
  run_here<On>(*static_cast<const typename On::Params*>(params), grid, index, arena);
}

/// Runs one tile. `params`: On::Params. `arena`: memory_bytes<On>() bytes, 64-byte aligned.
using RunTile = void (*)(const void* params, const TileGrid& grid, int index, u8* arena);

/// Runs one tile with the best instruction set of this processor. Under the address sanitizer a kernel is compiled once only: the checks
/// are the same for every instruction set, and take most of the time to build.
template <class On>
void run(const void* params, const TileGrid& grid, int index, u8* arena) {
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
  const int bytes = vector_bytes();
  if constexpr (tw::detail::vector_bytes_of<On>() > 32) {
    if (bytes == 64) return run_avx512<On>(params, grid, index, arena);
  }
  if (bytes >= 32) return run_avx2<On>(params, grid, index, arena);
  run_baseline<On>(params, grid, index, arena);
#else
  run_here<On>(*static_cast<const typename On::Params*>(params), grid, index, arena);
#endif
}

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
