#pragma once

#include "tilewave/tile/cpu/library.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

// The CPU as a target: a block is one thread of a pool. Loads are pulled: taking from an empty ring runs the kernel's load() for the next
// step. Mistakes that would hang or race on the GPU are reported: a put into a full ring, a take with no step left to load, a slot used
// after its release, or one released while a product reads it.

#if !TW_ON_GPU

namespace tw::cpu {

/// Throws tw::Error: the kernel's schedule is wrong (it would deadlock or race on a GPU).
[[noreturn]] void schedule_error(const char* what);
inline constexpr const char* kReleasedUnderAProduct = "release of a slot that a product in flight reads: wait for it first";
inline void require(const char* problem) {
  if (problem != nullptr) schedule_error(problem);
}

/// The stores that a GPU's copy engine might not have finished reading. All tiles that this thread has run in the current launch count as
/// one block. Empty when a launch begins.
inline constinit thread_local UnreadStores unread_stores{};

struct Waiting {
  i64 since = 0;
};
/// Lets other threads run, while this one waits for something that one of them does. Throws tw::Error, with `wrong` as message, if none
/// does it: at once if there is no other thread.
void wait_for_others(Waiting& waiting, const char* wrong);
/// Waits until another thread has made *counter `value`.
void await_turn(const u32* counter, u32 value);

/// Sorts so that the n largest values come first, in descending order.
void sort_descending(u64* values, int count, int n);

/// Whether released slots are overwritten with NaN, so that a kernel that reads one fails its test. On in debug builds of the library and
/// in its tests.
bool poison_released_slots();
void set_poison_released_slots(bool on);

/// This thread's memory for an operand that a product packs, number `which`. 64-byte aligned, and valid until it is requested again.
void* operand_memory(int which, long bytes);

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

struct GlobalView : BoundView {
  template <class T>
  T* at(int row, int col, int i, int j) const {
    return static_cast<T*>(data) + (j * stride_j + i * stride_i + row * stride_row + col * stride_col);
  }
};

/// The element type of a Global that is f32, f16 or bf16, depending on the tensor that the host binds: a kernel that computes in f32 is
/// then compiled once for all three. Such a tensor can only be loaded and stored as `Rows` of float.
struct AnyFloat {
  enum class Type : u8 { f32, f16, bf16 };
  u16 unused;  // tiles are as wide as for 16-bit elements
};
struct NoType {};

template <class T, class Tile = void, int Split = 1>
struct Global : GlobalView {
  using Element = remove_const<T>;
  using TileType = Tile;
  static constexpr int split = Split;
  static constexpr bool readable = !is_same<T, Element>;
  static constexpr bool any_float = is_same<Element, AnyFloat>;

  /// The tensor's type, if Element is AnyFloat.
  [[no_unique_address]] conditional<any_float, AnyFloat::Type, NoType> type;

  Global part(int first, int count, int i = 0, int j = 0) const {
    if (const char* const wrong = tw::detail::part_outside(*this, first, count)) schedule_error(wrong);
    if constexpr (any_float) {
      if (type == AnyFloat::Type::f32) return tw::detail::part(*this, this->template at<float>(first, 0, i, j), count);
    }
    return tw::detail::part(*this, this->template at<Element>(first, 0, i, j), count);
  }
};

/// Calls f(global), with an AnyFloat Global converted to a Global of its actual type.
template <class T, class Tile, int Split, class F>
TW_INLINE void with_type(const Global<T, Tile, Split>& global, F f) {
  if constexpr (Global<T, Tile, Split>::any_float) {
    const auto as = [&]<class E>(E) {
      Global<E, Tile, Split> typed{};
      static_cast<GlobalView&>(typed) = global;
      f(typed);
    };
    switch (global.type) {
      case AnyFloat::Type::f32:
        return as(float{});
      case AnyFloat::Type::f16:
        return as(f16{});
      case AnyFloat::Type::bf16:
        return as(bf16{});
    }
  } else {
    f(global);
  }
}

/// Elements that products cannot read: codes and their scales, metadata of sparse tiles.
template <class T>
inline constexpr bool is_bits = codes_in<T> > 1 || is_same<T, e8m0> || is_same<T, u8>;
/// The type of an operand's element in a panel: bf16 and i8 are kept, other types are widened to f32. Bits are stored as bytes.
template <class T>
using Packed = conditional<is_same<T, bf16> || is_same<T, i8>, T, conditional<is_bits<T>, i8, float>>;

template <class T>
TW_INLINE constexpr Packed<T> to_packed(auto x) {
  return tw::to<Packed<T>>(tw::to<T>(x));
}

/// Panels of 16 rows along the dimension that is not contracted: the layout of the library's products (library.tile.hpp).
template <class T, int Outer, int Depth>
struct Panels {
  static constexpr int group = 4 / static_cast<int>(sizeof(Packed<T>));
  static constexpr int panel_depth = round_up(Depth, group);
  static constexpr int offset(int outer, int k) {
    return outer / kPanelRows * kPanelRows * panel_depth + k / group * kPanelRows * group + outer % kPanelRows * group + k % group;
  }

  alignas(64) Packed<T> panels[round_up(Outer, kPanelRows) * panel_depth];
};

/// Columns kFirst to kFirst + C - 1 of a Shared tile or a Buffer, as a different operand.
template <class Source, class T, Contract kContract, int kFirst, int C>
struct View {
  static constexpr int rows = Source::rows;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int first = kFirst;
  static constexpr int outer = kContract == Contract::columns ? rows : C;
  static constexpr int depth = kContract == Contract::columns ? C : rows;
  using Element = T;

  const Source& source;

  template <class U, Contract k, int kColumn, int Count>
  View<Source, U, k, kFirst + kColumn, Count> view() const {
    return {source};
  }
};

/// The panels into which a view is packed.
template <class T, int Outer, int Depth>
struct PackedView : Panels<T, Outer, Depth> {
  static constexpr int outer = Outer;
  static constexpr int depth = Depth;
  using Element = T;
  int valid_outer, valid_depth;
};

template <class T, int R, int C, Contract kContract>
struct Shared : Panels<T, kContract == Contract::columns ? R : C, kContract == Contract::columns ? C : R> {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int outer = kContract == Contract::columns ? R : C;
  static constexpr int depth = kContract == Contract::columns ? C : R;
  using Element = T;

  int valid_outer;  ///< elements from here on are zero and may be skipped; negative: the slot was released
  int valid_depth;

  /// Index of element (row, col). Each element of the tile has a different one.
  static constexpr int offset(int row, int col) {
    return kContract == Contract::columns ? Panels<T, outer, depth>::offset(row, col) : Panels<T, outer, depth>::offset(col, row);
  }
  T get(int row, int col) const {
    const bool columns = kContract == Contract::columns;
    const bool inside = (columns ? row : col) < valid_outer && (columns ? col : row) < valid_depth;
    if constexpr (is_bits<T>)
      return bit_cast<T>(inside ? this->panels[offset(row, col)] : i8{0});
    else
      return tw::to<T>(inside ? this->panels[offset(row, col)] : Packed<T>{});
  }
  template <class U, Contract k, int kColumn, int Count>
  View<Shared, U, k, kColumn, Count> view() const {
    return {*this};
  }
};

/// A tile of f16 and, in memory of their own, the codes that it is made of.
template <class CodesType, int R, int C>
struct Widened : Shared<f16, R, C, Contract::columns> {
  static_assert(is_fp8<CodesType> && C % 128 == 0 && R % 8 == 0, TW_WIDENED);
  using Scales = Shared<float, R, 4, Contract::columns>;
  Shared<CodesType, R, C, Contract::columns> arriving;
  Scales arriving_scales;

  auto& codes() { return arriving; }
  Scales& scales() { return arriving_scales; }
};

/// A vector in a slot.
template <class T, int N>
struct SharedVector {
  static constexpr int size = N;
  using Element = T;
  T x[N];
  const T& operator[](int i) const { return x[i]; }
};

template <class T, int R, int C, TileKind kKind = TileKind::fragment>
struct Fragment {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr TileKind kind = kKind;
  using Element = T;
  alignas(64) T x[R * C];
  T& at(int row, int col) { return x[row * C + col]; }
  const T& at(int row, int col) const { return x[row * C + col]; }
};

/// A Fragment with a different number of rows than the kernel: on a GPU warpgroups share its rows, or each holds a multiple of 64.
template <class T, int R, int C, int Warpgroups>
struct HeldFragment : Fragment<T, R, C> {
  static constexpr int warpgroups = Warpgroups;
  static constexpr int column_groups = R / 64 < Warpgroups ? Warpgroups * 64 / R : 1;
  static_assert(R % 64 == 0 && (R / 64 % Warpgroups == 0 || Warpgroups % (R / 64) == 0) && C % (8 * column_groups) == 0, TW_HELD_FRAGMENT);
};
/// Whether several warpgroups hold a part of each row.
template <class F>
inline constexpr bool splits_rows = false;
template <class T, int R, int C, int Warpgroups>
inline constexpr bool splits_rows<HeldFragment<T, R, C, Warpgroups>> = HeldFragment<T, R, C, Warpgroups>::column_groups > 1;

template <class T, int R, int C>
struct Operand : Panels<T, R, C> {
  static constexpr int rows = R;
  static constexpr int cols = C;
  using Element = T;

  bool by_rows = false;  ///< elements are stored row by row, for Library::mma_bf16_by_rows, and not in panels
};

/// One thread computes all columns, whatever number of warps divides them on a GPU.
template <int R, int N, int Warps>
struct DividedSums {
  static_assert(R % 16 == 0 && N % 8 == 0, TW_DIVIDED_SUMS);
  float x[N * R];
};
template <int N, int Warps>
struct DividedSquares {
  static_assert(N % 8 == 0, TW_DIVIDED_SUMS);
  float x[N];
};
template <class T, int N, int C, int Warps>
struct DividedOperand {
  static_assert((sizeof(T) == 2 || is_same<T, i8>)&&N % 8 == 0 && C % (64 / static_cast<int>(sizeof(T)) * Warps) == 0, TW_DIVIDED_OPERAND);
  float x[N * C];
};
template <class T, int C, int Warps>
struct DividedRow {
  static_assert(sizeof(T) == 2 && C % (32 * Warps) == 0 && C / Warps <= 256, TW_DIVIDED_ROW);
  static constexpr int rows = 1, cols = C;
  float x[C];
};
/// The numbers of an operand are scaled already.
template <int N, int Warps>
struct DigitScales {};
template <int R, int C, class F, int Warps>
struct DividedScales {
  static_assert(R % 16 == 0 && is_divided_group<C / Warps, F::group>, TW_DIVIDED_SCALES);
  using Format = F;
  static constexpr int group = F::group;
  float scale[R * (C / group)], zero[R * (C / group)];
};

/// Rounds numbers to 15 bits, relative to the largest magnitude among them.
inline void round_to_fixed_point(float* x, int count) {
  u32 largest = 0;
  for (int i = 0; i < count; ++i) largest = max(largest, bit_cast<u32>(abs(x[i])));
  const float peak = bit_cast<float>(largest), power = fixed_point_power(peak), scale = fixed_point_scale(peak);
  for (int i = 0; i < count; ++i) {
    const volatile float sum = x[i] * power + kFixedPointRounding;  // not more exact than this
    x[i] = (sum - kFixedPointRounding) * scale;
  }
}

template <class T, class Tile>
struct RowVector {
  static constexpr int size = Tile::rows;
  using Element = T;
  T x[size];
  T& operator[](int i) { return x[i]; }
  const T& operator[](int i) const { return x[i]; }
};

/// A vector that has the same layout in memory is not copied: `view` points to it.
template <class T, class Tile>
struct ColumnVector {
  static constexpr int size = Tile::cols;
  using Element = T;
  T x[size];
  const T* view = nullptr;
  const T* data() const { return view ? view : x; }
};

template <class T, int R, int C>
struct Scratch {
  constexpr explicit Scratch(auto&) {}
};

/// The state of a ring. The rings of a Memory are linked, so that slots left in them at the end of a tile are found.
struct RingState {
  int filled = 0;  ///< slots that were put and not yet taken
  int taken = 0;   ///< slots that were taken and not yet released
  int peeked = 0;  ///< slots after those that have been looked at
  int next_put = 0;
  int next_take = 0;
  BufferUse* buffer = nullptr;  ///< a Buffer in the ring's slot
  const RingState* previous = nullptr;
};

/// Allocates a thread's tile memory. Without a base it only counts the bytes.
struct Allocator {
  u8* base = nullptr;
  i64 used = 0;
  const RingState* last_ring = nullptr;
  BufferUse* last_buffer = nullptr;
  const void* last_outbox = nullptr;
  template <class Slot>
  Slot* slots(int count) {
    u8* const at = base ? base + used : nullptr;
    used += (static_cast<i64>(sizeof(Slot)) * count + 63) / 64 * 64;
    return reinterpret_cast<Slot*>(at);
  }
};

/// On the CPU results go straight to memory. The staging slots that a GPU would use have addresses but no content.
template <class T, int R, int C>
struct Staging : Panelled<T, C> {
  using Element = T;
  u8* slot;
  explicit Staging(Allocator& allocator) : slot(allocator.template slots<u8>(Panelled<T, C>::slots)) {}
};

/// Fragments are added from where they are. The allocator remembers the Outbox, to check that the kernel names it.
template <int R, int C>
struct Outbox {
  static constexpr int rows = R;
  static constexpr int cols = C;
  using Element = float;
  explicit Outbox(Allocator& allocator) { allocator.last_outbox = this; }
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
};

/// Elements are stored row by row. Products pack the Buffers that they read.
template <class T, int R, int C, Contract kContract>
struct Buffer {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int outer = kContract == Contract::columns ? R : C;
  static constexpr int depth = kContract == Contract::columns ? C : R;
  using Element = T;
  T* elements;
  mutable BufferUse use;
  RingState* ring = nullptr;  ///< in whose slot it is

  explicit Buffer(Allocator& allocator) : elements(allocator.template slots<T>(R * C)) {
    use.previous = allocator.last_buffer;
    allocator.last_buffer = &use;
  }
  /// In the slot of a ring, which says when it is released.
  template <class RingType>
  requires(RingType::stages == 1) explicit Buffer(RingType& of) : elements(reinterpret_cast<T*>(of.slots)), ring(&of) {
    static_assert(sizeof(T) * R * C <= sizeof(typename RingType::Slot), TW_BUFFER_IN_SLOT);
    of.buffer = &use;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T& at(int row, int col) const { return elements[row * C + col]; }
  template <class U, Contract k, int kColumn, int Count>
  View<Buffer, U, k, kColumn, Count> view() const {
    return {*this};
  }
};

template <class T, int N>
struct VectorBuffer {
  static constexpr int size = N;
  using Element = T;
  T* x;
  explicit VectorBuffer(Allocator& allocator) : x(allocator.template slots<T>(N)) {}
  T& operator[](int i) const { return x[i]; }
};

template <class T, class Tile>
struct RowExchange {
  constexpr explicit RowExchange(auto&) {}
};

template <int N>
struct Histogram {
  static constexpr int size = N;
  u32* counts;
  explicit Histogram(Allocator& allocator) : counts(allocator.template slots<u32>(N)) {}
};

template <class T, int N>
struct List {
  static constexpr int capacity = N;
  T* values;
  int size = 0;
  explicit List(Allocator& allocator) : values(allocator.template slots<T>(N)) {}
  T& operator[](int i) { return values[i]; }
};

template <class SlotType, int Stages>
struct Ring : RingState {
  using Slot = SlotType;
  static constexpr int stages = Stages;
  static constexpr bool gathers = false;
  Slot* slots;
  explicit Ring(Allocator& allocator) : slots(allocator.template slots<Slot>(Stages)) {
    previous = allocator.last_ring;
    allocator.last_ring = this;
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
};

/// On a GPU gathered rows arrive asynchronously. To model this when released slots are poisoned, a slot stays poisoned until it is taken;
/// its content is kept in `arriving` until then.
template <class SlotType, int Stages>
struct GatherRing : Ring<SlotType, Stages> {
  static constexpr bool gathers = true;
  SlotType* arriving;
  explicit GatherRing(Allocator& allocator) : Ring<SlotType, Stages>(allocator), arriving(allocator.template slots<SlotType>(Stages)) {}
};

struct Target {
  static constexpr bool whole_pieces = true;    // has no variant for other tensors
  static constexpr bool multiplies_f32 = true;  // operands of f32 are not rounded
  template <class T, class Tile, int Split>
  using Global = cpu::Global<T, Tile, Split>;
  template <class T>
  using Pointer = T*;
  template <class T, int R, int C, Contract contract>
  using Shared = cpu::Shared<T, R, C, contract>;
  template <class Codes, int R, int C>
  using Widened = cpu::Widened<Codes, R, C>;
  template <class Slot, int Stages>
  using Ring = cpu::Ring<Slot, Stages>;
  template <class Slot, int Stages>
  using GatherRing = cpu::GatherRing<Slot, Stages>;
  template <class T, int R, int C, int Warpgroups = R / 64>
  using Fragment = conditional<Warpgroups == R / 64, cpu::Fragment<T, R, C>, cpu::HeldFragment<T, R, C, Warpgroups>>;
  template <class T, int R, int C, int>
  using TeamFragment = Fragment<T, R, C>;
  template <class T, int R, int C, int Warpgroups>
  using SoloFragment = Fragment<T, R, C, Warpgroups>;
  template <class T, int R, int C>
  using Operand = cpu::Operand<T, R, C>;
  template <int R, int N, int Warps>
  using DividedSums = cpu::DividedSums<R, N, Warps>;
  template <int N, int Warps>
  using DividedSquares = cpu::DividedSquares<N, Warps>;
  template <class T, int N, int C, int Warps>
  using DividedOperand = cpu::DividedOperand<T, N, C, Warps>;
  template <class T, int C, int Warps>
  using DividedRow = cpu::DividedRow<T, C, Warps>;
  template <int N, int Warps>
  using DigitScales = cpu::DigitScales<N, Warps>;
  template <int R, int C, class Format, int Warps>
  using DividedScales = cpu::DividedScales<R, C, Format, Warps>;
  template <class T, int R, int C, int Warps, int Width>
  using Rows = cpu::Fragment<T, R, C, TileKind::rows>;
  template <class T, class Tile>
  using RowVector = cpu::RowVector<T, Tile>;
  template <class T, class Tile>
  using ColumnVector = cpu::ColumnVector<T, Tile>;
  template <class T, int R, int C>
  using Staging = cpu::Staging<T, R, C>;
  template <int R, int C>
  using Outbox = cpu::Outbox<R, C>;
  template <class T, int R, int C>
  using Scratch = cpu::Scratch<T, R, C>;
  template <class T, int R, int C, Contract contract>
  using Buffer = cpu::Buffer<T, R, C, contract>;
  template <class T, int N>
  using VectorBuffer = cpu::VectorBuffer<T, N>;
  template <class T, int R>
  using SharedStrip = cpu::Shared<T, R, 16 / static_cast<int>(sizeof(T)), Contract::columns>;
  template <class T, int N>
  using SharedVector = cpu::SharedVector<T, N>;
  template <class T, class Tile>
  using RowExchange = cpu::RowExchange<T, Tile>;
  template <int N>
  using Histogram = cpu::Histogram<N>;
  template <class T, int N>
  using List = cpu::List<T, N>;
};

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
