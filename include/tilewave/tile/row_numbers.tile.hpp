#pragma once

#include "tilewave/tile/language.tile.hpp"

namespace tw {

/// f(0) to f(N - 1), as a function for copy.gather(). To be called in load() before producer.put(), by all threads: where a role of its own
/// loads by cp.async, each of them then asks once for the numbers of the rows that it copies, before it waits for slots. Elsewhere it is f.
/// N: a multiple of 16 on sm_90a. What f refers to must outlive the result.
template <int N, class Producer, class Fn>
TW_INLINE auto row_numbers(const Producer& producer, Fn f) {
  if constexpr (requires { producer.template row_numbers<N>(f); })
    return producer.template row_numbers<N>(f);
  else
    return f;
}

}  // namespace tw
