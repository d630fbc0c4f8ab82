#include <algorithm>

#include "testing.h"

namespace kvpool {
namespace {

TEST(History, IsEmptyAtFirst) {
  BlockPoolAllocator pool;
  EXPECT_TRUE(pool.history().empty());
  EXPECT_EQ(pool.stats(), AllocationStats{.n_blocks = 1024});
}

TEST(History, HasTheCountersAfterEachCallThatMovedBlocks) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 4});
  std::vector<AllocationStats> expected;
  const auto note = [&] { expected.push_back(pool.stats()); };
  pool.register_owner(1);
  const auto blocks = pool.allocate(Stream::kKey, 2, 1), shared = pool.share(blocks, 2);
  note();
  EXPECT_THROW(pool.allocate(Stream::kKey, 1, 3), BlockPoolExhaustedError);
  note();
  pool.free(blocks);
  note();
  pool.release(std::span(shared).subspan(0, 1));
  note();
  pool.free_all(2);
  note();
  pool.shrink(Stream::kKey, 0);
  note();
  pool.free_all(2);
  EXPECT_EQ(pool.history(), expected);
}

TEST(History, IsBoundedAndOldestFirst) {
  constexpr std::size_t kMost = BlockPoolAllocator::kHistorySize;
  BlockPoolAllocator pool;
  std::vector<AllocationStats> all;
  for (std::size_t i = 0; i < kMost * 2 + 7; ++i) {
    if (i % 2 == 0) {
      pool.allocate(Stream::kKey, 1, 1);
    } else {
      pool.free_all(1);
    }
    all.push_back(pool.stats());
    const auto history = pool.history();
    const std::size_t n = std::min(all.size(), kMost);
    ASSERT_EQ(history.size(), n);
    ASSERT_TRUE(std::equal(history.begin(), history.end(), all.end() - static_cast<long>(n)));
  }
}

TEST(Stats, ASnapshotDoesNotFollowThePool) {
  BlockPoolAllocator pool;
  pool.allocate(Stream::kKey, 1, 1);
  const AllocationStats before = pool.stats().snapshot();
  pool.free_all(1);
  EXPECT_EQ(before.n_frees, 0);
  EXPECT_EQ(before.blocks_in_use(), 1);
  EXPECT_EQ(pool.stats().blocks_in_use(), 0);
  EXPECT_EQ(pool.stats().peak_blocks_in_use, 1);
}

}  // namespace
}  // namespace kvpool
