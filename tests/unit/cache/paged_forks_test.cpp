// Forks that seal the same block hold the result once.

#include <mlx/stream.h>

#include "kvpool/errors.h"
#include "paged_fixture.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::kBlockSize;
using testing::kDim;
using testing::kHeads;

/// Bytes of a raw block of keys and one of values.
constexpr std::size_t kRawBlock = std::size_t{2} * kBlockSize * kHeads * kDim * sizeof(float);

class SealedOnce : public testing::PagedCache {
 protected:
  std::unique_ptr<PagedKVCache> fork(const PagedKVCache& other, std::vector<Owner> owners = {2}) {
    auto forked = std::make_unique<PagedKVCache>(storage_, other.config(), std::vector<Owner>{});
    forked->fork_rows(other, std::vector<std::int64_t>(owners.size()), owners);
    return forked;
  }
  /// What a cache gives that shares with none.
  mx::array alone(const PagedKVCacheConfig& config, const std::vector<mx::array>& appended) {
    PagedKVCache one(std::make_shared<PagedStorage>(pool_), config, std::vector<Owner>{77});
    for (const mx::array& k : appended) one.append(k, k);
    return one.fetch().first;
  }

  const mx::array k_ = rows(12);
  const mx::array next_ = rows(1);
};

TEST_F(SealedOnce, ByForksOneAfterTheOther) {
  for (const char* format : {"int8", "int4", "kivi2"}) {
    PagedKVCache first = cache(config(format, format));
    first.append(k_, k_);
    const auto second = fork(first);
    const auto third = fork(*second, {3});
    first.append(next_, next_);
    const std::size_t bytes = storage_->resident_bytes();
    EXPECT_GT(bytes, first.nbytes());  // the others still hold the raw blocks
    second->append(next_, next_);
    EXPECT_EQ(storage_->resident_bytes(), bytes + kRawBlock);  // its open block
    third->append(next_, next_);
    EXPECT_EQ(storage_->resident_bytes(), bytes + 2 * kRawBlock - 3 * kRawBlock);
    for (PagedKVCache* one : {&first, second.get(), third.get()}) {
      EXPECT_TRUE(equal(one->fetch().first, alone(config(format, format), {k_, next_}))) << format;
    }
    EXPECT_EQ(pool_->stats().blocks_in_use(), 2 * (3 + 3));
    mx::synchronize();  // On a GPU what a gather read is held until it is known to have run.
  }
}

TEST_F(SealedOnce, ByRowsOfOneAppend) {
  const PagedKVCacheConfig int4 = config("int4", "int4");
  PagedKVCache first = cache(int4);
  first.append(k_, k_);
  const auto batch = fork(first, {2, 3, 4});
  first.release();
  const std::size_t raw = storage_->resident_bytes();
  const mx::array three = mx::repeat(next_, 3, 0);
  batch->append(three, three);
  PagedKVCache one(std::make_shared<PagedStorage>(pool_), int4, std::vector<Owner>{77});
  one.append(k_, k_);
  one.append(next_, next_);
  EXPECT_EQ(storage_->resident_bytes(), one.storage()->resident_bytes() + 2 * kRawBlock);
  EXPECT_LT(storage_->resident_bytes(), raw + 3 * kRawBlock);
  EXPECT_TRUE(equal(batch->fetch().first, mx::repeat(one.fetch().first, 3, 0)));
}

TEST_F(SealedOnce, NotIfTheBlockHasChangedSince) {
  const PagedKVCacheConfig int4 = config("int4", "int4");
  PagedKVCache first = cache(int4);
  first.append(k_, k_);
  const auto second = fork(first);
  second->append(next_, next_);
  EXPECT_EQ(first.trim(2), 2);
  const mx::array other = rows(2);
  first.append(other, other);  // in the place of what the fork has sealed
  first.append(next_, next_);
  const mx::array changed = mx::concatenate({tokens(k_, 0, 10), other}, 2);
  EXPECT_TRUE(equal(first.fetch().first, alone(int4, {changed, next_})));
  EXPECT_TRUE(equal(second->fetch().first, alone(int4, {k_, next_})));
}

TEST_F(SealedOnce, AnewIfTheFirstIsGone) {
  const PagedKVCacheConfig int4 = config("int4", "int4");
  PagedKVCache first = cache(int4);
  first.append(k_, k_);
  const auto second = fork(first);
  first.append(next_, next_);
  first.release();
  PagedKVCache elsewhere = cache(int4, {5});
  elsewhere.append(rows(40), rows(40));  // where the first one's blocks lay
  elsewhere.append(next_, next_);
  second->append(next_, next_);
  EXPECT_TRUE(equal(second->fetch().first, alone(int4, {k_, next_})));
}

TEST_F(SealedOnce, AnAppendThatFailedLeavesNothingToShare) {
  const PagedKVCacheConfig int4 = config("int4", "int4");
  PagedKVCache first = cache(int4);
  first.append(k_, k_);
  const auto second = fork(first);
  EXPECT_THROW(first.append(rows(4 * 60), rows(4 * 60)), BlockPoolExhaustedError);
  second->append(next_, next_);
  first.append(next_, next_);
  for (PagedKVCache* one : {&first, second.get()}) {
    EXPECT_TRUE(equal(one->fetch().first, alone(int4, {k_, next_})));
  }
}

}  // namespace
}  // namespace kvpool
