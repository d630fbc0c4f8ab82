#include "kvpool/pooled_kv_cache.h"

#include <mlx/mlx.h>

#include "../storage/testing.h"
#include "kvpool/kv_cache_builder.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;
using testing::pool_of;

/// Counts tokens, and fails when told to.
class CountingCache final : public KVCache {
 public:
  explicit CountingCache(bool can_drop = true) : can_drop_(can_drop) {}

  void append_key(const mx::array&) override {
    if (fails_on_key) throw std::runtime_error("key");
    ++n_keys;
  }
  void append_value(const mx::array&) override {
    if (fails_on_value) throw std::runtime_error("value");
    ++n_values;
  }
  mx::array attend(const mx::array& q) override { return q; }
  std::int64_t memory_bytes() const override { return 100 * n_keys + n_values; }
  void reset() override { n_keys = n_values = 0; }
  std::int64_t size() const override { return n_values; }
  bool drop_last_key() override {
    if (can_drop_) --n_keys;
    return can_drop_;
  }

  bool fails_on_key = false;
  bool fails_on_value = false;
  std::int64_t n_keys = 0;
  std::int64_t n_values = 0;

 private:
  const bool can_drop_;
};

const mx::array kVector = mx::zeros({4});

std::int64_t in_use(const BlockPoolAllocator& pool) { return pool.stats().blocks_in_use(); }

void append(PooledKVCache& cache, int n) {
  for (int i = 0; i < n; ++i) cache.append(kVector, kVector);
}

TEST(Pooled, ChecksOutABlockWhenTheLastIsFull) {
  const auto pool = pool_of(64, 4);
  PooledKVCache cache(std::make_shared<CountingCache>(), pool, 7, "int2");
  for (int n = 1; n <= 9; ++n) {
    cache.append_key(kVector);
    cache.append_value(kVector);
    EXPECT_EQ(cache.n_blocks_held(), 2 * ((n + 3) / 4));
    EXPECT_EQ(pool->stats().fragmented_count, n % 4 == 0 ? 0 : 2);
  }
  EXPECT_EQ(cache.size(), 9);
  EXPECT_EQ(cache.memory_bytes(), 909);
  for (const Block& block : pool->blocks_for(7)) EXPECT_EQ(block.format(), "int2");
}

TEST(Pooled, KeysMayRunAheadOfValues) {
  const auto pool = pool_of(64, 4);
  PooledKVCache cache(std::make_shared<CountingCache>(), pool, 1);
  for (int i = 0; i < 5; ++i) cache.append_key(kVector);
  EXPECT_EQ(cache.n_blocks_held(), 2);
  EXPECT_EQ(cache.size(), 0);
  cache.append(kVector, kVector);
  EXPECT_EQ(cache.n_blocks_held(), 3);
  EXPECT_EQ(cache.size(), 1);
}

TEST(Pooled, ReleaseGivesBlocksBackAndTheNextAppendTakesThemAgain) {
  const auto pool = pool_of(64, 4);
  PooledKVCache cache(std::make_shared<CountingCache>(), pool, 1);
  append(cache, 9);
  cache.release();
  cache.release();
  EXPECT_EQ(in_use(*pool), 0);
  EXPECT_EQ(cache.n_blocks_held(), 0);
  EXPECT_EQ(cache.size(), 9);
  append(cache, 1);
  EXPECT_EQ(cache.n_blocks_held(), 6);
  EXPECT_EQ(pool->blocks_for(1).at(2).n_used(), 2);
}

TEST(Pooled, ResetForgetsAndDestructionGivesBack) {
  const auto pool = pool_of(64, 4);
  const auto inner = std::make_shared<CountingCache>();
  {
    PooledKVCache cache(inner, pool, 1);
    append(cache, 5);
    cache.reset();
    EXPECT_EQ(in_use(*pool), 0);
    EXPECT_EQ(cache.size(), 0);
    EXPECT_EQ(inner->n_keys, 0);
    append(cache, 1);
    EXPECT_EQ(in_use(*pool), 2);
  }
  EXPECT_EQ(in_use(*pool), 0);
}

TEST(Pooled, TwoCachesOfOneOwnerFreeTheirOwnBlocksOnly) {
  const auto pool = pool_of(64, 4);
  PooledKVCache a(std::make_shared<CountingCache>(), pool);
  PooledKVCache b(std::make_shared<CountingCache>(), pool);
  append(a, 4);
  append(b, 4);
  a.release();
  EXPECT_EQ(in_use(*pool), 2);
  EXPECT_EQ(b.n_blocks_held(), 2);
}

TEST(Pooled, ExhaustionOfEitherStreamChangesNeither) {
  for (const auto& [n_blocks, separate_kv] :
       {std::pair{2, true}, {3, true}, {2, false}, {3, false}}) {
    const auto pool = pool_of(n_blocks, 4, separate_kv);
    const auto inner = std::make_shared<CountingCache>(false);
    PooledKVCache cache(inner, pool, 1);
    append(cache, 4);
    error_of<BlockPoolExhaustedError>([&] { append(cache, 1); });
    EXPECT_EQ(in_use(*pool), 2);
    EXPECT_EQ(inner->n_keys, 4);
    EXPECT_EQ(cache.size(), 4);
    EXPECT_EQ(pool->stats().fragmented_count, 0);
  }
}

class InnerFails : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    append(cache, GetParam());
    before = pool->stats();
    blocks_before = cache.n_blocks_held();
  }
  void expect_as_before() const {
    EXPECT_EQ(inner->n_keys, GetParam());
    EXPECT_EQ(cache.size(), GetParam());
    EXPECT_EQ(cache.n_blocks_held(), blocks_before);
    EXPECT_EQ(in_use(*pool), before.blocks_in_use());
    EXPECT_EQ(pool->stats().fragmented_count, before.fragmented_count);
  }

  const std::shared_ptr<BlockPoolAllocator> pool = pool_of(64, 4);
  const std::shared_ptr<CountingCache> inner = std::make_shared<CountingCache>();
  PooledKVCache cache{inner, pool, 1};
  AllocationStats before;
  std::int64_t blocks_before = 0;
};

TEST_P(InnerFails, OnTheKey) {
  inner->fails_on_key = true;
  error_of<std::runtime_error>([&] { cache.append_key(kVector); });
  error_of<std::runtime_error>([&] { append(cache, 1); });
  expect_as_before();
}

TEST_P(InnerFails, OnTheValue) {
  inner->fails_on_value = true;
  error_of<std::runtime_error>([&] { append(cache, 1); });
  expect_as_before();
  inner->fails_on_value = false;
  append(cache, 1);
  EXPECT_EQ(cache.size(), GetParam() + 1);
}

INSTANTIATE_TEST_SUITE_P(AfterTokens, InnerFails, ::testing::Values(0, 1, 3, 4, 5, 8));

TEST(Pooled, AFailedAppendTakesBackNoEarlierKey) {
  const auto pool = pool_of(64, 1);
  const auto inner = std::make_shared<CountingCache>();
  PooledKVCache cache(inner, pool, 1);
  cache.append_key(kVector);
  inner->fails_on_key = true;
  error_of<std::runtime_error>([&] { append(cache, 1); });
  EXPECT_EQ(inner->n_keys, 1);
  EXPECT_EQ(cache.n_blocks_held(), 1);
}

TEST(Pooled, AnInnerCacheThatCannotDropItsKeyKeepsItAndItsSlot) {
  const auto pool = pool_of(64, 4);
  const auto inner = std::make_shared<CountingCache>(false);
  PooledKVCache cache(inner, pool, 1);
  inner->fails_on_value = true;
  error_of<std::runtime_error>([&] { append(cache, 1); });
  EXPECT_EQ(inner->n_keys, 1);
  EXPECT_EQ(cache.n_blocks_held(), 1);
  EXPECT_FALSE(cache.drop_last_key());
}

TEST(Pooled, DropLastKeyGivesBackABlockThatItEmpties) {
  const auto pool = pool_of(64, 4);
  PooledKVCache cache(std::make_shared<CountingCache>(), pool, 1);
  append(cache, 4);
  EXPECT_FALSE(cache.drop_last_key()) << "it has a value";
  cache.append_key(kVector);
  EXPECT_EQ(cache.n_blocks_held(), 3);
  EXPECT_TRUE(cache.drop_last_key());
  EXPECT_EQ(cache.n_blocks_held(), 2);
  EXPECT_EQ(pool->stats().fragmented_count, 0);
}

TEST(Pooled, DropLastKeyAfterRelease) {
  const auto pool = pool_of(64, 4);
  PooledKVCache cache(std::make_shared<CountingCache>(), pool, 1);
  cache.append_key(kVector);
  cache.release();
  EXPECT_TRUE(cache.drop_last_key());
  append(cache, 1);
  EXPECT_EQ(cache.n_blocks_held(), 2);
}

TEST(Pooled, BlocksFreedElsewhereAreTakenAnew) {
  const auto pool = pool_of(64, 4);
  PooledKVCache cache(std::make_shared<CountingCache>(), pool, 1);
  append(cache, 5);
  pool->free_all(1);
  EXPECT_EQ(cache.n_blocks_held(), 0);
  const std::vector<Block> of_others = pool->allocate(Stream::kKey, 16, 2);
  append(cache, 1);
  EXPECT_EQ(cache.n_blocks_held(), 4);
  EXPECT_EQ(pool->blocks_for(2).size(), 4U);
}

TEST(Pooled, ALastBlockFreedElsewhereLosesNoneOfTheOthers) {
  const auto pool = pool_of(64, 4);
  PooledKVCache cache(std::make_shared<CountingCache>(), pool, 1);
  for (int i = 0; i < 9; ++i) cache.append_key(kVector);
  pool->free({{pool->blocks_for(1).back()}});
  cache.append_key(kVector);
  EXPECT_EQ(in_use(*pool), 3);
  cache.release();
  EXPECT_EQ(in_use(*pool), 0);
}

TEST(Pooled, RefusesNull) {
  const auto pool = pool_of(4);
  error_of<std::invalid_argument>([&] { PooledKVCache(nullptr, pool); });
  error_of<std::invalid_argument>(
      [] { PooledKVCache(std::make_shared<CountingCache>(), nullptr); });
}

TEST(Pooled, Nests) {
  const auto pool = pool_of(64, 4);
  const auto middle =
      std::make_shared<PooledKVCache>(std::make_shared<CountingCache>(), pool, 1);
  PooledKVCache outer(middle, pool, 2);
  append(outer, 5);
  EXPECT_EQ(in_use(*pool), 8);
  outer.reset();
  EXPECT_EQ(in_use(*pool), 0);
}

/// Around a real cache: it stores and attends as without the pool.
class PooledAround : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int kDim = 32;

  static std::shared_ptr<KVCache> inner() {
    return KVCacheBuilder()
        .with_method(GetParam())
        .with_head_dim(kDim)
        .with_block_size(8)
        .with_window(0)
        .build();
  }
  void append_to_both(int n) {
    for (int i = 0; i < n; ++i) {
      const mx::array k = mx::random::normal({kDim});
      const mx::array v = mx::random::normal({kDim});
      pooled.append(k, v);
      twin->append(k, v);
    }
  }
  void expect_alike() {
    EXPECT_EQ(pooled.size(), twin->size());
    EXPECT_EQ(pooled.memory_bytes(), twin->memory_bytes());
    if (twin->size() == 0) return;
    const mx::array q = mx::random::normal({kDim});
    EXPECT_TRUE(testing::same(pooled.attend(q), twin->attend(q)));
  }

  const std::shared_ptr<BlockPoolAllocator> pool = pool_of(12, 4);
  const std::shared_ptr<KVCache> twin = inner();
  PooledKVCache pooled{inner(), pool, 7, GetParam()};
};

TEST_P(PooledAround, StoresAndAttendsAsWithoutThePool) {
  for (const int n : {1, 7, 1, 8, 2}) {
    append_to_both(n);
    expect_alike();
    EXPECT_EQ(pooled.n_blocks_held(), 2 * ((twin->size() + 3) / 4));
  }
  for (const Block& block : pool->blocks_for(7)) EXPECT_EQ(block.format(), GetParam());
}

TEST_P(PooledAround, FailsWithoutATrace) {
  append_to_both(24);
  error_of<BlockPoolExhaustedError>([&] { pooled.append(mx::zeros({kDim}), mx::zeros({kDim})); });
  expect_alike();
  pooled.reset();
  twin->reset();
  EXPECT_EQ(in_use(*pool), 0);
  append_to_both(9);
  error_of<std::invalid_argument>([&] { pooled.append(mx::zeros({kDim}), mx::zeros({kDim + 1})); });
  error_of<std::invalid_argument>([&] { pooled.append(mx::zeros({1}), mx::zeros({kDim})); });
  EXPECT_EQ(in_use(*pool), 6);
  expect_alike();
}

TEST_P(PooledAround, KeysThatWaitForValuesAreCountedAndDropped) {
  append_to_both(4);
  for (KVCache* cache : std::initializer_list<KVCache*>{&pooled, twin.get()}) {
    cache->append_key(mx::ones({kDim}));
  }
  EXPECT_EQ(in_use(*pool), 3);
  expect_alike();
  EXPECT_TRUE(pooled.drop_last_key());
  EXPECT_TRUE(twin->drop_last_key());
  EXPECT_EQ(in_use(*pool), 2);
  expect_alike();
}

TEST_P(PooledAround, ReleaseAndResetAreOfThePoolAndOfTheTokens) {
  append_to_both(10);
  pooled.release();
  EXPECT_EQ(in_use(*pool), 0);
  expect_alike();
  append_to_both(1);
  EXPECT_EQ(in_use(*pool), 6);
  expect_alike();
  pooled.reset();
  twin->reset();
  expect_alike();
  append_to_both(3);
  expect_alike();
}

INSTANTIATE_TEST_SUITE_P(Methods, PooledAround,
                         ::testing::Values("fp16", "int8", "int4", "int2", "kivi4", "kivi2"));

}  // namespace
}  // namespace kvpool
