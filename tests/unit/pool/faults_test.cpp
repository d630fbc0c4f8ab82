// P1 to P4 of the faults that people met elsewhere, as they stand there.

#include <barrier>
#include <set>
#include <thread>

#include "testing.h"

namespace kvpool {
namespace {

using testing::expect_balanced;
using testing::ids;
using testing::joined;

constexpr int kRounds = 10'000;

TEST(Faults, P1ABlockIsReleasedOnceByItsCurrentHolder) {
  for (const bool in_one_call : {false, true}) {
    BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
    const auto a = pool.allocate(Stream::kKey, 16, 1);
    if (in_one_call) {
      pool.free(joined(a, a));
    } else {
      pool.free(a);
      pool.free(a);
    }
    const auto b = pool.allocate(Stream::kKey, 16, 2);
    const auto c = pool.allocate(Stream::kKey, 16, 3);
    EXPECT_NE(b[0].block_id(), c[0].block_id());
    EXPECT_EQ(pool.n_free(Stream::kKey), 2);
    EXPECT_EQ(pool.stats().n_frees, 1);
  }
}

TEST(Faults, P2AFailedAllocationLeavesNoTrace) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  pool.allocate(Stream::kKey, 32, 1);
  EXPECT_THROW(pool.allocate(Stream::kKey, 48, 2), BlockPoolExhaustedError);
  EXPECT_EQ(pool.n_free(Stream::kKey), 2);
  EXPECT_EQ(pool.stats().blocks_in_use(), 2);
  EXPECT_TRUE(pool.blocks_for(2).empty());
  pool.register_owner(2);
}

/// How thread B lets go: by owner as thread A does, by handle, or by handle as a destructor does.
enum class Way { kFreeAll, kFree, kRelease };

class P3 : public ::testing::TestWithParam<Way> {};

TEST_P(P3, ReleaseIsSafeAgainstOtherThreads) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 64});
  std::vector<Block> held;
  std::barrier start(2);
  std::barrier finish(2);
  std::thread b([&] {
    for (int round = 0; round < kRounds; ++round) {
      start.arrive_and_wait();
      switch (GetParam()) {
        case Way::kFreeAll:
          pool.free_all(5);
          break;
        case Way::kFree:
          pool.free(held);
          break;
        case Way::kRelease:
          pool.release(held);
          break;
      }
      finish.arrive_and_wait();
    }
  });
  std::int64_t n_wrong = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto [keys, values] = pool.allocate_kv(32 * 16, 5);
    held = joined(keys, values);
    const auto all = ids(held);
    n_wrong += std::set(all.begin(), all.end()).size() != 64;
    const std::int64_t n_frees = pool.stats().n_frees;
    start.arrive_and_wait();
    pool.free_all(5);
    finish.arrive_and_wait();
    n_wrong += pool.stats().n_frees - n_frees != 64;
    n_wrong += pool.stats().blocks_in_use() != 0;
  }
  b.join();
  EXPECT_EQ(n_wrong, 0);
  EXPECT_EQ(pool.stats().n_frees, std::int64_t{64} * kRounds);
  expect_balanced(pool);
}

INSTANTIATE_TEST_SUITE_P(Ways, P3, ::testing::Values(Way::kFreeAll, Way::kFree, Way::kRelease));

TEST(Faults, P4CountersNeverGoNegative) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto k = pool.allocate(Stream::kKey, 48, 1);
  const auto v = pool.allocate(Stream::kValue, 16, 1);
  pool.free(joined(v, k));
  EXPECT_EQ(pool.shrink(Stream::kKey, 2), 2);
  EXPECT_EQ(pool.n_free(Stream::kKey), 2);
  EXPECT_EQ(pool.n_free(Stream::kValue), 4);
  EXPECT_EQ(pool.stats().blocks_in_use(), 0);
  EXPECT_EQ(pool.stats().n_blocks, 6);
  EXPECT_EQ(pool.stats().n_retired, 2);
}

}  // namespace
}  // namespace kvpool
