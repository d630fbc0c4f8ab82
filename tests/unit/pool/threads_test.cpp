#include <algorithm>
#include <array>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "testing.h"

namespace kvpool {
namespace {

using testing::expect_balanced;
using testing::ids;

constexpr int kThreads = 8;
#ifdef __SANITIZE_THREAD__
constexpr int kSteps = 10'000;
#else
constexpr int kSteps = 30'000;
#endif

/// Handles that one thread shows to the others.
class Board {
 public:
  static constexpr std::size_t kSlots = 16;

  void put(std::size_t slot, const Block& block) {
    const std::lock_guard guard(mutex_);
    slots_[slot] = block;
  }
  Block get(std::size_t slot) const {
    const std::lock_guard guard(mutex_);
    return slots_[slot];
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Block> slots_ = std::vector<Block>(kSlots, Block(0));
};

/// What a thread did, by its own account.
struct Tally {
  std::int64_t n_allocations = 0;
  std::int64_t n_exhausted = 0;
  std::int64_t n_retired = 0;
  std::int64_t n_wrong = 0;
};

/// Owners 1000 to 1001 are used by all threads, 10 * thread to 10 * thread + 2 by one alone.
class Worker {
 public:
  Worker(BlockPoolAllocator& pool, Board& board, int thread)
      : pool_(pool), board_(board), thread_(thread), random_(static_cast<unsigned>(thread)) {}

  Tally run() {
    for (int step = 0; step < kSteps; ++step) {
      one_step(any(16));
      read(board_.get(any(Board::kSlots)));
    }
    return tally_;
  }

 private:
  std::size_t any(std::size_t below) { return random_() % below; }
  Owner own() { return 10 * thread_ + static_cast<Owner>(any(3)); }
  Owner common() { return 1000 + static_cast<Owner>(any(2)); }
  Owner owner() { return any(3) == 0 ? common() : own(); }

  void one_step(std::size_t choice) {
    const std::int64_t block_size = pool_.config().block_size;
    switch (choice) {
      case 0:
      case 1:
      case 2:
        return counted([&] {
          return pool_.allocate(any(2) ? Stream::kKey : Stream::kValue,
                                1 + static_cast<std::int64_t>(any(40)), owner(), "int4");
        });
      case 3:
      case 4:
        return counted([&] {
          auto [keys, values] =
              pool_.allocate_kv(1 + static_cast<std::int64_t>(any(20)), owner(), "fp16");
          keys.insert(keys.end(), values.begin(), values.end());
          return keys;
        });
      case 5:
      case 6:
        return share(board_.get(any(Board::kSlots)));
      case 7:
        return refused_or_done([&] { pool_.free(some_of(pool_.blocks_for(owner()))); });
      case 8:
        return pool_.release(some_of(pool_.blocks_for(owner())));
      case 9:
      case 10:
        return pool_.free_all(own());
      case 11:
        return any(4) == 0 ? pool_.free_all(common()) : pool_.release_owner(own());
      case 12:
        return refused_or_done([&] { pool_.register_owner(owner()); });
      case 13:
        return refused_or_done([&] {
          pool_.mark_used(board_.get(any(Board::kSlots)),
                          static_cast<std::int64_t>(any(static_cast<std::size_t>(block_size) + 1)));
        });
      case 14:
        return refused_or_done(
            [&] { pool_.mark_used(pool_.blocks_for(own()), static_cast<std::int64_t>(any(30))); });
      default:
        return look();
    }
  }

  template <typename Call>
  void counted(Call&& call) {
    try {
      const auto blocks = call();
      tally_.n_allocations += static_cast<std::int64_t>(blocks.size());
      board_.put(any(Board::kSlots), blocks.front());
    } catch (const BlockPoolExhaustedError&) {
      ++tally_.n_exhausted;
      if (any(8) == 0) tally_.n_retired += pool_.shrink(Stream::kKey, 4);
    }
  }

  /// Another thread may have let go of what this call is about.
  template <typename Call>
  static void refused_or_done(Call&& call) {
    try {
      call();
    } catch (const std::invalid_argument&) {
    }
  }

  void share(const Block& block) {
    refused_or_done(
        [&] { board_.put(any(Board::kSlots), pool_.share(std::array{block}, own()).front()); });
  }

  std::vector<Block> some_of(std::vector<Block> blocks) {
    std::shuffle(blocks.begin(), blocks.end(), random_);
    blocks.resize(any(blocks.size() + 1), Block(0));
    return blocks;
  }

  void read(const Block& block) {
    const std::int64_t n_used = block.n_used();
    const auto owner = block.owner();
    tally_.n_wrong += n_used < 0 || n_used > pool_.config().block_size;
    tally_.n_wrong += owner && *owner > 1001;
    tally_.n_wrong += block.format() != "int4" && block.format() != "fp16";
    if (!block.live()) tally_.n_wrong += block.owner().has_value();
  }

  void look() {
    const AllocationStats stats = pool_.stats();
    tally_.n_wrong += stats.blocks_in_use() < 0 || stats.blocks_in_use() > stats.n_blocks;
    tally_.n_wrong += stats.fragmented_count < 0 || stats.fragmented_count > stats.blocks_in_use();
    tally_.n_wrong += pool_.n_free(Stream::kKey) < 0 || pool_.n_free(Stream::kValue) < 0;
    tally_.n_wrong += pool_.ref_count(board_.get(any(Board::kSlots))) < 0;
    const Owner fresh = pool_.new_owner();
    tally_.n_wrong += !new_owners_.insert(fresh).second;
    const auto history = pool_.history();
    for (std::size_t i = 1; i < history.size(); ++i) {
      tally_.n_wrong += history[i].n_allocations < history[i - 1].n_allocations;
      tally_.n_wrong += history[i].n_frees < history[i - 1].n_frees;
    }
  }

  BlockPoolAllocator& pool_;
  Board& board_;
  int thread_;
  std::mt19937 random_;
  std::set<Owner> new_owners_;
  Tally tally_;
};

class Threads : public ::testing::TestWithParam<PoolConfig> {};

TEST_P(Threads, LoseNoBlockAndNoCount) {
  const PoolConfig config = GetParam();
  BlockPoolAllocator pool(config);
  Board board;
  std::array<Tally, kThreads> tallies;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back(
          [&, i] { tallies[static_cast<std::size_t>(i)] = Worker(pool, board, i).run(); });
    }
  }
  Tally sum;
  for (const Tally& tally : tallies) {
    sum.n_allocations += tally.n_allocations;
    sum.n_exhausted += tally.n_exhausted;
    sum.n_retired += tally.n_retired;
    sum.n_wrong += tally.n_wrong;
  }
  EXPECT_EQ(sum.n_wrong, 0);
  EXPECT_GT(sum.n_exhausted, 0) << "the pool was never short of blocks";
  AllocationStats stats = pool.stats();
  EXPECT_EQ(stats.n_allocations, sum.n_allocations);
  EXPECT_EQ(stats.n_exhausted, sum.n_exhausted);
  EXPECT_EQ(stats.n_retired, sum.n_retired);
  EXPECT_EQ(stats.n_blocks, config.n_blocks + stats.n_grown - stats.n_retired);
  expect_balanced(pool);

  for (int i = 0; i < kThreads; ++i) {
    for (int j = 0; j < 3; ++j) pool.free_all(10 * i + j);
  }
  pool.free_all(1000);
  pool.free_all(1001);
  stats = pool.stats();
  EXPECT_EQ(stats.n_frees, stats.n_allocations);
  EXPECT_EQ(stats.fragmented_count, 0);
  std::vector<BlockId> all;
  for (const Stream stream : {Stream::kKey, Stream::kValue}) {
    const std::int64_t n_free = pool.n_free(stream);
    if (n_free == 0) continue;
    const auto got = ids(pool.allocate(stream, n_free * config.block_size, 1));
    all.insert(all.end(), got.begin(), got.end());
  }
  EXPECT_EQ(static_cast<std::int64_t>(std::set(all.begin(), all.end()).size()), stats.n_blocks);
  EXPECT_EQ(static_cast<std::int64_t>(all.size()), stats.n_blocks);
}

INSTANTIATE_TEST_SUITE_P(
    Pools, Threads,
    ::testing::Values(
        PoolConfig{.block_size = 4, .n_blocks = 128},
        PoolConfig{.block_size = 4, .n_blocks = 101, .separate_kv = false},
        PoolConfig{.block_size = 4, .n_blocks = 32, .grow_on_exhaustion = true, .max_blocks = 96}));

}  // namespace
}  // namespace kvpool
