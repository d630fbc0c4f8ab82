#include <gmock/gmock.h>

#include <limits>
#include <set>

#include "testing.h"

namespace kvpool {
namespace {

using testing::error_of;
using testing::expect_balanced;
using ::testing::HasSubstr;
using testing::ids;
using testing::picture;

TEST(Owners, ASecondRegistrationIsRefusedUntilReleased) {
  BlockPoolAllocator pool;
  pool.register_owner(4);
  const auto before = picture(pool, {4});
  EXPECT_THAT(error_of<OwnerAlreadyActiveError>([&] { pool.register_owner(4); }),
              HasSubstr("owner 4 is already active"));
  EXPECT_EQ(picture(pool, {4}), before);
  pool.release_owner(4);
  pool.register_owner(4);
}

TEST(Owners, AllocatingMakesAnOwnerActive) {
  BlockPoolAllocator pool;
  pool.allocate(Stream::kKey, 1, 4);
  EXPECT_THROW(pool.register_owner(4), OwnerAlreadyActiveError);
  pool.allocate(Stream::kKey, 1, 4);
  EXPECT_EQ(pool.blocks_for(4).size(), 2u);
}

TEST(Owners, ReleasingAnOwnerFreesNothing) {
  BlockPoolAllocator pool;
  pool.register_owner(4);
  const auto blocks = pool.allocate(Stream::kKey, 1, 4);
  pool.release_owner(4);
  EXPECT_TRUE(blocks[0].live());
  EXPECT_THROW(pool.register_owner(4), OwnerAlreadyActiveError);
  pool.free(blocks);
  pool.register_owner(4);
}

TEST(Owners, ReleasingAnUnknownOwnerIsANoOp) {
  BlockPoolAllocator pool;
  const auto before = picture(pool, {4});
  pool.release_owner(4);
  EXPECT_EQ(picture(pool, {4}), before);
  EXPECT_TRUE(pool.blocks_for(4).empty());
}

TEST(Owners, FreeAllEndsARegistration) {
  BlockPoolAllocator pool;
  pool.register_owner(4);
  pool.free_all(4);
  pool.register_owner(4);
  EXPECT_TRUE(pool.history().empty());
}

TEST(Owners, AnyIdWillDo) {
  constexpr auto kLeast = std::numeric_limits<Owner>::min();
  constexpr auto kMost = std::numeric_limits<Owner>::max();
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 16});
  for (const Owner owner : {kLeast, kMost, Owner{0}, Owner{-1}}) {
    pool.register_owner(owner);
    const auto blocks = pool.allocate(Stream::kKey, 2, owner);
    EXPECT_EQ(blocks[0].owner(), owner);
    EXPECT_THROW(pool.register_owner(owner), OwnerAlreadyActiveError);
  }
  EXPECT_EQ(pool.n_free(Stream::kKey), 0);
  pool.free_all(kLeast);
  EXPECT_EQ(pool.blocks_for(kMost).size(), 2u);
  pool.free_all(kMost);
  EXPECT_EQ(pool.blocks_for(0).size(), 2u);
  EXPECT_EQ(pool.blocks_for(-1).size(), 2u);
}

TEST(Owners, NewOwnersAreNeitherActiveNorGivenBefore) {
  BlockPoolAllocator pool;
  std::set<Owner> given;
  for (int i = 0; i < 100; ++i) {
    const Owner owner = pool.new_owner();
    EXPECT_TRUE(given.insert(owner).second);
    EXPECT_NE(owner, -1) << "the default of the caches";
    pool.register_owner(owner);
    if (i % 2 == 0) pool.free_all(owner);
    if (i % 3 == 0) {
      const Owner taken = owner - 1;
      pool.register_owner(taken);
      given.insert(taken);
    }
  }
}

TEST(Owners, ThousandsComeAndGo) {
  constexpr std::int64_t kOwners = 5000;
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = kOwners, .separate_kv = false});
  const auto id_of = [](std::int64_t i) -> Owner {
    return i % 3 == 0 ? i : i % 3 == 1 ? i << 40 : -i * 977;
  };
  for (int round = 0; round < 3; ++round) {
    for (std::int64_t i = 0; i < kOwners; ++i) {
      ASSERT_EQ(pool.allocate(Stream::kKey, 1, id_of(i)).size(), 1u);
    }
    for (std::int64_t i = 0; i < kOwners; i += 2) pool.free_all(id_of(i));
    for (std::int64_t i = 0; i < kOwners; ++i) {
      ASSERT_EQ(pool.blocks_for(id_of(i)).size(), static_cast<std::size_t>(i % 2)) << i;
    }
    for (std::int64_t i = 1; i < kOwners; i += 2) {
      ASSERT_THROW(pool.register_owner(id_of(i)), OwnerAlreadyActiveError) << i;
      pool.free(pool.blocks_for(id_of(i)));
      pool.register_owner(id_of(i));
      pool.release_owner(id_of(i));
    }
    EXPECT_EQ(pool.n_free(), kOwners);
    expect_balanced(pool);
  }
}

TEST(BlocksFor, ListsInTheOrderOfGetting) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 16});
  const auto theirs = pool.allocate(Stream::kKey, 1, 2);
  const auto a = pool.allocate(Stream::kKey, 2, 1);
  const auto shared = pool.share(theirs, 1);
  const auto b = pool.allocate(Stream::kValue, 1, 1);
  EXPECT_EQ(ids(pool.blocks_for(1)),
            (std::vector{a[0].block_id(), a[1].block_id(), shared[0].block_id(), b[0].block_id()}));
  const auto listed = pool.blocks_for(1);
  EXPECT_EQ(listed[2].generation(), shared[0].generation());
  EXPECT_EQ(listed[2].owner(), 1);
}

TEST(BlocksFor, HandlesDoAsWellAsThoseOfAllocate) {
  BlockPoolAllocator pool;
  const auto blocks = pool.allocate(Stream::kKey, 1, 1);
  pool.free(pool.blocks_for(1));
  EXPECT_FALSE(blocks[0].live());
  EXPECT_EQ(pool.stats().n_frees, 1);
}

}  // namespace
}  // namespace kvpool
