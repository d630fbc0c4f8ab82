#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvpool::calibration {

struct KMeansOptions {
  int n_restarts = 3;     ///< Starts tried on a sample of the points; the best goes on with all.
  int n_iterations = 20;  ///< Lloyd steps over all points, at most.
  std::uint64_t seed = 0;
};

/// Points, and how much each counts.
struct WeightedPoints {
  std::span<const float> rows;     ///< (n, dim), finite.
  std::span<const float> weights;  ///< (n,), >= 0; empty for all alike.
  int dim;                         ///< 2, 4 or 8.
};

/// Centroid c is scale * centroids[c], rows of `dim` whole numbers, each -127 to 127.
struct Centroids {
  float scale;
  std::vector<std::int8_t> centroids;
};

/// Weighted k-means: k-means++ starts, Lloyd steps until the error stands still, centroids without
/// points moved to where the error is largest, and last steps with the centroids rounded.
/// Sequential: the same input gives the same centroids, whatever runs beside it and at each level
/// of kernels. Fewer points than centroids, or equal ones, give centroids that repeat.
/// @throws std::invalid_argument naming what does not fit.
Centroids train_centroids(const WeightedPoints& points, int n_centroids,
                          const KMeansOptions& options);

/// Sum of w * |point - nearest centroid|^2 over that of w * |point|^2; 0 if all points are 0.
double normalised_error(const WeightedPoints& points, const Centroids& centroids);

}  // namespace kvpool::calibration
