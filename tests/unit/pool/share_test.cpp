#include <gmock/gmock.h>

#include "testing.h"

namespace kvpool {
namespace {

using testing::error_of;
using testing::expect_balanced;
using ::testing::HasSubstr;
using testing::ids;
using testing::picture;

TEST(Share, TheLastOwnerFrees) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto a = pool.allocate(Stream::kKey, 20, 1);
  const auto b = pool.share(a, 2);
  EXPECT_EQ(pool.ref_count(a[0]), 2);
  pool.free(a);
  EXPECT_EQ(pool.stats().n_frees, 0);
  EXPECT_EQ(pool.ref_count(b[0]), 1);
  EXPECT_EQ(pool.ref_count(a[0]), 0);
  EXPECT_TRUE(b[0].live());
  EXPECT_EQ(b[1].n_used(), 4);
  pool.free_all(2);
  EXPECT_EQ(pool.stats().n_frees, 2);
  EXPECT_EQ(pool.n_free(Stream::kKey), 4);
}

TEST(Share, CountsASharedBlockOnce) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 2});
  const auto a = pool.allocate(Stream::kKey, 1, 1);
  const auto before = pool.stats();
  for (Owner owner = 2; owner < 50; ++owner) pool.share(a, owner);
  EXPECT_EQ(pool.stats(), before);
  EXPECT_EQ(pool.ref_count(a[0]), 49);
  EXPECT_EQ(pool.n_free(Stream::kKey), 0);
  expect_balanced(pool);
}

TEST(Share, HandlesAreOfTheNewOwnerAndOfTheSameLife) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto a = pool.allocate(Stream::kValue, 20, 1, "int4");
  const auto b = pool.share(a, 2);
  ASSERT_EQ(b.size(), 2u);
  EXPECT_EQ(ids(b), ids(a));
  EXPECT_EQ(ids(pool.blocks_for(2)), ids(a));
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(b[i].owner(), 2);
    EXPECT_EQ(a[i].owner(), 1);
    EXPECT_EQ(b[i].format(), "int4");
    EXPECT_EQ(b[i].stream(), Stream::kValue);
    EXPECT_EQ(b[i].life(), a[i].life());
    EXPECT_NE(b[i].generation(), a[i].generation());
  }
  const auto old_life = a[0].life();
  pool.free_all(1);
  pool.free_all(2);
  EXPECT_NE(pool.allocate(Stream::kValue, 1, 1)[0].life(), old_life);
}

TEST(Share, AHandleFreedWhileOthersHoldIsANoOp) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto a = pool.allocate(Stream::kKey, 1, 1);
  const auto b = pool.share(a, 2);
  pool.free(a);
  const auto before = picture(pool, {1, 2});
  pool.free(a);
  pool.mark_used(a[0], 9);
  EXPECT_EQ(picture(pool, {1, 2}), before);
  EXPECT_EQ(a[0].owner(), std::nullopt);
  EXPECT_EQ(a[0].n_used(), 0);
  EXPECT_EQ(b[0].n_used(), 1);
}

TEST(Share, AnOwnerMayHoldABlockTwice) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto a = pool.allocate(Stream::kKey, 1, 1);
  const auto twice = pool.share(std::vector{a[0], a[0]}, 1);
  EXPECT_EQ(pool.ref_count(a[0]), 3);
  EXPECT_EQ(pool.blocks_for(1).size(), 3u);
  pool.free(std::vector{twice[0], a[0]});
  EXPECT_EQ(pool.ref_count(twice[1]), 1);
  EXPECT_EQ(pool.stats().n_frees, 0);
  pool.free_all(1);
  EXPECT_EQ(pool.stats().n_frees, 1);
}

TEST(Share, RefusesHandlesThatHoldNothing) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  BlockPoolAllocator other;
  const auto live = pool.allocate(Stream::kKey, 1, 1);
  const auto freed = pool.allocate(Stream::kKey, 1, 1);
  const auto stale = pool.allocate(Stream::kValue, 1, 1);
  pool.free(freed);
  pool.free(stale);
  pool.allocate(Stream::kValue, 1, 4);
  const auto foreign = other.allocate(Stream::kKey, 1, 1);
  const auto before = picture(pool, {1, 2, 4});
  const auto share = [&](const Block& block) {
    return error_of<std::invalid_argument>([&] { pool.share(std::vector{live[0], block}, 2); });
  };
  const std::string freed_id = std::to_string(freed[0].block_id());
  const std::string stale_id = std::to_string(stale[0].block_id());
  EXPECT_THAT(share(freed[0]),
              HasSubstr("cannot share block " + freed_id + ": this handle was freed"));
  EXPECT_THAT(share(stale[0]), HasSubstr("cannot share block " + stale_id +
                                         ": this handle was freed, and owner 4 holds the block"));
  EXPECT_THAT(share(foreign[0]), HasSubstr("cannot share block 0: it is not of this pool"));
  EXPECT_THAT(share(Block(5)), HasSubstr("cannot share block 5: it is not of this pool"));
  EXPECT_EQ(picture(pool, {1, 2, 4}), before);
  EXPECT_EQ(pool.ref_count(live[0]), 1);
  pool.register_owner(2);
}

TEST(Share, OfNothingMakesNoOwner) {
  BlockPoolAllocator pool;
  EXPECT_TRUE(pool.share({}, 5).empty());
  pool.register_owner(5);
}

TEST(Share, KeepsTheOwnerActive) {
  BlockPoolAllocator pool;
  const auto a = pool.allocate(Stream::kKey, 1, 1);
  const auto b = pool.share(a, 2);
  EXPECT_THROW(pool.register_owner(2), OwnerAlreadyActiveError);
  pool.free(b);
  pool.register_owner(2);
}

TEST(Share, HoldsAreRecycledAcrossBlocks) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 2, 1);
  const auto first = pool.share(std::span(blocks).subspan(0, 1), 2);
  pool.free(first);
  const auto second = pool.share(std::span(blocks).subspan(1, 1), 3);
  EXPECT_FALSE(first[0].live());
  EXPECT_EQ(first[0].owner(), std::nullopt);
  pool.free(first);
  EXPECT_TRUE(second[0].live());
  EXPECT_EQ(pool.ref_count(second[0]), 2);
}

TEST(IsHeld, ForAsLongAsAnyoneHoldsTheBlockInThisLife) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 2});
  BlockPoolAllocator other({.block_size = 16, .n_blocks = 2});
  const auto a = pool.allocate(Stream::kKey, 1, 1);
  const auto b = pool.share(a, 2);
  pool.free(a);
  EXPECT_TRUE(pool.is_held(a[0]));
  EXPECT_TRUE(pool.is_held(b[0]));
  pool.free(b);
  EXPECT_FALSE(pool.is_held(a[0]));
  const auto next = pool.allocate(Stream::kKey, 1, 1);
  EXPECT_TRUE(pool.is_held(next[0]));
  EXPECT_FALSE(pool.is_held(a[0]));
  other.allocate(Stream::kKey, 1, 1);
  EXPECT_FALSE(other.is_held(next[0]));
  EXPECT_FALSE(pool.is_held(Block(next[0].block_id())));
}

TEST(RefCount, IsZeroForHandlesThatHoldNothing) {
  BlockPoolAllocator pool;
  BlockPoolAllocator other;
  const auto a = pool.allocate(Stream::kKey, 1, 1);
  EXPECT_EQ(pool.ref_count(a[0]), 1);
  EXPECT_EQ(other.ref_count(a[0]), 0);
  EXPECT_EQ(pool.ref_count(Block(0)), 0);
  pool.free(a);
  EXPECT_EQ(pool.ref_count(a[0]), 0);
  pool.allocate(Stream::kKey, 1, 2);
  EXPECT_EQ(pool.ref_count(a[0]), 0);
}

}  // namespace
}  // namespace kvpool
