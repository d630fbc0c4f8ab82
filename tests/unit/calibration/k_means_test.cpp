#include "calibration/k_means.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <set>
#include <stdexcept>
#include <vector>

#include "calibration/random.h"

namespace kvpool::calibration {
namespace {

/// Independent draws of N(0, 1), by Box and Muller.
std::vector<float> normal(std::size_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> numbers(n);
  for (float& number : numbers) {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - random.uniform()));
    number = static_cast<float>(radius * std::cos(2.0 * std::numbers::pi * random.uniform()));
  }
  return numbers;
}

/// The error on points that training has not seen.
double error_of_normal(int dim, int code_bits) {
  const std::vector<float> seen = normal(std::size_t{1} << 17, 1);
  const std::vector<float> unseen = normal(std::size_t{1} << 17, 2);
  const Centroids centroids = train_centroids({seen, {}, dim}, 1 << code_bits, {});
  return normalised_error({unseen, {}, dim}, centroids);
}

// From below: the rate-distortion bound 2^(-2 bits) of any code. From above: a scalar quantiser's.
TEST(KMeans, ErrorOnNormalNumbersIsThatOfVectorCodes) {
  const double one = error_of_normal(8, 8);
  const double two = error_of_normal(4, 8);
  const double four = error_of_normal(2, 8);
  EXPECT_GE(one, 0.25);
  EXPECT_LE(one, 0.3634);
  EXPECT_GE(two, 0.0625);
  EXPECT_LE(two, 0.1175);
  EXPECT_GE(four, 0.0039);
  EXPECT_LE(four, 0.0095);
}

// vecinfer3 has keys of 4 and values of 2 bits: its error is what three bits cost, as a geometric
// mean.
TEST(KMeans, ErrorAtThreeBitsIsBetweenThoseOfItsHalves) {
  const double three = std::sqrt(error_of_normal(4, 8) * error_of_normal(2, 8));
  EXPECT_GE(three, 0.0156);
  EXPECT_LE(three, 0.0345);
}

TEST(KMeans, SameInputGivesSameCentroids) {
  const std::vector<float> points = normal(1 << 14, 3);
  const KMeansOptions options{2, 10, 7};
  const Centroids first = train_centroids({points, {}, 4}, 256, options);
  const Centroids again = train_centroids({points, {}, 4}, 256, options);
  EXPECT_EQ(first.scale, again.scale);
  EXPECT_EQ(first.centroids, again.centroids);
  const Centroids other = train_centroids({points, {}, 4}, 256, {2, 10, 8});
  EXPECT_NE(first.centroids, other.centroids);
}

TEST(KMeans, FewerDifferentPointsThanCentroidsAreCodedExactly) {
  std::vector<float> points;
  for (int i = 0; i < 1000; ++i) {
    const auto x = static_cast<float>(i % 5);
    points.insert(points.end(), {x, -x});
  }
  const Centroids centroids = train_centroids({points, {}, 2}, 256, {});
  EXPECT_LT(normalised_error({points, {}, 2}, centroids), 1e-4);

  const std::vector<float> one{3.0F, -4.0F};
  EXPECT_LT(normalised_error({one, {}, 2}, train_centroids({one, {}, 2}, 256, {})), 1e-4);
}

TEST(KMeans, PointsThatAreAllZeroGiveZeros) {
  const std::vector<float> points(64, 0.0F);
  const Centroids centroids = train_centroids({points, {}, 4}, 256, {});
  EXPECT_EQ(centroids.centroids, std::vector<std::int8_t>(1024, 0));
  EXPECT_EQ(centroids.scale, 1.0F);
  EXPECT_EQ(normalised_error({points, {}, 4}, centroids), 0.0);
}

// Two far groups, one of them rare: a start that misses the rare one leaves a centroid without
// points among the many duplicates, which then moves there.
TEST(KMeans, CentroidsWithoutPointsMoveToWhereTheErrorIsLargest) {
  std::vector<float> points;
  for (int i = 0; i < 5000; ++i) points.insert(points.end(), {1.0F, 1.0F});
  for (int i = 0; i < 8; ++i) {
    points.insert(points.end(), {100.0F + static_cast<float>(i) * 4.0F, -50.0F});
  }
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const Centroids centroids = train_centroids({points, {}, 2}, 16, {1, 20, seed});
    EXPECT_LT(normalised_error({points, {}, 2}, centroids), 1e-4) << "seed " << seed;
  }
}

TEST(KMeans, WeightsDrawCentroidsToWhatCounts) {
  const std::vector<float> points = normal(1 << 13, 5);
  std::vector<float> weights(points.size() / 2, 0.01F);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (points[2 * i] > 1.0F) weights[i] = 1.0F;
  }
  const Centroids plain = train_centroids({points, {}, 2}, 16, {});
  const Centroids weighted = train_centroids({points, weights, 2}, 16, {});
  EXPECT_LT(normalised_error({points, weights, 2}, weighted),
            0.7 * normalised_error({points, weights, 2}, plain));
}

TEST(KMeans, RoundedCentroidsFillTheirRange) {
  const Centroids centroids = train_centroids({normal(1 << 12, 6), {}, 4}, 256, {});
  int largest = 0;
  for (const std::int8_t step : centroids.centroids) {
    EXPECT_NE(step, -128);
    largest = std::max(largest, std::abs(static_cast<int>(step)));
  }
  EXPECT_EQ(largest, 127);
}

TEST(KMeans, RefusesWhatDoesNotFit) {
  const std::vector<float> points(64, 1.0F);
  const auto train = [](const WeightedPoints& p, int n, const KMeansOptions& options) {
    return train_centroids(p, n, options);
  };
  EXPECT_THROW(train({points, {}, 3}, 16, {}), std::invalid_argument);
  EXPECT_THROW(train({std::span(points).first(6), {}, 4}, 16, {}), std::invalid_argument);
  EXPECT_THROW(train({{}, {}, 4}, 16, {}), std::invalid_argument);
  EXPECT_THROW(train({points, std::span(points).first(3), 4}, 16, {}), std::invalid_argument);
  EXPECT_THROW(train({points, {}, 4}, 0, {}), std::invalid_argument);
  EXPECT_THROW(train({points, {}, 4}, 16, {0, 20, 0}), std::invalid_argument);
  EXPECT_THROW(train({points, {}, 4}, 16, {1, 0, 0}), std::invalid_argument);
  const std::vector<float> infinite(4, std::numeric_limits<float>::infinity());
  EXPECT_THROW(train({infinite, {}, 4}, 16, {}), std::invalid_argument);
  const std::vector<float> below(16, -1.0F);
  EXPECT_THROW(train({points, below, 4}, 16, {}), std::invalid_argument);
}

}  // namespace
}  // namespace kvpool::calibration
