#include "runtime/thread_pool.hpp"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/error.hpp"

namespace tw::test {
namespace {

/// Sets the number of threads for one test.
class Threads {
 public:
  explicit Threads(int threads) : before_(cpu_threads()) { set_cpu_threads(threads); }
  ~Threads() { set_cpu_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

TEST(ThreadPool, EveryIndexOnce) {
  for (int threads : {1, 2, 3, 8}) {
    const Threads set(threads);
    for (long count : {0L, 1L, 2L, 7L, 1000L}) {
      std::vector<std::atomic<int>> hits(static_cast<std::size_t>(count));
      detail::parallel_for(count, [&](long i) { ++hits[static_cast<std::size_t>(i)]; });
      for (auto& hit : hits) EXPECT_EQ(hit, 1) << threads << " threads, " << count << " indices";
    }
  }
}

TEST(ThreadPool, NegativeCountDoesNothing) {
  detail::parallel_for(-3, [](long) { ADD_FAILURE(); });
}

TEST(ThreadPool, UsesAsManyThreadsAsSetAndNoMore) {
  constexpr int kThreads = 4;
  const Threads set(kThreads);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::atomic<int> arrived = 0;
  // Each of four bodies waits until all four have begun: only four threads at once can do that.
  detail::parallel_for(kThreads, [&](long) {
    {
      const std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    }
    ++arrived;
    while (arrived < kThreads) std::this_thread::yield();
  });
  EXPECT_EQ(ids.size(), static_cast<std::size_t>(kThreads));

  const Threads fewer(2);
  std::atomic<int> inside = 0;
  std::atomic<int> most = 0;
  detail::parallel_for(64, [&](long) {
    const int now = ++inside;
    for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    --inside;
  });
  EXPECT_LE(most, 2);
}

TEST(ThreadPool, ExceptionOfTheLowestIndexReachesTheCaller) {
  for (int threads : {1, 4}) {
    const Threads set(threads);
    for (int round = 0; round < 50; ++round) {
      std::string message;
      try {
        detail::parallel_for(200, [](long i) {
          if (i % 50 == 37) throw std::runtime_error(std::to_string(i));
        });
      } catch (const std::runtime_error& error) {
        message = error.what();
      }
      EXPECT_EQ(message, "37") << threads << " threads";
    }
    // The pool works on.
    std::atomic<long> sum = 0;
    detail::parallel_for(100, [&](long i) { sum += i; });
    EXPECT_EQ(sum, 4950);
  }
}

TEST(ThreadPool, NestedCallsRunInPlace) {
  const Threads set(4);
  std::atomic<long> sum = 0;
  detail::parallel_for(8, [&](long) {
    const std::thread::id outer = std::this_thread::get_id();
    long expected = 0;
    detail::parallel_for(10, [&](long j) {
      EXPECT_EQ(std::this_thread::get_id(), outer);
      EXPECT_EQ(j, expected++);
      sum += j;
    });
  });
  EXPECT_EQ(sum, 8 * 45);
}

TEST(ThreadPool, ManyCallersAtOnce) {
  const Threads set(3);
  std::vector<std::thread> callers;
  std::atomic<long> sum = 0;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::atomic<long> mine = 0;
        detail::parallel_for(17, [&](long i) { mine += i; });
        EXPECT_EQ(mine, 136);
        sum += mine;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 6 * 200 * 136);
}

TEST(ThreadPool, ResultDoesNotDependOnThreads) {
  auto compute = [](int threads) {
    const Threads set(threads);
    std::vector<float> out(5000);
    detail::parallel_for(static_cast<long>(out.size()), [&](long i) {
      float x = 0;
      for (int k = 1; k < 50; ++k) x += std::sin(static_cast<float>(i * k)) / static_cast<float>(k);
      out[static_cast<std::size_t>(i)] = x;
    });
    return out;
  };
  const std::vector<float> one = compute(1);
  EXPECT_EQ(one, compute(2));
  EXPECT_EQ(one, compute(7));
}

TEST(ThreadPool, OwnPoolEndsWithItsThreads) {
  std::atomic<int> hits = 0;
  {
    ThreadPool pool;
    auto body = [](void* context, long) { ++*static_cast<std::atomic<int>*>(context); };
    for (int i = 0; i < 20; ++i) pool.run(100, 1 + i % 5, body, &hits);
  }
  EXPECT_EQ(hits, 2000);
}

TEST(ThreadPool, WorksInAChildProcess) {
  const Threads set(4);
  // A child has none of the parent's workers, and may be born while one of them holds the pool's lock.
  for (int round = 0; round < 20; ++round) {
    detail::parallel_for(100, [](long) {});
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::atomic<long> sum = 0;
      detail::parallel_for(100, [&](long i) { sum += i; });
      _exit(sum == 4950 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

TEST(ThreadPool, NumberOfThreadsIsChecked) {
  EXPECT_GE(cpu_threads(), 1);
  const int before = cpu_threads();
  EXPECT_THROW(set_cpu_threads(0), InvalidArgument);
  EXPECT_THROW(set_cpu_threads(-4), InvalidArgument);
  EXPECT_THROW(set_cpu_threads(1 << 20), InvalidArgument);
  EXPECT_EQ(cpu_threads(), before);
}

}  // namespace
}  // namespace tw::test
