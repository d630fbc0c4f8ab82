#include <mlx/mlx.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include "kvpool/mlx_buffer_pool.h"
#include "testing.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
constexpr int kThreads = 8;

void run_threads(const auto& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

/// Each thread writes its mark all over its buffers, and must find it there later.
TEST(BufferPoolThreads, NoTwoHoldersShareABuffer) {
  MlxBufferPool pool(1 << 18);
  std::atomic<int> n_clashes{0};
  run_threads([&](int self) {
    std::mt19937 random(static_cast<unsigned>(self));
    std::vector<MlxBuffer> mine;
    const auto release_one = [&] {
      const std::size_t i = random() % mine.size();
      std::optional<mx::array> view = mine[i].array();
      const auto* bytes = view->data<std::uint8_t>();
      for (std::size_t b = 0; b < mine[i].byte_len(); ++b) n_clashes += bytes[b] != self + 1;
      if (random() % 4 != 0) view.reset();
      pool.release(mine[i]);
      mine[i] = mine.back();
      mine.pop_back();
    };
    for (int step = 0; step < 4000; ++step) {
      if (mine.size() < 20 && random() % 5 < 3) {
        const std::size_t bytes = random() % 2000 + 1;
        mine.push_back(pool.alloc(mx::Device::cpu, bytes, mx::uint8, {1}));
        std::memset(mine.back().array().data<std::uint8_t>(), self + 1, bytes);
      } else if (!mine.empty()) {
        release_one();
      }
      if (step % 512 == 0) pool.clear();
    }
    while (!mine.empty()) release_one();
  });
  EXPECT_EQ(n_clashes, 0);
  EXPECT_EQ(pool.in_use_count(), 0U);
  EXPECT_LE(pool.free_bytes(), std::size_t{1} << 18);
}

TEST(BufferPoolThreads, ResetBesideAllocAndReleaseLosesAndDoublesNothing) {
  MlxBufferPool pool;
  std::atomic<std::size_t> n_stale{0};
  run_threads([&](int self) {
    for (int step = 0; step < 3000; ++step) {
      if (self == 0) {
        pool.reset();
        continue;
      }
      const MlxBuffer buffer = pool.alloc(mx::Device::cpu, 64, mx::uint8, {64});
      try {
        pool.release(buffer);
      } catch (const StaleBufferError&) {
        ++n_stale;
      }
      EXPECT_FALSE(buffer.live());
    }
  });
  EXPECT_EQ(pool.in_use_count(), 0U);
  EXPECT_EQ(pool.free_bytes(), pool.created_bytes());
  EXPECT_EQ(pool.free_count() * 64, pool.free_bytes());
  EXPECT_LE(pool.free_count(), std::size_t{kThreads - 1});
}

/// A stale handle never looks live, whatever its buffer goes through meanwhile.
TEST(BufferPoolThreads, LiveIsNeverTrueOfAHandleGivenBack) {
  MlxBufferPool pool;
  const MlxBuffer stale = pool.alloc(mx::Device::cpu, 64, mx::uint8, {64});
  pool.release(stale);
  std::atomic<bool> done{false};
  std::atomic<int> n_live{0};
  std::thread reader([&] {
    while (!done) n_live += stale.live();
  });
  for (int i = 0; i < 100000; ++i) pool.release(pool.alloc(mx::Device::cpu, 64, mx::uint8, {64}));
  done = true;
  reader.join();
  EXPECT_EQ(n_live, 0);
}

}  // namespace
}  // namespace kvpool
