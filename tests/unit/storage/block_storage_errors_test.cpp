#include <mlx/mlx.h>

#include <limits>

#include "kvpool/mlx_block_storage.h"
#include "testing.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;
using testing::one_block;
using testing::pool_of;
using testing::same;

void expect_refused(auto call, const std::string& reason) {
  const std::string error = error_of<std::invalid_argument>(call);
  EXPECT_NE(error.find(reason), std::string::npos) << error;
}

TEST(BlockStorageErrors, Construction) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  const auto pool = pool_of(8);
  expect_refused([&] { MLXBlockStorage(nullptr, 8); }, "pool must not be null");
  expect_refused([&] { MLXBlockStorage(pool, 0); }, "head_dim must be >= 1, got 0");
  expect_refused([&] { MLXBlockStorage(pool, -8); }, "head_dim must be >= 1, got -8");
  expect_refused([&] { MLXBlockStorage(pool, 8, 0); }, "n_kv_heads must be >= 1, got 0");
  expect_refused([&] { MLXBlockStorage(pool, kMax); }, "at most 2^30 bytes");
  expect_refused([&] { MLXBlockStorage(pool, 8, kMax); }, "at most 2^30 bytes");
  expect_refused([&] { MLXBlockStorage(pool, (1 << 24) + 1); }, "at most 2^30 bytes");
  EXPECT_EQ(MLXBlockStorage(pool, 1 << 24).head_dim(), 1 << 24);
}

TEST(BlockStorageErrors, ValuesThatDoNotFitChangeNothing) {
  const auto pool = pool_of(8);
  MLXBlockStorage storage(pool, 8, 2);
  const Block block = one_block(*pool, 16, 1, "fp32");
  const auto write = [&](std::int64_t offset, const mx::Shape& shape) {
    return [&storage, &block, offset, shape] { storage.write(block, offset, mx::ones(shape)); };
  };
  expect_refused(write(0, {2, 1, 7}), "values must be (2, n, 8), got (2, 1, 7)");
  expect_refused(write(0, {1, 1, 8}), "values must be (2, n, 8)");
  expect_refused(write(0, {1, 8}), "values must be (2, n, 8), got (1, 8)");
  expect_refused(write(-1, {2, 1, 8}), "1 row(s) at offset -1 do not fit a block of 16 slots");
  expect_refused(write(16, {2, 1, 8}), "do not fit");
  expect_refused(write(0, {2, 17, 8}), "do not fit");
  expect_refused(write(10, {2, 7, 8}), "do not fit");
  expect_refused(write(std::numeric_limits<std::int64_t>::max(), {2, 1, 8}), "do not fit");
  EXPECT_EQ(storage.resident_bytes(), 0U);
  write(16, {2, 0, 8})();
  write(0, {2, 16, 8})();
  EXPECT_TRUE(same(storage.read(block), mx::ones({2, 16, 8})));
}

TEST(BlockStorageErrors, CodesMustBeIntegers) {
  const auto pool = pool_of(8);
  MLXBlockStorage storage(pool, 8);
  const Block block = one_block(*pool, 16, 1, "int4");
  expect_refused([&] { storage.write(block, 0, mx::ones({1, 8})); },
                 "format int4 takes codes of an integer type");
  const Block unknown = one_block(*pool, 16, 1, "turbo");
  expect_refused([&] { storage.read(unknown); }, "got 'turbo'");
  expect_refused([&] { storage.buffer_for(unknown); }, "got 'turbo'");
  expect_refused([&] { storage.write(unknown, 0, mx::ones({1, 8})); }, "got 'turbo'");
}

TEST(BlockStorageErrors, BlocksThatAreNotHeld) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const mx::array row = mx::ones({1, 8});
  const auto refuses = [&](const Block& block) {
    expect_refused([&] { storage.read(block); }, "is not held");
    expect_refused([&] { storage.buffer_for(block); }, "is not held");
    expect_refused([&] { storage.write(block, 0, row); }, "is not held");
  };
  const Block freed = one_block(*pool, 16, 1, "fp32");
  pool->free({{freed}});
  refuses(freed);
  const Block held = one_block(*pool, 16, 2, "fp32");
  refuses(freed);
  storage.write(held, 0, row);
  refuses(freed);
  const auto other = pool_of(2);
  refuses(one_block(*other, 16, 1, "fp32"));
  refuses(Block(0));
  expect_refused([&] { storage.release(held); }, "is still held: free it");
  storage.release(Block(0));
  EXPECT_TRUE(same(mx::slice(storage.read(held), {0, 0}, {1, 8}), row));
}

}  // namespace
}  // namespace kvpool
