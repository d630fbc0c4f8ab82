#include "calibration/transform_fit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "calibration/eigen.h"
#include "kernels/kernels.h"

namespace kvpool::calibration {
namespace {

/// A channel counts as costing this part of the dearest, at least, and as varying by this part of
/// the variance that is largest.
constexpr double kLeastCost = 1e-6;
constexpr double kLeastVariance = 1e-9;

/// The weighted mean of rows (n, dim).
std::vector<double> mean_of(std::span<const float> rows, std::span<const float> weights) {
  const std::size_t dim = rows.size() / weights.size();
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<double> mean(dim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    mean[i % dim] += static_cast<double>(weights[i / dim]) / total * static_cast<double>(rows[i]);
  }
  return mean;
}

/// The weighted covariance (dim, dim) of (rows - mean) / smooth.
std::vector<double> covariance_of(std::span<const float> rows, std::span<const float> weights,
                                  const std::vector<double>& mean,
                                  const std::vector<double>& smooth) {
  const std::size_t dim = mean.size();
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<double> covariance(dim * dim);
  std::vector<double> row(dim);
  for (std::size_t t = 0; t < weights.size(); ++t) {
    const double share = static_cast<double>(weights[t]) / total;
    for (std::size_t d = 0; d < dim; ++d) {
      row[d] = (static_cast<double>(rows[t * dim + d]) - mean[d]) / smooth[d];
    }
    for (std::size_t i = 0; i < dim; ++i) {
      const double x = share * row[i];
      for (std::size_t j = 0; j <= i; ++j) covariance[i * dim + j] += x * row[j];
    }
  }
  for (std::size_t i = 0; i < dim; ++i) {
    for (std::size_t j = i + 1; j < dim; ++j) covariance[i * dim + j] = covariance[j * dim + i];
  }
  return covariance;
}

/// The transform without a rotation; `energy` is that of what it codes, over all channels.
codec::HeadTransform scaled(const std::vector<double>& mean, const std::vector<double>& smooth,
                            double energy) {
  const std::size_t dim = mean.size();
  const double scale = energy > 0.0 ? std::sqrt(energy / static_cast<double>(dim)) : 1.0;
  codec::HeadTransform transform;
  for (std::size_t d = 0; d < dim; ++d) {
    transform.smooth.push_back(static_cast<float>(smooth[d] * scale));
    transform.mean.push_back(static_cast<float>(mean[d]));
  }
  return transform;
}

double trace(const std::vector<double>& matrix, std::size_t dim) {
  double sum = 0.0;
  for (std::size_t d = 0; d < dim; ++d) sum += matrix[d * dim + d];
  return sum;
}

/// The axes, largest variance first, in as many groups as a sub-vector has channels, each group
/// mixed by a Hadamard matrix, or by several if its size is no power of two; sub-vector i is the
/// i-th of each group. Every other group is turned round, so that where several matrices mix a group
/// no sub-vector has all that vary most.
std::vector<double> dealt(const Eigen& axes, std::size_t sub_dim) {
  const std::size_t dim = axes.values.size();
  const std::size_t n_subs = dim / sub_dim;
  const std::size_t n_mixed = n_subs & (~n_subs + 1);
  const double share = 1.0 / std::sqrt(static_cast<double>(n_mixed));
  std::vector<double> rows;
  for (std::size_t i = 0; i < dim; ++i) {
    const std::size_t sub = i / sub_dim;
    const std::size_t group = i % sub_dim;
    std::vector<double> row(dim);
    for (std::size_t k = 0; k < n_mixed; ++k) {
      const std::size_t at = sub / n_mixed * n_mixed + k;
      const std::size_t axis = group * n_subs + (group % 2 == 0 ? at : n_subs - 1 - at);
      const double factor = std::popcount(sub % n_mixed & k) % 2 == 0 ? share : -share;
      for (std::size_t d = 0; d < dim; ++d) row[d] += factor * axes.vectors[axis * dim + d];
    }
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

void append_rounded(const double* row, std::size_t dim, std::vector<std::int8_t>& to) {
  double largest = 0.0;
  for (std::size_t d = 0; d < dim; ++d) largest = std::max(largest, std::abs(row[d]));
  for (std::size_t d = 0; d < dim; ++d) {
    to.push_back(static_cast<std::int8_t>(std::nearbyint(row[d] / largest * 127.0)));
  }
}

}  // namespace

FittedTransform fit_values(std::span<const float> rows, std::span<const float> weights) {
  const std::vector<double> mean = mean_of(rows, weights);
  const std::size_t dim = mean.size();
  std::vector<double> smooth(dim, 1.0);
  const std::vector<double> covariance = covariance_of(rows, weights, mean, smooth);
  double largest = 0.0;
  for (std::size_t d = 0; d < dim; ++d) largest = std::max(largest, covariance[d * dim + d]);
  if (largest == 0.0) return {scaled(mean, smooth, largest), {}, largest};
  double squares = 0.0;
  double energy = 0.0;
  for (std::size_t d = 0; d < dim; ++d) {
    const double variance = std::max(covariance[d * dim + d], largest * kLeastVariance);
    smooth[d] = std::sqrt(std::sqrt(variance));
    squares += smooth[d] * smooth[d];
    energy += covariance[d * dim + d] / (smooth[d] * smooth[d]);
  }
  return {scaled(mean, smooth, energy), {}, energy * squares / static_cast<double>(dim)};
}

FittedTransform fit_keys(std::span<const float> rows, std::span<const float> weights,
                         std::span<const double> costs, int sub_dim) {
  const std::size_t dim = costs.size();
  const double dearest = *std::max_element(costs.begin(), costs.end());
  std::vector<double> smooth(dim, 1.0);
  if (dearest > 0.0) {
    for (std::size_t d = 0; d < dim; ++d) {
      smooth[d] = 1.0 / std::sqrt(std::max(costs[d] / dearest, kLeastCost));
    }
  }
  const std::vector<double> mean = mean_of(rows, weights);
  const std::vector<double> covariance = covariance_of(rows, weights, mean, smooth);
  const double energy = trace(covariance, dim);
  FittedTransform fitted{scaled(mean, smooth, energy), {}, dearest * energy};
  const Eigen axes = eigen(covariance, dim);
  const std::vector<double> rows_of_rotation = dealt(axes, static_cast<std::size_t>(sub_dim));
  for (std::size_t i = 0; i < dim; ++i) {
    append_rounded(rows_of_rotation.data() + i * dim, dim, fitted.rotation);
  }
  codec::set_rotation(fitted.transform, fitted.rotation);
  return fitted;
}

void transform_rows(const codec::HeadTransform& transform, std::span<float> rows) {
  const std::size_t dim = transform.mean.size();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = (rows[i] - transform.mean[i % dim]) / transform.smooth[i % dim];
  }
  const auto n_rows = static_cast<int>(rows.size() / dim);
  if (!transform.rotation.empty()) {
    kernels::active().rotate(transform.rotation.data(), rows.data(), n_rows, static_cast<int>(dim));
  } else if (transform.hadamard) {
    codec::hadamard(rows.data(), n_rows, static_cast<int>(dim));
  }
}

}  // namespace kvpool::calibration
