#include "calibration/nearest.h"

#include <gtest/gtest.h>

#include <vector>

#include "calibration/nearest_tile.h"
#include "calibration/random.h"
#include "kernels/kernels.h"

namespace kvpool::calibration {
namespace {

std::vector<float> numbers(std::size_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(2.0 * random.uniform() - 1.0);
  return values;
}

class NearestOfDim : public testing::TestWithParam<int> {};

TEST_P(NearestOfDim, IsWhatACountOfAllDistancesFinds) {
  const auto dim = static_cast<std::size_t>(GetParam());
  const std::vector<float> rows = numbers(37 * dim, 1);
  const std::vector<float> centroids = numbers(19 * dim, 2);
  std::vector<std::int32_t> codes(37);
  std::vector<float> distances(37);
  nearest(TiledPoints(rows, GetParam()), centroids, codes, distances);
  for (std::size_t i = 0; i < 37; ++i) {
    double least = 1e9;
    std::int32_t best = -1;
    for (std::size_t c = 0; c < 19; ++c) {
      double distance = 0.0;
      for (std::size_t j = 0; j < dim; ++j) {
        const double off = static_cast<double>(rows[i * dim + j] - centroids[c * dim + j]);
        distance += off * off;
      }
      if (distance < least) {
        least = distance;
        best = static_cast<std::int32_t>(c);
      }
    }
    EXPECT_EQ(codes[i], best);
    EXPECT_NEAR(distances[i], least, 1e-5);
  }
}

TEST_P(NearestOfDim, IsTheFirstOfEqualCentroids) {
  const auto dim = static_cast<std::size_t>(GetParam());
  const std::vector<float> centroids(4 * dim, 0.5F);
  const std::vector<float> rows(5 * dim, 0.25F);
  std::vector<std::int32_t> codes(5, -1);
  std::vector<float> distances(5);
  nearest(TiledPoints(rows, GetParam()), centroids, codes, distances);
  EXPECT_EQ(codes, std::vector<std::int32_t>(5, 0));
}

#if defined(__x86_64__)
TEST_P(NearestOfDim, IsTheSameAtEachLevel) {
  const auto dim = static_cast<std::size_t>(GetParam());
  const TiledPoints points(numbers(16 * dim, 3), GetParam());
  const std::vector<float> centroids = numbers(256 * dim, 4);
  const std::vector<float> half_norms = numbers(256, 5);
  const TileSearch search{centroids.data(), half_norms.data(), 256};
  const auto of = [&](const TileSearches& all) {
    const TileSearch::Run run = dim == 2 ? all.of2 : dim == 4 ? all.of4 : all.of8;
    std::vector<std::int32_t> codes(16);
    std::vector<float> distances(16);
    run(search, points.tile(0), codes.data(), distances.data());
    return std::pair(codes, distances);
  };
  for (const kernels::Level& level : kernels::levels()) {
    if (level.table == nullptr) continue;  // This CPU does not run it.
    if (level.name == "avx2") {
      EXPECT_EQ(of(kTileSearchesAvx2), of(kTileSearches));
    } else if (level.name == "avx512") {
      EXPECT_EQ(of(kTileSearchesAvx512), of(kTileSearches));
    }
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(Dims, NearestOfDim, testing::Values(2, 4, 8));

}  // namespace
}  // namespace kvpool::calibration
