#include "calibration/token_sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

namespace kvpool::calibration {
namespace {

/// Offers tokens 0, 1, ... whose two rows hold their number, and that below 0; their weight is the
/// number.
TokenSample sample_of(int n_tokens, std::size_t max_tokens, std::uint64_t seed) {
  TokenSample sample(2, 4, 1, max_tokens, seed);
  for (int token = 0; token < n_tokens; ++token) {
    const std::vector<float> up(4, static_cast<float>(token));
    const std::vector<float> down(4, static_cast<float>(-token));
    const float weight = up[0];
    sample.offer(std::array<const float*, 2>{up.data(), down.data()}, {&weight, 1});
  }
  return sample;
}

TEST(TokenSample, KeepsAllWhileThereIsRoom) {
  const TokenSample sample = sample_of(5, 8, 0);
  ASSERT_EQ(sample.n_tokens(), 5U);
  const std::vector<float> rows = sample.rows(1, 5);
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i], -static_cast<float>(i / 4));
}

TEST(TokenSample, GivesRowsEvenlySpread) {
  const std::vector<float> rows = sample_of(8, 8, 0).rows(0, 4);
  ASSERT_EQ(rows.size(), 16U);
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i], static_cast<float>(i / 4 * 2));
  EXPECT_EQ(sample_of(8, 8, 0).weights(0, 4), (std::vector<float>{0.0F, 2.0F, 4.0F, 6.0F}));
}

TEST(TokenSample, KeepsAnEvenChoiceOfMore) {
  double sum = 0.0;
  constexpr int kSeeds = 64;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const TokenSample sample = sample_of(1000, 50, seed);
    ASSERT_EQ(sample.n_tokens(), 50U);
    std::vector<float> rows = sample.rows(0, 50);
    std::sort(rows.begin(), rows.end());
    for (std::size_t i = 4; i < rows.size(); i += 4) EXPECT_NE(rows[i], rows[i - 4]);
    for (const float row : rows) sum += static_cast<double>(row);
  }
  EXPECT_NEAR(sum / (kSeeds * 200), 499.5, 25.0);
}

TEST(TokenSample, IsTheSameForASeed) {
  EXPECT_EQ(sample_of(300, 20, 4).rows(0, 20), sample_of(300, 20, 4).rows(0, 20));
  EXPECT_NE(sample_of(300, 20, 4).rows(0, 20), sample_of(300, 20, 5).rows(0, 20));
}

}  // namespace
}  // namespace kvpool::calibration
