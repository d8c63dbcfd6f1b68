#pragma once

#include "kernels/dequant_gemm/formats.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

// One token of each of a few sequences through all layers of a Llama decoder, in one launch. The time of such a step is that of reading the
// weights once. They do not depend on what is computed: the role that loads runs ahead of the tiles' order through all layers, so the
// memory is read while the blocks wait for each other's results. Those are elements of Awaited tensors: a tile waits for what it loads.

namespace tw::kernels::decode_step {

/// What the tiles of a step compute: the embeddings of the tokens, then for each layer five parts in this order, then the head.
enum class Part { qkv, attention, out, gate_up, down, head, embed };
inline constexpr int layer_parts = 5;

/// A tile of a step.
struct Place {
  Part part;
  int layer;
  int index;  ///< among the tiles of this part of the layer
};

/// The tiles of a step. A tile of a product has several pairs of groups of 8 rows of the weight, so that each block waits for a part once.
struct Tiles {
  int embed;
  int end[layer_parts];  ///< of each part, counted from the layer's first tile
  int layers;
  int head;
  int pairs[layer_parts + 2];    ///< of a part; of those that are no products the tiles
  int in_tile[layer_parts + 2];  ///< pairs of a tile

  TW_INLINE constexpr int count() const { return embed + layers * end[layer_parts - 1] + head; }
  TW_INLINE constexpr int count(int part) const { return end[part] - (part == 0 ? 0 : end[part - 1]); }
  TW_INLINE constexpr Place at(int tile) const {
    if (tile < embed) return {Part::embed, 0, tile};
    const int after = tile - embed, each = end[layer_parts - 1], layer = static_cast<int>(static_cast<u32>(after) / static_cast<u32>(each));
    if (layer >= layers) return {Part::head, layers, after - layers * each};
    const int index = after - layer * each;
    int part = 0;
    TW_UNROLL
    for (int n = 0; n < layer_parts - 1; ++n) part += index >= end[n];
    return {static_cast<Part>(part), layer, part == 0 ? index : index - end[part - 1]};
  }
};

/// Tiles in order, each to the next block: a tile waits only for tiles before it.
struct InOrder {
  static constexpr Dispatch dispatch = Dispatch::persistent;
  TW_INLINE static constexpr Tile at(const TileGrid&, int i) { return {i, 0, 0}; }
};

/// The format of weights that are stored in the dtype of everything else.
template <class T>
struct Plain {
  using Codes = T;
};

/// The scales of groups of a row, of a format that has them.
template <class Format, bool kByGroup>
struct GroupScale {
  using Type = typename Format::Scale;
};
template <class Format>
struct GroupScale<Format, false> {
  using Type = f16;
};

/// `Format`: of the weights, Plain<T> or one of kernels/dequant_gemm. `D`: the dimension of a head. `Group`: query heads for each head of
/// keys and values. `Room`: for so many sequences, 1, 8 or 16.
template <class Format, class T, int D, int Group, int Room, int Stages>
struct DecodeStep {
  static constexpr const char* source = "kernels/decode_step/decode_step.tile.hpp";
  using Codes = typename Format::Codes;
  static constexpr bool one = Room == 1;
  static constexpr int N = one ? 8 : Room;  ///< columns of products
  static constexpr bool plain = is_same<Codes, T>;
  /// Integers are multiplied as such, by operands of two digits. With more sequences making digits would take longer than decoding.
  static constexpr bool integers = is_same<Codes, i8> && N <= 8;
  static constexpr bool by_group = codes_in<Codes> > 1;
  static constexpr int panel = plain ? 128 : 256;              ///< columns of a weight for each warp, in a slot of 32 KB, or half of it
  static constexpr int panel_codes = panel / codes_in<Codes>;  ///< elements that hold them
  static constexpr int page = 64;                              ///< tokens of a page
  static constexpr int keys = 32;                              ///< that a tile of attention has in registers
  static constexpr int most_splits = 32;
  static constexpr float kLowest = -1e30f;  ///< below all scores, and finite: differences of it are numbers

  template <class Target>
  struct On {
    static constexpr int warps = 8;
    static constexpr bool waits = true;
    static constexpr int depth = panel * warps;  ///< columns of a slot
    static constexpr int ahead = 2048 / depth;   ///< steps whose operands are in registers
    using Schedule = InOrder;
    // 16 rows of a weight: two groups of 8, such as the rows of a gate and those of the values that it multiplies.
    using Slot = Shared<Target, Codes, 16 * warps, panel_codes>;
    using Sums = DividedSums<Target, 16, N, warps>;
    using Squares = DividedSquares<Target, N, warps>;
    using Operand = DividedOperand<Target, T, N, depth, warps>;
    using OperandScales = conditional<integers, DigitScales<Target, N, warps>, Unscaled>;
    using CodeScales = conditional<by_group, DividedScales<Target, 16, depth, Format, warps>, Unscaled>;
    using Probe = DividedOperand<Target, T, 8, 32 * warps, warps>;
    // An operand, and factors of it in equal rows, until the operand is multiplied.
    using Numbers = conditional<one, DividedRow<Target, T, depth, warps>, Operand>;
    using Factors = conditional<one, Numbers, DividedOperand<Target, T, 8, depth, warps>>;
    using Out = Rows<Target, float, 4 * warps, 8, warps, 1>;  // a row for each sequence, and a column for each row of a group
    using Keys = Rows<Target, float, keys, D, warps, 8>;
    using Scores = RowVector<Target, float, Keys>;
    using Vector = ColumnVector<Target, float, Keys>;
    using Heads = Rows<Target, float, warps, D, warps, D / 32>;  // query head g of a head of keys in row g
    using Line = Rows<Target, float, warps, 32, warps, 1>;       // a number for each key, or for each split; a row in each warp
    using PerLine = RowVector<Target, float, Line>;
    using ScaleVector = ColumnVector<Target, float, Out>;  // of rows of a weight

    /// The weights of a part, of all layers.
    struct Weights {
      Windowed<Target, const Codes, Slot> rows;  ///< [groups of groups of rows, K / panel, rows of a group of groups, panel]
      Global<Target, const float> scales;        ///< of rows: [1, rows]
      Global<Target, const typename GroupScale<Format, by_group>::Type> group_scales;  ///< [rows, K / group]
      Global<Target, const u8> zeros;                                                  ///< the same, of groups with zero points
    };
    struct Params {
      static constexpr bool plain = DecodeStep::plain;
      static constexpr bool by_group = DecodeStep::by_group;
      static constexpr int panel_codes = DecodeStep::panel_codes;
      Weights qkv, out, gate_up, down, head;
      Global<Target, const T, Keys> embedding;  ///< [vocabulary, hidden]
      Global<Target, const T, Keys> norms;      ///< [2 layers + 1, 8, hidden]: those before qkv and gate_up of each layer, and the head's
      Global<Target, T, Out> scores;            ///< [sequences, vocabulary]
      Global<Target, T, Keys> keys, values;     ///< [layers, 1, tokens of all pages, kv_heads * D]
      Global<Target, const float, Out> cosines, sines;  ///< [positions, D / 2]
      Global<Target, T, Out> last;                      ///< [sequences, hidden]: what the last layer leaves, without a head
      Pointer<Target, const int> ids, lengths;          ///< [sequences]: the token, and the number of those before it
      Pointer<Target, const int> pages;                 ///< [sequences, page_count]
      // What tiles hand to other tiles, for each layer.
      Awaited<Target, T, Keys> x;                     ///< [layers + 1, sequences, hidden]
      Awaited<Target, T, Keys> middle;                ///< [layers, sequences, hidden]: x after attention
      Awaited<Target, T, Keys> q, attended;           ///< [layers, sequences, heads * D]
      Awaited<Target, T, Keys> new_keys, new_values;  ///< [layers, sequences, kv_heads * D]
      Awaited<Target, T, Heads> attended_heads;       ///< attended as [layers, sequences * kv_heads, Group, D]
      Awaited<Target, T, Keys> product;               ///< [layers, sequences, intermediate]
      Awaited<Target, float, Heads> parts;            ///< [layers, splits * sequences * kv_heads, Group, D]: sums of values
      Awaited<Target, float, Line> peaks, totals;  ///< [layers, sequences * kv_heads, Group, splits]: the largest score, the weights' sum
      Tiles tiles;
      int sequences, heads, kv_heads, page_count, splits;
      float epsilon;
      float scale;  ///< of scores, as powers of 2
    };
    struct Memory {
      Ring<Target, Slot, Stages> weights;
      Scratch<Target, float, 16 * warps, 16 * N> sums;
      VectorBuffer<Target, float, N * warps> squares;
      VectorBuffer<Target, float, Group * keys> scores, totals;
      VectorBuffer<Target, int, N> places;  ///< of the sequences' tokens in the pages
      explicit constexpr Memory(auto& block) : weights(block), sums(block), squares(block), scores(block), totals(block), places(block) {}
    };
    struct State {};

    /// The weights are complete before the previous launch begins.
    TW_INLINE static bool loads_early(const Params&) { return true; }

    TW_INLINE static int columns(const Params& p, Part part) {
      switch (part) {
        case Part::qkv:
        case Part::gate_up:
        case Part::head:
          return p.x.cols;
        case Part::out:
          return p.attended.cols;
        case Part::down:
          return p.product.cols;
        default:
          return 0;
      }
    }
    TW_INLINE static const Weights& weights(const Params& p, Part part) {
      switch (part) {
        case Part::qkv:
          return p.qkv;
        case Part::out:
          return p.out;
        case Part::gate_up:
          return p.gate_up;
        case Part::down:
          return p.down;
        default:
          return p.head;
      }
    }
    /// Two groups of 8 rows of a weight, of all layers: from `row` of the group of groups on, and of the next.
    struct RowsOfPair {
      int group, apart, row;  ///< `apart`: rows of a group of groups
      TW_INLINE int first() const { return group * apart + row; }
    };
    TW_INLINE static RowsOfPair rows_of(const Params& p, Place at, int pair) {
      switch (at.part) {
        case Part::qkv:  // rows that are rotated together: those of the halves of a head
          return {(at.layer * (p.heads + 2 * p.kv_heads) + pair / (D / 16)) * 2, D / 2, pair % (D / 16) * 8};
        case Part::gate_up:  // rows of gate, and the same of up
          return {at.layer * 2, p.product.cols, pair * 8};
        case Part::head:
          return {pair * 2, 8, 0};
        default:  // neighbours in the others
          return {(at.layer * p.tiles.pairs[static_cast<int>(at.part)] + pair) * 2, 8, 0};
      }
    }
    TW_INLINE static int first_pair(const Params& p, Place at) { return at.index * p.tiles.in_tile[static_cast<int>(at.part)]; }
    TW_INLINE static int pairs(const Params& p, Place at) {
      const int part = static_cast<int>(at.part), in_tile = p.tiles.in_tile[part];
      return min(in_tile, p.tiles.pairs[part] - at.index * in_tile);
    }
    TW_INLINE static int steps(const Params& p, Tile t) {
      const Place at = p.tiles.at(t.m);
      return ceil_div(columns(p, at.part), depth) * pairs(p, at);
    }

    TW_INLINE static void load(auto& producer, const Params& p, Tile t, int step, Memory& memory) {
      const Place at = p.tiles.at(t.m);
      const int steps = ceil_div(columns(p, at.part), depth);
      const RowsOfPair rows = rows_of(p, at, first_pair(p, at) + step / steps);
      const Weights& from = weights(p, at.part);
      // The part before ends while a tile's first slots are on their way.
      if (step < Stages)
        producer.template limit<1>(memory.weights);
      else
        producer.template limit<2>(memory.weights);
      if constexpr (!plain) {
        if (step % steps == 0) {  // the threads that compute load them from the cache
          for (int row = rows.first(); row <= rows.first() + rows.apart; row += rows.apart) {
            if constexpr (by_group) {
              producer.prefetch(from.group_scales, row, 0, 8, from.group_scales.cols);
              producer.prefetch(from.zeros, row, 0, 8, from.zeros.cols);
            } else {
              producer.prefetch(from.scales, 0, row, 1, 8);
            }
          }
        }
      }
      producer.put(memory.weights,
                   [&](auto copy, Slot& slot) { copy.window(from.rows, slot, rows.row, 0, step % steps * warps, rows.group); });
    }

    TW_INLINE static void compute(auto& block, const Params& p, Tile t, Memory& memory, State&) {
      const Place at = p.tiles.at(t.m);
      switch (at.part) {
        case Part::embed:
          return embed(block, p, at);
        case Part::attention:
          return attend(block, p, at, memory);
        default:
          return multiply(block, p, at, memory);
      }
    }
    TW_INLINE static void finish(auto&, const Params&, Tile, Memory&, State&) {}

   private:
    TW_INLINE static void embed(auto& block, const Params& p, Place at) {
      Keys rows;
      block.gather(
          rows, p.embedding, [&](int row) { return row < p.sequences ? p.ids[row] : -1; }, at.index * D);
      block.store(rows, p.x, 0, at.index * D, 0);
    }

    /// The left operand of a part's products.
    TW_INLINE static const auto& operand(const Params& p, Part part) {
      switch (part) {
        case Part::out:
          return p.attended;
        case Part::gate_up:
          return p.middle;
        case Part::down:
          return p.product;
        default:
          return p.x;
      }
    }

    /// The products of the sequences' rows with the tile's rows of weights, for one pair of groups of 8 rows after the other: results[i](n,
    /// r) is the product of row n with row r of group i. qkv, gate_up and the head multiply RMS norms, x(n, c) norm(c) / sqrt(mean of
    /// x(n, :)^2 + epsilon), whose denominator is a factor of the results.
    TW_INLINE static void multiply(auto& block, const Params& p, Place at, Memory& memory) {
      const auto x = operand(p, at.part);
      const bool normed = at.part != Part::out && at.part != Part::down;
      const int norm = 2 * at.layer + (at.part == Part::gate_up ? 1 : 0);
      const int n = ceil_div(x.cols, depth), count = pairs(p, at), first = first_pair(p, at);
      const bool kept = n <= ahead;  // all operands are in registers, for all pairs
      Operand a[ahead];
      [[maybe_unused]] Numbers alone[ahead];  // of one sequence
      const auto numbers = [&](int s) -> Numbers& {
        if constexpr (one)
          return alone[s];
        else
          return a[s];
      };
      OperandScales a_scales[ahead];
      Factors factors[ahead];
      Squares squares;
      RowVector<Target, float, Out> factor;
      Added added;
      block.fill(squares, 0.0f);
      if (normed) {
        TW_UNROLL
        for (int s = 0; s < ahead; ++s) block.load(factors[s], p.norms, 0, s * depth, norm);
      }
      // What does not depend on the part before is there when that ends.
      const bool rotates = at.part == Part::qkv;
      if (rotates) {
        block.parallel(p.sequences, [&](int row) { memory.places[row] = token(p, row, p.lengths[row]); });
        load_angles(block, p, first, added);
      }
      Scales scales;
      scales.load(block, p, at, first);
      CodeScales code_scales;  // of the next step
      if constexpr (by_group) load_scales(block, p, at, first, 0, code_scales);
      // While the part before runs, a block of many sequences asks for few of its results.
      if (plain && p.sequences > 2) {
        Probe probe;
        block.await([&](auto& loads) { loads.load(probe, x, 0, 0, at.layer); });
      }
      block.await([&](auto& loads) {
        TW_UNROLL
        for (int s = 0; s < ahead; ++s) loads.load(numbers(s), x, 0, s * depth, at.layer);
        load_residual(loads, p, at, first, added);
      });
      bool there[ahead], added_there = true;
      TW_UNROLL
      for (bool& all : there) all = true;
      TW_NO_UNROLL
      for (int pair = 0; pair < count; ++pair) {
        Sums sums;
        block.fill(sums, 0.0f);
        TW_NO_UNROLL
        for (int first_step = 0; first_step < n; first_step += ahead) {
          TW_UNROLL
          for (int s = 0; s < ahead; ++s) {
            const int step = first_step + s;
            if (step >= n) continue;
            const auto load = [&](int of_step) {
              return [&numbers, s, &x, at, of_step](auto& loads) { loads.load(numbers(s), x, 0, of_step * depth, at.layer); };
            };
            block.await(there[s], load(step));
            if (pair == 0 && normed) block.add_squares(squares, numbers(s));
            if (pair == 0 || !kept) {
              if (normed) block.scale(numbers(s), factors[s]);
              if constexpr (integers) block.make_digits(numbers(s), a_scales[s]);
              if constexpr (one) block.spread(a[s], alone[s]);
            }
            if constexpr (by_group) {
              const CodeScales now = code_scales;
              const bool last = step + 1 == n;
              load_scales(block, p, at, first + pair + (last ? 1 : 0), last ? 0 : step + 1, code_scales);
              block.add_products_of_groups(sums, block.take(memory.weights), a[s], now);
            } else {
              block.add_products_of_groups(sums, block.take(memory.weights), a[s], a_scales[s]);
            }
            block.release(memory.weights);
            if (kept) continue;
            const int next = step + ahead < n ? step + ahead : s;  // the last ones load the next pair's first
            there[s] = block.attempt(load(next));
            if (normed) block.load(factors[s], p.norms, 0, next * depth, norm);
          }
        }
        Out results[2];
        block.complete(sums, results[0], results[1], memory.sums);
        scales.apply(block, results);
        if (normed) {
          if (pair == 0) {
            block.complete(squares, factor, memory.squares);
            const float mean = 1.0f / static_cast<float>(x.cols), epsilon = p.epsilon;
            block.for_rows(factor, [=](int, int, auto& y) { y = rsqrt(y * mean + epsilon); });
          }
          for (Out& result : results) block.map(result, factor, [](auto y, auto f) { return y * f; });
        }
        const auto load = [&](int of_pair) {
          return [&p, at, &added, of_pair](auto& loads) { load_residual(loads, p, at, of_pair, added); };
        };
        block.await(added_there, load(first + pair));
        store(block, p, at, first + pair, results[0], results[1], added, memory);
        if (pair + 1 == count) continue;
        if (rotates) load_angles(block, p, first + pair + 1, added);
        added_there = block.attempt(load(first + pair + 1));
        scales.load(block, p, at, first + pair + 1);
      }
      if (rotates) block.sync();  // the places have been read
    }

    /// The scales of a pair's rows.
    template <bool kNone, class = void>
    struct ScalesOf {
      TW_INLINE void load(auto&, const Params&, Place, int) {}
      TW_INLINE void apply(auto&, Out*) const {}
    };
    template <class Unused>
    struct ScalesOf<false, Unused> {
      ScaleVector of[2];
      TW_INLINE void load(auto& block, const Params& p, Place at, int pair) {
        const RowsOfPair rows = rows_of(p, at, pair);
        const auto& from = weights(p, at.part).scales;
        block.load(of[0], from, 0, rows.first());
        block.load(of[1], from, 0, rows.first() + rows.apart);
      }
      TW_INLINE void apply(auto& block, Out* results) const {
        TW_UNROLL
        for (int i = 0; i < 2; ++i) block.map(results[i], of[i], [](auto sum, auto scale) { return sum * scale; });
      }
    };
    using Scales = ScalesOf<plain || by_group>;
    /// The scales of the groups of a pair's rows, in a step.
    TW_INLINE static void load_scales(auto& block, const Params& p, Place at, int pair, int step, CodeScales& scales) {
      const RowsOfPair rows = rows_of(p, at, pair);
      const Weights& from = weights(p, at.part);
      block.load(scales, from.group_scales, from.zeros, rows.first(), step * depth, rows.apart);
    }

    /// What results of products are combined with: x, or the cosines and sines of a rotation.
    struct Added {
      Out first, second;
    };
    TW_INLINE static void load_angles(auto& block, const Params& p, int pair, Added& angles) {
      const auto position = [&](int row) { return row < p.sequences ? p.lengths[row] : -1; };
      block.gather(angles.first, p.cosines, position, pair % (D / 16) * 8);
      block.gather(angles.second, p.sines, position, pair % (D / 16) * 8);
    }
    TW_INLINE static void load_residual(auto& loads, const Params& p, Place at, int pair, Added& added) {
      if (at.part != Part::out && at.part != Part::down) return;
      const auto& from = at.part == Part::out ? p.x : p.middle;
      loads.load(added.first, from, 0, pair * 16, at.layer);
      loads.load(added.second, from, 0, pair * 16 + 8, at.layer);
    }

    TW_INLINE static void store(auto& block, const Params& p, Place at, int pair, Out& first, Out& second, const Added& added,
                                Memory& memory) {
      switch (at.part) {
        case Part::qkv:
          return store_qkv(block, p, at, pair, first, second, added, memory);
        case Part::gate_up:
          block.map(first, second, [](auto g, auto u) { return g * sigmoid(g) * u; });
          return block.store(first, p.product, 0, pair * 8, at.layer);
        case Part::head:
          block.store(first, p.scores, 0, pair * 16);
          return block.store(second, p.scores, 0, pair * 16 + 8);
        default:
          block.map(first, added.first, [](auto y, auto x) { return x + y; });
          block.map(second, added.second, [](auto y, auto x) { return x + y; });
          const auto to = [&](const auto& tensor, int layer) {
            block.store(first, tensor, 0, pair * 16, layer);
            block.store(second, tensor, 0, pair * 16 + 8, layer);
          };
          if (at.part == Part::out)
            to(p.middle, at.layer);
          else if (at.layer + 1 == p.tiles.layers && p.tiles.head == 0)
            to(p.last, 0);
          else
            to(p.x, at.layer + 1);
      }
    }

    /// Rotated queries, and the new keys and values, which go to the cache.
    TW_INLINE static void store_qkv(auto& block, const Params& p, Place at, int pair, Out& first, Out& second, const Added& angles,
                                    Memory& memory) {
      const int head = pair / (D / 16), column = pair % (D / 16) * 8;
      if (head < p.heads + p.kv_heads) {
        Out low = first;
        block.map(first, second, angles.first, angles.second, [](auto x, auto y, auto c, auto s) { return x * c - y * s; });
        block.map(second, low, angles.first, angles.second, [](auto y, auto x, auto c, auto s) { return y * c + x * s; });
      }
      const auto in_pages = [&](int row) { return row < p.sequences ? memory.places[row] : -1; };
      const auto to = [&](const auto& tensor, int to_column) {
        block.store(first, tensor, 0, to_column, at.layer);
        block.store(second, tensor, 0, to_column + D / 2, at.layer);
      };
      const auto to_cache = [&](const auto& tensor, int to_column) {
        block.scatter(first, tensor, in_pages, to_column, 0, at.layer);
        block.scatter(second, tensor, in_pages, to_column + D / 2, 0, at.layer);
      };
      const int key_head = head - p.heads, value_head = key_head - p.kv_heads;
      if (key_head < 0) {
        to(p.q, head * D + column);
      } else if (value_head < 0) {
        to(p.new_keys, key_head * D + column);
        to_cache(p.keys, key_head * D + column);
      } else {
        to(p.new_values, value_head * D + column);
        to_cache(p.values, value_head * D + column);
      }
    }

    /// The place of a sequence's token in the pages.
    TW_INLINE static int token(const Params& p, int sequence, int n) {
      return p.pages[sequence * p.page_count + n / page] * page + n % page;
    }

    /// One split of the keys, for the query heads of one head of keys: the sum of exp2(score - peak) value, the peak and the sum of the
    /// weights. The tile of the last split combines all of them.
    TW_INLINE static void attend(auto& block, const Params& p, Place at, Memory& memory) {
      const int split = at.index % p.splits, kv_head = at.index / p.splits % p.kv_heads, sequence = at.index / p.splits / p.kv_heads;
      const int count = p.lengths[sequence] + 1, share = ceil_div(ceil_div(count, keys), p.splits) * keys;
      const int begin = split * share, end = min(count, begin + share), group = sequence * p.kv_heads + kv_head;
      PerLine peaks, totals;  // of query head g in row g
      block.fill(peaks, -kInfinity);
      block.fill(totals, 0.0f);
      if (begin < end) {
        Heads part;
        add_values(block, p, {at.layer, sequence, kv_head, count, begin, end}, part, peaks, totals, memory);
        block.store(part, p.parts, 0, 0, split * p.sequences * p.kv_heads + group, at.layer);
      }
      block.store(peaks, p.peaks, 0, split, group, at.layer);
      block.store(totals, p.totals, 0, split, group, at.layer);
      if (split == p.splits - 1) combine(block, p, at.layer, group, ceil_div(count, share), memory);
    }

    /// Keys from `begin` to `end`, of `count`.
    struct Split {
      int layer, sequence, kv_head, count, begin, end;
    };
    TW_INLINE static void add_values(auto& block, const Params& p, Split s, Heads& part, PerLine& peaks, PerLine& totals, Memory& memory) {
      const int column = s.kv_head * D, end = s.end, newest = s.count - 1;
      Keys k, v, new_k, new_v, sums[Group];
      static_assert(page % keys == 0, "the keys of a tile are neighbours in a page");
      const auto place = [&](int from) { return from >= s.begin ? token(p, s.sequence, from) : 0; };
      const auto load_keys = [&](Keys& to_keys, Keys& to_values, int from, int first) {
        const auto row_of = [=](int row) { return from >= s.begin && from + row < min(end, newest) ? first + row : -1; };
        block.gather(to_keys, p.keys, row_of, column, 0, s.layer);
        block.gather(to_values, p.values, row_of, column, 0, s.layer);
      };
      // From the last tile on: the newest key, which has to be waited for, is in it.
      const int last = s.begin + (end - s.begin - 1) / keys * keys;
      load_keys(k, v, last, place(last));
      int next_place = place(last - keys);
      Vector q[Group];
      block.await([&](auto& loads) {
        TW_UNROLL
        for (int g = 0; g < Group; ++g) loads.load(q[g], p.q, s.sequence, (s.kv_head * Group + g) * D, s.layer);
        const auto row_of = [=](int row) { return last + row == newest ? s.sequence : -1; };
        loads.gather(new_k, p.new_keys, row_of, column, s.layer);
        loads.gather(new_v, p.new_values, row_of, column, s.layer);
      });
      // Only the row of the newest key is not 0.
      block.map(k, new_k, [](auto old, auto fresh) { return old + fresh; });
      block.map(v, new_v, [](auto old, auto fresh) { return old + fresh; });
      // Each row of the tiles has a largest score and a sum of weights of its own, of the keys that come by in it.
      Scores row_peaks[Group], row_totals[Group];
      TW_UNROLL
      for (int g = 0; g < Group; ++g) {
        block.fill(sums[g], 0.0f);
        block.fill(row_peaks[g], kLowest);
        block.fill(row_totals[g], 0.0f);
      }
      TW_NO_UNROLL
      for (int from = last; from >= s.begin; from -= keys) {
        Keys next_k, next_v;
        load_keys(next_k, next_v, from - keys, next_place);  // a branch around it would wait for what it loads
        next_place = place(from - 2 * keys);
        TW_UNROLL
        for (int g = 0; g < Group; ++g) {
          Scores weights, decays;
          block.fill(weights, 0.0f);
          block.add_products(weights, k, q[g]);
          block.complete(weights);
          block.for_rows(weights, [&](int row, int i, auto& x) {
            auto score = x * p.scale;
            if (from + row >= end) score = -kInfinity;
            const auto peak = max(row_peaks[g][i], score);
            decays[i] = exp2(row_peaks[g][i] - peak);
            x = exp2(score - peak);
            row_totals[g][i] = row_totals[g][i] * decays[i] + x;
            row_peaks[g][i] = peak;
          });
          block.map(sums[g], v, decays, weights,
                    [](auto sum, auto value, auto decay, auto weight) { return sum * decay + value * weight; });
        }
        k = next_k;
        v = next_v;
      }
      TW_UNROLL
      for (int g = 0; g < Group; ++g) {
        if (!block.owns_rows(row_peaks[g])) continue;
        block.for_rows(row_peaks[g], [&](int row, int i, auto& x) {
          memory.scores[g * keys + row] = x;
          memory.totals[g * keys + row] = row_totals[g][i];
        });
      }
      block.sync();
      Line factors, weighted;
      block.for_each(factors, weighted, [&](int g, int row, auto& peak, auto& total) {
        peak = total = 0.0f;
        if (g >= Group) return;
        peak = memory.scores[g * keys + row];
        total = memory.totals[g * keys + row];
      });
      block.rows(factors, [&](int i, auto row) {
        const auto peak = row.max();
        row.map([peak](auto x) { return exp2(x - peak); });
        peaks[i] = peak;
      });
      block.map(weighted, factors, [](auto total, auto factor) { return total * factor; });
      block.rows(weighted, [&](int i, auto row) { totals[i] = row.sum(); });
      block.for_each(factors, [&](int g, int row, auto& x) {
        if (g < Group) memory.scores[g * keys + row] = x;
      });
      block.sync();
      TW_UNROLL
      for (int g = 0; g < Group; ++g) {
        Scores factor;
        block.for_rows(factor, [&](int row, int, auto& x) { x = memory.scores[g * keys + row]; });
        block.map(sums[g], factor, [](auto sum, auto f) { return sum * f; });
      }
      block.column_fold(sums, part, [](auto a, auto b) { return a + b; });
    }

    /// The attention of the query heads of one head of keys, group `group` of a layer's, from its splits.
    TW_INLINE static void combine(auto& block, const Params& p, int layer, int group, int splits, Memory& memory) {
      static_assert(keys == most_splits && most_splits == Line::cols, "the splits' weights share the memory of scores");
      constexpr int ahead = 16;  // splits whose sums are in registers
      Heads parts[ahead], sum;
      const auto load = [&](auto& loads, int first) {
        TW_UNROLL
        for (int s = 0; s < ahead; ++s) {
          const int split = first + s;
          loads.load(parts[s], p.parts, split < splits ? 0 : Group, 0, split * p.sequences * p.kv_heads + group, layer);
        }
      };
      Line weights, totals;  // of query head g in row g
      block.await([&](auto& loads) {
        loads.load(weights, p.peaks, 0, 0, group, layer);
        loads.load(totals, p.totals, 0, 0, group, layer);
        load(loads, 0);
      });
      block.for_each(weights, [&](int g, int split, auto& peak) {
        if (g < Group && split >= splits) peak = -kInfinity;
      });
      block.rows(weights, [](int, auto row) {
        const auto peak = row.max();
        row.map([peak](auto x) { return exp2(x - peak); });
      });
      PerLine all;
      block.map(totals, weights, [](auto total, auto weight) { return total * weight; });
      block.rows(totals, [&](int i, auto row) { all[i] = row.sum(); });
      block.map(weights, all, [](auto weight, auto total) { return weight / total; });
      block.for_each(weights, [&](int g, int split, auto& x) {
        if (g < Group) memory.scores[g * most_splits + split] = x;
      });
      block.sync();
      block.fill(sum, 0.0f);
      TW_NO_UNROLL
      for (int first = 0; first < splits; first += ahead) {
        if (first > 0) block.await([&](auto& loads) { load(loads, first); });
        TW_UNROLL
        for (int s = 0; s < ahead; ++s) {
          RowVector<Target, float, Heads> weight;
          block.for_rows(weight, [&](int g, int, auto& x) { x = memory.scores[min(g, Group - 1) * most_splits + first + s]; });
          block.map(sum, parts[s], weight, [](auto x, auto part, auto w) { return x + part * w; });
        }
      }
      block.store(sum, p.attended_heads, 0, 0, group, layer);
      block.sync();  // the weights have been read
    }
  };
};

}  // namespace tw::kernels::decode_step
