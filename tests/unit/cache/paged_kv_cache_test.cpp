#include "kvpool/paged_kv_cache.h"

#include <mlx/memory.h>
#include <mlx/transforms.h>

#include <limits>

#include "kvpool/errors.h"
#include "paged_fixture.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::kBlockSize;
using testing::kDim;
using testing::kHeads;
using testing::PagedCache;

// Exhaustion --------------------------------------------------------------------------------------

TEST_F(PagedCache, AnAppendThatDoesNotFitChangesNoRow) {
  PagedKVCache batch = cache({}, {1, 2, 3});
  const mx::array k = rows(6, 3);
  const mx::array v = rows(6, 3);
  batch.append(k, v);
  const AllocationStats before = pool_->stats();
  const std::size_t bytes = storage_->resident_bytes();

  // The first two rows fit, the third does not.
  EXPECT_THROW(batch.append(rows(60, 3), rows(60, 3)), BlockPoolExhaustedError);
  EXPECT_EQ(batch.lengths(), (std::vector<std::int64_t>{6, 6, 6}));
  EXPECT_EQ(pool_->stats().blocks_in_use(), before.blocks_in_use());
  EXPECT_EQ(pool_->stats().fragmented_count, before.fragmented_count);
  EXPECT_EQ(storage_->resident_bytes(), bytes);

  const mx::array more_k = rows(3, 3);
  const mx::array more_v = rows(3, 3);
  batch.append(more_k, more_v);
  const auto [keys, values] = batch.fetch();
  EXPECT_TRUE(equal(keys, mx::concatenate({k, more_k}, 2)));
  EXPECT_TRUE(equal(values, mx::concatenate({v, more_v}, 2)));
}

TEST_F(PagedCache, ExhaustionWhileAForkIsCopiedAndBlocksAreSealedChangesNothing) {
  PagedKVCache one = cache(config("int4", "int4"));
  const mx::array k = rows(10);
  one.append(k, k);
  PagedKVCache fork = cache(config("int4", "int4"), {});
  fork.fork_rows(one, std::vector<std::int64_t>{0}, std::vector<Owner>{2});
  const std::int64_t in_use = pool_->stats().blocks_in_use();
  EXPECT_THROW(fork.append(rows(400), rows(400)), BlockPoolExhaustedError);
  EXPECT_EQ(pool_->stats().blocks_in_use(), in_use);
  EXPECT_TRUE(equal(one.fetch().first, k));
  EXPECT_TRUE(equal(fork.fetch().first, k));
}

TEST_F(PagedCache, AFirstAppendThatFailsLeavesNoFormat) {
  PagedKVCache one = cache();
  EXPECT_THROW(one.append(rows(1000), rows(1000)), BlockPoolExhaustedError);
  EXPECT_THROW(one.append(rows(4, 1, 20), rows(4, 1, 20)), std::invalid_argument);
  EXPECT_THROW(one.fetch(), std::invalid_argument);
  const mx::array k = mx::astype(rows(5, 1, 32), mx::float16);
  one.append(k, k);
  EXPECT_TRUE(equal(one.fetch().first, k));
  EXPECT_EQ(one.fetch().first.dtype(), mx::float16);
}

// Formats and what stays raw
// ------------------------------------------------------------------------

TEST_F(PagedCache, KeysAndValuesHaveFormatsOfTheirOwn) {
  const mx::array k = rows(32);
  const mx::array v = rows(32, 1, 24);
  for (const auto& [keys, values] :
       {std::pair{"int4", "raw"}, {"raw", "kivi2"}, {"int8", "int2"}}) {
    PagedKVCache one = cache(config(keys, values));
    one.append(k, v);
    one.append(rows(1), rows(1, 1, 24));
    const auto [got_k, got_v] = one.fetch();
    EXPECT_EQ(changed(tokens(got_k, 0, 32), k).empty(), std::string(keys) == "raw") << keys;
    EXPECT_EQ(changed(tokens(got_v, 0, 32), v).empty(), std::string(values) == "raw") << values;
  }
}

TEST_F(PagedCache, ExactlyTheFullBlocksBetweenSinkAndWindowAreSealed) {
  // Blocks at 0, 4, 8, ... Before the last token there are 40.
  const struct {
    std::int64_t window, sink;
    int first, last;
  } cases[] = {{0, 0, 0, 40}, {8, 0, 0, 32},  {9, 0, 0, 28}, {7, 0, 0, 32},
               {0, 4, 4, 40}, {0, 5, 8, 40},  {8, 1, 4, 32}, {40, 0, 0, 0},
               {36, 0, 0, 4}, {100, 0, 0, 0}, {0, 40, 0, 0}, {0, 36, 36, 40}};
  const mx::array k = rows(40);
  for (const auto& c : cases) {
    PagedKVCache one = cache(config("int2", "int2", c.window, c.sink));
    one.append(k, k);
    EXPECT_TRUE(changed(one.fetch().first, k).empty()) << "sealed by the append that wrote it";
    one.append(rows(1), rows(1));
    const auto [keys, values] = one.fetch();
    EXPECT_EQ(changed(tokens(keys, 0, 40), k), range(c.first, c.last)) << c.window << ' ' << c.sink;
    EXPECT_EQ(changed(tokens(values, 0, 40), k), range(c.first, c.last));
  }
}

TEST_F(PagedCache, TokenByTokenTheWindowIsNeverShorterThanAsked) {
  PagedKVCache one = cache(config("int2", "int2", 6, 3));
  const mx::array k = rows(50);
  for (int t = 0; t < 50; ++t) {
    one.append(tokens(k, t, t + 1), tokens(k, t, t + 1));
    const std::vector<int> sealed = changed(one.fetch().first, tokens(k, 0, t + 1));
    const int n_before = t;
    EXPECT_EQ(sealed, range(4, std::max(4, (n_before - 6) / kBlockSize * kBlockSize))) << t;
  }
}

// Trim
// ----------------------------------------------------------------------------------------------

TEST_F(PagedCache, TrimIntoASealedBlockKeepsItsBitsAndAppendsBehindIt) {
  PagedKVCache one = cache(config("kivi4", "int8"));
  one.append(rows(16), rows(16));
  one.append(rows(1), rows(1));
  const auto before = one.fetch();
  EXPECT_EQ(one.trim(7), 7);  // into the block at 8
  const mx::array k = rows(9);
  const mx::array v = rows(9);
  one.append(k, v);
  const auto [keys, values] = one.fetch();
  EXPECT_TRUE(equal(tokens(keys, 0, 10), tokens(before.first, 0, 10)));
  EXPECT_TRUE(equal(tokens(values, 0, 10), tokens(before.second, 0, 10)));
  EXPECT_TRUE(equal(tokens(keys, 10, 19), k));
  EXPECT_TRUE(equal(tokens(values, 10, 19), v));
}

TEST_F(PagedCache, TrimClampsAndCountsUsedSlots) {
  PagedKVCache one = cache();
  one.append(rows(10), rows(10));
  EXPECT_EQ(one.trim(-5), 0);
  EXPECT_EQ(one.trim(std::numeric_limits<std::int64_t>::min()), 0);
  EXPECT_EQ(one.trim(0), 0);
  EXPECT_EQ(one.size(), 10);
  EXPECT_EQ(one.trim(2), 2);  // blocks of 4, 4 and now 0
  EXPECT_EQ(pool_->stats().blocks_in_use(), 4);
  EXPECT_EQ(pool_->stats().fragmented_count, 0);
  EXPECT_EQ(one.trim(1), 1);
  EXPECT_EQ(pool_->stats().fragmented_count, 2);
  EXPECT_EQ(one.trim(std::numeric_limits<std::int64_t>::max()), 7);
  EXPECT_EQ(pool_->stats().blocks_in_use(), 0);
  EXPECT_EQ(one.nbytes(), 0U);
}

TEST_F(PagedCache, TrimmingARowOfABatchShorterThanTheCutEmptiesIt) {
  PagedKVCache batch = cache({}, {1, 2});
  batch.append(rows(8, 2), rows(8, 2), std::vector<std::int64_t>{0, 0},
               std::vector<std::int64_t>{8, 3});
  EXPECT_EQ(batch.trim(5), 5);
  EXPECT_EQ(batch.lengths(), (std::vector<std::int64_t>{3, 0}));
}

TEST_F(PagedCache, AnAppendAfterTrimDoesNotReachAFork) {
  PagedKVCache one = cache();
  const mx::array k = rows(7);
  one.append(k, k);
  PagedKVCache fork = cache({}, {});
  fork.fork_rows(one, std::vector<std::int64_t>{0}, std::vector<Owner>{2});
  one.trim(2);
  one.append(rows(2), rows(2));
  EXPECT_TRUE(equal(fork.fetch().first, k));
  EXPECT_EQ(pool_->stats().blocks_in_use(), 6);  // the full block shared, the open one not
}

// Sliding windows
// -----------------------------------------------------------------------------------

TEST_F(PagedCache, SlidingGivesBlocksBackAndAttendsAsIfItHadNot) {
  PagedKVCache one = cache(config("raw", "raw", 0, 0, 6));
  PagedKVCache all = cache({}, {2});
  AttentionMask causal;
  causal.causal = true;
  for (const int n : {5, 1, 1, 9, 1, 1, 1, 3, 20, 1}) {
    const mx::array k = rows(n);
    const mx::array v = rows(n);
    one.append(k, v);
    all.append(k, v);
    const mx::array q = rows(n);
    EXPECT_TRUE(
        mx::allclose(attend(one, q), all.attend(q, 0.25F, causal, std::nullopt, 6), 1e-5, 1e-5)
            .item<bool>());
    const auto wanted = all.fetch();
    const int kept = static_cast<int>(std::min<std::int64_t>(one.size(), n + 5));
    const int size = static_cast<int>(one.size());
    EXPECT_TRUE(equal(one.fetch().first, tokens(wanted.first, size - kept, size)));
    EXPECT_TRUE(equal(one.fetch().second, tokens(wanted.second, size - kept, size)));
  }
  EXPECT_EQ(one.size(), 43);
  EXPECT_FALSE(one.is_trimmable());
  EXPECT_EQ(one.trim(1), 0);
  EXPECT_EQ(one.size(), 43);
  // Before the last token: 42, of which the next query sees 37 ... 41, in the blocks at 36 and 40.
  EXPECT_EQ(one.nbytes(), std::size_t{2 * 2 * kBlockSize * kHeads * kDim * 4});
}

TEST_F(PagedCache, ASlidingCacheThatHasDroppedNothingTrims) {
  PagedKVCache one = cache(config("raw", "raw", 0, 0, 6));
  one.append(rows(9), rows(9));
  EXPECT_TRUE(one.is_trimmable());
  EXPECT_EQ(one.trim(4), 4);
  EXPECT_EQ(one.size(), 5);
}

TEST_F(PagedCache, AWindowOfOneTokenSeesItself) {
  PagedKVCache one = cache(config("raw", "raw", 0, 0, 1));
  const mx::array v = rows(9);
  one.append(rows(9), v);
  const mx::array q = rows(9);
  EXPECT_TRUE(mx::allclose(attend(one, q), v).item<bool>());
  one.append(rows(0), rows(0));
  EXPECT_TRUE(equal(one.fetch().second, mx::zeros({1, kHeads, 0, kDim})));
  one.append(v, v);
  EXPECT_EQ(one.size(), 18);
  EXPECT_FALSE(one.is_trimmable());
  EXPECT_EQ(one.trim(3), 0);
}

// Rows
// ----------------------------------------------------------------------------------------------

TEST_F(PagedCache, EachRowTakesItsColumns) {
  PagedKVCache batch = cache({}, {1, 2, 3});
  const mx::array k = rows(8, 3);
  batch.append(k, k, std::vector<std::int64_t>{0, 5, 2}, std::vector<std::int64_t>{8, 3, 0});
  EXPECT_EQ(batch.lengths(), (std::vector<std::int64_t>{8, 3, 0}));
  const mx::array keys = batch.fetch().first;
  EXPECT_TRUE(equal(tokens(keys, 0, 8, 0), tokens(k, 0, 8, 0)));
  EXPECT_TRUE(equal(tokens(keys, 5, 8, 1), tokens(k, 5, 8, 1)));
  EXPECT_TRUE(equal(tokens(keys, 0, 5, 1), mx::zeros({1, kHeads, 5, kDim})));
  EXPECT_TRUE(equal(tokens(keys, 0, 8, 2), mx::zeros({1, kHeads, 8, kDim})));
}

TEST_F(PagedCache, ColumnsOutsideAreRefused) {
  PagedKVCache one = cache();
  const mx::array k = rows(4);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  using List = std::vector<std::int64_t>;
  for (const auto& [first, count] : {std::pair<List, List>{{1}, {4}},
                                     {{-1}, {2}},
                                     {{0}, {-1}},
                                     {{1}, {kMost}},
                                     {{kMost}, {kMost}},
                                     {{0, 0}, {1, 1}},
                                     {{0}, {}}}) {
    EXPECT_THROW(one.append(k, k, first, count), std::invalid_argument);
  }
  EXPECT_EQ(one.size(), 0);
  EXPECT_EQ(pool_->stats().blocks_in_use(), 0);
}

TEST_F(PagedCache, KeptRowsComeInTheOrderAskedAndOthersAreFreed) {
  PagedKVCache batch = cache({}, {1, 2, 3});
  const mx::array k = rows(4, 3);
  batch.append(k, k);
  EXPECT_THROW(batch.keep_rows(std::vector<std::int64_t>{0, 0}), std::invalid_argument);
  EXPECT_THROW(batch.keep_rows(std::vector<std::int64_t>{3}), std::invalid_argument);
  batch.keep_rows(std::vector<std::int64_t>{2, 0});
  EXPECT_EQ(batch.owners(), (std::vector<Owner>{3, 1}));
  EXPECT_TRUE(
      equal(batch.fetch().first, mx::concatenate({tokens(k, 0, 4, 2), tokens(k, 0, 4, 0)}, 0)));
  EXPECT_EQ(pool_->stats().blocks_in_use(), 4);
}

TEST_F(PagedCache, RowsJoinOnlyWhatIsAlike) {
  PagedKVCache one = cache();
  one.append(rows(4), rows(4));
  PagedKVCache half = cache();
  half.append(mx::astype(rows(4), mx::float16), mx::astype(rows(4), mx::float16));
  PagedKVCache packed = cache(config("int4", "int4"));
  PagedKVCache elsewhere(std::make_shared<PagedStorage>(pool_), {}, std::vector<Owner>{1});
  for (PagedKVCache* other : {&half, &packed, &elsewhere, &one}) {
    EXPECT_THROW(one.take_rows(*other), std::invalid_argument);
    EXPECT_EQ(other->n_rows(), 1);
  }
  EXPECT_EQ(one.n_rows(), 1);
  PagedKVCache empty = cache({}, {4, 5});
  empty.take_rows(one);
  EXPECT_EQ(empty.lengths(), (std::vector<std::int64_t>{0, 0, 4}));
}

// Life
// ----------------------------------------------------------------------------------------------

TEST_F(PagedCache, FreedElsewhereItIsEmptyAndStartsAnew) {
  PagedKVCache one = cache();
  one.append(rows(6), rows(6));
  pool_->free_all(1);
  EXPECT_EQ(one.size(), 0);
  EXPECT_EQ(one.nbytes(), 0U);
  EXPECT_EQ(one.trim(3), 0);
  EXPECT_EQ(one.fetch().first.shape(), (mx::Shape{1, kHeads, 0, kDim}));
  const mx::array k = rows(3);
  one.append(k, k);
  EXPECT_TRUE(equal(one.fetch().first, k));
  EXPECT_EQ(pool_->stats().blocks_in_use(), 2);
  one.release();
  EXPECT_EQ(pool_->stats().blocks_in_use(), 0);
  mx::synchronize();  // A GPU lets go of what it read after the result is there.
  EXPECT_EQ(storage_->resident_bytes(), 0U);
}

TEST_F(PagedCache, ARowFreedElsewhereStaysEmptyWhenOthersAreTrimmed) {
  PagedKVCache batch = cache({}, {1, 2});
  batch.append(rows(4, 2), rows(4, 2), std::vector<std::int64_t>{0, 0},
               std::vector<std::int64_t>{4, 2});
  pool_->free_all(1);
  EXPECT_EQ(batch.trim(1), 1);
  EXPECT_EQ(batch.lengths(), (std::vector<std::int64_t>{0, 1}));
}

TEST_F(PagedCache, AnArrayFetchedEarlierOutlivesTheCache) {
  mx::array keys = mx::array(0);
  const mx::array k = rows(6);
  {
    PagedKVCache one = cache();
    one.append(k, k);
    keys = one.fetch().first;
  }
  PagedKVCache two = cache();
  two.append(rows(200), rows(200), std::vector<std::int64_t>{0}, std::vector<std::int64_t>{60});
  two.pending().eval();
  EXPECT_TRUE(equal(keys, k));
}

TEST_F(PagedCache, APoolThatDoesNotSeparateKeysAndValuesServes) {
  const auto pool = std::make_shared<BlockPoolAllocator>(
      PoolConfig{.block_size = kBlockSize, .n_blocks = 6, .separate_kv = false});
  PagedKVCache one(std::make_shared<PagedStorage>(pool), {}, std::vector<Owner>{1});
  const mx::array k = rows(12);
  const mx::array v = rows(12);
  one.append(k, v);
  EXPECT_EQ(pool->stats().blocks_in_use(), 6);
  EXPECT_THROW(one.append(rows(1), rows(1)), BlockPoolExhaustedError);
  EXPECT_TRUE(equal(one.fetch().second, v));
}

TEST_F(PagedCache, MemoryFallsOnReleaseAndComesBack) {
  const auto pool = std::make_shared<BlockPoolAllocator>(
      PoolConfig{.block_size = 32, .n_blocks = 1024, .grow_on_exhaustion = true});
  const auto storage =
      std::make_shared<PagedStorage>(pool, std::make_shared<MlxBufferPool>(std::size_t{0}));
  PagedKVCache one(storage, config("int4", "int4"), std::vector<Owner>{1});
  const auto grow = [&] {
    for (int i = 0; i < 8; ++i) one.append(rows(256, 1, 64), rows(256, 1, 64));
    one.pending().eval();
    mx::synchronize();
  };
  // Tables and work space of a GPU stay.
  one.append(rows(1, 1, 64), rows(1, 1, 64));
  attend(one, rows(1, 1, 64)).eval();
  one.release();
  one.pending().eval();
  mx::synchronize();
  const std::size_t before = mx::get_active_memory();
  for (int round = 0; round < 3; ++round) {
    grow();
    const std::size_t held = mx::get_active_memory() - before;
    EXPECT_GE(held, one.nbytes());
    EXPECT_LE(held, storage->resident_bytes() + (64 << 10));  // the allocator rounds up
    one.release();
    one.pending().eval();
    mx::synchronize();
    EXPECT_LE(mx::get_active_memory(), before + 4096);
    EXPECT_EQ(storage->resident_bytes(), 0U);
  }
}

// Attention
// -----------------------------------------------------------------------------------------

TEST_F(PagedCache, PrefillInChunksIsPrefillAtOnce) {
  const mx::array k = rows(50);
  const mx::array v = rows(50);
  const mx::array q = rows(50);
  PagedKVCache whole = cache();
  whole.append(k, v);
  const mx::array at_once = attend(whole, q);
  for (const int chunk : {1, 3, 4, 17}) {
    PagedKVCache parts = cache({}, {2});
    std::vector<mx::array> outputs;
    for (int t = 0; t < 50; t += chunk) {
      const int end = std::min(50, t + chunk);
      parts.append(tokens(k, t, end), tokens(v, t, end));
      outputs.push_back(attend(parts, tokens(q, t, end)));
    }
    EXPECT_TRUE(mx::allclose(mx::concatenate(outputs, 2), at_once, 1e-5, 1e-6).item<bool>())
        << chunk;
    EXPECT_TRUE(equal(parts.fetch().first, k));
    EXPECT_TRUE(equal(parts.fetch().second, v));
  }
}

TEST_F(PagedCache, AttendSaysWhatDoesNotFit) {
  PagedKVCache one = cache();
  EXPECT_THROW(attend(one, rows(1)), std::invalid_argument);  // no token yet
  one.append(rows(5), rows(5));
  EXPECT_THROW(attend(one, rows(1, 2)), std::invalid_argument);
  EXPECT_THROW(attend(one, rows(1, 1, 8)), std::invalid_argument);
  EXPECT_THROW(attend(one, mx::zeros({1, 3, 1, kDim})), std::invalid_argument);
  EXPECT_THROW(attend(one, mx::zeros({1, 0, 1, kDim})), std::invalid_argument);
  EXPECT_THROW(attend(one, mx::zeros({1, kHeads, 1, kDim}, mx::int32)), std::invalid_argument);
  EXPECT_THROW(one.attend(rows(1), 1.0F, {}, mx::zeros({3})), std::invalid_argument);
  EXPECT_THROW(one.attend(rows(1), 1.0F, {}, std::nullopt, 0, -1.0F), std::invalid_argument);
  AttentionMask mask;
  mask.array = mx::zeros({1, 4});
  EXPECT_THROW(one.attend(rows(1), 1.0F, mask), std::invalid_argument);
  mask.array = mx::zeros({1, 5}, mx::int32);
  EXPECT_THROW(one.attend(rows(1), 1.0F, mask), std::invalid_argument);
}

TEST_F(PagedCache, NothingAppendedAndNothingAskedGiveEmptyResults) {
  PagedKVCache one = cache();
  one.append(rows(0), rows(0));
  EXPECT_EQ(one.fetch().first.shape(2), 0);
  const mx::array alone = attend(one, rows(2));
  EXPECT_TRUE(equal(alone, mx::zeros({1, kHeads, 2, kDim})));
  one.append(rows(3), rows(3));
  EXPECT_EQ(attend(one, rows(0)).shape(2), 0);
  one.pending().eval();
}

TEST_F(PagedCache, ArgumentsOfTheCacheAreChecked) {
  EXPECT_THROW(PagedKVCache(nullptr, {}, {}), std::invalid_argument);
  EXPECT_THROW(cache(config("fp16", "raw")), std::invalid_argument);
  EXPECT_THROW(cache(config("raw", "int3")), std::invalid_argument);
  EXPECT_THROW(cache(config("raw", "raw", -1)), std::invalid_argument);
  EXPECT_THROW(cache(config("raw", "raw", 0, -1)), std::invalid_argument);
  EXPECT_THROW(cache(config("raw", "raw", 0, 0, -1)), std::invalid_argument);
  PagedKVCacheConfig odd;
  odd.group_size = 48;
  EXPECT_THROW(cache(odd), std::invalid_argument);
}

}  // namespace
}  // namespace kvpool
