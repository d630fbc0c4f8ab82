// Rows 1 to 3 of the performance table: what a block costs, and what 8 threads on one pool reach.
// Times are of the process's CPU unless a benchmark's name ends in real_time.

#include <benchmark/benchmark.h>

#include <array>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "kvpool/block_pool.h"

namespace kvpool {
namespace {

constexpr std::int64_t kBlockSize = 16;

void report_blocks(benchmark::State& state, std::int64_t blocks_per_iteration) {
  const auto blocks = static_cast<double>(state.iterations() * blocks_per_iteration);
  state.counters["blocks"] = benchmark::Counter(blocks, benchmark::Counter::kIsRate);
  state.counters["per_block"] =
      benchmark::Counter(blocks, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

/// A process of one thread gets cheaper atomics and locks from the C library than any server has.
class SecondThread {
 public:
  SecondThread() : thread_([this] { stop_.acquire(); }) {}
  ~SecondThread() {
    stop_.release();
    thread_.join();
  }

 private:
  std::binary_semaphore stop_{0};
  std::thread thread_;
};

void allocate_and_free(BlockPoolAllocator& pool, benchmark::State& state) {
  for (auto _ : state) {
    const auto blocks = pool.allocate(Stream::kKey, kBlockSize, 1);
    benchmark::DoNotOptimize(blocks.data());
    pool.free(blocks);
  }
  report_blocks(state, 1);
}

void allocate_and_free_all(BlockPoolAllocator& pool, benchmark::State& state) {
  const std::int64_t n_blocks = state.range(0);
  for (auto _ : state) {
    const auto blocks = pool.allocate(Stream::kKey, n_blocks * kBlockSize, 1);
    benchmark::DoNotOptimize(blocks.data());
    pool.free_all(1);
  }
  report_blocks(state, n_blocks);
}

void AllocateFreeOne(benchmark::State& state) {
  BlockPoolAllocator pool;
  allocate_and_free(pool, state);
}
BENCHMARK(AllocateFreeOne);

void AllocateFreeOneBesideAThread(benchmark::State& state) {
  const SecondThread second;
  BlockPoolAllocator pool;
  allocate_and_free(pool, state);
}
BENCHMARK(AllocateFreeOneBesideAThread);

void AllocateFreeAll(benchmark::State& state) {
  BlockPoolAllocator pool;
  allocate_and_free_all(pool, state);
}
BENCHMARK(AllocateFreeAll)->Arg(64);

void AllocateFreeAllBesideAThread(benchmark::State& state) {
  const SecondThread second;
  BlockPoolAllocator pool;
  allocate_and_free_all(pool, state);
}
BENCHMARK(AllocateFreeAllBesideAThread)->Arg(64);

/// The pool that all threads of a benchmark draw from; each holds at most one block of it.
BlockPoolAllocator& common_pool() {
  static BlockPoolAllocator pool;
  return pool;
}

/// The rate over all threads is the counter `blocks`.
void OnePool(benchmark::State& state) {
  BlockPoolAllocator& pool = common_pool();
  const Owner owner = state.thread_index();
  for (auto _ : state) {
    const auto blocks = pool.allocate(Stream::kKey, kBlockSize, owner);
    benchmark::DoNotOptimize(blocks.data());
    pool.free(blocks);
  }
  state.counters["blocks"] =
      benchmark::Counter(static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}
BENCHMARK(OnePool)->Threads(1)->UseRealTime();
BENCHMARK(OnePool)->Threads(8)->UseRealTime();

void Share(benchmark::State& state) {
  BlockPoolAllocator pool;
  const auto blocks = pool.allocate(Stream::kKey, 64 * kBlockSize, 1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(pool.share(blocks, 2).data());
    pool.free_all(2);
  }
  report_blocks(state, 64);
}
BENCHMARK(Share);

void MarkUsed(benchmark::State& state) {
  BlockPoolAllocator pool;
  const auto block = pool.allocate(Stream::kKey, 1, 1)[0];
  std::int64_t n_used = 0;
  for (auto _ : state) {
    pool.mark_used(block, n_used);
    n_used = n_used == kBlockSize ? 0 : n_used + 1;
  }
}
BENCHMARK(MarkUsed);

void Stats(benchmark::State& state) {
  BlockPoolAllocator pool;
  for (auto _ : state) benchmark::DoNotOptimize(pool.stats());
}
BENCHMARK(Stats);

}  // namespace
}  // namespace kvpool
