#pragma once

#include "tilewave/tile/language.tile.hpp"

// What a compiled kernel tells the host that launches it. The source given to the run-time compiler defines one Module for the kernel;
// runtime/module.cpp reads it from the machine code.

namespace tw {

struct ModuleHeader {
  static constexpr u32 kMagic = 0x32777474;  // must change whenever the members change

  u32 magic = kMagic;
  int threads = 0;       ///< per block
  int shared_bytes = 0;  ///< dynamic shared memory per block
  int cluster = 1;       ///< blocks per cluster
  int min_blocks = 1;    ///< blocks that an SM must be able to hold at once
  int persistent = 0;    ///< 1: as many blocks as fit at once share all tiles; 0: one block per tile
  int loads = 0;         ///< 1: the kernel has a load()
  int waits = 0;         ///< 1: tiles wait for others, so all blocks must run at once
  int params_offset = 0, params_bytes = 0;
};

/// `On` is the kernel on a target, and `Shape` is what the target derives from it. `params` is a default-constructed Params: its unbound
/// Globals name the boxes in which TMA copies them.
template <class On, class Shape>
struct Module {
  ModuleHeader header;
  typename On::Params params{};

  constexpr Module() {
    header.threads = Shape::threads;
    header.shared_bytes = Shape::shared_bytes();
    header.cluster = Shape::cluster;
    header.min_blocks = Shape::min_blocks;
    header.persistent = Shape::dispatch != Dispatch::plain;
    header.loads = Shape::produces;
    header.waits = tw::detail::waits_of<On>();
    header.params_offset =
        static_cast<int>((sizeof(header) + alignof(typename On::Params) - 1) / alignof(typename On::Params) * alignof(typename On::Params));
    header.params_bytes = static_cast<int>(sizeof(params));
  }
};

}  // namespace tw
