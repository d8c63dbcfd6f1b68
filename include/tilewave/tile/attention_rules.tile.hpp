#pragma once

#include "tilewave/tile/attention_config.tile.hpp"
#include "tilewave/tile/language.tile.hpp"

// Rules define which keys a query sees and how scores change. They are small types, which attention's kernel takes as a list. A rule is
//
//   struct Mask {
//   template <class Target> struct Params { ... };                  what the host fills in: numbers and Pointers
//     static bool visible(const auto& params, const Score& at);       false: the score becomes -infinity
//   };
//   struct Change {
//     template <class Target> struct Params { ... };
//     static auto score(const auto& params, const Score& at, auto x);  x is the score
//   };
//
// or both; then score() is applied first. A rule may also describe a tile of rows, so that blocks of keys are skipped, or used without
// testing each score:
//
//   static KeyRange keys(const auto& params, const ScoreRows& rows);       no row sees a key outside
//   static QueryRange queries(const auto& params, const ScoreKeys& keys);  no query outside sees one of these keys
//   static KeyRange untouched(const auto& params, const ScoreRows& rows);  the rule does nothing to any row's keys inside
//
// Attention's backward pass also needs the derivative of score(), unless it is 1, as a function of what score() returned:
//
//   static auto slope(const auto& params, auto x);
//
// A rule that changes scores only a little and hides nothing declares `static constexpr bool bounded = true`. The kernel then looks for a
// row's maximum less often.
//
// A user-defined rule is in an embedded *.tile.hpp file that includes tilewave/tile/attention.tile.hpp; its `static constexpr const char*
// source` names the file. Pass it to tilewave/attention_with.hpp; examples/custom_mask shows how.

namespace tw {

/// The position of a score: a query and a key of one sequence, both counted from 0.
struct Score {
  int batch, head, query, key;
  int seqlen_q, seqlen_k;
  int diagonal;    ///< query i is aligned with key i + diagonal
  float distance;  ///< query + diagonal - key
};

/// The rows of scores that a block computes together.
struct ScoreRows {
  int batch, head;              ///< if the rows are of several heads, the first of these
  int first_query, last_query;  ///< inclusive
  int seqlen_q, seqlen_k;
  int diagonal;
};

/// Keys begin, ..., end - 1.
struct KeyRange {
  int begin, end;
  TW_INLINE constexpr KeyRange operator&(const KeyRange& other) const { return {max(begin, other.begin), min(end, other.end)}; }
};

/// The keys of scores that a block computes together.
struct ScoreKeys {
  int first_key, last_key;  ///< inclusive
  int seqlen_q, seqlen_k;
  int diagonal;
};

/// Queries begin, ..., end - 1.
struct QueryRange {
  int begin, end;
  TW_INLINE constexpr QueryRange operator&(const QueryRange& other) const { return {max(begin, other.begin), min(end, other.end)}; }
};

/// Chunks of `size` positions, which may be negative, of at least -2^29 and below 2^30: chunk_of() 0 begins at position 0.
struct Chunks {
  int size;
  u32 multiplier;  ///< ceil(2^(31 + shift) / size)
  int shift;       ///< the smallest with 2^shift >= size
  int bias;        ///< a multiple of size that is at least 2^29

  /// `size`: 1 to 2^29; 0: all positions are one chunk.
  static constexpr Chunks of(int size) {
    if (size == 0) return {0x7fffffff, 0, 0, 1 << 30};  // from -2^30 on
    int shift = 0;
    while (1 << shift < size) ++shift;
    const u64 divisor = static_cast<u64>(size), scale = u64{1} << (31 + shift);
    return {size, static_cast<u32>((scale + divisor - 1) / divisor), shift, ((1 << 29) + size - 1) / size * size};
  }
  /// The first position of the chunk that a position lies in. Without a division, for which kernels would need registers.
  TW_INLINE constexpr int begin(int position) const {
    const u32 twice = 2 * static_cast<u32>(position + bias);  // the sum is below 2^31
    const u32 number = static_cast<u32>(u64{twice} * multiplier >> 32) >> shift;
    return static_cast<int>(number) * size - bias;
  }
};

/// Query i sees keys from i + diagonal - left on (kLower) and up to i + diagonal + right (kUpper). A causal mask is the upper bound with
/// right = 0; a sliding window has both bounds. left and right must be below 2^30. With kChunks it also sees only keys of the chunk that i
/// + diagonal lies in.
template <bool kLower, bool kUpper, bool kChunks = false>
struct Band {
  static constexpr bool lower = kLower || kChunks;
  template <class Target>
  struct Params {
    int left, right;
    Chunks chunks;
  };
  TW_INLINE static bool visible(const auto& p, const Score& at) {
    const int beside = at.query + at.diagonal;
    int first = kLower ? beside - p.left : 0, last = kUpper ? beside + p.right : 0;
    if constexpr (kChunks) {
      const int begin = p.chunks.begin(beside), end = begin + p.chunks.size - 1;
      first = kLower ? max(first, begin) : begin;
      last = kUpper ? min(last, end) : end;
    }
    return (!(kUpper || kChunks) || at.key <= last) && (!(kLower || kChunks) || at.key >= first);
  }
  TW_INLINE static KeyRange keys(const auto& p, const ScoreRows& rows) {
    KeyRange seen{kLower ? rows.first_query + rows.diagonal - p.left : 0,
                  kUpper ? rows.last_query + rows.diagonal + p.right + 1 : rows.seqlen_k};
    if constexpr (kChunks)
      seen = seen &
             KeyRange{p.chunks.begin(rows.first_query + rows.diagonal), p.chunks.begin(rows.last_query + rows.diagonal) + p.chunks.size};
    return seen;
  }
  TW_INLINE static KeyRange untouched(const auto& p, const ScoreRows& rows) {
    KeyRange whole{kLower ? rows.last_query + rows.diagonal - p.left : 0,
                   kUpper ? rows.first_query + rows.diagonal + p.right + 1 : rows.seqlen_k};
    if constexpr (kChunks)
      whole = whole &
              KeyRange{p.chunks.begin(rows.last_query + rows.diagonal), p.chunks.begin(rows.first_query + rows.diagonal) + p.chunks.size};
    return whole;
  }
  TW_INLINE static QueryRange queries(const auto& p, const ScoreKeys& keys) {
    QueryRange seen{kUpper ? keys.first_key - keys.diagonal - p.right : 0,
                    kLower ? keys.last_key - keys.diagonal + p.left + 1 : keys.seqlen_q};
    if constexpr (kChunks)
      seen =
          seen & QueryRange{p.chunks.begin(keys.first_key) - keys.diagonal, p.chunks.begin(keys.last_key) + p.chunks.size - keys.diagonal};
    return seen;
  }
};

// The library's own rules keep scores in units: the score is x times a number that the host knows at each rule. So the products of q and k
// need no extra multiplication.

/// cap tanh(score / cap): x becomes tanh(factor x), in units of cap. `factor` is the previous unit divided by cap.
struct Softcap {
  static constexpr bool bounded = true;
  template <class Target>
  struct Params {
    float factor;
  };
  TW_INLINE static auto score(const auto& p, const Score&, auto x) { return tanh_approx(x * p.factor); }
  TW_INLINE static auto slope(const auto&, auto x) { return 1.0f - x * x; }
};

/// score - slope |query + diagonal - key| (Press et al., arXiv 2108.12409).
struct Alibi {
  static constexpr bool bounded = true;
  template <class Target>
  struct Params {
    Pointer<Target, const float> slopes;  ///< [batch, heads]
    i64 stride_batch, stride_head;
    float per_unit;  ///< 1 / unit
  };
  TW_INLINE static auto score(const auto& p, const Score& at, auto x) {
    const auto slope = p.slopes[at.batch * p.stride_batch + at.head * p.stride_head] * p.per_unit;
    return x - slope * abs(at.distance);
  }
};

/// A tensor [batch, heads, seqlen_q, seqlen_k] that is added (f32, f16, bf16), or that says which keys are seen (bool, as u8). Its element
/// type is a run-time value.
struct MaskTensor {
  enum class Type : u8 { boolean, f32, f16, bf16 };
  template <class Target>
  struct Params {
    const void* data;
    i64 stride_batch, stride_head, stride_query, stride_key;
    int last_query, last_key;  ///< of the tensor; positions after them have their element
    float per_unit;            ///< 1 / unit
    Type type;
  };
  TW_INLINE static auto score(const auto& p, const Score& at, auto x) {
    // Rows and columns after the last one are computed and dropped.
    const i64 index = at.batch * p.stride_batch + at.head * p.stride_head + min(at.query, p.last_query) * p.stride_query +
                      min(at.key, p.last_key) * p.stride_key;
    switch (p.type) {
      case Type::boolean:
        return static_cast<const u8*>(p.data)[index] != 0 ? x : decltype(x)(-kInfinity);
      case Type::f32:
        return x + static_cast<const float*>(p.data)[index] * p.per_unit;
      case Type::f16:
        return x + static_cast<float>(static_cast<const f16*>(p.data)[index]) * p.per_unit;
      default:
        return x + static_cast<float>(static_cast<const bf16*>(p.data)[index]) * p.per_unit;
    }
  }
};

/// Adapts a user-defined rule. A user's rule does not know about units: it is given the score itself and returns the score itself, and the
/// unit is the same before and after it, so it may leave some scores untouched. It may index arrays with the position it is given: rows and
/// columns after the last one, which are computed and dropped, get the last one's position.
template <class Rule>
struct UserRule : Rule {
  template <class Target>
  struct Params : Rule::template Params<Target> {
    float unit, per_unit;
  };
  TW_INLINE static bool visible(const auto& p, const Score& at) requires requires { Rule::visible(p, at); }
  { return Rule::visible(p, inside(at)); }
  TW_INLINE static auto score(const auto& p, const Score& at, auto x) requires requires { Rule::score(p, at, x); }
  { return Rule::score(p, inside(at), x * p.unit) * p.per_unit; }

 private:
  TW_INLINE static Score inside(Score at) {
    at.query = min(at.query, at.seqlen_q - 1);
    at.key = min(at.key, at.seqlen_k - 1);
    return at;
  }
};

/// A rule that always has its place in Params, so that the host fills in one structure for all lists of rules.
template <class Rule, Use kUse>
struct Optional {
  using Inner = Rule;
  static constexpr Use use = kUse;
  template <class Target>
  struct Params : Rule::template Params<Target> {
    bool used;
  };
};

namespace detail {

/// A rule without its Optional.
template <class Rule>
struct RuleOf {
  using Type = Rule;
  static constexpr Use use = Use::always;
};
template <class Rule, Use kUse>
struct RuleOf<Optional<Rule, kUse>> {
  using Type = Rule;
  static constexpr Use use = kUse;
};

/// For asking which members a rule has, which does not depend on the target.
struct AnyTarget {
  template <class T>
  using Pointer = T*;
};

template <class Rule, class P>
inline constexpr bool narrows = requires(const P& p, const ScoreRows& rows) {
  Rule::untouched(p, rows);
};
template <class Rule, class P>
inline constexpr bool limits = requires(const P& p, const ScoreRows& rows) {
  Rule::keys(p, rows);
};
template <class Rule, class P>
inline constexpr bool limits_queries = requires(const P& p, const ScoreKeys& keys) {
  Rule::queries(p, keys);
};
template <class Rule, class P>
inline constexpr bool bends = requires(const P& p) {
  Rule::slope(p, 1.0f);
};
template <class Rule, class P>
inline constexpr bool hides = requires(const P& p, const Score& at) {
  Rule::visible(p, at);
};
template <class Rule, class P>
inline constexpr bool changes = requires(const P& p, const Score& at) {
  Rule::score(p, at, 1.0f);
};

/// The embedded file that defines a rule; null for the library's rules.
template <class Rule>
constexpr const char* rule_source() {
  if constexpr (requires { Rule::source; })
    return Rule::source;
  else
    return nullptr;
}

}  // namespace detail

/// A list of rules, applied from the first to the last.
template <class... R>
struct Rules {
  static constexpr const char* source = nullptr;
  static constexpr bool lower = false;
  static constexpr bool anywhere = false;
  template <class Target>
  struct Params {};
  TW_INLINE static KeyRange keys(const auto&, const ScoreRows&, KeyRange all) { return all; }
  TW_INLINE static KeyRange untouched(const auto&, const ScoreRows&, KeyRange all) { return all; }
  TW_INLINE static QueryRange queries(const auto&, const ScoreKeys&, QueryRange all) { return all; }
  static constexpr bool changing = false;
  static constexpr bool bending = false;
  template <bool kEdge, int kFirst, int kCount>
  TW_INLINE static void apply(auto&, const auto&, auto&, auto, auto&...) {}
};

template <class First, class... Rest>
struct Rules<First, Rest...> {
  using Rule = typename detail::RuleOf<First>::Type;
  using Others = Rules<Rest...>;
  static constexpr Use use = detail::RuleOf<First>::use;

  template <class Target>
  struct Params {
    typename First::template Params<Target> first;
    typename Others::template Params<Target> rest;
  };
  template <class P>
  static constexpr bool narrows = use != Use::never&& detail::narrows<Rule, P>;

  /// The file that a user-defined rule names, or null.
  static constexpr const char* source = detail::rule_source<Rule>() ? detail::rule_source<Rule>() : Others::source;

  static constexpr bool has_lower() {
    if constexpr (requires { Rule::lower; }) return Rule::lower;
    return detail::narrows<Rule, typename First::template Params<detail::AnyTarget>>;
  }
  /// Whether a rule may touch the first blocks of the keys that rows see. (It may always touch the last ones.) A rule with untouched() can
  /// declare that it does not: `static constexpr bool lower = false`.
  static constexpr bool lower = (use != Use::never && has_lower()) || Others::lower;

  static constexpr bool is_bounded() {
    if constexpr (requires { Rule::bounded; }) return Rule::bounded;
    return false;
  }
  /// Whether a row may see its first key, or scores of any size, in any block, not only in blocks that rules cut.
  static constexpr bool anywhere =
      (use != Use::never && !detail::narrows<Rule, typename First::template Params<detail::AnyTarget>> && !is_bounded()) ||
      Others::anywhere;

  /// The keys among `all` that a row may see.
  TW_INLINE static KeyRange keys(const auto& p, const ScoreRows& rows, KeyRange all) {
    if constexpr (use != Use::never && detail::limits<Rule, decltype(p.first)>) {
      if (on(p)) all = all & Rule::keys(p.first, rows);
    }
    return Others::keys(p.rest, rows, all);
  }
  /// The keys whose scores need no test. A rule without untouched() is applied to all keys.
  TW_INLINE static KeyRange untouched(const auto& p, const ScoreRows& rows, KeyRange all) {
    if constexpr (narrows<decltype(p.first)>) {
      if (on(p)) all = all & Rule::untouched(p.first, rows);
    }
    return Others::untouched(p.rest, rows, all);
  }
  /// The queries among `all` that may see one of the keys.
  TW_INLINE static QueryRange queries(const auto& p, const ScoreKeys& keys, QueryRange all) {
    if constexpr (use != Use::never && detail::limits_queries<Rule, decltype(p.first)>) {
      if (on(p)) all = all & Rule::queries(p.first, keys);
    }
    return Others::queries(p.rest, keys, all);
  }
  /// Whether the derivative of a rule's score() is not 1.
  static constexpr bool bending =
      (use != Use::never && detail::bends<Rule, typename First::template Params<detail::AnyTarget>>) || Others::bending;
  /// Whether a rule changes scores everywhere.
  static constexpr bool changing = (use != Use::never && detail::changes<Rule, typename First::template Params<detail::AnyTarget>> &&
                                    !detail::narrows<Rule, typename First::template Params<detail::AnyTarget>>) ||
                                   Others::changing;

  /// Applies the rules to kCount columns of a tile of scores, from kFirst on. `at(row, col)` is a score's position. kEdge: also applies the
  /// rules that leave other tiles untouched. `slopes`: nothing, or a tile like the scores whose elements are multiplied by the derivative
  /// of the score; then all columns are asked for.
  template <bool kEdge, int kFirst, int kCount>
  TW_INLINE static void apply(auto& block, const auto& p, auto& scores, auto at, auto&... slopes) {
    using P = decltype(p.first);
    static_assert(detail::changes<Rule, P> || detail::hides<Rule, P>, "a rule has visible(params, at) or score(params, at, x)");
    if constexpr (use != Use::never && (kEdge || !detail::narrows<Rule, P>)) {
      if (on(p)) {
        block.template for_columns<kFirst, kCount>(scores, [&](int row, auto col, auto& x) {
          if constexpr (detail::changes<Rule, P>) x = Rule::score(p.first, at(row, col), x);
          if constexpr (detail::hides<Rule, P>) {
            if (!Rule::visible(p.first, at(row, col))) x = -kInfinity;
          }
        });
        if constexpr (detail::bends<Rule, P>)
          (block.for_each(slopes, scores, [&](int, int, auto& slope, auto& x) { slope *= Rule::slope(p.first, x); }), ...);
      }
    }
    Others::template apply<kEdge, kFirst, kCount>(block, p.rest, scores, at, slopes...);
  }

 private:
  TW_INLINE static bool on(const auto& p) {
    if constexpr (use == Use::runtime)
      return p.first.used;
    else
      return true;
  }
};

}  // namespace tw
