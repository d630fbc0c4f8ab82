#include "calibration/bit_allocation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace kvpool::calibration {
namespace {

const std::vector<double> kBits = {1, 2, 4};

double mean_bits(const std::vector<std::size_t>& taken) {
  double sum = 0.0;
  for (const std::size_t choice : taken) sum += kBits[choice];
  return sum / static_cast<double>(taken.size());
}

TEST(BitAllocation, IsNearTheBestOfAllWithinTheBits) {
  std::mt19937 random(3);
  std::lognormal_distribution<double> size(0.0, 2.0);
  constexpr std::size_t kParts = 8;
  for (int round = 0; round < 20; ++round) {
    std::vector<double> costs;
    for (std::size_t part = 0; part < kParts; ++part) {
      const double cost = size(random);
      for (const double bits : kBits) costs.push_back(cost * std::pow(4.0, -bits));
    }
    const auto cost_of = [&](const std::vector<std::size_t>& taken) {
      double sum = 0.0;
      for (std::size_t part = 0; part < kParts; ++part) sum += costs[part * 3 + taken[part]];
      return sum;
    };
    for (const double most : {1.0, 2.0, 3.0}) {
      double least = std::numeric_limits<double>::infinity();
      for (std::size_t number = 0; number < 6561; ++number) {
        std::vector<std::size_t> taken;
        for (std::size_t rest = number; taken.size() < kParts; rest /= 3) taken.push_back(rest % 3);
        if (mean_bits(taken) <= most) least = std::min(least, cost_of(taken));
      }
      const std::vector<std::size_t> taken = allocate_bits(costs, kBits, most);
      EXPECT_LE(mean_bits(taken), most);
      EXPECT_LT(cost_of(taken), 1.25 * least);
    }
  }
}

TEST(BitAllocation, TakesNoBitsThatGainNothing) {
  EXPECT_EQ(allocate_bits(std::vector<double>{5, 5, 5, 3, 2, 1}, kBits, 4.0),
            (std::vector<std::size_t>{0, 2}));
  EXPECT_EQ(allocate_bits(std::vector<double>(6, 0.0), kBits, 4.0),
            (std::vector<std::size_t>{0, 0}));
}

}  // namespace
}  // namespace kvpool::calibration
