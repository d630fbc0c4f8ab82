#include "attention/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <set>

namespace kvpool::attention {
namespace {

TEST(ThreadPool, RunsEachItemOnce) {
  for (const int n_threads : {1, 2, 5}) {
    ThreadPool pool(n_threads);
    EXPECT_EQ(pool.n_threads(), n_threads);
    for (const std::size_t n : {0U, 1U, 2U, 7U, 1000U}) {
      std::vector<std::atomic<int>> counts(n);
      pool.for_each(n, [&](std::size_t i) { ++counts[i]; });
      for (const auto& count : counts) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, UsesItsWorkersAndTheCaller) {
  ThreadPool pool(3);
  std::atomic<int> n_inside{0};
  // Each item waits for two others at the same time.
  pool.for_each(3, [&](std::size_t) {
    ++n_inside;
    while (n_inside < 3) std::this_thread::yield();
  });
  EXPECT_EQ(n_inside, 3);
}

TEST(ThreadPool, TakesJobsOfSeveralThreadsAtOnce) {
  ThreadPool pool(3);
  std::vector<std::int64_t> sums(4);
  {
    std::vector<std::jthread> callers;
    for (std::size_t c = 0; c < sums.size(); ++c) {
      callers.emplace_back([&pool, &sum = sums[c]] {
        for (int round = 0; round < 300; ++round) {
          std::vector<std::int64_t> items(20);
          pool.for_each(items.size(), [&](std::size_t i) { items[i] = static_cast<int>(i); });
          sum += std::accumulate(items.begin(), items.end(), std::int64_t{0});
        }
      });
    }
  }
  for (const std::int64_t sum : sums) EXPECT_EQ(sum, 300 * 190);
}

TEST(ThreadPool, RefusesNoThreads) { EXPECT_THROW(ThreadPool(-1), std::invalid_argument); }

}  // namespace
}  // namespace kvpool::attention
