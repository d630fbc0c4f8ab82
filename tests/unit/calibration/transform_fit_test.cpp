#include "calibration/transform_fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

namespace kvpool::calibration {
namespace {

constexpr std::size_t kDim = 16;
constexpr std::size_t kTokens = 4000;

/// Channel d is d + normal numbers of width 2^(d / 4).
std::vector<float> some_rows() {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> rows;
  for (std::size_t t = 0; t < kTokens; ++t) {
    for (std::size_t d = 0; d < kDim; ++d) {
      rows.push_back(static_cast<float>(d) +
                     normal(random) * std::exp2(static_cast<float>(d / 4)));
    }
  }
  return rows;
}

std::vector<double> channel_energy(const std::vector<float>& rows) {
  std::vector<double> energy(kDim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    energy[i % kDim] += double{rows[i]} * rows[i] / kTokens;
  }
  return energy;
}

TEST(TransformFit, WhatIsCodedHasUnitEnergy) {
  const std::vector<float> weights(kTokens, 2.0F);
  const std::vector<double> costs(kDim, 3.0);
  for (const auto& fitted :
       {fit_values(some_rows(), weights), fit_keys(some_rows(), weights, costs, 4)}) {
    std::vector<float> rows = some_rows();
    transform_rows(fitted.transform, rows);
    const std::vector<double> energy = channel_energy(rows);
    EXPECT_NEAR(std::accumulate(energy.begin(), energy.end(), 0.0), kDim, 1e-2);
    EXPECT_NEAR(fitted.transform.mean[5], 5.0F, 0.2F);
    const double deviations = 4.0 * (1 + 2 + 4 + 8);
    const double of_values = deviations * deviations / kDim;
    const double of_keys = 3.0 * 4.0 * (1 + 4 + 16 + 64);
    EXPECT_NEAR(fitted.cost, fitted.rotation.empty() ? of_values : of_keys, 0.1 * fitted.cost);
  }
}

TEST(TransformFit, ChannelsOfValuesAreDividedByTheRootOfTheirDeviation) {
  const std::vector<float> weights(kTokens, 1.0F);
  const std::vector<float> smooth = fit_values(some_rows(), weights).transform.smooth;
  for (std::size_t d = 0; d < kDim; ++d) {
    const double expected = std::exp2(0.5 * static_cast<double>(d / 4));
    EXPECT_NEAR(smooth[d] / smooth[0], expected, 0.05 * expected) << d;
  }
}

TEST(TransformFit, SubVectorsOfKeysVaryAlikeEachChannelUnlikeTheNext) {
  const std::vector<float> weights(kTokens, 1.0F);
  const FittedTransform fitted = fit_keys(some_rows(), weights, std::vector<double>(kDim, 1.0), 4);
  std::vector<float> rows = some_rows();
  transform_rows(fitted.transform, rows);
  const std::vector<double> energy = channel_energy(rows);
  for (std::size_t i = 0; i < kDim; ++i) {
    const double expected = std::exp2(6.0 - 2.0 * static_cast<double>(i % 4)) * 16.0 / 85.0;
    EXPECT_NEAR(energy[i], expected / 4.0, 0.1 * expected) << i;
  }
}

TEST(TransformFit, GroupsOfAxesThatAreNoPowerOfTwoAreMixed) {
  constexpr std::size_t kWide = 40;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> rows;
  for (std::size_t i = 0; i < kTokens * kWide; ++i) {
    rows.push_back(normal(random) * (1.0F + static_cast<float>(i % kWide)));
  }
  const std::vector<float> weights(kTokens, 1.0F);
  const FittedTransform fitted = fit_keys(rows, weights, std::vector<double>(kWide, 1.0), 2);
  transform_rows(fitted.transform, rows);
  std::vector<double> energy(kWide / 2);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    energy[i % kWide / 2] += double{rows[i]} * rows[i] / kTokens;
  }
  for (const double of_sub : energy) EXPECT_NEAR(of_sub, 2.0, 0.9);
}

TEST(TransformFit, ChannelsAreScaledByTheRootOfTheirCost) {
  const std::vector<float> weights(kTokens, 1.0F);
  std::vector<double> costs(kDim, 1.0);
  costs[3] = 25.0;
  costs[4] = 0.0;
  const std::vector<float> smooth = fit_keys(some_rows(), weights, costs, 4).transform.smooth;
  EXPECT_NEAR(smooth[0] / smooth[3], 5.0F, 1e-4F);
  EXPECT_TRUE(std::isfinite(smooth[4]));
  EXPECT_GT(smooth[4], smooth[0]);
  const std::vector<float> equal =
      fit_keys(some_rows(), weights, std::vector<double>(kDim), 4).transform.smooth;
  EXPECT_EQ(equal[0], equal[15]);
}

TEST(TransformFit, RowsThatAreAllTheSameHaveATransform) {
  const std::vector<float> weights(10, 1.0F);
  const std::vector<float> same(10 * kDim, 3.0F);
  for (const auto& fitted : {fit_keys(same, weights, std::vector<double>(kDim, 1.0), 8),
                             fit_values(same, weights)}) {
    EXPECT_EQ(fitted.cost, 0.0);
    std::vector<float> rows = same;
    transform_rows(fitted.transform, rows);
    for (const float x : rows) EXPECT_EQ(x, 0.0F);
  }
}

}  // namespace
}  // namespace kvpool::calibration
