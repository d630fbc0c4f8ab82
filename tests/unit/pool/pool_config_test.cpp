#include "kvpool/pool_config.h"

#include <gmock/gmock.h>

#include <limits>

#include "testing.h"

namespace kvpool {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

std::string error_with(const PoolConfig& config) {
  const auto said = error_of<std::invalid_argument>([&] { config.validate(); });
  EXPECT_EQ(error_of<std::invalid_argument>([&] { BlockPoolAllocator pool(config); }), said);
  return said;
}

TEST(PoolConfig, HasTheDefaultsOfTheSeed) {
  const PoolConfig config;
  EXPECT_EQ(config, (PoolConfig{16, 1024, true, false, std::nullopt}));
  EXPECT_EQ(BlockPoolAllocator().config(), config);
}

TEST(PoolConfig, AcceptsTheBounds) {
  PoolConfig{.block_size = 1, .n_blocks = 1, .max_blocks = 1}.validate();
  PoolConfig{.block_size = kMost, .n_blocks = kMost, .max_blocks = kMost}.validate();
  PoolConfig{.max_blocks = std::numeric_limits<std::int64_t>::max()}.validate();
}

TEST(PoolConfig, NamesTheFieldItsValueAndWhatIsAllowed) {
  for (const std::int64_t n : {std::int64_t{0}, std::int64_t{-3}, kMost + 1}) {
    const std::string rest = " must be 1 to 2147483647, got " + std::to_string(n);
    EXPECT_THAT(error_with({.block_size = n}), HasSubstr("block_size" + rest));
    EXPECT_THAT(error_with({.n_blocks = n}), HasSubstr("n_blocks" + rest));
  }
  EXPECT_THAT(error_with({.n_blocks = 8, .max_blocks = 7}),
              HasSubstr("max_blocks must be at least n_blocks (8), got 7"));
}

}  // namespace
}  // namespace kvpool
