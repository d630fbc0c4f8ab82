// What a block shows over its lives, and what memory is held for it.

#include <mlx/mlx.h>

#include "kvpool/mlx_block_storage.h"
#include "testing.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;
using testing::one_block;
using testing::pool_of;
using testing::random_rows;
using testing::same;

mx::array rows_of(float value, mx::ShapeElem n, mx::ShapeElem head_dim = 8) {
  return mx::full({n, head_dim}, value);
}

struct Change {
  const char* from;
  const char* to;
};

void PrintTo(const Change& change, std::ostream* out) { *out << change.from << "_to_" << change.to; }

class RecycledBlock : public ::testing::TestWithParam<Change> {};

TEST_P(RecycledBlock, ShowsNothingOfItsLastUser) {
  const auto [from, to] = GetParam();
  const auto pool = pool_of(8);
  MLXBlockStorage storage(pool, 8);
  const bool was_code = block_format(from).is_code();
  const Block a = one_block(*pool, 16, 1, from);
  storage.write(a, 0, was_code ? mx::full({16, 8}, 255, mx::uint8) : rows_of(NAN, 16));
  mx::eval(storage.read(a));
  pool->free({{a}});
  const Block b = one_block(*pool, 3, 2, to);
  ASSERT_EQ(b.block_id(), a.block_id());
  const BlockFormat format = block_format(to);
  const mx::array ones = mx::full({3, 8}, 1, format.dtype);
  storage.write(b, 0, ones);
  EXPECT_TRUE(same(storage.read(b), ones));
  const mx::array whole = storage.buffer_for(b);
  EXPECT_EQ(whole.dtype(), format.dtype);
  const mx::array rest = mx::slice(whole, {3, 0}, {16, whole.shape(1)});
  EXPECT_TRUE(same(rest, mx::zeros(rest.shape(), format.dtype)));
}

INSTANTIATE_TEST_SUITE_P(FormatChanges, RecycledBlock,
                         ::testing::Values(Change{"fp16", "int8"}, Change{"int8", "fp16"},
                                           Change{"fp16", "int4"}, Change{"fp16", "fp16"},
                                           Change{"fp16", "bf16"}, Change{"fp32", "fp16"},
                                           Change{"int4", "int4"}, Change{"int2", "fp32"}),
                         [](const auto& test) {
                           return std::string(test.param.from) + "_to_" + test.param.to;
                         });

TEST(BlockLife, ReadBeforeAnyWriteIsZero) {
  const auto pool = pool_of(4);
  MLXBlockStorage storage(pool, 8, 2);
  const Block block = one_block(*pool, 5, 1, "fp16");
  EXPECT_TRUE(same(storage.read(block), mx::zeros({2, 5, 8}, mx::float16)));
}

TEST(BlockLife, ReadShowsTheSlotsInUse) {
  const auto pool = pool_of(4);
  MLXBlockStorage storage(pool, 8);
  const Block block = one_block(*pool, 2, 1, "fp32");
  storage.write(block, 0, rows_of(1, 16));
  EXPECT_TRUE(same(storage.read(block), rows_of(1, 2)));
  pool->mark_used(block, 0);
  EXPECT_TRUE(same(storage.read(block), mx::zeros({0, 8})));
  pool->mark_used(block, 16);
  EXPECT_TRUE(same(storage.read(block), rows_of(1, 16)));
}

TEST(BlockLife, SharersSeeOneBlockUntilTheLastLetsGo) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const Block a = one_block(*pool, 16, 1, "fp32");
  storage.write(a, 0, rows_of(1, 16));
  const Block b = pool->share({{a}}, 2).at(0);
  pool->free({{a}});
  const std::size_t held = storage.resident_bytes();
  storage.release(a);
  EXPECT_EQ(storage.resident_bytes(), held);
  EXPECT_TRUE(same(storage.read(b), rows_of(1, 16)));
  storage.write(b, 0, rows_of(2, 1));
  EXPECT_TRUE(same(mx::slice(storage.read(b), {0, 0}, {1, 8}), rows_of(2, 1)));
  pool->free({{b}});
  storage.release(b);
  EXPECT_EQ(storage.resident_bytes(), 0U);
}

TEST(BlockLife, ReleaseAfterTheIdWasHandedOnDoesNothing) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const Block a = one_block(*pool, 16, 1, "fp32");
  storage.write(a, 0, rows_of(1, 16));
  pool->free({{a}});
  const Block b = one_block(*pool, 16, 2, "fp32");
  ASSERT_EQ(a.block_id(), b.block_id());
  storage.write(b, 0, rows_of(2, 16));
  const std::size_t held = storage.resident_bytes();
  storage.release(a);
  EXPECT_EQ(storage.resident_bytes(), held);
  EXPECT_TRUE(same(storage.read(b), rows_of(2, 16)));
}

TEST(BlockLife, AViewOutlivesItsBlock) {
  const auto pool = pool_of(2);
  MLXBlockStorage storage(pool, 8);
  const Block a = one_block(*pool, 16, 1, "fp32");
  storage.write(a, 0, rows_of(1, 16));
  mx::array view = storage.buffer_for(a);
  storage.write(a, 0, rows_of(5, 16));
  pool->free({{a}});
  storage.write(one_block(*pool, 16, 2, "fp32"), 0, rows_of(9, 16));
  EXPECT_TRUE(same(view, rows_of(1, 16)));
}

TEST(BlockLife, ABlockStaysWhereItIsWhileOthersComeAndGo) {
  const auto pool = pool_of(400);
  MLXBlockStorage storage(pool, 8);
  const Block kept = one_block(*pool, 16, 1, "fp32");
  storage.write(kept, 0, rows_of(7, 16));
  for (int round = 0; round < 5; ++round) {
    const std::vector<Block> others = pool->allocate(Stream::kKey, 199 * 16, 2, "fp32");
    for (const Block& block : others) storage.write(block, 0, rows_of(NAN, 16));
    pool->free(others);
    for (std::size_t i = 0; i < others.size(); i += 2) storage.release(others[i]);
    EXPECT_TRUE(same(storage.read(kept), rows_of(7, 16)));
  }
}

TEST(ResidentBytes, IsThePowerOfTwoOfOneBlockAndGoesBackToZero) {
  const auto pool = pool_of(8);
  MLXBlockStorage storage(pool, 40);
  EXPECT_EQ(storage.resident_bytes(), 0U);
  const Block block = one_block(*pool, 16, 1, "fp16");
  EXPECT_EQ(storage.resident_bytes(), 0U) << "at first use, not before";
  storage.write(block, 0, rows_of(1, 1, 40));
  EXPECT_EQ(storage.resident_bytes(), 2048U) << "16 rows of 80 bytes";
  storage.read(block);
  storage.buffer_for(block);
  EXPECT_EQ(storage.resident_bytes(), 2048U);
  pool->free({{block}});
  EXPECT_EQ(storage.resident_bytes(), 2048U) << "kept for the id's next life";
  storage.release(block);
  EXPECT_EQ(storage.resident_bytes(), 0U);
  storage.release(block);
  EXPECT_EQ(storage.resident_bytes(), 0U);
}

TEST(ResidentBytes, SteadyStateTakesNothingNew) {
  const auto pool = pool_of(64);
  const auto buffers = std::make_shared<MlxBufferPool>();
  MLXBlockStorage storage(pool, 64, 2, buffers);
  const auto run_request = [&](Owner owner) {
    for (const Block& block : pool->allocate(Stream::kKey, 32 * 16, owner, "fp16")) {
      storage.write(block, 0, mx::zeros({2, 16, 64}));
    }
    pool->free_all(owner);
  };
  run_request(1);
  const std::size_t held = storage.resident_bytes();
  const std::size_t created = buffers->created_bytes();
  for (Owner owner = 2; owner < 20; ++owner) run_request(owner);
  EXPECT_EQ(storage.resident_bytes(), held);
  EXPECT_EQ(buffers->created_bytes(), created);
}

/// Against what the buffer pool says is out, over formats, frees, releases and re-use.
TEST(ResidentBytes, IsWhatTheBufferPoolHasHandedOut) {
  const auto pool = pool_of(200);
  const auto buffers = std::make_shared<MlxBufferPool>();
  MLXBlockStorage storage(pool, 80, 1, buffers);
  std::vector<Block> live;
  std::vector<Block> freed;
  const auto expect_exact = [&] {
    ASSERT_EQ(storage.resident_bytes(), buffers->created_bytes() - buffers->free_bytes());
  };
  for (std::size_t i = 0; i < 1500; ++i) {
    const char* format = testing::kFormats[i * 7 % std::size(testing::kFormats)];
    if (i % 5 != 4 && live.size() < 90) {
      live.push_back(one_block(*pool, 16, 1, format));
      storage.write(live.back(), 0, random_rows({1, 80}, format));
    } else if (i % 2 == 0 && !live.empty()) {
      pool->free({{live.back()}});
      freed.push_back(live.back());
      live.pop_back();
    } else if (!freed.empty()) {
      storage.release(freed.front());
      freed.erase(freed.begin());
    }
    expect_exact();
    if (i % 100 == 0) {
      for (const Block& block : live) mx::eval(storage.buffer_for(block));
    }
  }
  pool->free(live);
  for (const auto* blocks : {&live, &freed}) {
    for (const Block& block : *blocks) storage.release(block);
  }
  EXPECT_EQ(storage.resident_bytes(), 0U);
  EXPECT_EQ(buffers->in_use_count(), 0U);
}

TEST(ResidentBytes, RetiredIdsGiveTheirMemoryBack) {
  const auto pool = pool_of(8);
  MLXBlockStorage storage(pool, 8);
  const std::vector<Block> blocks = pool->allocate(Stream::kKey, 64, 1, "fp32");
  for (const Block& block : blocks) storage.write(block, 0, rows_of(1, 16));
  pool->free(blocks);
  EXPECT_EQ(pool->shrink(Stream::kKey, 0), 4);
  for (const Block& block : blocks) storage.release(block);
  EXPECT_EQ(storage.resident_bytes(), 0U);
}

TEST(ResidentBytes, AFormatThatNeedsRoomTakesThatOfFreedBlocks) {
  const auto pool = pool_of(64);
  MLXBlockStorage storage(pool, 64);
  const std::vector<Block> wide = pool->allocate(Stream::kKey, 32 * 16, 1, "fp32");
  for (const Block& block : wide) storage.write(block, 0, rows_of(1, 1, 64));
  const std::size_t held = storage.resident_bytes();
  pool->free(wide);
  for (const Block& block : pool->allocate(Stream::kKey, 32 * 16, 2, "int2")) {
    storage.write(block, 0, mx::zeros({1, 64}, mx::uint8));
  }
  EXPECT_LT(storage.resident_bytes(), held / 8);
}

TEST(ResidentBytes, ReleaseReallyLowersWhatMlxHolds) {
  const auto pool = pool_of(256);
  const auto buffers = std::make_shared<MlxBufferPool>(0);
  MLXBlockStorage storage(pool, 128, 8, buffers);
  const std::size_t before = mx::get_active_memory();
  const std::vector<Block> blocks = pool->allocate(Stream::kKey, 128 * 16, 1, "fp16");
  for (const Block& block : blocks) {
    storage.write(block, 0, mx::zeros({8, 16, 128}, mx::float16));
    mx::eval(storage.read(block));
  }
  constexpr std::size_t kBytes = std::size_t{128} * 8 * 16 * 128 * 2;
  EXPECT_GE(mx::get_active_memory(), before + kBytes);
  EXPECT_GE(storage.resident_bytes(), kBytes);
  EXPECT_LE(storage.resident_bytes(), kBytes + kBytes / 8);
  pool->free_all(1);
  for (const Block& block : blocks) storage.release(block);
  mx::synchronize();
  EXPECT_LT(mx::get_active_memory(), before + kBytes / 64);
}

TEST(ResidentBytes, ADestroyedStorageGivesEverythingBack) {
  const auto pool = pool_of(8);
  const auto buffers = std::make_shared<MlxBufferPool>();
  {
    MLXBlockStorage storage(pool, 8, 1, buffers);
    storage.write(one_block(*pool, 16, 1, "fp32"), 0, rows_of(1, 16));
    EXPECT_EQ(buffers->in_use_count(), 1U);
  }
  EXPECT_EQ(buffers->in_use_count(), 0U);
}

TEST(ResidentBytes, ABufferPoolResetByOthersTakesNothingFromTheBlocks) {
  const auto pool = pool_of(8);
  const auto buffers = std::make_shared<MlxBufferPool>();
  MLXBlockStorage storage(pool, 8, 1, buffers);
  const Block block = one_block(*pool, 16, 1, "fp32");
  storage.write(block, 0, rows_of(3, 16));
  buffers->reset();
  const MlxBuffer other = buffers->alloc(mx::Device::cpu, 512, mx::float32, {128});
  std::fill_n(other.array().data<float>(), 128, 9.0F);
  storage.write(block, 15, rows_of(4, 1));
  const mx::array expected = mx::concatenate({rows_of(3, 15), rows_of(4, 1)}, 0);
  EXPECT_TRUE(same(storage.read(block), expected));
  pool->free({{block}});
  storage.release(block);
  EXPECT_TRUE(same(other.array(), mx::full({128}, 9.0F)));
  EXPECT_EQ(storage.resident_bytes(), 0U);
}

}  // namespace
}  // namespace kvpool
