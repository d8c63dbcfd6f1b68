#pragma once

#include <type_traits>

namespace tw::detail {

/// Calls body(context, index) for every index in [0, count), on the threads of the CPU pool and the calling one; returns when all are done.
/// Which thread does which index, and in which order, is not defined, so a result that does not depend on that is the same for any number
/// of threads. A call from inside a body runs in place, one index after another. When bodies throw, indices not yet begun are given up and
/// the exception of the lowest index that threw reaches the caller: always the same one.
void parallel_for(long count, void (*body)(void* context, long index), void* context);

/// The same for a callable: parallel_for(count, [&](long index) { ... }).
template <class F>
void parallel_for(long count, F&& f) {
  using Callable = std::remove_reference_t<F>;
  parallel_for(
      count, [](void* context, long index) { (*static_cast<Callable*>(context))(index); }, const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace tw::detail
