#include <gmock/gmock.h>

#include <limits>

#include "testing.h"

namespace kvpool {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::joined;
using testing::picture;

TEST(MarkUsed, SetsWhatTheHandleShows) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto block = pool.allocate(Stream::kKey, 1, 1)[0];
  for (const std::int64_t n_used : {0, 5, 16, 15}) {
    pool.mark_used(block, n_used);
    EXPECT_EQ(block.n_used(), n_used);
    EXPECT_EQ(pool.blocks_for(1)[0].n_used(), n_used);
  }
}

TEST(MarkUsed, KeepsTheCountOfBlocksThatAreNotFull) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 20, 1);
  EXPECT_EQ(pool.stats().fragmented_count, 1);
  EXPECT_EQ(pool.stats().fragmentation(), 1.0 / 8);
  pool.mark_used(blocks[0], 15);
  EXPECT_EQ(pool.stats().fragmented_count, 2);
  pool.mark_used(blocks[0], 3);
  EXPECT_EQ(pool.stats().fragmented_count, 2);
  pool.mark_used(blocks[0], 16);
  pool.mark_used(blocks[1], 16);
  EXPECT_EQ(pool.stats().fragmented_count, 0);
  pool.mark_used(blocks[1], 0);
  EXPECT_EQ(pool.stats().fragmentation(), 1.0 / 8);
  pool.free_all(1);
  EXPECT_EQ(pool.stats().fragmented_count, 0);
}

TEST(MarkUsed, ShowsThroughEveryHandleOfASharedBlock) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto a = pool.allocate(Stream::kKey, 16, 1);
  const auto b = pool.share(a, 2);
  pool.mark_used(b[0], 7);
  EXPECT_EQ(a[0].n_used(), 7);
  EXPECT_EQ(pool.stats().fragmented_count, 1);
}

TEST(MarkUsed, RefusesSlotsThatTheBlockDoesNotHave) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 40, 1);
  const auto before = picture(pool, {1});
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t n : {std::int64_t{-1}, std::int64_t{17}, kMost, -kMost - 1}) {
    EXPECT_THAT(
        error_of<std::invalid_argument>([&] { pool.mark_used(blocks[0], n); }),
        HasSubstr("n_used must be 0 to 16 (1 block(s) of 16 slots), got " + std::to_string(n)));
  }
  for (const std::int64_t n : {std::int64_t{-1}, std::int64_t{49}, kMost, -kMost - 1}) {
    EXPECT_THAT(
        error_of<std::invalid_argument>([&] { pool.mark_used(blocks, n); }),
        HasSubstr("n_tokens must be 0 to 48 (3 block(s) of 16 slots), got " + std::to_string(n)));
  }
  EXPECT_EQ(picture(pool, {1}), before);
}

TEST(MarkUsed, SpreadsTokensOverASpan) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 64, 1);
  const auto used = [&] {
    std::vector<std::int64_t> n_used;
    for (const Block& block : blocks) n_used.push_back(block.n_used());
    return n_used;
  };
  pool.mark_used(blocks, 35);
  EXPECT_EQ(used(), (std::vector<std::int64_t>{16, 16, 3, 0}));
  EXPECT_EQ(pool.stats().fragmented_count, 2);
  pool.mark_used(blocks, 0);
  EXPECT_EQ(used(), (std::vector<std::int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(pool.stats().fragmented_count, 4);
  pool.mark_used(blocks, 64);
  EXPECT_EQ(used(), (std::vector<std::int64_t>{16, 16, 16, 16}));
  EXPECT_EQ(pool.stats().fragmented_count, 0);
}

TEST(MarkUsed, ASpanOfNoneTakesNoTokens) {
  BlockPoolAllocator pool;
  pool.mark_used(std::span<const Block>(), 0);
  EXPECT_THROW(pool.mark_used(std::span<const Block>(), 1), std::invalid_argument);
}

TEST(MarkUsed, PassesOverAFreedHandle) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  const auto blocks = pool.allocate(Stream::kKey, 48, 1);
  pool.free(std::span(blocks).subspan(1, 1));
  pool.mark_used(blocks, 36);
  EXPECT_EQ(blocks[0].n_used(), 16);
  EXPECT_EQ(blocks[1].n_used(), 0);
  EXPECT_EQ(blocks[2].n_used(), 4);
  EXPECT_EQ(pool.stats().fragmented_count, 1);
}

TEST(MarkUsed, RefusesStaleAndForeignHandlesAndMarksNothingOfTheCall) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 8});
  BlockPoolAllocator other;
  const auto stale = pool.allocate(Stream::kKey, 1, 1);
  pool.free(stale);
  const auto held = pool.allocate(Stream::kKey, 32, 2);
  const auto foreign = other.allocate(Stream::kKey, 1, 3);
  const auto before = picture(pool, {1, 2});
  const std::string id = std::to_string(stale[0].block_id());
  EXPECT_THAT(error_of<std::invalid_argument>([&] { pool.mark_used(joined(held, stale), 1); }),
              HasSubstr("cannot mark block " + id + ": this handle was freed, and owner 2 holds"));
  EXPECT_THAT(error_of<std::invalid_argument>([&] { pool.mark_used(foreign[0], 1); }),
              HasSubstr("cannot mark block 0: it is not of this pool"));
  EXPECT_EQ(picture(pool, {1, 2}), before);
}

TEST(MarkUsed, IsNoPartOfHistory) {
  BlockPoolAllocator pool;
  const auto blocks = pool.allocate(Stream::kKey, 1, 1);
  const auto before = pool.history();
  pool.mark_used(blocks[0], 16);
  EXPECT_EQ(pool.history(), before);
}

}  // namespace
}  // namespace kvpool
