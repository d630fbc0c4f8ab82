#include "kvpool/mlx_buffer_pool.h"

#include <mlx/mlx.h>

#include <cstdint>
#include <cstring>
#include <set>

#include "testing.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;

MlxBuffer alloc(MlxBufferPool& pool, std::size_t bytes) {
  return pool.alloc(mx::Device::cpu, bytes, mx::uint8, {static_cast<mx::ShapeElem>(bytes)});
}

const void* address(const MlxBuffer& buffer) { return buffer.array().data<std::uint8_t>(); }

TEST(BufferPool, ASmallRequestNeverCapturesALargeBuffer) {
  MlxBufferPool pool;
  const MlxBuffer a = alloc(pool, 256 << 10);
  const void* large = address(a);
  pool.release(a);
  const MlxBuffer b = alloc(pool, 8 << 10);
  const MlxBuffer c = alloc(pool, 256 << 10);
  EXPECT_EQ(address(c), large);
  EXPECT_EQ(pool.created_bytes(), std::size_t{264 << 10});
  EXPECT_TRUE(b.live());
}

TEST(BufferPool, TakesTheClassAboveButNotTheOneAboveThat) {
  MlxBufferPool pool;
  const MlxBuffer first = alloc(pool, 1024);
  pool.release(first);
  const MlxBuffer above = alloc(pool, 512);
  EXPECT_EQ(above.capacity(), 1024U);
  EXPECT_EQ(above.byte_len(), 512U);
  pool.release(above);
  EXPECT_EQ(alloc(pool, 256).capacity(), 256U);
  EXPECT_EQ(pool.free_bytes(), 1024U);
}

TEST(BufferPool, PrefersItsOwnClass) {
  MlxBufferPool pool;
  const MlxBuffer small = alloc(pool, 512);
  const MlxBuffer large = alloc(pool, 1024);
  pool.release(small);
  pool.release(large);
  EXPECT_EQ(alloc(pool, 300).capacity(), 512U);
}

TEST(BufferPool, ReleaseMakesABufferFreeOnce) {
  MlxBufferPool pool;
  const MlxBuffer a = alloc(pool, 100);
  const MlxBuffer copy = a;
  pool.release(a);
  pool.release(a);
  pool.release(copy);
  EXPECT_EQ(pool.free_count(), 1U);
  EXPECT_EQ(pool.free_bytes(), 128U);
  EXPECT_EQ(pool.in_use_count(), 0U);
  EXPECT_NE(address(alloc(pool, 100)), address(alloc(pool, 100)));
}

TEST(BufferPool, ResetAfterReleaseReturnsABufferOnce) {
  MlxBufferPool pool;
  const MlxBuffer a = alloc(pool, 100);
  const MlxBuffer b = alloc(pool, 100);
  pool.release(a);
  pool.reset();
  EXPECT_EQ(pool.free_count(), 2U);
  EXPECT_EQ(pool.in_use_count(), 0U);
  EXPECT_FALSE(a.live());
  EXPECT_FALSE(b.live());
  std::set<const void*> addresses;
  std::vector<MlxBuffer> taken;
  for (int i = 0; i < 3; ++i) {
    taken.push_back(alloc(pool, 100));
    addresses.insert(address(taken.back()));
  }
  EXPECT_EQ(addresses.size(), 3U);
}

TEST(BufferPool, AReleasedHandleIsRefusedAndStaysSoWhenTheBufferIsHandedOn) {
  MlxBufferPool pool;
  const MlxBuffer a = alloc(pool, 64);
  pool.release(a);
  EXPECT_NE(error_of<StaleBufferError>([&] { a.array(); }).find("released"), std::string::npos);
  const MlxBuffer b = alloc(pool, 64);
  EXPECT_FALSE(a.live());
  EXPECT_TRUE(b.live());
  EXPECT_NE(error_of<StaleBufferError>([&] { a.array(); }).find("handed on"), std::string::npos);
  EXPECT_NE(error_of<StaleBufferError>([&] { pool.release(a); }).find("handed on"),
            std::string::npos);
  EXPECT_EQ(pool.in_use_count(), 1U);
}

TEST(BufferPool, AHandleAfterResetIsRefused) {
  MlxBufferPool pool;
  const MlxBuffer a = alloc(pool, 64);
  pool.reset();
  EXPECT_NE(error_of<StaleBufferError>([&] { a.array(); }).find("reset"), std::string::npos);
  EXPECT_NE(error_of<StaleBufferError>([&] { pool.release(a); }).find("reset"), std::string::npos);
  pool.reset();
  EXPECT_EQ(pool.free_count(), 1U);
}

TEST(BufferPool, ABufferOfAnotherPoolIsRefused) {
  MlxBufferPool pool;
  MlxBufferPool other;
  const MlxBuffer a = alloc(other, 64);
  EXPECT_NE(error_of<std::invalid_argument>([&] { pool.release(a); }).find("another pool"),
            std::string::npos);
  EXPECT_TRUE(a.live());
}

TEST(BufferPool, AnArrayThatOutlivesResetKeepsItsMemoryToItself) {
  MlxBufferPool pool;
  const MlxBuffer a = alloc(pool, 64);
  const mx::array kept = a.array();
  pool.reset();
  EXPECT_EQ(pool.free_count(), 0U) << "dropped, not recycled";
  const MlxBuffer b = alloc(pool, 64);
  EXPECT_NE(address(b), kept.data<std::uint8_t>());
  EXPECT_EQ(pool.created_bytes(), 128U);
}

TEST(BufferPool, SoDoesWhatIsComputedFromItLater) {
  MlxBufferPool pool;
  const MlxBuffer a = alloc(pool, 64);
  std::memset(a.array().data<std::uint8_t>(), 7, 64);
  mx::array later = mx::add(a.array(), mx::array(1, mx::uint8));
  pool.release(a);
  const MlxBuffer b = alloc(pool, 64);
  std::memset(b.array().data<std::uint8_t>(), 99, 64);
  EXPECT_TRUE(testing::same(later, mx::full({64}, 8, mx::uint8)));
}

TEST(BufferPool, ClearDropsFreeBuffersOnly) {
  MlxBufferPool pool;
  const MlxBuffer a = alloc(pool, 4096);
  pool.release(alloc(pool, 4096));
  const std::size_t before = mx::get_active_memory();
  pool.clear();
  EXPECT_EQ(pool.free_bytes(), 0U);
  EXPECT_TRUE(a.live());
  EXPECT_LE(mx::get_active_memory() + 4096, before);
}

TEST(BufferPool, LargeBuffersBeginAtALineOfTheCache) {
  MlxBufferPool pool;
  for (const std::size_t bytes : {1U << 17U, 200000U, 1U << 20U}) {
    for (int i = 0; i < 8; ++i) {
      const MlxBuffer buffer = alloc(pool, bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.array().data<std::uint8_t>()) % 64, 0U);
    }
  }
}

TEST(BufferPool, FreshMemoryIsZero) {
  MlxBufferPool pool;
  for (const std::size_t bytes : {1U, 3U, 4096U, 100000U}) {
    for (int i = 0; i < 8; ++i) {
      const MlxBuffer buffer = alloc(pool, bytes);
      EXPECT_TRUE(testing::same(buffer.array(),
                                mx::zeros({static_cast<mx::ShapeElem>(bytes)}, mx::uint8)));
      std::memset(buffer.array().data<std::uint8_t>(), 0xFF, bytes);
    }
    pool.reset();
    pool.clear();
  }
}

TEST(BufferPool, AnArrayHasTheShapeAndTypeAskedFor) {
  MlxBufferPool pool;
  const MlxBuffer buffer = pool.alloc(mx::Device::cpu, 1000, mx::float16, {5, 4, 3});
  mx::array view = buffer.array();
  EXPECT_EQ(view.shape(), (mx::Shape{5, 4, 3}));
  EXPECT_EQ(view.dtype(), mx::float16);
  EXPECT_EQ(buffer.capacity(), 1024U);
  std::fill_n(view.data<mx::float16_t>(), 60, mx::float16_t{2});
  EXPECT_EQ(mx::sum(mx::transpose(view)).item<mx::float16_t>(), mx::float16_t{120});
}

TEST(BufferPool, AHandleOutlivesItsPool) {
  auto pool = std::make_unique<MlxBufferPool>();
  const MlxBuffer a = alloc(*pool, 64);
  pool.reset();
  EXPECT_TRUE(testing::same(a.array(), mx::zeros({64}, mx::uint8)));
}

TEST(BufferPool, ABatchIsHandedOutInOrder) {
  MlxBufferPool pool;
  const std::vector<BufferRequest> requests{
      {100, mx::uint8, {100}}, {64, mx::float32, {4, 4}}, {100, mx::uint8, {}}};
  const std::vector<MlxBuffer> buffers = pool.alloc_batch(mx::Device::cpu, requests);
  ASSERT_EQ(buffers.size(), 3U);
  EXPECT_EQ(buffers[1].shape(), (mx::Shape{4, 4}));
  EXPECT_EQ(buffers[2].array().ndim(), 0U);
  EXPECT_EQ(pool.in_use_count(), 3U);
  EXPECT_TRUE(pool.alloc_batch(mx::Device::cpu, {}).empty());
}

TEST(BufferPool, ABadRequestInABatchTakesNothing) {
  MlxBufferPool pool;
  pool.release(alloc(pool, 64));
  const std::vector<BufferRequest> requests{{64, mx::uint8, {64}}, {0, mx::uint8, {0}}};
  error_of<std::invalid_argument>([&] { pool.alloc_batch(mx::Device::cpu, requests); });
  EXPECT_EQ(pool.in_use_count(), 0U);
  EXPECT_EQ(pool.free_count(), 1U);
}

TEST(BufferPool, ABatchThatRunsOutOfMemoryGivesBackWhatItTook) {
  MlxBufferPool pool;
  const std::vector<BufferRequest> requests{{64, mx::uint8, {64}},
                                            {std::size_t{1} << 60, mx::uint8, {64}}};
  EXPECT_ANY_THROW(pool.alloc_batch(mx::Device::cpu, requests));
  EXPECT_EQ(pool.in_use_count(), 0U);
  EXPECT_EQ(pool.free_count(), 1U);
  EXPECT_EQ(pool.created_bytes(), 64U);
}

}  // namespace
}  // namespace kvpool
