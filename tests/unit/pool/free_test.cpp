#include <gmock/gmock.h>

#include "testing.h"

namespace kvpool {
namespace {

using testing::error_of;
using testing::expect_balanced;
using ::testing::HasSubstr;
using testing::ids;
using testing::joined;
using testing::picture;

TEST(Free, GivesEachBlockBackToItsOwnStream) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto [keys, values] = pool.allocate_kv(40, 1);
  pool.free(joined(values, keys));
  EXPECT_EQ(pool.n_free(Stream::kKey), 4);
  EXPECT_EQ(pool.n_free(Stream::kValue), 4);
  EXPECT_EQ(pool.stats().n_frees, 6);
  EXPECT_EQ(pool.stats().fragmented_count, 0);
  EXPECT_TRUE(pool.blocks_for(1).empty());
}

TEST(Free, TakesBlocksOfSeveralOwnersAndKeepsTheRestInOrder) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 16});
  const auto a = pool.allocate(Stream::kKey, 4, 1);
  const auto b = pool.allocate(Stream::kKey, 3, 2);
  pool.free(std::vector{a[1], b[2], a[3], b[0]});
  EXPECT_EQ(ids(pool.blocks_for(1)), (std::vector{a[0].block_id(), a[2].block_id()}));
  EXPECT_EQ(ids(pool.blocks_for(2)), (std::vector{b[1].block_id()}));
  const auto more = pool.allocate(Stream::kKey, 1, 1);
  EXPECT_EQ(ids(pool.blocks_for(1)),
            (std::vector{a[0].block_id(), a[2].block_id(), more[0].block_id()}));
}

TEST(Free, OfNothingAndOfFreedHandlesChangesNothing) {
  BlockPoolAllocator pool;
  const auto blocks = pool.allocate(Stream::kKey, 40, 1);
  pool.free(blocks);
  const auto before = picture(pool, {1});
  pool.free({});
  pool.free(blocks);
  pool.free(joined(blocks, blocks));
  pool.free_all(1);
  pool.free_all(99);
  EXPECT_EQ(picture(pool, {1}), before);
}

TEST(Free, ADuplicateCountsOnce) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 32, 1);
  pool.free(std::vector{blocks[0], blocks[1], blocks[0], blocks[0]});
  EXPECT_EQ(pool.stats().n_frees, 2);
  expect_balanced(pool);
  EXPECT_NE(pool.allocate(Stream::kKey, 1, 1)[0].block_id(),
            pool.allocate(Stream::kKey, 1, 1)[0].block_id());
}

TEST(Free, RefusesAStaleHandleAndFreesNothingOfTheCall) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto stale = pool.allocate(Stream::kKey, 1, 1);
  pool.free(stale);
  const auto held = pool.allocate(Stream::kKey, 32, 2);
  ASSERT_EQ(held[0].block_id(), stale[0].block_id());
  const auto before = picture(pool, {1, 2});
  const std::string id = std::to_string(stale[0].block_id());
  EXPECT_THAT(error_of<std::invalid_argument>([&] {
                pool.free(std::vector{held[1], held[0], stale[0]});
              }),
              HasSubstr("cannot free block " + id +
                        ": this handle was freed, and owner 2 holds the block since"));
  EXPECT_EQ(picture(pool, {1, 2}), before);
  EXPECT_TRUE(held[0].live());
  EXPECT_TRUE(held[1].live());
}

TEST(Free, RefusesAStaleHandleWhoeverHoldsTheBlockNow) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 2});
  const auto stale = pool.allocate(Stream::kKey, 1, 1);
  pool.free(stale);
  const auto held = pool.allocate(Stream::kKey, 1, 1);
  EXPECT_THROW(pool.free(stale), std::invalid_argument);
  const auto shared = pool.share(held, 3);
  pool.free(held);
  EXPECT_THROW(pool.free(stale), std::invalid_argument);
  pool.free(shared);
  pool.free(stale);
  EXPECT_EQ(pool.stats().n_frees, 2);
}

TEST(Free, RefusesABlockOfAnotherPoolOrOfNone) {
  BlockPoolAllocator pool;
  BlockPoolAllocator other;
  const auto own = pool.allocate(Stream::kKey, 1, 1);
  const auto foreign = other.allocate(Stream::kKey, 1, 1);
  const auto before = picture(pool, {1});
  const auto before_other = picture(other, {1});
  for (const Block& stranger : {foreign[0], Block(0)}) {
    EXPECT_THAT(error_of<std::invalid_argument>([&] {
                  pool.free(std::vector{own[0], stranger});
                }),
                HasSubstr("cannot free block 0: it is not of this pool"));
  }
  EXPECT_EQ(picture(pool, {1}), before);
  EXPECT_EQ(picture(other, {1}), before_other);
}

TEST(Free, EndsAnOwnerThatNobodyRegistered) {
  BlockPoolAllocator pool;
  pool.free(pool.allocate(Stream::kKey, 1, 1));
  pool.register_owner(1);
  pool.free(pool.allocate(Stream::kKey, 1, 1));
  EXPECT_THROW(pool.register_owner(1), OwnerAlreadyActiveError);
}

TEST(Release, LetsGoOfWhatIsHeldAndPassesOverAllElse) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  BlockPoolAllocator other;
  const auto stale = pool.allocate(Stream::kKey, 1, 1);
  pool.free(stale);
  const auto held = pool.allocate(Stream::kKey, 1, 2);
  const auto mine = pool.allocate(Stream::kKey, 32, 3);
  const auto foreign = other.allocate(Stream::kKey, 1, 1);
  pool.release(std::vector{stale[0], mine[0], foreign[0], Block(0), mine[0], mine[1]});
  EXPECT_TRUE(held[0].live());
  EXPECT_TRUE(foreign[0].live());
  EXPECT_TRUE(pool.blocks_for(3).empty());
  EXPECT_EQ(pool.stats().n_frees, 3);
  expect_balanced(pool);
}

TEST(Release, KeepsTheRestOfTheOwnerInOrder) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 16});
  const auto blocks = pool.allocate(Stream::kKey, 4, 1);
  pool.release(std::span(blocks).subspan(1, 2));
  EXPECT_EQ(ids(pool.blocks_for(1)), (std::vector{blocks[0].block_id(), blocks[3].block_id()}));
}

TEST(FreeAll, LetsGoOfEverythingOfOneOwner) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto mine = pool.allocate_kv(20, 1);
  const auto others = pool.allocate(Stream::kKey, 1, 2);
  pool.free_all(1);
  EXPECT_TRUE(pool.blocks_for(1).empty());
  EXPECT_FALSE(mine.first[0].live());
  EXPECT_FALSE(mine.second[1].live());
  EXPECT_TRUE(others[0].live());
  EXPECT_EQ(pool.stats().n_frees, 4);
  EXPECT_EQ(pool.stats().blocks_in_use(), 1);
  pool.register_owner(1);
}

}  // namespace
}  // namespace kvpool
