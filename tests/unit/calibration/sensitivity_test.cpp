#include "calibration/sensitivity.h"

#include <gtest/gtest.h>
#include <mlx/ops.h>
#include <mlx/random.h>
#include <mlx/transforms.h>

#include <cmath>
#include <vector>

namespace mx = mlx::core;

namespace kvpool::calibration {
namespace {

constexpr int kHeads = 2;
constexpr int kGroup = 2;
constexpr int kLength = 300;
constexpr int kDim = 8;
constexpr int kWindow = 20;
constexpr float kScale = 0.35F;

std::vector<float> numbers(mx::array array) {
  array.eval();
  return {array.data<float>(), array.data<float>() + array.size()};
}

TEST(Sensitivity, IsThatOfAttentionWrittenOut) {
  const mx::array queries = mx::random::normal({1, kHeads * kGroup, kLength, kDim});
  const mx::array keys = mx::random::normal({1, kHeads, kLength, kDim});
  const mx::array values = mx::random::normal({1, kHeads, kLength, kDim});
  const Sensitivity got = sensitivity(queries, keys, values, kScale, kWindow);
  ASSERT_EQ(got.keys.shape(), (mx::Shape{1, kHeads, kLength}));
  ASSERT_EQ(got.channels.shape(), (mx::Shape{kHeads, kDim}));
  const std::vector<float> q = numbers(queries);
  const std::vector<float> k = numbers(keys);
  const std::vector<float> v = numbers(values);
  std::vector<double> of_keys(kHeads * kLength);
  std::vector<double> of_values(kHeads * kLength);
  std::vector<double> of_channels(kHeads * kDim);
  for (int head = 0; head < kHeads * kGroup; ++head) {
    const int kv_head = head / kGroup;
    const auto row = [&](const std::vector<float>& all, int h, int t) {
      return all.data() + (h * kLength + t) * kDim;
    };
    for (int t = 0; t < kLength; ++t) {
      const float* const query = row(q, head, t);
      std::vector<double> weights;
      double sum = 0.0;
      for (int s = 0; s <= t; ++s) {
        double score = 0.0;
        for (int d = 0; d < kDim; ++d) score += double{query[d]} * row(k, kv_head, s)[d];
        weights.push_back(std::exp(kScale * score));
        sum += weights.back();
      }
      std::vector<double> output(kDim);
      for (int s = 0; s <= t; ++s) {
        for (int d = 0; d < kDim; ++d) output[d] += weights[s] / sum * row(v, kv_head, s)[d];
      }
      for (int s = 0; s <= t - kWindow; ++s) {
        const double square = weights[s] / sum * weights[s] / sum;
        double apart = 0.0;
        double norm = 0.0;
        for (int d = 0; d < kDim; ++d) {
          apart += std::pow(row(v, kv_head, s)[d] - output[d], 2);
          norm += std::pow(kScale * query[d], 2);
        }
        of_values[kv_head * kLength + s] += square;
        of_keys[kv_head * kLength + s] += square * apart * norm;
        for (int d = 0; d < kDim; ++d) {
          of_channels[kv_head * kDim + d] += square * apart * std::pow(kScale * query[d], 2);
        }
      }
    }
  }
  const auto expect_near = [](const std::vector<float>& have, const std::vector<double>& want) {
    ASSERT_EQ(have.size(), want.size());
    for (std::size_t i = 0; i < have.size(); ++i) {
      ASSERT_NEAR(have[i], want[i], 1e-6 + 1e-3 * want[i]) << i;
    }
  };
  expect_near(numbers(got.keys), of_keys);
  expect_near(numbers(got.values), of_values);
  expect_near(numbers(got.channels), of_channels);
}

}  // namespace
}  // namespace kvpool::calibration
