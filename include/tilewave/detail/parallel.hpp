#pragma once

#include <type_traits>

namespace tw::detail {

/// Calls body(context, index) for every index in [0, count), on the threads of the CPU pool and the calling thread. Returns when all are
/// done. The order, and the thread of an index, are not defined. A call from inside a body runs serially on its thread. If bodies throw,
/// indices not yet begun are skipped, and the exception of the lowest index that threw reaches the caller: always the same one.
void parallel_for(long count, void (*body)(void* context, long index), void* context);

/// The same for a callable: parallel_for(count, [&](long index) { ... }).
template <class F>
void parallel_for(long count, F&& f) {
  using Callable = std::remove_reference_t<F>;
  parallel_for(
      count, [](void* context, long index) { (*static_cast<Callable*>(context))(index); }, const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace tw::detail
