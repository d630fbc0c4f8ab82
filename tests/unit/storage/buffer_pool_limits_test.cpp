#include <mlx/mlx.h>

#include <limits>

#include "kvpool/mlx_buffer_pool.h"
#include "testing.h"

/// AddressSanitizer's malloc gives up on huge sizes unless told to fail as malloc does.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;

constexpr std::size_t kMax = std::numeric_limits<std::size_t>::max();

MlxBuffer alloc(MlxBufferPool& pool, std::size_t bytes) {
  return pool.alloc(mx::Device::cpu, bytes, mx::uint8, {static_cast<mx::ShapeElem>(bytes)});
}

void release_in_order(MlxBufferPool& pool, std::initializer_list<MlxBuffer> buffers) {
  for (const MlxBuffer& buffer : buffers) pool.release(buffer);
}

TEST(BufferPoolCap, TheLeastRecentlyUsedGoFirst) {
  MlxBufferPool pool(1024);
  const MlxBuffer oldest = alloc(pool, 256);
  const MlxBuffer middle = alloc(pool, 512);
  const MlxBuffer newest = alloc(pool, 512);
  const void* kept[] = {middle.array().data<void>(), newest.array().data<void>()};
  release_in_order(pool, {oldest, middle, newest});
  EXPECT_EQ(pool.free_bytes(), 1024U);
  EXPECT_EQ(pool.free_count(), 2U);
  EXPECT_EQ(alloc(pool, 512).array().data<void>(), kept[1]);
  EXPECT_EQ(alloc(pool, 512).array().data<void>(), kept[0]);
}

TEST(BufferPoolCap, UsingABufferMakesItRecent) {
  MlxBufferPool pool(768);
  const MlxBuffer a = alloc(pool, 256);
  const MlxBuffer b = alloc(pool, 512);
  release_in_order(pool, {a, b});
  pool.release(alloc(pool, 256));
  pool.release(alloc(pool, 128));
  EXPECT_EQ(pool.free_bytes(), 768U) << "128 was served by 256, which is now the newest";
  const MlxBuffer c = alloc(pool, 1024);
  pool.release(c);
  EXPECT_EQ(pool.free_count(), 2U) << "a buffer above the cap pushes nothing out";
}

TEST(BufferPoolCap, ZeroKeepsNothing) {
  MlxBufferPool pool(0);
  pool.release(alloc(pool, 1));
  alloc(pool, 64);
  pool.reset();
  EXPECT_EQ(pool.free_count(), 0U);
  EXPECT_EQ(pool.free_bytes(), 0U);
  EXPECT_EQ(pool.max_free_bytes(), 0U);
}

TEST(BufferPoolCap, BoundsWhatALongRunOfMixedSizesKeeps) {
  MlxBufferPool pool(1 << 16);
  for (std::size_t step = 0; step < 200; ++step) {
    for (std::size_t i = 0; i < 20; ++i) alloc(pool, (step * 131 + i * 977) % 9000 + 1);
    pool.reset();
    EXPECT_LE(pool.free_bytes(), std::size_t{1} << 16);
    EXPECT_EQ(pool.in_use_count(), 0U);
  }
}

TEST(BufferPoolSizes, CapacityIsTheNextPowerOfTwo) {
  MlxBufferPool pool(0);
  const std::pair<std::size_t, std::size_t> cases[] = {
      {1, 1}, {2, 2}, {3, 4}, {4, 4}, {5, 8}, {1000, 1024}, {1024, 1024}, {1025, 2048},
      {(1 << 20) + 1, 1 << 21}};
  for (const auto& [bytes, capacity] : cases) EXPECT_EQ(alloc(pool, bytes).capacity(), capacity);
}

TEST(BufferPoolSizes, WhatCannotBeIsRefusedWithTheReason) {
  MlxBufferPool pool;
  const auto fails = [&pool](std::size_t bytes, const mx::Shape& shape, const char* reason) {
    const std::string error = error_of<std::invalid_argument>(
        [&] { pool.alloc(mx::Device::cpu, bytes, mx::float32, shape); });
    EXPECT_NE(error.find(reason), std::string::npos) << error;
  };
  fails(0, {0}, "byte_len must be 1 to");
  fails(kMax, {1}, "byte_len must be 1 to");
  fails((kMax >> 1) + 1, {1}, "byte_len must be 1 to");
  fails(15, {4}, "at least the 16 bytes");
  fails(16, {-1}, "must not be negative, got -1");
  fails(16, {0, -1}, "must not be negative, got -1");
  fails(16, {1 << 30, 1 << 30, 1 << 30}, "more bytes than can be counted");
  EXPECT_EQ(pool.created_bytes(), 0U);
}

TEST(BufferPoolSizes, MoreMemoryThanThereIsIsAnErrorAndNoCrash) {
  MlxBufferPool pool;
  for (const int log2 : {50, 58, 62}) {
    EXPECT_ANY_THROW(pool.alloc(mx::Device::cpu, std::size_t{1} << log2, mx::uint8, {1})) << log2;
  }
  EXPECT_EQ(pool.created_bytes(), 0U);
  EXPECT_EQ(pool.in_use_count(), 0U);
}

TEST(BufferPoolSizes, ADeviceThatIsNotThereIsRefused) {
  MlxBufferPool pool;
  if (mx::is_available(mx::Device::gpu)) {
    EXPECT_TRUE(pool.alloc(mx::Device::gpu, 16, mx::float32, {4}).live());
  } else {
    EXPECT_NE(error_of<std::invalid_argument>([&] {
                pool.alloc(mx::Device::gpu, 16, mx::float32, {4});
              }).find("gpu"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace kvpool
