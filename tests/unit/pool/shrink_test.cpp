#include <gmock/gmock.h>

#include <limits>

#include "testing.h"

namespace kvpool {
namespace {

using testing::error_of;
using testing::expect_balanced;
using ::testing::HasSubstr;
using testing::ids;
using testing::joined;
using testing::picture;

TEST(Shrink, RetiresFreshBlocks) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 8});
  EXPECT_EQ(pool.shrink(Stream::kKey, 1), 3);
  EXPECT_EQ(pool.n_free(Stream::kKey), 1);
  EXPECT_EQ(pool.n_free(Stream::kValue), 4);
  EXPECT_EQ(pool.stats().n_blocks, 5);
  EXPECT_EQ(pool.stats().n_retired, 3);
  EXPECT_EQ(pool.allocate(Stream::kKey, 1, 1).size(), 1u);
  EXPECT_THROW(pool.allocate(Stream::kKey, 1, 1), BlockPoolExhaustedError);
}

TEST(Shrink, RetiresUsedBlocksBeforeFreshOnes) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 8});
  const auto used = pool.allocate(Stream::kKey, 2, 1);
  pool.free(used);
  EXPECT_EQ(pool.shrink(Stream::kKey, 2), 2);
  const auto left = ids(pool.allocate(Stream::kKey, 2, 1));
  EXPECT_THAT(left, ::testing::Not(::testing::Contains(used[0].block_id())));
  EXPECT_THAT(left, ::testing::Not(::testing::Contains(used[1].block_id())));
  EXPECT_EQ(pool.stats().n_reused, 0);
}

TEST(Shrink, LeavesBlocksInUse) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 3, 1);
  EXPECT_EQ(pool.shrink(Stream::kKey, 0), 1);
  for (const Block& block : blocks) EXPECT_TRUE(block.live());
  EXPECT_EQ(pool.stats().n_blocks, 7);
  pool.free_all(1);
  EXPECT_EQ(pool.n_free(Stream::kKey), 3);
  expect_balanced(pool);
}

TEST(Shrink, HandlesOfRetiredBlocksAreFreedHandles) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 2, .grow_on_exhaustion = true});
  const auto old = pool.allocate(Stream::kKey, 1, 1);
  pool.free(old);
  EXPECT_EQ(pool.shrink(Stream::kKey, 0), 1);
  const auto grown = pool.allocate(Stream::kKey, 1, 2);
  EXPECT_NE(grown[0].block_id(), old[0].block_id());
  const auto before = picture(pool, {1, 2});
  pool.free(old);
  pool.mark_used(old[0], 1);
  EXPECT_EQ(pool.ref_count(old[0]), 0);
  EXPECT_EQ(old[0].owner(), std::nullopt);
  EXPECT_EQ(old[0].block_id(), 0);
  EXPECT_EQ(picture(pool, {1, 2}), before);
  EXPECT_THAT(error_of<std::invalid_argument>([&] { pool.share(old, 3); }),
              HasSubstr("cannot share block 0: this handle was freed"));
}

TEST(Shrink, ToWhatIsFreeOrMoreIsANoOp) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 8});
  const auto before = picture(pool, {});
  EXPECT_EQ(pool.shrink(Stream::kKey, 4), 0);
  EXPECT_EQ(pool.shrink(Stream::kKey, std::numeric_limits<std::int64_t>::max()), 0);
  EXPECT_EQ(picture(pool, {}), before);
}

TEST(Shrink, RefusesANegativeTarget) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 8});
  const auto before = picture(pool, {});
  EXPECT_THAT(error_of<std::invalid_argument>([&] { pool.shrink(Stream::kKey, -1); }),
              HasSubstr("target_free must be >= 0, got -1"));
  EXPECT_THAT(error_of<std::invalid_argument>([&] { pool.shrink(Stream::kKeyValue, 1); }),
              HasSubstr("stream must be 'k' or 'v', got 'kv'"));
  EXPECT_EQ(picture(pool, {}), before);
}

TEST(Shrink, ToNothingLeavesAPoolOfNone) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 5, .separate_kv = false});
  EXPECT_EQ(pool.shrink(Stream::kValue, 0), 5);
  EXPECT_EQ(pool.stats().n_blocks, 0);
  EXPECT_EQ(pool.stats().fragmentation(), 0.0);
  EXPECT_THROW(pool.allocate(Stream::kKey, 1, 1), BlockPoolExhaustedError);
}

TEST(Shrink, AndGrowthInTurnsNeverRepeatAnId) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 4, .grow_on_exhaustion = true});
  std::vector<BlockId> seen;
  for (int round = 0; round < 20; ++round) {
    const auto [keys, values] = pool.allocate_kv(3, 1);
    for (const BlockId id : ids(joined(keys, values))) {
      EXPECT_THAT(seen, ::testing::Not(::testing::Contains(id)));
      seen.push_back(id);
    }
    pool.free_all(1);
    pool.shrink(Stream::kKey, 0);
    pool.shrink(Stream::kValue, 0);
    expect_balanced(pool);
  }
}

}  // namespace
}  // namespace kvpool
