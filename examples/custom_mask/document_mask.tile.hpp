#pragma once

#include "tilewave/tile/attention.tile.hpp"

/// Several documents share a sequence. A query sees only keys of its own document.
struct SameDocument {
  static constexpr const char* source = "document_mask.tile.hpp";

  template <class Target>
  struct Params {
    tw::Pointer<Target, const tw::i32> document;  ///< [seqlen]: the number of each token's document
  };
  static bool visible(const auto& p, const tw::Score& at) { return p.document[at.query] == p.document[at.key]; }
};
