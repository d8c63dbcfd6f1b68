#include "runtime/thread_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <thread>

#include "runtime/format.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/device.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

// A thread that waits polls this often before it sleeps, for some tens of microseconds: the launches of one model step follow each other
// faster than the system wakes a thread, and their threads end within microseconds of each other.
constexpr int kSpins = 2000;
constexpr int kMaxThreads = 1024;

// The largest tiles of the library's kernels (attention in f32) take 1.5 MB. Sanitizers and user-defined kernels may take more.
constexpr std::size_t kCallerStack = std::size_t{4} << 20;
constexpr std::size_t kWorkerStack = std::size_t{8} << 20;  // address space: untouched pages cost nothing

thread_local bool inside_body = false;

/// Marks this thread as running a body, so that a nested call runs in place.
struct InsideBody {
  InsideBody() { inside_body = true; }
  ~InsideBody() { inside_body = false; }
};

/// Whether the calling thread has enough stack for any body. False on a stack that is not the thread's own, such as a fiber's.
bool has_stack() {
  struct Stack {
    std::uintptr_t lowest = 0, highest = 0;
    Stack() {
      pthread_attr_t attributes;
      if (pthread_getattr_np(pthread_self(), &attributes) != 0) return;
      void* address = nullptr;
      std::size_t size = 0;
      if (pthread_attr_getstack(&attributes, &address, &size) == 0) {
        lowest = reinterpret_cast<std::uintptr_t>(address);
        highest = lowest + size;
      }
      pthread_attr_destroy(&attributes);
    }
  };
  thread_local const Stack stack;
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  return here < stack.highest && here > stack.lowest && here - stack.lowest >= kCallerStack;
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Kernels may have used non-temporal stores, which are not ordered. Completes them before other threads learn that the work is done.
void drain_stores() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int count = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(count, 1, kMaxThreads);
}

std::atomic<int>& thread_setting() {
  static std::atomic<int> threads = usable_cores();
  return threads;
}

}  // namespace

struct ThreadPool::Job {
  long count;
  void (*body)(void* context, long index);
  void* context;
  int places;                    // workers that may still join; under the pool's mutex
  std::atomic<int> workers = 0;  // workers that are in; changed under the pool's mutex
  std::atomic<long> next = 0;
  std::mutex failure_mutex;
  std::exception_ptr failure;
  long failed_index = 0;

  Job(long indices, void (*function)(void*, long), void* argument, int helpers)
      : count(indices), body(function), context(argument), places(helpers) {}
};

void ThreadPool::do_indices(Job& job) {
  const InsideBody inside;
  for (long i = job.next.fetch_add(1); i < job.count; i = job.next.fetch_add(1)) {
    try {
      job.body(job.context, i);
    } catch (...) {
      // Indices are taken in ascending order, so the lowest one that throws is always reached.
      const std::lock_guard lock(job.failure_mutex);
      if (!job.failure || i < job.failed_index) {
        job.failure = std::current_exception();
        job.failed_index = i;
      }
      job.next.store(job.count);
    }
  }
  drain_stores();
}

/// The oldest job that a worker may join, with the mutex held.
ThreadPool::Job* ThreadPool::open_job() {
  for (Job* job : jobs_) {
    if (job->places > 0) return job;
  }
  return nullptr;
}

/// Lets no more workers join, with the mutex held.
void ThreadPool::close(Job& job) {
  if (job.places > 0) open_jobs_.fetch_sub(1, std::memory_order_relaxed);
  job.places = 0;
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    Job* job = open_job();
    if (job == nullptr) {
      if (stopping_) return;
      lock.unlock();
      for (int i = 0; i < kSpins && open_jobs_.load(std::memory_order_relaxed) == 0; ++i) pause();
      lock.lock();
      if (open_job() == nullptr && !stopping_) wake_.wait(lock, [this] { return stopping_ || open_job() != nullptr; });
      continue;
    }
    if (--job->places == 0) open_jobs_.fetch_sub(1, std::memory_order_relaxed);
    ++job->workers;
    lock.unlock();
    do_indices(*job);
    lock.lock();
    // No index is left, so no other worker has to join. The job is on its caller's stack and may be gone once `workers` is 0.
    close(*job);
    if (job->workers.fetch_sub(1, std::memory_order_release) == 1) finished_.notify_all();
  }
}

void ThreadPool::start_workers(int wanted) {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setstacksize(&attributes, kWorkerStack);
  const auto start = [](void* pool) -> void* {
    static_cast<ThreadPool*>(pool)->work();
    return nullptr;
  };
  while (static_cast<int>(workers_.size()) < wanted) {
    pthread_t worker;
    // If the system has no more threads, the existing ones, or the caller alone, do the work.
    if (pthread_create(&worker, &attributes, start, this) != 0) break;
    workers_.push_back(worker);
  }
  pthread_attr_destroy(&attributes);
}

void ThreadPool::run(long count, int threads, void (*body)(void* context, long index), void* context) {
  if (count <= 0) return;
  const bool works = inside_body || has_stack();  // a thread that runs a body has enough stack
  const int helpers = static_cast<int>(std::min<long>(count, std::max(threads, 1))) - (works ? 1 : 0);
  if (helpers <= 0 || inside_body) {
    for (long i = 0; i < count; ++i) body(context, i);
    drain_stores();
    return;
  }
  Job job(count, body, context, helpers);
  {
    const std::lock_guard lock(mutex_);
    start_workers(helpers);
    if (!works && workers_.empty()) {
      throw Error(tw::format("this thread has less than {} KiB of stack left for the CPU's kernels, and no other thread could be started",
                             kCallerStack >> 10));
    }
    jobs_.push_back(&job);
    open_jobs_.fetch_add(1, std::memory_order_relaxed);
  }
  if (helpers == 1) {
    wake_.notify_one();
  } else {
    wake_.notify_all();
  }
  if (works) do_indices(job);

  std::unique_lock lock(mutex_);
  // If the caller does not work, the workers may not have started yet.
  if (!works) finished_.wait(lock, [&] { return job.workers == 0 && job.next.load() >= job.count; });
  jobs_.remove(&job);
  close(job);
  lock.unlock();
  const auto finished = [&] { return job.workers.load(std::memory_order_acquire) == 0; };
  for (int i = 0; i < kSpins && !finished(); ++i) pause();
  if (!finished()) {
    lock.lock();
    finished_.wait(lock, finished);
    lock.unlock();
  }
  if (job.failure) std::rethrow_exception(job.failure);
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (const pthread_t worker : workers_) pthread_join(worker, nullptr);
}

int cpu_threads() { return thread_setting().load(); }

void set_cpu_threads(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw InvalidArgument(tw::format("set_cpu_threads: threads is {}; allowed: 1 to {}", threads, kMaxThreads));
  }
  thread_setting().store(threads);
}

namespace detail {

namespace {

/// Never destroyed, because joining threads while the process ends may deadlock.
std::atomic<ThreadPool*>& pool() {
  static std::atomic<ThreadPool*> instance = [] {
    // After a fork the child has the pool's memory but not its threads, and one of them may have held the lock. So it gets a new pool.
    pthread_atfork(nullptr, nullptr, [] { pool().store(new ThreadPool); });
    return new ThreadPool;
  }();
  return instance;
}

}  // namespace

void parallel_for(long count, void (*body)(void* context, long index), void* context) {
  pool().load(std::memory_order_acquire)->run(count, cpu_threads(), body, context);
}

}  // namespace detail
}  // namespace tw
