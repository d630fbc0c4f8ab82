#include "kvpool/pool_backed_kv_cache.h"

#include <mlx/mlx.h>

#include "../storage/testing.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;
using testing::pool_of;
using testing::same;
using KeysAndValues = PoolBackedKVCache::KeysAndValues;

/// Random keys and values of S tokens: B rows, 2 heads, 8 and 6 wide.
KeysAndValues tokens(mx::ShapeElem n, mx::ShapeElem n_rows = 1, mx::Dtype dtype = mx::float32) {
  return {mx::astype(mx::random::normal({n_rows, 2, n, 8}), dtype),
          mx::astype(mx::random::normal({n_rows, 2, n, 6}), dtype)};
}

void append(PoolBackedKVCache& cache, mx::ShapeElem n, mx::ShapeElem n_rows = 1) {
  const auto [keys, values] = tokens(n, n_rows);
  cache.update_and_fetch(keys, values);
}

std::int64_t in_use(const BlockPoolAllocator& pool) { return pool.stats().blocks_in_use(); }

std::int64_t used_slots(const BlockPoolAllocator& pool, Owner owner) {
  std::int64_t n = 0;
  for (const Block& block : pool.blocks_for(owner)) n += block.n_used();
  return n;
}

void expect_holds(const PoolBackedKVCache& cache, const KeysAndValues& expected) {
  const auto state = cache.state();
  ASSERT_TRUE(state.has_value());
  EXPECT_TRUE(same(state->first, expected.first));
  EXPECT_TRUE(same(state->second, expected.second));
}

KeysAndValues joined(const KeysAndValues& a, const KeysAndValues& b) {
  return {mx::concatenate({a.first, b.first}, 2), mx::concatenate({a.second, b.second}, 2)};
}

KeysAndValues first(const KeysAndValues& a, mx::ShapeElem n) {
  const auto cut = [n](const mx::array& x) {
    mx::Shape stop = x.shape();
    stop[2] = n;
    return mx::slice(x, {0, 0, 0, 0}, stop);
  };
  return {cut(a.first), cut(a.second)};
}

TEST(PoolBacked, FetchesAllTokensInOrderAndEvaluatesNothing) {
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    const auto pool = pool_of(4096);
    PoolBackedKVCache cache(pool, 1, 4);
    KeysAndValues all = tokens(3, 3, dtype);
    cache.update_and_fetch(all.first, all.second);
    for (const mx::ShapeElem n : {1, 1, 7, 1, 30, 1}) {
      const KeysAndValues more = tokens(n, 3, dtype);
      const KeysAndValues fetched = cache.update_and_fetch(more.first, more.second);
      EXPECT_EQ(fetched.first.status(), mx::array::Status::unscheduled);
      all = joined(all, more);
      EXPECT_TRUE(same(fetched.first, all.first));
      EXPECT_TRUE(same(fetched.second, all.second));
      EXPECT_EQ(cache.offset(), all.first.shape(2));
    }
  }
}

TEST(PoolBacked, WhatWasFetchedStaysAsItWas) {
  const auto pool = pool_of(4096);
  PoolBackedKVCache cache(pool, 1);
  const KeysAndValues a = tokens(2);
  const KeysAndValues fetched = cache.update_and_fetch(a.first, a.second);
  cache.trim(1);
  append(cache, 1);
  mx::eval(cache.state()->first);
  EXPECT_TRUE(same(fetched.first, a.first));
}

TEST(PoolBacked, LaterTokensAreCastToTheFirstType) {
  const auto pool = pool_of(4096);
  PoolBackedKVCache cache(pool, 1);
  const KeysAndValues a = tokens(2, 1, mx::float16);
  const KeysAndValues b = tokens(2);
  cache.update_and_fetch(a.first, a.second);
  const KeysAndValues fetched = cache.update_and_fetch(b.first, b.second);
  EXPECT_TRUE(same(fetched.first, mx::concatenate({a.first, mx::astype(b.first, mx::float16)}, 2)));
}

TEST(PoolBacked, TakesTheBlocksOfItsCapacityForAllRows) {
  const auto pool = pool_of(4096, 16);
  PoolBackedKVCache cache(pool, 1);
  append(cache, 1, 3);
  EXPECT_EQ(in_use(*pool), 2 * (256 * 3 / 16));
  EXPECT_EQ(used_slots(*pool, 1), 2 * 3);
  append(cache, 255, 3);
  EXPECT_EQ(in_use(*pool), 2 * (256 * 3 / 16));
  append(cache, 1, 3);
  EXPECT_EQ(in_use(*pool), 2 * (512 * 3 / 16));
  EXPECT_EQ(used_slots(*pool, 1), 2 * 3 * 257);
  EXPECT_EQ(cache.nbytes(), std::size_t{3 * 2 * 512 * (8 + 6) * 4});
}

TEST(PoolBacked, BlocksThatStepDoesNotDivideAreFilledInOrder) {
  const auto pool = pool_of(64, 16);
  PoolBackedKVCache cache(pool, 1, 10);
  for (int n = 1; n <= 45; ++n) {
    append(cache, 1);
    ASSERT_EQ(used_slots(*pool, 1), 2 * n);
    ASSERT_EQ(in_use(*pool), 2 * (((n + 9) / 10 * 10 + 15) / 16));
  }
  cache.trim(20);
  EXPECT_EQ(used_slots(*pool, 1), 2 * 25);
}

TEST(PoolBacked, FragmentationIsTheBlocksNotFull) {
  const auto pool = pool_of(64, 16);
  PoolBackedKVCache cache(pool, 1, 64);
  append(cache, 16);
  EXPECT_EQ(pool->stats().fragmented_count, 2 * 3);
  append(cache, 40);
  EXPECT_EQ(pool->stats().fragmented_count, 2 * 1);
  append(cache, 8);
  EXPECT_EQ(pool->stats().fragmented_count, 0);
  cache.trim(33);
  EXPECT_EQ(pool->stats().fragmented_count, 2 * 3);
  cache.release();
  EXPECT_EQ(pool->stats().fragmented_count, 0);
}

class Exhausted : public ::testing::TestWithParam<std::pair<std::int64_t, bool>> {};

TEST_P(Exhausted, LeavesCacheAndPoolAsTheyWere) {
  const auto [n_blocks, separate_kv] = GetParam();
  const auto pool = pool_of(n_blocks, 16, separate_kv);
  PoolBackedKVCache cache(pool, 1, 16);
  const KeysAndValues held = tokens(32);
  cache.update_and_fetch(held.first, held.second);
  const auto before = pool->stats();
  error_of<BlockPoolExhaustedError>([&] { append(cache, 1); });
  error_of<BlockPoolExhaustedError>([&] { append(cache, 1); });
  EXPECT_EQ(in_use(*pool), 4);
  EXPECT_EQ(pool->stats().n_allocations, before.n_allocations);
  EXPECT_EQ(used_slots(*pool, 1), 64);
  EXPECT_EQ(cache.offset(), 32);
  expect_holds(cache, held);
  PoolBackedKVCache other(pool, 2, 16);
  error_of<BlockPoolExhaustedError>([&] { append(other, 1); });
  EXPECT_TRUE(other.empty());
  pool->register_owner(2);
  pool->release_owner(2);
  cache.release();
  append(other, 32);
}

/// 5 blocks: 3 for keys and 2 for values, so that only values run out; or one list of 5 for both.
INSTANTIATE_TEST_SUITE_P(Pools, Exhausted,
                         ::testing::Values(std::pair{4, true}, std::pair{5, true},
                                           std::pair{4, false}, std::pair{5, false}));

TEST(PoolBacked, RefusesWhatDoesNotFit) {
  const auto pool = pool_of(4096);
  error_of<std::invalid_argument>([] { PoolBackedKVCache(nullptr, 1); });
  error_of<std::invalid_argument>([&] { PoolBackedKVCache(pool, 1, 0); });
  error_of<std::invalid_argument>([&] { PoolBackedKVCache(pool, 1, -1); });
  PoolBackedKVCache cache(pool, 1);
  const auto refused = [&cache](const mx::Shape& keys, const mx::Shape& values) {
    error_of<std::invalid_argument>(
        [&] { cache.update_and_fetch(mx::zeros(keys), mx::zeros(values)); });
  };
  refused({1, 2, 3}, {1, 2, 3});
  refused({1, 2, 3, 8}, {1, 2, 4, 6});
  refused({1, 2, 3, 8}, {2, 2, 3, 6});
  EXPECT_TRUE(cache.empty());
  const KeysAndValues held = tokens(5);
  cache.update_and_fetch(held.first, held.second);
  refused({2, 2, 1, 8}, {2, 2, 1, 6});
  refused({1, 1, 1, 8}, {1, 1, 1, 6});
  refused({1, 2, 1, 4}, {1, 2, 1, 6});
  refused({1, 2, 1, 8}, {1, 2, 1, 8});
  expect_holds(cache, held);
}

TEST(PoolBacked, TrimIsClampedAndTheRestStays) {
  const auto pool = pool_of(4096);
  PoolBackedKVCache cache(pool, 1);
  EXPECT_EQ(cache.trim(5), 0);
  const KeysAndValues ten = tokens(10);
  cache.update_and_fetch(ten.first, ten.second);
  EXPECT_EQ(cache.trim(-5), 0);
  EXPECT_EQ(cache.trim(0), 0);
  EXPECT_EQ(cache.trim(std::numeric_limits<std::int64_t>::min()), 0);
  const KeysAndValues one = tokens(1);
  const KeysAndValues fetched = cache.update_and_fetch(one.first, one.second);
  EXPECT_TRUE(same(fetched.first, joined(ten, one).first));
  EXPECT_EQ(cache.trim(99), 11);
  EXPECT_EQ(cache.offset(), 0);
  EXPECT_FALSE(cache.empty());
  cache.update_and_fetch(one.first, one.second);
  expect_holds(cache, one);
}

TEST(PoolBacked, NoTokensAreAnUpdateToo) {
  const auto pool = pool_of(64);
  PoolBackedKVCache cache(pool, 1);
  const KeysAndValues none = tokens(0);
  const KeysAndValues fetched = cache.update_and_fetch(none.first, none.second);
  EXPECT_EQ(fetched.second.shape(), (mx::Shape{1, 2, 0, 6}));
  EXPECT_EQ(in_use(*pool), 0);
  const KeysAndValues five = tokens(5);
  cache.update_and_fetch(five.first, five.second);
  cache.update_and_fetch(none.first, none.second);
  expect_holds(cache, five);
}

TEST(PoolBacked, StateIsReplacedAtItsTrueLength) {
  const auto pool = pool_of(64);
  PoolBackedKVCache cache(pool, 1);
  append(cache, 200);
  const KeysAndValues state = tokens(21, 2);
  cache.set_state(state);
  EXPECT_EQ(cache.offset(), 21);
  EXPECT_EQ(in_use(*pool), 2 * 3);
  EXPECT_EQ(used_slots(*pool, 1), 2 * 42);
  expect_holds(cache, state);
  const KeysAndValues more = tokens(1, 2);
  cache.update_and_fetch(more.first, more.second);
  expect_holds(cache, joined(state, more));
  cache.set_state(std::nullopt);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(in_use(*pool), 0);
}

TEST(PoolBacked, StateNeedsOnlyTheBlocksThatItAdds) {
  const auto pool = pool_of(4, 16);
  PoolBackedKVCache cache(pool, 1, 16);
  append(cache, 20);
  const KeysAndValues full = tokens(32);
  cache.set_state(full);
  const KeysAndValues too_long = tokens(33);
  error_of<BlockPoolExhaustedError>([&] { cache.set_state(too_long); });
  error_of<std::invalid_argument>([&] {
    cache.set_state(KeysAndValues{mx::zeros({1, 2, 3}), mx::zeros({1, 2, 3})});
  });
  expect_holds(cache, full);
  EXPECT_EQ(used_slots(*pool, 1), 64);
}

TEST(PoolBacked, DestructionGivesBlocksBack) {
  const auto pool = pool_of(64);
  {
    PoolBackedKVCache cache(pool, 1);
    append(cache, 3);
  }
  EXPECT_EQ(in_use(*pool), 0);
}

TEST(PoolBacked, BlocksFreedElsewhereEmptyTheCache) {
  const auto pool = pool_of(256);
  PoolBackedKVCache cache(pool, 1);
  append(cache, 3);
  pool->free_all(1);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.offset(), 0);
  EXPECT_EQ(cache.nbytes(), 0U);
  EXPECT_FALSE(cache.state().has_value());
  EXPECT_EQ(cache.trim(1), 0);
  const std::vector<Block> of_others = pool->allocate(Stream::kKey, 32 * 16, 2);
  EXPECT_TRUE(cache.empty());
  pool->free(of_others);
  const KeysAndValues again = tokens(2, 3);
  cache.update_and_fetch(again.first, again.second);
  expect_holds(cache, again);
}

TEST(Linked, ReleaseOfOneEmptiesAll) {
  const auto pool = pool_of(256);
  PoolBackedKVCache a(pool, 1);
  PoolBackedKVCache b(pool, 1);
  auto c = std::make_unique<PoolBackedKVCache>(pool, 1);
  PoolBackedKVCache stranger(pool, 2);
  a.link(b);
  b.link(*c);
  b.link(b);
  for (PoolBackedKVCache* cache : {&a, &b, c.get(), &stranger}) append(*cache, 3);
  c.reset();
  b.release();
  EXPECT_TRUE(a.empty());
  EXPECT_EQ(a.nbytes(), 0U);
  EXPECT_EQ(stranger.offset(), 3);
  EXPECT_EQ(in_use(*pool), 32);
}

class Fork : public ::testing::Test {
 protected:
  void SetUp() override {
    cache.update_and_fetch(common.first, common.second);
    fork.fork_from(cache);
  }

  const std::shared_ptr<BlockPoolAllocator> pool = pool_of(64, 16);
  const KeysAndValues common = tokens(20);
  PoolBackedKVCache cache{pool, 1, 16};
  PoolBackedKVCache fork{pool, 2, 16};
};

TEST_F(Fork, SharesBlocksAndBytesUntilOneSideAppends) {
  EXPECT_EQ(in_use(*pool), 4);
  EXPECT_EQ(pool->blocks_for(2).size(), 4U);
  expect_holds(fork, common);
  const KeysAndValues of_fork = tokens(1);
  const KeysAndValues of_cache = tokens(2);
  fork.update_and_fetch(of_fork.first, of_fork.second);
  EXPECT_EQ(in_use(*pool), 8);
  cache.update_and_fetch(of_cache.first, of_cache.second);
  EXPECT_EQ(in_use(*pool), 8) << "the other side is alone with its blocks and keeps them";
  expect_holds(fork, joined(common, of_fork));
  expect_holds(cache, joined(common, of_cache));
  EXPECT_EQ(used_slots(*pool, 1), 2 * 22);
  EXPECT_EQ(used_slots(*pool, 2), 2 * 21);
}

TEST_F(Fork, TrimmedForksAppendOverTheSameSlotsApart) {
  fork.trim(15);
  cache.trim(3);
  EXPECT_EQ(in_use(*pool), 4);
  const KeysAndValues of_fork = tokens(4);
  const KeysAndValues of_cache = tokens(4);
  fork.update_and_fetch(of_fork.first, of_fork.second);
  cache.update_and_fetch(of_cache.first, of_cache.second);
  expect_holds(fork, joined(first(common, 5), of_fork));
  expect_holds(cache, joined(first(common, 17), of_cache));
}

TEST_F(Fork, MarksItsOwnFillAgainOnceItIsAlone) {
  fork.trim(15);
  cache.release();
  EXPECT_EQ(in_use(*pool), 4);
  append(fork, 1);
  EXPECT_EQ(used_slots(*pool, 2), 2 * 6);
  append(fork, 1);
  EXPECT_EQ(used_slots(*pool, 2), 2 * 7);
}

TEST_F(Fork, OutlivesWhatItWasForkedFrom) {
  cache.release();
  expect_holds(fork, common);
  fork.release();
  EXPECT_EQ(in_use(*pool), 0);
}

TEST_F(Fork, ThatCannotGrowSharesOn) {
  const std::vector<Block> rest = pool->allocate(Stream::kValue, 29 * 16, 3);
  const auto before = pool->stats();
  error_of<BlockPoolExhaustedError>([&] { append(fork, 1); });
  EXPECT_EQ(pool->stats().n_allocations, before.n_allocations);
  EXPECT_EQ(in_use(*pool), before.blocks_in_use());
  expect_holds(fork, common);
  expect_holds(cache, common);
  EXPECT_EQ(used_slots(*pool, 1), 2 * 20);
}

TEST_F(Fork, OfAForkAndOfNothing) {
  PoolBackedKVCache third(pool, 3, 16);
  third.fork_from(fork);
  EXPECT_EQ(in_use(*pool), 4);
  cache.release();
  append(fork, 1);
  expect_holds(third, common);
  PoolBackedKVCache empty(pool, 4, 16);
  third.fork_from(empty);
  EXPECT_TRUE(third.empty());
  EXPECT_TRUE(pool->blocks_for(3).empty());
}

TEST_F(Fork, StaysInItsPoolAndNeedsAnOwner) {
  PoolBackedKVCache elsewhere(pool_of(8), 5);
  PoolBackedKVCache same_owner(pool, 1);
  error_of<std::invalid_argument>([&] { elsewhere.fork_from(cache); });
  error_of<std::invalid_argument>([&] { same_owner.fork_from(cache); });
  error_of<std::invalid_argument>([&] { cache.fork_from(cache); });
  expect_holds(cache, common);
}

TEST_F(Fork, StateOfAForkTakesBlocksOfItsOwn) {
  const KeysAndValues state = tokens(3);
  fork.set_state(state);
  EXPECT_EQ(in_use(*pool), 6);
  expect_holds(cache, common);
  EXPECT_EQ(used_slots(*pool, 1), 2 * 20);
  EXPECT_EQ(used_slots(*pool, 2), 2 * 3);
}

}  // namespace
}  // namespace kvpool
