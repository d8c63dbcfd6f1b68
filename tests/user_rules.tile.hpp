#pragma once

#include "tilewave/tile/attention.tile.hpp"

// Rules of attention as a user writes them, for kernels/attention/attention_with_test.cpp.

namespace tw::test {

/// A query sees the keys of its own document. Documents follow each other.
struct SameDocument {
  static constexpr const char* source = "tests/user_rules.tile.hpp";

  template <class Target>
  struct Params {
    Pointer<Target, const i32> of_query, of_key;  ///< [batch, seqlen_q] and [batch, seqlen_k]: the number of the document
    Pointer<Target, const i32> begin;             ///< [batch, documents + 1]: its first key
    int documents;
  };
  static bool visible(const auto& p, const Score& at) {
    return p.of_query[at.batch * at.seqlen_q + at.query] == p.of_key[at.batch * at.seqlen_k + at.key];
  }
};

/// The same, and tells which keys they are.
struct SameDocumentByRange : SameDocument {
  static KeyRange keys(const auto& p, const ScoreRows& rows) {
    return {begin_of(p, rows, rows.first_query, 0), begin_of(p, rows, rows.last_query, 1)};
  }
  static KeyRange untouched(const auto& p, const ScoreRows& rows) {
    return {begin_of(p, rows, rows.last_query, 0), begin_of(p, rows, rows.first_query, 1)};
  }

 private:
  static int begin_of(const auto& p, const ScoreRows& rows, int query, int next) {
    return p.begin[rows.batch * (p.documents + 1) + p.of_query[rows.batch * rows.seqlen_q + query] + next];
  }
};

/// score + factor bias[head, distance to the query], where that is less than `reach`. Its parameter has the name of one of the library's.
struct RelativeBias {
  static constexpr const char* source = "tests/user_rules.tile.hpp";

  template <class Target>
  struct Params {
    Pointer<Target, const float> bias;  ///< [heads, 2 reach - 1]
    int reach;
    float factor;
  };
  static auto score(const auto& p, const Score& at, auto x) {
    const int distance = at.key - at.query - at.diagonal;
    return distance > -p.reach && distance < p.reach ? x + p.bias[at.head * (2 * p.reach - 1) + distance + p.reach - 1] * p.factor : x;
  }
};

/// The same, and tells of the keys before it all, or behind.
template <bool kBefore>
struct RelativeBiasFromOneSide : RelativeBias {
  static KeyRange untouched(const auto& p, const ScoreRows& rows) {
    if (kBefore) return {0, rows.first_query + rows.diagonal - p.reach + 1};
    return {rows.last_query + rows.diagonal + p.reach, rows.seqlen_k};
  }
};

/// Changes scores, and hides them where the change makes them odd: hides by what it is told, changes all.
struct DoubledEvenKeys {
  static constexpr const char* source = "tests/user_rules.tile.hpp";

  template <class Target>
  struct Params {};
  static bool visible(const auto&, const Score& at) { return at.key % 2 == 0; }
  static auto score(const auto&, const Score&, auto x) { return x + x; }
};

}  // namespace tw::test
