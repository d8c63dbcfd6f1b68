#pragma once

#include "kernels/dequant_gemm/formats.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

// One token of each of a few sequences through all layers of a Llama decoder, in one launch. The time of such a step is that of reading the
// weights once. They do not depend on what is computed: the role that loads runs ahead of the tiles' order through all layers, so the
// memory is read while the blocks wait for each other's results. A tile waits until all tiles of the part before have announced theirs.

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

/// `Format`: of the weights, Plain<T> or one of kernels/dequant_gemm. `D`: the dimension of a head. `Group`: query heads for each head of
/// keys and values. Up to N sequences.
template <class Format, class T, int D, int Group, int N, int Stages>
struct DecodeStep {
  static constexpr const char* source = "kernels/decode_step/decode_step.tile.hpp";
  using Codes = typename Format::Codes;
  static constexpr bool plain = is_same<Codes, T>;
  static constexpr int panel = plain ? 128 : 256;  ///< columns of a weight for each warp, in a slot of 32 KB
  static constexpr int page = 64;                  ///< tokens of a page
  static constexpr int keys = 32;                  ///< that a tile of attention has in registers
  static constexpr int most_splits = 32;

  template <class Target>
  struct On {
    static constexpr int warps = 8;
    static constexpr bool waits = true;
    static constexpr int depth = panel * warps;  ///< columns of a slot
    static constexpr int ahead = 2048 / depth;   ///< steps whose operands are in registers
    using Schedule = InOrder;
    // 16 rows of a weight: two groups of 8, such as the rows of a gate and those of the values that it multiplies.
    using Slot = Shared<Target, Codes, 16 * warps, panel>;
    using Sums = DividedSums<Target, 16, N, warps>;
    using Squares = DividedSquares<Target, N, warps>;
    using Operand = DividedOperand<Target, T, N, depth, warps>;
    using Factors = DividedOperand<Target, T, 8, depth, warps>;  // in equal rows
    using Out = Rows<Target, float, 4 * warps, 8, warps, 1>;     // a row for each sequence, and a column for each row of a group
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
      conditional<plain, Unscaled, Global<Target, const float>> scales;  ///< [1, rows]
    };
    struct Params {
      static constexpr bool plain = DecodeStep::plain;
      static constexpr int panel = DecodeStep::panel;
      Weights qkv, out, gate_up, down, head;
      Global<Target, const T, Keys> embedding;  ///< [vocabulary, hidden]
      Global<Target, const T, Keys> norms;      ///< [2 layers + 1, 8, hidden]: those before qkv and gate_up of each layer, and the head's
      Global<Target, T, Out> scores;            ///< [sequences, vocabulary]
      Global<Target, T, Keys> keys, values;     ///< [layers, 1, tokens of all pages, kv_heads * D]
      Global<Target, const float, Out> cosines, sines;  ///< [positions, D / 2]
      Global<Target, T, Keys> x;                        ///< [sequences, hidden]
      Global<Target, T, Keys> q, attended;              ///< [sequences, heads * D]
      Global<Target, T, Heads> attended_heads;          ///< the same as [sequences * heads, D]
      Global<Target, T, Keys> product;                  ///< [sequences, intermediate]
      Global<Target, float, Heads> parts;               ///< [splits, sequences * heads, D]: sums of values
      Pointer<Target, float> peaks, totals;             ///< [sequences * heads, splits]: the largest score, and the sum of the weights
      Pointer<Target, const int> ids, lengths;          ///< [sequences]: the token, and the number of those before it
      Pointer<Target, u32> counters;                    ///< of the embedding and of each layer's parts: zeros
      Pointer<Target, u32> arrivals;                    ///< [layers, sequences, kv_heads], of splits: zeros
      Pointer<Target, const int> pages;                 ///< [sequences, page_count]
      Tiles tiles;
      int sequences, heads, kv_heads, page_count, splits;
      float epsilon;
      float scale;  ///< of scores, as powers of 2
    };
    struct Memory {
      Ring<Target, Slot, Stages> weights;
      Scratch<Target, float, 16 * warps, 16 * N> sums;
      VectorBuffer<Target, float, N * warps> squares;
      VectorBuffer<Target, float, Group * keys> scores;
      VectorBuffer<Target, float, Group> decays;
      VectorBuffer<Target, int, N> places;  ///< of the sequences' tokens in the pages
      explicit constexpr Memory(auto& block) : weights(block), sums(block), squares(block), scores(block), decays(block), places(block) {}
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
          producer.prefetch(from.scales, 0, rows.first(), 1, 8);
          producer.prefetch(from.scales, 0, rows.first() + rows.apart, 1, 8);
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
    TW_INLINE static void finish(auto& block, const Params& p, Tile t, Memory&, State&) {
      const Place at = p.tiles.at(t.m);
      if (at.part != Part::head && at.part != Part::attention) block.announce(p.counters, counter(at));
    }

   private:
    TW_INLINE static void embed(auto& block, const Params& p, Place at) {
      Keys rows;
      block.gather(
          rows, p.embedding, [&](int row) { return row < p.sequences ? p.ids[row] : -1; }, at.index * D);
      block.store(rows, p.x, 0, at.index * D);
    }

    TW_INLINE static int counter(Place at) { return at.part == Part::embed ? 0 : 1 + at.layer * layer_parts + static_cast<int>(at.part); }
    /// Waits for all tiles of the part before; of attention, for those that combine the splits of a head of keys.
    TW_INLINE static void wait(auto& block, const Params& p, Place at) {
      const int before = counter(at.part == Part::head ? Place{Part::qkv, at.layer, 0} : at) - 1;
      const int count = before == 0 ? p.tiles.embed : p.tiles.count((before - 1) % layer_parts);
      block.wait_for(p.counters, before, at.part == Part::out ? p.sequences * p.kv_heads : count);
    }

    /// The left operand of a part's products.
    TW_INLINE static const auto& operand(const Params& p, Part part) {
      return part == Part::out ? p.attended : part == Part::down ? p.product : p.x;
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
        load_added(block, p, at.part, first, added);
      }
      Scales scales;
      scales.load(block, p, at, first);
      wait(block, p, at);
      TW_UNROLL
      for (int s = 0; s < ahead; ++s) block.load(a[s], x, 0, s * depth);
      if (!rotates) load_added(block, p, at.part, first, added);
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
            if (normed) {
              if (pair == 0) block.add_squares(squares, a[s]);
              if (pair == 0 || !kept) block.scale(a[s], factors[s]);
            }
            block.add_products_of_groups(sums, block.take(memory.weights), a[s]);
            block.release(memory.weights);
            if (kept) continue;
            const int next = step + ahead < n ? step + ahead : s;  // the last ones load the next pair's first
            block.load(a[s], x, 0, next * depth);
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
        store(block, p, at, first + pair, results[0], results[1], added, memory);
        if (pair + 1 == count) continue;
        load_added(block, p, at.part, first + pair + 1, added);
        scales.load(block, p, at, first + pair + 1);
      }
    }

    /// The scales of a pair's rows.
    template <bool kPlain, class = void>
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
    using Scales = ScalesOf<plain>;

    /// What results of products are combined with: x, or the cosines and sines of a rotation.
    struct Added {
      Out first, second;
    };
    TW_INLINE static void load_added(auto& block, const Params& p, Part part, int pair, Added& added) {
      if (part == Part::qkv) {
        const auto position = [&](int row) { return row < p.sequences ? p.lengths[row] : -1; };
        block.gather(added.first, p.cosines, position, pair % (D / 16) * 8);
        block.gather(added.second, p.sines, position, pair % (D / 16) * 8);
      } else if (part == Part::out || part == Part::down) {
        block.load(added.first, p.x, 0, pair * 16);
        block.load(added.second, p.x, 0, pair * 16 + 8);
      }
    }

    TW_INLINE static void store(auto& block, const Params& p, Place at, int pair, Out& first, Out& second, const Added& added,
                                Memory& memory) {
      switch (at.part) {
        case Part::qkv:
          return store_qkv(block, p, at, pair, first, second, added, memory);
        case Part::gate_up:
          block.map(first, second, [](auto g, auto u) { return g * sigmoid(g) * u; });
          return block.store(first, p.product, 0, pair * 8);
        case Part::head:
          block.store(first, p.scores, 0, pair * 16);
          return block.store(second, p.scores, 0, pair * 16 + 8);
        default:
          block.map(first, added.first, [](auto y, auto x) { return x + y; });
          block.map(second, added.second, [](auto y, auto x) { return x + y; });
          block.store(first, p.x, 0, pair * 16);
          block.store(second, p.x, 0, pair * 16 + 8);
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
      const auto to = [&](const auto& tensor, int heads_before, auto row_of, int layer) {
        const int to_column = (head - heads_before) * D + column;
        block.scatter(first, tensor, row_of, to_column, 0, layer);
        block.scatter(second, tensor, row_of, to_column + D / 2, 0, layer);
      };
      if (head < p.heads)
        to(
            p.q, 0, [](int row) { return row; }, 0);
      else if (head < p.heads + p.kv_heads)
        to(p.keys, p.heads, in_pages, at.layer);
      else
        to(p.values, p.heads + p.kv_heads, in_pages, at.layer);
    }

    /// The place of a sequence's token in the pages.
    TW_INLINE static int token(const Params& p, int sequence, int n) {
      return p.pages[sequence * p.page_count + n / page] * page + n % page;
    }

    /// One split of the keys, for the query heads of one head of keys: the sum of exp2(score - peak) value, the peak and the sum of the
    /// weights. The tile that comes last combines all of them.
    TW_INLINE static void attend(auto& block, const Params& p, Place at, Memory& memory) {
      const int split = at.index % p.splits, kv_head = at.index / p.splits % p.kv_heads, sequence = at.index / p.splits / p.kv_heads;
      const int count = p.lengths[sequence] + 1, share = ceil_div(ceil_div(count, keys), p.splits) * keys;
      const int begin = split * share, end = min(count, begin + share), column = kv_head * D;
      if (begin >= count) return;
      Keys k, v, sums[Group];
      static_assert(page % keys == 0, "the keys of a tile are neighbours in a page");
      const auto place = [&](int from) { return from < end ? token(p, sequence, from) : 0; };
      const auto load_keys = [&](Keys& to_keys, Keys& to_values, int from, int first) {
        const auto row_of = [=](int row) { return from + row < end ? first + row : -1; };
        block.gather(to_keys, p.keys, row_of, column, 0, at.layer);
        block.gather(to_values, p.values, row_of, column, 0, at.layer);
      };
      // The tile that has the newest key waits for it, with its place.
      const bool early = begin + keys < count;
      const int first_place = place(begin);
      int next_place = place(begin + keys);
      if (early) load_keys(k, v, begin, first_place);
      TW_UNROLL
      for (int g = 0; g < Group; ++g) block.fill(sums[g], 0.0f);
      PerLine peaks, totals, decays;  // of query head g in row g
      block.fill(peaks, -kInfinity);
      block.fill(totals, 0.0f);
      wait(block, p, at);
      if (!early) load_keys(k, v, begin, first_place);
      Vector q[Group];
      TW_UNROLL
      for (int g = 0; g < Group; ++g) block.load(q[g], p.q, sequence, (kv_head * Group + g) * D);
      TW_NO_UNROLL
      for (int from = begin; from < end; from += keys) {
        Keys next_k, next_v;
        load_keys(next_k, next_v, from + keys, next_place);  // a branch around it would wait for what it loads
        next_place = place(from + 2 * keys);
        Scores weights[Group];
        TW_UNROLL
        for (int g = 0; g < Group; ++g) {
          block.fill(weights[g], 0.0f);
          block.add_products(weights[g], k, q[g]);
          block.complete(weights[g]);
          block.for_rows(weights[g], [&](int row, int, auto& x) { x = from + row < end ? x * p.scale : -kInfinity; });
          if (block.owns_rows(weights[g])) block.for_rows(weights[g], [&](int row, int, auto& x) { memory.scores[g * keys + row] = x; });
        }
        block.sync();
        Line line;
        block.for_each(line, [&](int g, int key, auto& x) {
          x = 0.0f;
          if (g < Group) x = memory.scores[g * keys + key];
        });
        block.rows(line, [&](int i, auto row) {
          const auto peak = max(peaks[i], row.max());
          decays[i] = exp2(peaks[i] - peak);
          totals[i] = totals[i] * decays[i] + row.map_sum([peak](auto x) { return exp2(x - peak); });
          peaks[i] = peak;
        });
        block.for_each(line, [&](int g, int key, auto& x) {
          if (g < Group) memory.scores[g * keys + key] = x;
        });
        block.for_rows(decays, [&](int g, int, auto& x) {
          if (g < Group) memory.decays[g] = x;
        });
        block.sync();
        TW_UNROLL
        for (int g = 0; g < Group; ++g) {
          const auto decay = memory.decays[g];
          block.for_rows(weights[g], [&](int row, int, auto& x) { x = memory.scores[g * keys + row]; });
          block.map(sums[g], v, weights[g], [=](auto sum, auto value, auto weight) { return sum * decay + value * weight; });
        }
        block.sync();
        k = next_k;
        v = next_v;
      }
      const int head = sequence * p.heads + kv_head * Group;
      Heads part;
      block.column_fold(sums, part, [](auto a, auto b) { return a + b; });
      block.scatter(
          part, p.parts, [=](int g) { return g < Group ? head + g : -1; }, 0, split);
      if (block.owns_rows(peaks)) {
        block.for_rows(peaks, [&](int g, int, auto& x) {
          if (g < Group) p.peaks[(head + g) * p.splits + split] = x;
        });
        block.for_rows(totals, [&](int g, int, auto& x) {
          if (g < Group) p.totals[(head + g) * p.splits + split] = x;
        });
      }
      const int used = ceil_div(count, share);
      if (!block.announces_last(p.arrivals, (at.layer * p.sequences + sequence) * p.kv_heads + kv_head, split, used)) return;
      combine(block, p, sequence, kv_head, used, memory);
      block.announce(p.counters, counter(at));
    }

    /// The attention of the query heads of one head of keys from its splits.
    TW_INLINE static void combine(auto& block, const Params& p, int sequence, int kv_head, int splits, Memory& memory) {
      static_assert(keys == most_splits && most_splits == Line::cols, "the splits' weights share the memory of scores");
      constexpr int ahead = 16;  // splits whose sums are in registers
      const int head = sequence * p.heads + kv_head * Group;
      const auto row_of = [=](int g) { return g < Group ? head + g : -1; };
      Heads parts[ahead], sum;
      const auto load = [&](int first) {
        TW_UNROLL
        for (int s = 0; s < ahead; ++s)
          block.gather(
              parts[s], p.parts, [=](int g) { return first + s < splits ? row_of(g) : -1; }, 0, first + s);
      };
      load(0);
      Line weights, totals;  // of query head g in row g
      block.for_each(weights, totals, [&](int g, int split, auto& peak, auto& total) {
        peak = g < Group ? -kInfinity : 0.0f;
        total = 0.0f;
        if (g >= Group || split >= splits) return;
        peak = p.peaks[(head + g) * p.splits + split];
        total = p.totals[(head + g) * p.splits + split];
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
        if (first > 0) load(first);
        TW_UNROLL
        for (int s = 0; s < ahead; ++s) {
          RowVector<Target, float, Heads> weight;
          block.for_rows(weight, [&](int g, int, auto& x) { x = memory.scores[min(g, Group - 1) * most_splits + first + s]; });
          block.map(sum, parts[s], weight, [](auto x, auto part, auto w) { return x + part * w; });
        }
      }
      block.scatter(sum, p.attended_heads, row_of, 0);
    }
  };
};

}  // namespace tw::kernels::decode_step
