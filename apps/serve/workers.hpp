#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tw::serve {

/// Threads that run functions in the order that they were given. A connection has at most one function here at a time, so that the queue is
/// bounded by the number of connections.
class Workers {
 public:
  explicit Workers(int threads);
  ~Workers() { stop(); }

  /// Runs what is queued, then ends.
  void stop();

  /// `function` must not throw.
  void post(std::function<void()> function);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> queue_;
  bool ended_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace tw::serve
