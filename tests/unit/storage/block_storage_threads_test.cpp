#include <mlx/mlx.h>

#include <atomic>
#include <optional>
#include <thread>

#include "kvpool/mlx_block_storage.h"
#include "testing.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;
using testing::one_block;
using testing::pool_of;
using testing::same;

mx::array rows_of(float value) { return mx::full({16, 8}, value); }

void on_another_thread(auto body) { std::thread(body).join(); }

TEST(BlockStorageThreads, EightThreadsUseOneStorageEachForItself) {
  constexpr int kThreads = 8;
  const auto pool = pool_of(64);
  MLXBlockStorage storage(pool, 8);
  std::atomic<int> n_right{0};
  std::vector<std::thread> threads;
  for (int self = 0; self < kThreads; ++self) {
    threads.emplace_back([&, self] {
      for (int round = 0; round < 200; ++round) {
        const std::vector<Block> blocks = pool->allocate(Stream::kKey, 64, self, "fp32");
        const auto mark = static_cast<float>(self * 1000 + round);
        for (const Block& block : blocks) storage.write(block, 0, rows_of(mark));
        for (const Block& block : blocks) {
          const mx::array read = storage.read(block);
          n_right += mx::all(mx::equal(read, mx::array(mark))).item<bool>();
        }
        pool->free(blocks);
        if (round % 3 == 0) {
          for (const Block& block : blocks) storage.release(block);
        }
      }
      mx::synchronize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(n_right, kThreads * 200 * 4);
}

TEST(BlockStorageThreads, WorkThatAThreadLeavesUndoneHoldsNobodyUp) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  on_another_thread([&] {
    storage.write(one_block(*pool, 16, 1, "fp32"), 0, rows_of(1));
    pool->free_all(1);
  });
  const Block block = one_block(*pool, 16, 2, "fp32");
  storage.write(block, 0, rows_of(2));
  EXPECT_TRUE(same(storage.read(block), rows_of(2)));
}

TEST(BlockStorageThreads, ABlockPassesToAnotherThreadOnceItsWorkIsEvaluated) {
  const auto pool = pool_of(4);
  MLXBlockStorage storage(pool, 8);
  std::optional<Block> block;
  on_another_thread([&] {
    block = one_block(*pool, 16, 1, "fp32");
    storage.write(*block, 0, rows_of(1));
    mx::eval(storage.read(*block));
    mx::synchronize();
  });
  storage.write(*block, 15, mx::zeros({1, 8}));
  const mx::array expected =
      mx::concatenate({mx::full({15, 8}, 1.0F), mx::zeros({1, 8})}, 0);
  EXPECT_TRUE(same(storage.read(*block), expected));
}

TEST(BlockStorageThreads, BeforeThatItIsRefused) {
  const auto pool = pool_of(4);
  MLXBlockStorage storage(pool, 8);
  const Block block = one_block(*pool, 16, 1, "fp32");
  storage.write(block, 0, rows_of(1));
  on_another_thread([&] {
    for (const std::string& error :
         {error_of<std::runtime_error>([&] { storage.read(block); }),
          error_of<std::runtime_error>([&] { storage.buffer_for(block); }),
          error_of<std::runtime_error>([&] { storage.write(block, 0, rows_of(2)); })}) {
      EXPECT_NE(error.find("evaluate it there first"), std::string::npos) << error;
    }
  });
  EXPECT_TRUE(same(storage.read(block), rows_of(1)));
}

}  // namespace
}  // namespace kvpool
