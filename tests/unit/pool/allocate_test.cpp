#include <gmock/gmock.h>

#include <algorithm>
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
using testing::with_one_exhausted;

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

TEST(Allocate, GivesFullBlocksAndTheRestInTheLast) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kValue, 40, 7, "int2");
  ASSERT_EQ(blocks.size(), 3u);
  EXPECT_EQ(blocks[0].n_used(), 16);
  EXPECT_EQ(blocks[1].n_used(), 16);
  EXPECT_EQ(blocks[2].n_used(), 8);
  for (const Block& block : blocks) {
    EXPECT_EQ(block.stream(), Stream::kValue);
    EXPECT_EQ(block.format(), "int2");
    EXPECT_EQ(block.owner(), 7);
    EXPECT_TRUE(block.live());
    EXPECT_TRUE(block.ever_allocated());
  }
  EXPECT_EQ(pool.n_free(Stream::kValue), 1);
  EXPECT_EQ(pool.n_free(Stream::kKey), 4);
}

TEST(Allocate, FormatIsFp16UnlessSaid) {
  BlockPoolAllocator pool;
  EXPECT_EQ(pool.allocate(Stream::kKey, 1, 1)[0].format(), "fp16");
  EXPECT_EQ(pool.allocate_kv(1, 1).second[0].format(), "fp16");
}

TEST(Allocate, EachHoldingKeepsTheFormatOfItsOwnCall) {
  BlockPoolAllocator pool({.n_blocks = 2});
  const auto old = pool.allocate(Stream::kKey, 1, 1, "fp16");
  pool.free(old);
  const auto now = pool.allocate(Stream::kKey, 1, 1, std::string("int") + "4");
  EXPECT_EQ(now[0].block_id(), old[0].block_id());
  EXPECT_EQ(old[0].format(), "fp16");
  EXPECT_EQ(now[0].format(), "int4");
}

TEST(Allocate, TakesTheBlockFreedLastFirst) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 3, 1);
  pool.free(std::span(blocks).subspan(0, 1));
  pool.free(std::span(blocks).subspan(2, 1));
  EXPECT_EQ(ids(pool.allocate(Stream::kKey, 2, 1)),
            (std::vector{blocks[2].block_id(), blocks[0].block_id()}));
}

TEST(Allocate, CountsBlocks) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  pool.allocate(Stream::kKey, 40, 1);
  pool.free_all(1);
  pool.allocate(Stream::kKey, 64, 1);
  const AllocationStats stats = pool.stats();
  EXPECT_EQ(stats.n_allocations, 7);
  EXPECT_EQ(stats.n_frees, 3);
  EXPECT_EQ(stats.n_reused, 3);
  EXPECT_EQ(stats.peak_blocks_in_use, 4);
}

TEST(Allocate, StreamIsIgnoredByAPoolOfOneList) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 3, .separate_kv = false});
  EXPECT_EQ(pool.allocate(Stream::kKey, 1, 1)[0].stream(), Stream::kKeyValue);
  EXPECT_EQ(pool.allocate(Stream::kValue, 1, 1)[0].stream(), Stream::kKeyValue);
  EXPECT_EQ(pool.allocate(Stream::kKeyValue, 1, 1)[0].stream(), Stream::kKeyValue);
  EXPECT_EQ(pool.n_free(Stream::kKey), 0);
  EXPECT_EQ(pool.n_free(Stream::kValue), 0);
}

TEST(Allocate, RefusesTokensBelowOne) {
  BlockPoolAllocator pool;
  const auto before = picture(pool, {1});
  for (const std::int64_t n : {std::int64_t{0}, std::int64_t{-1}, -kHuge - 1}) {
    const std::string expected = "n_tokens must be > 0, got " + std::to_string(n);
    EXPECT_THAT(error_of<std::invalid_argument>([&] { pool.allocate(Stream::kKey, n, 1); }),
                HasSubstr(expected));
    EXPECT_THAT(error_of<std::invalid_argument>([&] { pool.allocate_kv(n, 1); }),
                HasSubstr(expected));
  }
  EXPECT_EQ(picture(pool, {1}), before);
  pool.register_owner(1);
}

TEST(Allocate, RefusesAStreamThatThePoolDoesNotHave) {
  BlockPoolAllocator pool;
  const auto before = picture(pool, {1});
  EXPECT_THAT(error_of<std::invalid_argument>([&] { pool.allocate(Stream::kKeyValue, 1, 1); }),
              HasSubstr("stream must be 'k' or 'v', got 'kv'"));
  const auto no_stream = static_cast<Stream>(200);
  EXPECT_THROW(pool.allocate(no_stream, 1, 1), std::invalid_argument);
  EXPECT_THROW(pool.shrink(no_stream, 1), std::invalid_argument);
  EXPECT_THROW((void)pool.n_free(no_stream), std::invalid_argument);
  EXPECT_THAT(error_of<std::invalid_argument>([&] { (void)pool.n_free(Stream::kKeyValue); }),
              HasSubstr("stream must be 'k' or 'v', got 'kv'"));
  EXPECT_EQ(picture(pool, {1}), before);
  pool.register_owner(1);
}

TEST(Allocate, SaysWhatIsMissing) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  pool.allocate(Stream::kKey, 32, 1);
  const auto before = picture(pool, {1, 2});
  EXPECT_THAT(error_of<BlockPoolExhaustedError>([&] { pool.allocate(Stream::kKey, 48, 2); }),
              HasSubstr("48 token(s) need 3 block(s) of stream 'k', 2 are free; the pool has 8"));
  EXPECT_EQ(picture(pool, {1, 2}), with_one_exhausted(before));
  pool.register_owner(2);
}

TEST(Allocate, AFailedCallOfAnActiveOwnerKeepsWhatItHolds) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  pool.allocate(Stream::kKey, 30, 1);
  const auto before = picture(pool, {1});
  EXPECT_THROW(pool.allocate(Stream::kKey, 33, 1), BlockPoolExhaustedError);
  EXPECT_EQ(picture(pool, {1}), with_one_exhausted(before));
}

TEST(Allocate, RefusesHugeRequestsAtOnce) {
  for (const bool separate : {true, false}) {
    for (const bool grow : {true, false}) {
      for (const std::int64_t block_size : {1, 16, std::numeric_limits<std::int32_t>::max()}) {
        BlockPoolAllocator pool({.block_size = block_size,
                                 .n_blocks = 8,
                                 .separate_kv = separate,
                                 .grow_on_exhaustion = grow});
        auto expected = picture(pool, {1});
        for (const std::int64_t n : {kHuge, kHuge - 1, kHuge / 2 + 2}) {
          EXPECT_THROW(pool.allocate(Stream::kKey, n, 1), BlockPoolExhaustedError);
          expected = with_one_exhausted(expected);
          EXPECT_THROW(pool.allocate_kv(n, 1), BlockPoolExhaustedError);
          expected = with_one_exhausted(expected);
        }
        EXPECT_EQ(picture(pool, {1}), expected);
        expect_balanced(pool);
      }
    }
  }
}

TEST(Allocate, ThePoolMayBeAsLargeAsBlockTablesAllow) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  BlockPoolAllocator pool({.block_size = kMost, .n_blocks = kMost});
  EXPECT_EQ(pool.allocate(Stream::kKey, kMost + 1, 1).size(), 2u);
  EXPECT_EQ(pool.n_free(Stream::kKey), kMost - kMost / 2 - 2);
  EXPECT_EQ(pool.n_free(Stream::kValue), kMost / 2);
  expect_balanced(pool);
}

TEST(Allocate, GrowthNeverMakesAnIdThatBlockTablesCannotHold) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  BlockPoolAllocator pool(
      {.block_size = 1, .n_blocks = kMost - 1, .separate_kv = false, .grow_on_exhaustion = true});
  pool.shrink(Stream::kKey, 0);
  EXPECT_EQ(ids(pool.allocate(Stream::kKey, 1, 1)), std::vector{kMost - 1});
  EXPECT_THROW(pool.allocate(Stream::kKey, 1, 1), BlockPoolExhaustedError);
  EXPECT_EQ(pool.stats().n_blocks, 1);
}

TEST(AllocateKv, GivesBothStreams) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto [keys, values] = pool.allocate_kv(20, 3, "int4");
  ASSERT_EQ(keys.size(), 2u);
  ASSERT_EQ(values.size(), 2u);
  EXPECT_EQ(keys[1].stream(), Stream::kKey);
  EXPECT_EQ(values[1].stream(), Stream::kValue);
  EXPECT_EQ(keys[1].n_used(), 4);
  EXPECT_EQ(values[1].n_used(), 4);
  EXPECT_EQ(ids(pool.blocks_for(3)), ids(joined(keys, values)));
  EXPECT_EQ(pool.history().size(), 1u);
}

TEST(AllocateKv, TakesNeitherWhenOneOfThemIsShort) {
  for (const Stream full : {Stream::kKey, Stream::kValue}) {
    BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
    pool.allocate(full, 64, 1);
    const auto before = picture(pool, {1, 2});
    EXPECT_THAT(error_of<BlockPoolExhaustedError>([&] { pool.allocate_kv(1, 2); }),
                HasSubstr("stream '" + std::string(to_string(full)) + "', 0 are free"));
    EXPECT_EQ(picture(pool, {1, 2}), with_one_exhausted(before));
    pool.register_owner(2);
  }
}

TEST(AllocateKv, NeedsTwiceTheBlocksOfAPoolOfOneList) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 5, .separate_kv = false});
  const auto before = picture(pool, {1});
  EXPECT_THAT(error_of<BlockPoolExhaustedError>([&] { pool.allocate_kv(48, 1); }),
              HasSubstr("48 token(s) need 6 block(s) of stream 'kv', 5 are free"));
  EXPECT_EQ(picture(pool, {1}), with_one_exhausted(before));
  const auto [keys, values] = pool.allocate_kv(32, 1);
  EXPECT_EQ(keys.size(), 2u);
  EXPECT_EQ(values.size(), 2u);
  EXPECT_EQ(pool.n_free(), 1);
}

TEST(Growth, AddsWhatIsMissing) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 4, .grow_on_exhaustion = true});
  const auto blocks = pool.allocate(Stream::kKey, 5, 1);
  EXPECT_EQ(blocks.size(), 5u);
  EXPECT_EQ(pool.stats().n_blocks, 7);
  EXPECT_EQ(pool.stats().n_grown, 3);
  EXPECT_EQ(pool.n_free(Stream::kKey), 0);
  EXPECT_EQ(pool.n_free(Stream::kValue), 2);
  expect_balanced(pool);
}

TEST(Growth, OfBothStreamsAtOnce) {
  for (const bool separate : {true, false}) {
    BlockPoolAllocator pool({.block_size = 1,
                             .n_blocks = 3,
                             .separate_kv = separate,
                             .grow_on_exhaustion = true,
                             .max_blocks = 10});
    const auto [keys, values] = pool.allocate_kv(5, 1);
    auto all = ids(joined(keys, values));
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, (std::vector<BlockId>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
    EXPECT_EQ(pool.stats().n_grown, 7);
    EXPECT_THROW(pool.allocate(Stream::kKey, 1, 1), BlockPoolExhaustedError);
  }
}

TEST(Growth, IsKeptOnlyWhenTheCallSucceeds) {
  BlockPoolAllocator pool(
      {.block_size = 1, .n_blocks = 4, .grow_on_exhaustion = true, .max_blocks = 7});
  const auto before = picture(pool, {1});
  EXPECT_THAT(error_of<BlockPoolExhaustedError>([&] { pool.allocate_kv(4, 1); }),
              HasSubstr("the pool has 4 and can grow to 7"));
  EXPECT_EQ(picture(pool, {1}), with_one_exhausted(before));
  EXPECT_EQ(pool.allocate(Stream::kKey, 5, 1).size(), 5u);
  EXPECT_EQ(pool.stats().n_blocks, 7);
}

TEST(Growth, RoomComesBackWithRetiredBlocksAndTheirIdsDoNot) {
  BlockPoolAllocator pool(
      {.block_size = 1, .n_blocks = 4, .grow_on_exhaustion = true, .max_blocks = 4});
  EXPECT_THROW(pool.allocate(Stream::kKey, 3, 1), BlockPoolExhaustedError);
  EXPECT_EQ(pool.shrink(Stream::kValue, 0), 2);
  EXPECT_EQ(ids(pool.allocate(Stream::kKey, 4, 1)), (std::vector<BlockId>{0, 1, 4, 5}));
  EXPECT_EQ(pool.stats().n_blocks, 4);
}

TEST(Growth, DoesNotHappenUnasked) {
  BlockPoolAllocator pool({.block_size = 1, .n_blocks = 4, .max_blocks = 100});
  EXPECT_THROW(pool.allocate(Stream::kKey, 3, 1), BlockPoolExhaustedError);
  EXPECT_EQ(pool.stats().n_blocks, 4);
}

TEST(Pool, OddBlocksAreAllUsable) {
  for (const std::int64_t n_blocks : {1, 3, 7}) {
    BlockPoolAllocator pool({.block_size = 1, .n_blocks = n_blocks});
    const std::int64_t n_values = n_blocks / 2;
    EXPECT_EQ(pool.n_free(Stream::kKey), n_blocks - n_values);
    EXPECT_EQ(pool.n_free(Stream::kValue), n_values);
    auto all = ids(pool.allocate(Stream::kKey, n_blocks - n_values, 1));
    if (n_values > 0) {
      for (const BlockId id : ids(pool.allocate(Stream::kValue, n_values, 1))) all.push_back(id);
    }
    std::sort(all.begin(), all.end());
    for (std::int64_t i = 0; i < n_blocks; ++i) EXPECT_EQ(all[static_cast<std::size_t>(i)], i);
    EXPECT_THROW(pool.allocate(Stream::kValue, 1, 1), BlockPoolExhaustedError);
  }
}

}  // namespace
}  // namespace kvpool
