#include "calibration/k_means.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "calibration/nearest.h"
#include "calibration/random.h"
#include "util/concat.h"

namespace kvpool::calibration {
namespace {

/// Points to a centroid on which starts are tried, points in all, and Lloyd steps of each start.
constexpr std::size_t kSamplePerCentroid = 24;
constexpr std::size_t kMaxSample = std::size_t{1} << 15;
constexpr int kTrialIterations = 4;
/// Lloyd steps after the centroids are rounded.
constexpr int kRoundedIterations = 2;
/// A step that gains less than this part of the error is the last.
constexpr double kLeastGain = 5e-4;

double weight_of(std::span<const float> weights, std::size_t point) {
  return weights.empty() ? 1.0 : static_cast<double>(weights[point]);
}

/// Centroids as they move over one set of points.
class Lloyd {
 public:
  Lloyd(const TiledPoints& points, std::span<const float> weights, std::vector<float> centroids)
      : points_(points), weights_(weights), codes_(points.size()), distances_(points.size()) {
    put(std::move(centroids));
  }

  double error() const noexcept { return error_; }
  const std::vector<float>& centroids() const noexcept { return centroids_; }

  void put(std::vector<float> centroids) {
    centroids_ = std::move(centroids);
    nearest(points_, centroids_, codes_, distances_);
    error_ = 0.0;
    for (std::size_t i = 0; i < points_.size(); ++i) error_ += error_of(i);
  }

  /// The means of the points of each centroid; for one without any, a point that is coded worst.
  std::vector<float> moved() const {
    const std::size_t dim = points_.dim();
    std::vector<double> sums(centroids_.size());
    std::vector<double> masses(centroids_.size() / dim);
    for (std::size_t i = 0; i < points_.size(); ++i) {
      const auto code = static_cast<std::size_t>(codes_[i]);
      const double mass = weight_of(weights_, i);
      masses[code] += mass;
      for (std::size_t j = 0; j < dim; ++j) {
        sums[code * dim + j] += mass * static_cast<double>(points_.at(i, j));
      }
    }
    std::vector<float> means(centroids_);
    std::vector<std::size_t> unused;
    for (std::size_t c = 0; c < masses.size(); ++c) {
      if (masses[c] > 0.0) {
        for (std::size_t j = 0; j < dim; ++j) {
          means[c * dim + j] = static_cast<float>(sums[c * dim + j] / masses[c]);
        }
      } else {
        unused.push_back(c);
      }
    }
    const std::vector<std::size_t> worst = coded_worst(unused.size());
    for (std::size_t u = 0; u < worst.size(); ++u) {
      for (std::size_t j = 0; j < dim; ++j) means[unused[u] * dim + j] = points_.at(worst[u], j);
    }
    return means;
  }

 private:
  double error_of(std::size_t point) const {
    return weight_of(weights_, point) * static_cast<double>(distances_[point]);
  }

  std::vector<std::size_t> coded_worst(std::size_t n) const {
    std::vector<std::size_t> points(n > 0 ? points_.size() : 0);
    std::iota(points.begin(), points.end(), std::size_t{0});
    n = std::min(n, points.size());
    const auto worse = [this](std::size_t a, std::size_t b) {
      const double difference = error_of(a) - error_of(b);
      return difference != 0.0 ? difference > 0.0 : a < b;
    };
    std::partial_sort(points.begin(), points.begin() + static_cast<std::ptrdiff_t>(n), points.end(),
                      worse);
    points.resize(n);
    return points;
  }

  const TiledPoints& points_;
  std::span<const float> weights_;
  std::vector<float> centroids_;
  std::vector<std::int32_t> codes_;
  std::vector<float> distances_;
  double error_ = 0.0;
};

/// k-means++ (Arthur, Vassilvitskii 2007): each centroid is a point, drawn by its weighted squared
/// distance to those before it.
std::vector<float> first_centroids(const TiledPoints& points, std::span<const float> weights,
                                   std::size_t n_centroids, Random& random) {
  const std::size_t dim = points.dim();
  std::vector<float> centroids(n_centroids * dim);
  std::vector<float> least(points.size(), std::numeric_limits<float>::max());
  std::vector<float> to_new(points.size());
  std::vector<std::int32_t> codes(points.size());
  std::vector<double> chances(points.size());
  for (std::size_t i = 0; i < points.size(); ++i) chances[i] = weight_of(weights, i);
  for (std::size_t c = 0; c < n_centroids; ++c) {
    const std::size_t drawn = random.draw(chances);
    for (std::size_t j = 0; j < dim; ++j) centroids[c * dim + j] = points.at(drawn, j);
    nearest(points, std::span(centroids).subspan(c * dim, dim), codes, to_new);
    for (std::size_t i = 0; i < points.size(); ++i) {
      least[i] = std::min(least[i], to_new[i]);
      chances[i] = weight_of(weights, i) * static_cast<double>(least[i]);
    }
  }
  return centroids;
}

/// The best of several starts, after a few steps on points that are spread evenly over all.
std::vector<float> best_start(const WeightedPoints& points, std::size_t n_centroids,
                              const KMeansOptions& options) {
  const auto dim = static_cast<std::size_t>(points.dim);
  const std::size_t n = points.rows.size() / dim;
  const std::size_t n_sample = std::min({n, kSamplePerCentroid * n_centroids, kMaxSample});
  std::vector<float> rows;
  std::vector<float> weights;
  rows.reserve(n_sample * dim);
  for (std::size_t s = 0; s < n_sample; ++s) {
    const std::size_t point = s * n / n_sample;
    const auto row = points.rows.subspan(point * dim, dim);
    rows.insert(rows.end(), row.begin(), row.end());
    if (!points.weights.empty()) weights.push_back(points.weights[point]);
  }
  const TiledPoints sample(rows, points.dim);
  Random random(options.seed);
  std::vector<float> best;
  double least = std::numeric_limits<double>::infinity();
  for (int r = 0; r < options.n_restarts; ++r) {
    Lloyd lloyd(sample, weights, first_centroids(sample, weights, n_centroids, random));
    for (int i = 0; i < kTrialIterations; ++i) lloyd.put(lloyd.moved());
    if (best.empty() || lloyd.error() < least) {
      least = lloyd.error();
      best = lloyd.centroids();
    }
  }
  return best;
}

Centroids rounded(const std::vector<float>& values) {
  float largest = 0.0F;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  const float scale = largest / 127.0F;
  Centroids whole{scale > 0.0F && std::isfinite(127.0F / scale) ? scale : 1.0F, {}};
  whole.centroids.reserve(values.size());
  for (const float value : values) {
    const float step = std::clamp(std::nearbyint(value / whole.scale), -127.0F, 127.0F);
    whole.centroids.push_back(static_cast<std::int8_t>(step));
  }
  return whole;
}

std::vector<float> values_of(const Centroids& centroids) {
  std::vector<float> values;
  values.reserve(centroids.centroids.size());
  for (const std::int8_t step : centroids.centroids) {
    values.push_back(centroids.scale * static_cast<float>(step));
  }
  return values;
}

void check(const WeightedPoints& points, int n_centroids, const KMeansOptions& options) {
  const auto refuse = [](const auto&... parts) {
    throw std::invalid_argument(detail::concat("train_centroids: ", parts...));
  };
  if (points.dim != 2 && points.dim != 4 && points.dim != 8) {
    refuse("dim must be 2, 4 or 8, got ", points.dim);
  }
  const auto dim = static_cast<std::size_t>(points.dim);
  if (points.rows.empty() || points.rows.size() % dim != 0) {
    refuse("rows must be points of ", dim, " numbers, at least one, got ", points.rows.size(),
           " numbers");
  }
  if (!points.weights.empty() && points.weights.size() != points.rows.size() / dim) {
    refuse("weights must be one a point, ", points.rows.size() / dim, ", got ",
           points.weights.size());
  }
  if (n_centroids < 1 || n_centroids > 1 << 16) {
    refuse("n_centroids must be 1 to 65536, got ", n_centroids);
  }
  if (options.n_restarts < 1) refuse("n_restarts must be at least 1, got ", options.n_restarts);
  if (options.n_iterations < 1) {
    refuse("n_iterations must be at least 1, got ", options.n_iterations);
  }
  for (const float x : points.rows) {
    if (!std::isfinite(x)) refuse("rows must be finite, got ", x);
  }
  for (const float w : points.weights) {
    if (!std::isfinite(w) || w < 0.0F) refuse("weights must be finite and not below 0, got ", w);
  }
}

}  // namespace

Centroids train_centroids(const WeightedPoints& points, int n_centroids,
                          const KMeansOptions& options) {
  check(points, n_centroids, options);
  const TiledPoints tiled(points.rows, points.dim);
  Lloyd lloyd(tiled, points.weights,
              best_start(points, static_cast<std::size_t>(n_centroids), options));
  for (int i = 0; i < options.n_iterations; ++i) {
    const double before = lloyd.error();
    lloyd.put(lloyd.moved());
    if (before - lloyd.error() <= kLeastGain * before) break;
  }
  Centroids best = rounded(lloyd.centroids());
  lloyd.put(values_of(best));
  for (int i = 0; i < kRoundedIterations; ++i) {
    const double before = lloyd.error();
    Centroids next = rounded(lloyd.moved());
    lloyd.put(values_of(next));
    if (lloyd.error() >= before) break;
    best = std::move(next);
  }
  return best;
}

double normalised_error(const WeightedPoints& points, const Centroids& centroids) {
  const TiledPoints tiled(points.rows, points.dim);
  std::vector<std::int32_t> codes(tiled.size());
  std::vector<float> distances(tiled.size());
  nearest(tiled, values_of(centroids), codes, distances);
  double error = 0.0;
  double energy = 0.0;
  for (std::size_t i = 0; i < tiled.size(); ++i) {
    const double weight = weight_of(points.weights, i);
    error += weight * static_cast<double>(distances[i]);
    for (std::size_t j = 0; j < tiled.dim(); ++j) {
      energy += weight * static_cast<double>(tiled.at(i, j)) * static_cast<double>(tiled.at(i, j));
    }
  }
  return energy > 0.0 ? error / energy : 0.0;
}

}  // namespace kvpool::calibration
