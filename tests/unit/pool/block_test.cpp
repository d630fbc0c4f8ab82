#include "kvpool/block.h"

#include <gmock/gmock.h>

#include "testing.h"

namespace kvpool {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

TEST(Block, WithoutAPoolShowsWhatItIsGiven) {
  const Block block(12, Stream::kValue, "int2", 5, 99, true);
  EXPECT_EQ(block.block_id(), 12);
  EXPECT_EQ(block.stream(), Stream::kValue);
  EXPECT_EQ(block.format(), "int2");
  EXPECT_EQ(block.n_used(), 5);
  EXPECT_EQ(block.owner(), 99);
  EXPECT_TRUE(block.ever_allocated());
  EXPECT_FALSE(block.live());
  EXPECT_EQ(block.generation(), 0u);
  EXPECT_EQ(block.life(), 0u);
}

TEST(Block, WithoutAPoolHasTheDefaultsOfTheSeed) {
  const Block block(3);
  EXPECT_EQ(block.stream(), Stream::kKeyValue);
  EXPECT_EQ(block.format(), "fp16");
  EXPECT_EQ(block.n_used(), 0);
  EXPECT_EQ(block.owner(), std::nullopt);
  EXPECT_FALSE(block.ever_allocated());
}

TEST(Block, WithoutAPoolKeepsItsOwnCopyOfTheFormat) {
  std::string format = "kivi4";
  const Block block(0, Stream::kKey, format);
  format = "other";
  EXPECT_EQ(block.format(), "kivi4");
}

TEST(Block, AFreedHandleShowsNoOwnerAndNoSlots) {
  BlockPoolAllocator pool({.block_size = 16, .n_blocks = 2});
  const Block freed = pool.allocate(Stream::kKey, 9, 1, "int4")[0];
  const Block copy = freed;
  pool.free_all(1);
  for (const Block& block : {freed, copy}) {
    EXPECT_FALSE(block.live());
    EXPECT_EQ(block.owner(), std::nullopt);
    EXPECT_EQ(block.n_used(), 0);
    EXPECT_EQ(block.format(), "int4");
    EXPECT_TRUE(block.ever_allocated());
  }
  const Block next = pool.allocate(Stream::kKey, 16, 2)[0];
  EXPECT_EQ(next.block_id(), freed.block_id());
  EXPECT_NE(next.generation(), freed.generation());
  EXPECT_NE(next.life(), freed.life());
  EXPECT_FALSE(freed.live());
  EXPECT_EQ(freed.owner(), std::nullopt);
  EXPECT_EQ(freed.n_used(), 0);
}

TEST(Stream, NamesGoBothWays) {
  for (const Stream stream : {Stream::kKey, Stream::kValue, Stream::kKeyValue}) {
    EXPECT_EQ(stream_from_string(to_string(stream)), stream);
  }
  EXPECT_EQ(to_string(Stream::kKey), "k");
  EXPECT_EQ(to_string(Stream::kValue), "v");
  EXPECT_EQ(to_string(Stream::kKeyValue), "kv");
}

TEST(Stream, RefusesOtherNames) {
  for (const char* name : {"", "K", "vk", "key", "k "}) {
    const std::string expected = std::string(", got '") + name + "'";
    const auto said = error_of<std::invalid_argument>([&] { stream_from_string(name); });
    EXPECT_THAT(said, HasSubstr("stream must be 'k' or 'v'"));
    EXPECT_THAT(said, HasSubstr(expected));
  }
}

}  // namespace
}  // namespace kvpool
