#pragma once

#include "tilewave/tile/language.tile.hpp"

// The analysis target. It runs a kernel's control flow without computing, and counts what its blocks would copy and compute. Tensors have
// sizes but no content. A tile in registers is a single number that stands for all its elements, and every element loaded is 1.

#if !TW_ON_GPU

namespace tw::analysis {

/// Element types of products. Tensor cores have a different rate for each.
enum class OperandType { f32, f16, bf16, fp8, i8, count };

template <class T>
inline constexpr OperandType operand_type = is_same<T, f16>                                ? OperandType::f16
                                            : is_same<T, bf16>                             ? OperandType::bf16
                                            : is_same<T, fp8_e4m3> || is_same<T, fp8_e5m2> ? OperandType::fp8
                                            : is_same<T, i8>                               ? OperandType::i8
                                                                                           : OperandType::f32;

/// The number of tensors and arrays that are counted separately. All others share the last entry.
inline constexpr int kArrays = 32;

/// What one tile, or a whole launch, does. Plain numbers, so that tiles can be compared.
struct Tally {
  u64 read[kArrays] = {};                                   ///< bytes that blocks load from each array in global memory
  u64 written[kArrays] = {};                                ///< bytes that blocks store to it
  u64 shared = 0;                                           ///< bytes written to or read from shared memory
  u64 products[static_cast<int>(OperandType::count)] = {};  ///< operations of matrix products: a multiply-add counts as two
  u64 inside[static_cast<int>(OperandType::count)] = {};    ///< the same for elements inside the tensors only
  Cost cost;
};

/// This thread's counts. Element functions count into tw::analysis::cost.
inline constinit thread_local Tally tally{};

/// The stores that the copy engine might not have finished reading, if all tiles of this analysis belonged to one block and ran in this
/// order.
inline constinit thread_local UnreadStores unread_stores{};

/// Throws tw::Error: the kernel's schedule is wrong.
[[noreturn]] void schedule_error(const char* what);
inline void require(const char* problem) {
  if (problem != nullptr) schedule_error(problem);
}

// Finds out which elements of arrays an element function reads and writes, by calling it for one column and one row of elements. Between
// begin_walk() and end_walk(), at_element() announces each call, and Pointer reports accesses with touch(). end_walk() adds each array's
// distinct elements to `tally`. A nested walk is part of the outer one.
void begin_walk();
void at_element(int row, int col);
/// `place`: the tensor's index in Tally, or -1 for an array that is not bound.
void touch(const void* array, int place, i64 index, int bytes, bool write);
bool touched();
void end_walk();

constexpr int overlap(int first, int size, int extent) {
  const int begin = first < 0 ? 0 : first;
  const int end = extent - first < size ? extent : first + size;
  return end > begin ? end - begin : 0;
}

struct GlobalView : BoundView {
  int place;  ///< index in Tally
};

template <class T>
class Pointer;

template <class T, class Tile = void, int Split = 1>
struct Global : GlobalView {
  using Element = remove_const<T>;
  using TileType = Tile;
  static constexpr int split = Split;
  static constexpr bool readable = !is_same<T, Element>;

  /// Bytes of the part of a tile that is inside the tensor.
  u64 bytes(int row0, int col0, int tile_rows, int tile_cols) const {
    return static_cast<u64>(overlap(row0, tile_rows, rows)) * static_cast<u64>(overlap(col0, tile_cols, cols)) * sizeof(Element);
  }
  template <class E>
  Pointer<E> at(int row, int col, int i, int j) const {
    return Pointer<E>(static_cast<E*>(data), place) + (j * stride_j + i * stride_i + row * stride_row + col * stride_col);
  }
  Global part(int first, int count, int i = 0, int j = 0) const {
    if (const char* const wrong = tw::detail::part_outside(*this, first, count)) schedule_error(wrong);
    return tw::detail::part(*this, static_cast<Element*>(data) + (j * stride_j + i * stride_i + first * stride_row), count);
  }
};

/// How many of the first `count` rows of a window that begins at (row, i, j) are inside a tensor.
template <class G>
int inside_window(const G& tensor, int count, int row, int i, int j) {
  const Window& w = tensor.window;
  const auto has = [](int at, int extent) { return at >= 0 && at < extent; };
  int inside = 0;
  for (int r = 0; r < count; ++r)
    inside += has(row + w.row(r), tensor.rows) && has(i + w.i(r), tensor.size_i) && has(j + w.j(r), tensor.size_j);
  return inside;
}

/// The type of an element: Counted for float, T itself otherwise.
template <class T>
using Number = conditional<is_same<T, float>, Counted, T>;

/// An array in global memory that element functions index, or an element of a tensor; see tw::Pointer. Integers are read, because they may
/// steer the kernel. Every other element is 1.
template <class T>
class Pointer {
 public:
  using Element = remove_const<T>;

  /// An element of an array that is written.
  class Reference {
   public:
    Reference(const Pointer& array, i64 index) : array_(array), index_(index) {}
    operator Number<Element>() const { return array_.read(index_); }
    template <class X>
    void operator=(const X&) const {
      touch(array_.data_, array_.place_, index_, sizeof(T), true);
    }

   private:
    Pointer array_;
    i64 index_;
  };

  Pointer() = default;
  Pointer(T* data, int place = -1) : data_(data), place_(place) {}
  explicit operator bool() const { return data_ != nullptr; }
  auto operator[](i64 index) const {
    if constexpr (is_same<T, Element>)
      return Reference(*this, first_ + index);
    else
      return read(first_ + index);
  }
  auto operator*() const { return (*this)[0]; }
  Pointer operator+(i64 offset) const {
    Pointer moved = *this;
    moved.first_ += offset;
    return moved;
  }

 private:
  Number<Element> read(i64 index) const {
    touch(data_, place_, index, sizeof(T), false);
    if constexpr (requires(Element x) { x << 1; })
      return data_[index];
    else
      return Number<Element>(1.0f);
  }

  T* data_ = nullptr;
  int place_ = -1;
  i64 first_ = 0;
};

/// Columns kFirst to kFirst + C - 1 of a Shared tile or a Buffer, as a different operand.
template <class Source, class T, Contract kContract, int kFirst, int C>
struct View {
  static constexpr int rows = Source::rows;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int outer = kContract == Contract::columns ? rows : C;
  static constexpr int depth = kContract == Contract::columns ? C : rows;
  static constexpr int byte_count = rows * C * static_cast<int>(sizeof(T));
  using Element = T;

  const Source& source;

  auto inside() const {
    const auto all = source.inside();
    constexpr bool columns = Source::contract == Contract::columns;
    const int inside_rows = columns ? all.outer : all.depth;
    const int inside_cols = min(max((columns ? all.depth : all.outer) - kFirst, 0), C);
    return kContract == Contract::columns ? decltype(all){inside_rows, inside_cols} : decltype(all){inside_cols, inside_rows};
  }
  template <class U, Contract k, int kColumn, int Count>
  View<Source, U, k, kFirst + kColumn, Count> view() const {
    return {source};
  }
};

/// The size of the part of a tile that was inside the tensor.
struct Inside {
  int outer, depth;
};

template <class T, int R, int C, Contract kContract>
struct Shared {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int outer = kContract == Contract::columns ? R : C;
  static constexpr int depth = kContract == Contract::columns ? C : R;
  using Element = T;

  using Inside = analysis::Inside;
  static constexpr int byte_count = R * C * static_cast<int>(sizeof(T));
  Inside inside() const {
    Inside extents;
    __builtin_memcpy(&extents, bytes, sizeof extents);
    return extents;
  }
  void set_inside(Inside extents) { __builtin_memcpy(bytes, &extents, sizeof extents); }
  /// Every element is 1.
  T get(int, int) const {
    cost.shared += sizeof(T);
    if constexpr (codes_in < T >> 1)
      return T{};
    else
      return tw::to<T>(1.0f);
  }

  template <class U, Contract k, int kColumn, int Count>
  View<Shared, U, k, kColumn, Count> view() const {
    return {*this};
  }

  u8 bytes[byte_count];  ///< the tile's size, so that a Slot has its real size; inside() is stored in it
};

/// A tile of f16, in whose memory its codes arrive.
template <class CodesType, int R, int C>
struct Widened : Shared<f16, R, C, Contract::columns> {
  static_assert(is_fp8<CodesType> && C % 128 == 0 && R % 8 == 0, TW_WIDENED);
  using Scales = Shared<float, R, 4, Contract::columns>;
  auto& codes() { return *reinterpret_cast<Shared<CodesType, R, C, Contract::columns>*>(this->bytes); }
  Scales& scales() { return *reinterpret_cast<Scales*>(this->bytes); }
};

template <class T, int R, int C, TileKind kKind = TileKind::fragment>
struct Fragment {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr TileKind kind = kKind;
  using Element = T;
  Number<T> x = {};
};

/// A Fragment with a different number of rows than the kernel: on a GPU warpgroups share its rows, or each holds a multiple of 64.
template <class T, int R, int C, int Warpgroups>
struct HeldFragment : Fragment<T, R, C> {
  static constexpr int warpgroups = Warpgroups;
  static constexpr int column_groups = R / 64 < Warpgroups ? Warpgroups * 64 / R : 1;
  static_assert(R % 64 == 0 && (R / 64 % Warpgroups == 0 || Warpgroups % (R / 64) == 0) && C % (8 * column_groups) == 0, TW_HELD_FRAGMENT);
};
/// All of it is in one warpgroup, which reads the operands of its products once.
template <class T, int R, int C, int Warpgroups>
struct SoloFragment : Fragment<T, R, C> {
  static constexpr int warpgroups = Warpgroups, soloists = Warpgroups * 64 / R;
  static_assert(R == 64 && soloists == 2, TW_SOLO);
};
/// Whether several warpgroups hold a part of each row.
template <class F>
inline constexpr bool splits_rows = false;
template <class T, int R, int C, int Warpgroups>
inline constexpr bool splits_rows<HeldFragment<T, R, C, Warpgroups>> = HeldFragment<T, R, C, Warpgroups>::column_groups > 1;

template <class T, int R, int C>
struct Operand {
  static constexpr int rows = R;
  static constexpr int cols = C;
  using Element = T;
};

template <int R, int N, int Warps>
struct DividedSums {
  static_assert(R % 16 == 0 && N % 8 == 0, TW_DIVIDED_SUMS);
};
template <int N, int Warps>
struct DividedSquares {
  static_assert(N % 8 == 0, TW_DIVIDED_SUMS);
};
template <class T, int N, int C, int Warps>
struct DividedOperand {
  static_assert((sizeof(T) == 2 || is_same<T, i8>)&&N % 8 == 0 && C % (64 / static_cast<int>(sizeof(T)) * Warps) == 0, TW_DIVIDED_OPERAND);
  int inside_rows;  ///< inside the tensor
};
template <class T, int C, int Warps>
struct DividedRow {
  static_assert(sizeof(T) == 2 && C % (32 * Warps) == 0 && C / Warps <= 256, TW_DIVIDED_ROW);
};
template <int N, int Warps>
struct DigitScales {};
template <int R, int C, class F, int Warps>
struct DividedScales {
  static_assert(R % 16 == 0 && is_divided_group<C / Warps, F::group>, TW_DIVIDED_SCALES);
  static constexpr int group = F::group;
};

template <class T, class Tile>
struct RowVector {
  static constexpr int size = Tile::rows;
  using Element = T;
  Number<T> x = {};
  Number<T>& operator[](int) { return x; }
  const Number<T>& operator[](int) const { return x; }
};

template <class T, class Tile>
struct ColumnVector {
  static constexpr int size = Tile::cols;
  using Element = T;
  Number<T> x = {};
};

/// Allocates a block's shared memory.
struct Allocator {
  u8* base = nullptr;
  i64 used = 0;
  BufferUse* last_buffer = nullptr;
  u8* bytes(i64 count) {
    u8* const at = base ? base + used : nullptr;
    used += count;
    return at;
  }
};

/// The size is that on sm_90a: slots of 64 rows of 128 bytes for every 64 rows. f32 results are stored without staging.
template <class T, int R, int C>
struct Staging : Panelled<T, C> {
  using Element = T;
  u8* slot;  ///< one byte here stands for each slot
  explicit Staging(Allocator& allocator) : slot(allocator.bytes(sizeof(T) == 2 ? R / 64 * Panelled<T, C>::slots * 64 * 128 : 0)) {}
};
template <int R, int C>
struct Outbox {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int byte_count = R * C * static_cast<int>(sizeof(float));
  using Element = float;
  explicit Outbox(Allocator& allocator) { allocator.bytes(byte_count); }
};
/// One row of partial results for each warp of 16 rows.
template <class T, int R, int C>
struct Scratch {
  static constexpr int bytes = R / 16 * C * static_cast<int>(sizeof(T));
  explicit Scratch(Allocator& allocator) { allocator.bytes(bytes); }
};

/// Every element is 1. Reading or writing one is counted.
template <class T, int R, int C, Contract kContract>
struct Buffer {
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int outer = kContract == Contract::columns ? R : C;
  static constexpr int depth = kContract == Contract::columns ? C : R;
  static constexpr int byte_count = R * C * static_cast<int>(sizeof(T));
  using Element = T;
  mutable BufferUse use;
  mutable Number<T> element{};

  explicit Buffer(Allocator& allocator) {
    allocator.bytes(byte_count);
    use.previous = allocator.last_buffer;
    allocator.last_buffer = &use;
  }
  /// In the slot of a ring.
  template <class RingType>
  requires(RingType::stages == 1) explicit Buffer(RingType& of) {
    static_assert(byte_count <= static_cast<int>(sizeof(typename RingType::Slot)), TW_BUFFER_IN_SLOT);
    of.buffer = &use;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Number<T>& at(int, int) const {
    cost.shared += sizeof(T);
    element = Number<T>(1.0f);
    return element;
  }
  Inside inside() const { return {outer, depth}; }
  template <class U, Contract k, int kColumn, int Count>
  View<Buffer, U, k, kColumn, Count> view() const {
    return {*this};
  }
};
template <class T, int N>
struct VectorBuffer {
  static constexpr int size = N;
  using Element = T;
  explicit VectorBuffer(Allocator& allocator) { allocator.bytes(N * static_cast<int>(sizeof(T))); }
  /// Integers have the values that the tile has stored, because a kernel may use them as row numbers. Every other element is 1.
  decltype(auto) operator[]([[maybe_unused]] int i) const {
    cost.shared += sizeof(T);
    if constexpr (holds_integers)
      return static_cast<T&>(integers[i]);
    else
      return Number<T>(1.0f);
  }

 private:
  static constexpr bool holds_integers = requires(T x) { x << 1; };
  mutable conditional<holds_integers, T, char> integers[N];
};
template <class T, int N>
struct SharedVector {
  static constexpr int size = N;
  using Element = T;
  Number<T> operator[](int) const {
    cost.shared += sizeof(T);
    return Number<T>(1.0f);
  }
  u8 bytes[N * sizeof(T)];
};
/// One value for each row and each warpgroup that holds a part of the row.
template <class T, class Tile>
struct RowExchange {
  static constexpr int parts() {
    if constexpr (requires { Tile::column_groups; }) return Tile::column_groups;
    if constexpr (requires { Tile::soloists; }) return Tile::soloists;
    return 1;
  }
  static constexpr int bytes = Tile::rows * parts() * static_cast<int>(sizeof(T));
  explicit RowExchange(Allocator& allocator) { allocator.bytes(bytes); }
};

// What a kernel counts in a histogram or appends to a list depends on values, and there are none. So a histogram always answers that its
// first counter holds exactly the number asked for: a radix select needs one of them. An element function appends or not as for an element
// of 1, and append_few() until the list is half full. A list's value n is n + 1.

/// The size is that on sm_90a: the counters, a sum for each of up to 32 warps, and the result of locate().
template <int N>
struct Histogram {
  static constexpr int size = N;
  explicit Histogram(Allocator& allocator) {
    allocator.bytes((N + 32) * static_cast<int>(sizeof(u32)) + static_cast<int>(sizeof(Located)));
  }
};
template <class T, int N>
struct List {
  static constexpr int capacity = N;
  explicit List(Allocator& allocator) { allocator.bytes(N * static_cast<int>(sizeof(T)) + (1 + 32) * static_cast<int>(sizeof(u32))); }
  int size = 0;
  /// Reading and writing a value counts.
  struct Value {
    int n;
    operator T() const {
      cost.shared += sizeof(T);
      return static_cast<T>(n + 1);
    }
    void operator=(T) const { cost.shared += sizeof(T); }
  };
  Value operator[](int n) const { return {n}; }
};

template <class SlotType, int Stages>
struct Ring {
  using Slot = SlotType;
  static constexpr int stages = Stages;
  static constexpr bool gathers = false;
  Slot* slots;
  int filled = 0;
  BufferUse* buffer = nullptr;  ///< a Buffer in the ring's slot
  explicit Ring(Allocator& allocator) : slots(reinterpret_cast<Slot*>(allocator.bytes(static_cast<i64>(sizeof(Slot)) * Stages))) {}
};

template <class SlotType, int Stages>
struct GatherRing : Ring<SlotType, Stages> {
  static constexpr bool gathers = true;
  using Ring<SlotType, Stages>::Ring;
};

struct Target {
  static constexpr bool whole_pieces = true;  // counts what the usual variant does
  template <class T, class Tile, int Split>
  using Global = analysis::Global<T, Tile, Split>;
  template <class T>
  using Pointer = analysis::Pointer<T>;
  template <class T, int R, int C, Contract contract>
  using Shared = analysis::Shared<T, R, C, contract>;
  template <class Codes, int R, int C>
  using Widened = analysis::Widened<Codes, R, C>;
  template <class Slot, int Stages>
  using Ring = analysis::Ring<Slot, Stages>;
  template <class Slot, int Stages>
  using GatherRing = analysis::GatherRing<Slot, Stages>;
  template <class T, int R, int C, int Warpgroups = R / 64>
  using Fragment = conditional<Warpgroups == R / 64, analysis::Fragment<T, R, C>, analysis::HeldFragment<T, R, C, Warpgroups>>;
  template <class T, int R, int C, int>
  using TeamFragment = Fragment<T, R, C>;
  template <class T, int R, int C, int Warpgroups>
  using SoloFragment = analysis::SoloFragment<T, R, C, Warpgroups>;
  template <class T, int R, int C>
  using Operand = analysis::Operand<T, R, C>;
  template <int R, int N, int Warps>
  using DividedSums = analysis::DividedSums<R, N, Warps>;
  template <int N, int Warps>
  using DividedSquares = analysis::DividedSquares<N, Warps>;
  template <class T, int N, int C, int Warps>
  using DividedOperand = analysis::DividedOperand<T, N, C, Warps>;
  template <class T, int C, int Warps>
  using DividedRow = analysis::DividedRow<T, C, Warps>;
  template <int N, int Warps>
  using DigitScales = analysis::DigitScales<N, Warps>;
  template <int R, int C, class Format, int Warps>
  using DividedScales = analysis::DividedScales<R, C, Format, Warps>;
  template <class T, int R, int C, int Warps, int Width>
  using Rows = analysis::Fragment<T, R, C, TileKind::rows>;
  template <class T, class Tile>
  using RowVector = analysis::RowVector<T, Tile>;
  template <class T, class Tile>
  using ColumnVector = analysis::ColumnVector<T, Tile>;
  template <class T, int R, int C>
  using Staging = analysis::Staging<T, R, C>;
  template <int R, int C>
  using Outbox = analysis::Outbox<R, C>;
  template <class T, int R, int C>
  using Scratch = analysis::Scratch<T, R, C>;
  template <class T, int R, int C, Contract contract>
  using Buffer = analysis::Buffer<T, R, C, contract>;
  template <class T, int N>
  using VectorBuffer = analysis::VectorBuffer<T, N>;
  template <class T, int R>
  using SharedStrip = analysis::Shared<T, R, 16 / static_cast<int>(sizeof(T)), Contract::columns>;
  template <class T, int N>
  using SharedVector = analysis::SharedVector<T, N>;
  template <class T, class Tile>
  using RowExchange = analysis::RowExchange<T, Tile>;
  template <int N>
  using Histogram = analysis::Histogram<N>;
  template <class T, int N>
  using List = analysis::List<T, N>;
};

}  // namespace tw::analysis

#endif  // !TW_ON_GPU
