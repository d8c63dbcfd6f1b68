#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tilewave/dtype.hpp"
#include "tilewave/kernel.hpp"
#include "tilewave/tile/sm_90a/target.tile.hpp"

// Where the elements of a kernel's tiles are on a Hopper GPU. `tilewave kernels layout` draws it.
//
// A kernel does not have to do anything: its Memory and its State are constructed on a target whose tiles report themselves. To include
// tiles that exist only inside compute(), the kernel names them in a struct that is used for nothing else:
//
//   struct Locals {
//     Scores scores;
//     Weights weights;
//   };

namespace tw {

/// How one type of tile is laid out, in shared memory or in registers.
struct TileLayout {
  const char* type;  ///< "Shared", "Fragment", "Operand" or "Rows"
  DType dtype;
  int rows;
  int cols;
  bool contracts_rows;  ///< Shared: products sum over its rows, not over its columns

  /// In shared memory: byte offset of element (row, col). Null for tiles in registers.
  int (*offset)(int row, int col);

  /// In registers: row and column of element i of a thread, i < size. Null for tiles in shared memory.
  std::pair<int, int> (*element)(int thread, int i);
  int threads;
  int size;          ///< elements per thread
  int width;         ///< how many of them are neighbours in a row: i, i + 1, ...
  int per_register;  ///< elements in one register
};

/// A kernel's tile and where it keeps it: "ring 1, 4 slots", "staging, 2 slots for each warpgroup", "state", "locals of compute".
struct KernelTile {
  TileLayout layout;
  std::string where;
};

namespace detail {

template <class Tile>
std::pair<int, int> element_of(int thread, int i) {
  const sm_90a::Position at = sm_90a::Position::of(thread);
  return {Tile::row(at, i), Tile::col(at, i)};
}
template <class Tile>
constexpr TileLayout register_layout(const char* type, DType dtype, int per_register) {
  constexpr int threads = Tile::rows * Tile::row_threads / Tile::row_count;
  return {type, dtype, Tile::rows, Tile::cols, false, nullptr, &element_of<Tile>, threads, Tile::size, Tile::width, per_register};
}

/// A function of its own, because the tile's is always inlined: g++ -Og cannot inline a call through its address.
template <class Tile>
int offset_of(int row, int col) {
  return Tile::offset(row, col);
}
template <class T, int R, int C, Contract contract>
constexpr TileLayout make_layout(const sm_90a::Shared<T, R, C, contract>*) {
  using Tile = sm_90a::Shared<T, R, C, contract>;
  return {"Shared", DTypeOf<T>::value, R, C, contract == Contract::rows, &offset_of<Tile>, nullptr, 0, 0, 0, 0};
}
template <class T, int R, int C, int WarpRows, int ColumnWarps>
constexpr TileLayout make_layout(const sm_90a::Fragment<T, R, C, WarpRows, ColumnWarps>*) {
  using F = sm_90a::Fragment<T, R, C, WarpRows, ColumnWarps>;
  TileLayout layout = register_layout<F>("Fragment", DTypeOf<T>::value, 1);
  layout.threads = F::warps * 32;
  return layout;
}
template <class T, int R, int C, int Warpgroups>
constexpr TileLayout make_layout(const sm_90a::TallFragment<T, R, C, Warpgroups>*) {
  return register_layout<sm_90a::TallFragment<T, R, C, Warpgroups>>("Fragment", DTypeOf<T>::value, 1);
}
template <class T, int R, int C>
constexpr TileLayout make_layout(const sm_90a::Operand<T, R, C>*) {
  using Operand = sm_90a::Operand<T, R, C>;
  return register_layout<Operand>("Operand", DTypeOf<T>::value, Operand::width);
}
template <class T, int R, int C, int Warps, int Width>
constexpr TileLayout make_layout(const sm_90a::Rows<T, R, C, Warps, Width>*) {
  return register_layout<sm_90a::Rows<T, R, C, Warps, Width>>("Rows", DTypeOf<T>::value, 1);
}

}  // namespace detail

/// The layout of one of sm_90a's tile types: layout_of<sm_90a::Fragment<float, 64, 128>>.
template <class Tile>
inline constexpr TileLayout layout_of = detail::make_layout(static_cast<const Tile*>(nullptr));

namespace detail {

/// Collects the tiles that the current thread constructs.
class TileRecorder {
 public:
  TileRecorder();
  ~TileRecorder();
  TileRecorder(const TileRecorder&) = delete;
  TileRecorder& operator=(const TileRecorder&) = delete;

  static void add(const TileLayout& layout);
  void enter_ring(int slots);
  void enter_staging(int slots);
  void enter(const char* where);

  std::vector<KernelTile> tiles;

 private:
  std::string where_;
  int rings_ = 0;
};

template <class Tile>
struct RecordedTile : Tile {
  RecordedTile() { TileRecorder::add(layout_of<Tile>); }
};

template <class SlotType, int Stages>
struct RecordedRing {
  using Slot = SlotType;
  static constexpr int stages = Stages;
  TileRecorder& recorder;
  explicit RecordedRing(TileRecorder& with) : recorder(with) {
    recorder.enter_ring(Stages);
    [[maybe_unused]] Slot slot;
  }
};

/// Each slot holds a panel of a warpgroup's rows, swizzled like a Shared tile of the same size.
template <class T, int R, int C>
struct RecordedStaging {
  using Staging = sm_90a::Staging<T, R, C>;
  explicit RecordedStaging(TileRecorder& recorder) {
    if constexpr (Staging::bytes > 0) {
      recorder.enter_staging(Staging::slots);
      TileRecorder::add(layout_of<sm_90a::Shared<T, Staging::box_rows, Staging::box_cols, Contract::columns>>);
    }
  }
};

template <class T, int R, int C, Contract contract>
struct RecordedBuffer {
  explicit RecordedBuffer(TileRecorder& recorder) {
    recorder.enter("buffer");
    TileRecorder::add(layout_of<sm_90a::Shared<T, R, C, contract>>);
  }
  /// In the slot of a ring.
  template <class SlotType, int Stages>
  explicit RecordedBuffer(const RecordedRing<SlotType, Stages>& ring) : RecordedBuffer(ring.recorder) {}
};

template <int R, int C>
struct RecordedOutbox {
  explicit RecordedOutbox(TileRecorder& recorder) {
    recorder.enter("outbox");
    TileRecorder::add(layout_of<sm_90a::Shared<float, R, C, Contract::columns>>);
  }
};

struct NotRecorded {
  explicit NotRecorded(TileRecorder&) {}
};

/// sm_90a, with tiles that report themselves.
struct RecordingTarget : sm_90a::Target<> {
  template <class T, int R, int C, Contract contract>
  using Shared = RecordedTile<sm_90a::Shared<T, R, C, contract>>;
  template <class Codes, int R, int C>
  using Widened = RecordedTile<sm_90a::Shared<f16, R, C, Contract::columns>>;
  template <class Slot, int Stages>
  using Ring = RecordedRing<Slot, Stages>;
  template <class Slot, int Stages>
  using GatherRing = RecordedRing<Slot, Stages>;
  template <class T, int R, int C, int Warpgroups = R / sm_90a::kWarpgroupRows>
  using Fragment = RecordedTile<typename sm_90a::Target<>::template Fragment<T, R, C, Warpgroups>>;
  template <class T, int R, int C, int Teams>
  using TeamFragment = Fragment<T, R, C, R / sm_90a::kWarpgroupRows / Teams>;
  template <class T, int R, int C, int Warpgroups>
  using SoloFragment = RecordedTile<typename sm_90a::Target<>::template SoloFragment<T, R, C, Warpgroups>>;
  template <class T, int R, int C>
  using Operand = RecordedTile<sm_90a::Operand<T, R, C>>;
  template <class T, int R, int C, int Warps, int Width>
  using Rows = RecordedTile<sm_90a::Rows<T, R, C, Warps, Width>>;
  template <class T, int R, int C>
  using Staging = RecordedStaging<T, R, C>;
  template <int R, int C>
  using Outbox = RecordedOutbox<R, C>;
  template <class T, int R, int C>
  using Scratch = NotRecorded;
  template <class T, int R, int C, Contract contract>
  using Buffer = RecordedBuffer<T, R, C, contract>;
  template <class T, int N>
  using VectorBuffer = NotRecorded;
  template <class T, class Tile>
  using RowExchange = NotRecorded;
  template <int N>
  using Histogram = NotRecorded;
  template <class T, int N>
  using List = NotRecorded;
};

/// Reports a kernel's tiles to the recorder.
template <class Kernel>
void record_tiles([[maybe_unused]] TileRecorder& recorder) {
  using On = typename Kernel::template On<RecordingTarget>;
  if constexpr (requires { typename On::Memory; }) {
    [[maybe_unused]] const typename On::Memory memory(recorder);
  }
  if constexpr (requires { typename On::State; }) {
    recorder.enter("state");
    [[maybe_unused]] typename On::State state;
  }
  if constexpr (requires { typename On::Locals; }) {
    recorder.enter("locals of compute");
    [[maybe_unused]] typename On::Locals locals;
  }
}

/// record_tiles of a kernel that has tiles to report, otherwise null.
template <class Kernel>
constexpr auto tile_recorder() -> void (*)(TileRecorder&) {
  using On = typename Kernel::template On<sm_90a::Target<>>;
  if constexpr (
      requires { typename On::Memory; } || requires { typename On::State; } || requires { typename On::Locals; })
    return &record_tiles<Kernel>;
  else
    return nullptr;
}

}  // namespace detail

/// The tiles of a kernel's rings, buffers and staging, of its State and of its Locals, in the order of their declarations.
std::vector<KernelTile> tiles_of(const KernelSpec& spec);

}  // namespace tw
