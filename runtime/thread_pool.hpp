#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <vector>

namespace tw {

/// The threads of the cpu target. Any number of threads may call `run` at the same time: workers join any call with indices left. A caller
/// also works on its own call, so that it ends even if no worker is free. Bodies keep more than a megabyte of tiles on the stack, so a
/// caller with a small stack (Java's threads, fibers) only waits.
class ThreadPool {
 public:
  ThreadPool() = default;
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// body(context, i) for every i in [0, count), on at most `threads` threads, the caller's included if it works. Throws Error if the
  /// caller's stack is too small and no thread can be started. See tw::detail::parallel_for.
  void run(long count, int threads, void (*body)(void* context, long index), void* context);

 private:
  struct Job;

  void start_workers(int wanted);
  void work();
  Job* open_job();
  void close(Job& job);
  static void do_indices(Job& job);

  std::mutex mutex_;
  std::condition_variable wake_;      // a job was added
  std::condition_variable finished_;  // a worker left a job
  std::list<Job*> jobs_;              // with indices left, oldest first
  std::atomic<int> open_jobs_ = 0;    // how many of them a worker may join, read by spinning workers without the lock
  std::vector<pthread_t> workers_;    // not std::thread, which cannot set the stack size
  bool stopping_ = false;
};

}  // namespace tw
