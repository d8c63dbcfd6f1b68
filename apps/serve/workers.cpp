#include "apps/serve/workers.hpp"

#include <utility>

namespace tw::serve {

Workers::Workers(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

void Workers::stop() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  posted_.notify_all();
  threads_.clear();
}

void Workers::post(std::function<void()> function) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(function));
  }
  posted_.notify_one();
}

void Workers::run() {
  for (;;) {
    std::unique_lock lock(mutex_);
    posted_.wait(lock, [&] { return ended_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<void()> function = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    function();
  }
}

}  // namespace tw::serve
