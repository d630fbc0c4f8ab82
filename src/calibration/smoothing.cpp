#include "calibration/smoothing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace kvpool::calibration {
namespace {

/// A channel counts as loud as this part of the loudest, at least.
constexpr double kLeastShare = 1e-3;

}  // namespace

codec::HeadTransform fit_transform(codec::Role role, std::span<const float> rows,
                                   std::span<const float> weights) {
  const std::size_t dim = rows.size() / weights.size();
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const auto share = [&](std::size_t i) { return static_cast<double>(weights[i / dim]) / total; };
  std::vector<double> mean(dim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    mean[i % dim] += share(i) * static_cast<double>(rows[i]);
  }
  std::vector<double> energy(dim);
  std::vector<double> largest(dim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double x = static_cast<double>(rows[i]) - mean[i % dim];
    energy[i % dim] += share(i) * x * x;
    largest[i % dim] = std::max(largest[i % dim], std::abs(x));
  }
  const double loudest = *std::max_element(largest.begin(), largest.end());
  std::vector<double> smooth(dim, 1.0);
  double coded = 0.0;
  for (std::size_t d = 0; d < dim; ++d) {
    if (role == codec::Role::kKeys && loudest > 0.0) {
      smooth[d] = std::sqrt(std::max(largest[d], kLeastShare * loudest));
    }
    coded += energy[d] / (smooth[d] * smooth[d]) / static_cast<double>(dim);
  }
  const double scale = coded > 0.0 ? std::sqrt(coded) : 1.0;
  codec::HeadTransform transform{std::vector<float>(dim), std::vector<float>(dim), true};
  for (std::size_t d = 0; d < dim; ++d) {
    transform.smooth[d] = static_cast<float>(smooth[d] * scale);
    transform.mean[d] = static_cast<float>(mean[d]);
  }
  return transform;
}

void transform_rows(const codec::HeadTransform& transform, std::span<float> rows) {
  const std::size_t dim = transform.mean.size();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = (rows[i] - transform.mean[i % dim]) / transform.smooth[i % dim];
  }
  if (transform.hadamard) {
    codec::hadamard(rows.data(), static_cast<int>(rows.size() / dim), static_cast<int>(dim));
  }
}

}  // namespace kvpool::calibration
