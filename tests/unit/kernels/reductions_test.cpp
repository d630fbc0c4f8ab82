#include <limits>

#include "unit/kernels/testing.h"

namespace kvpool::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Reductions : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { KVPOOL_REQUIRE_LEVEL(GetParam()); }
  const KernelTable& table() const { return table_named(GetParam()); }
};

TEST_P(Reductions, MaxIsTheLargestWhereverItStands) {
  EXPECT_EQ(table().max(nullptr, 0), -kInfinity);
  for (std::size_t n = 1; n < 70; ++n) {
    for (std::size_t at = 0; at < n; ++at) {
      std::vector<float> values(n + 1, -5.0F);
      values[at] = -2.0F;
      values[n] = 9.0F;
      ASSERT_EQ(table().max(values.data(), n), -2.0F) << n << " " << at;
    }
  }
}

TEST_P(Reductions, ExpSumIsExpOfEachAndTheirSum) {
  for (std::size_t n = 1; n < 70; ++n) {
    std::vector<float> values(n + 1, 0.5F);
    for (std::size_t i = 0; i < n; ++i) values[i] = 3.0F - 1.7F * static_cast<float>(i);
    if (n > 3) values[3] = -kInfinity;
    const std::vector<float> before = values;
    const float sum = table().exp_sum(values.data(), n, 3.0F);
    double expected_sum = 0.0;
    for (std::size_t i = 0; i < n; ++i) {
      const double expected = std::exp(double{before[i]} - 3.0);
      expected_sum += expected;
      // Relative to the weight of the largest the error of a small one is nothing.
      const double relative = expected == 0.0 ? 0.0 : 1e-6 + 2e-7 * std::fabs(before[i] - 3.0);
      ASSERT_NEAR(values[i], expected, relative * expected + 1e-37) << before[i];
    }
    EXPECT_EQ(values[n], 0.5F);
    EXPECT_NEAR(sum, expected_sum, 1e-5 * expected_sum);
  }
}

TEST_P(Reductions, NanIsPassedOverByMaxAndShowsInTheSum) {
  for (std::size_t n = 1; n < 70; ++n) {
    for (std::size_t at = 0; at < n; ++at) {
      std::vector<float> values(n, -5.0F);
      values[n / 3] = -2.0F;
      values[at] = kNan;
      const float largest = n == 1 ? -kInfinity : at == n / 3 ? -5.0F : -2.0F;
      ASSERT_EQ(table().max(values.data(), n), largest) << n << " " << at;
      ASSERT_TRUE(std::isnan(table().exp_sum(values.data(), n, -2.0F))) << n << " " << at;
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(std::isnan(values[i]), i == at);
    }
  }
}

TEST_P(Reductions, SoftCapIsTanh) {
  std::vector<float> values;
  for (float x = -200.0F; x < 200.0F; x += 0.37F) values.push_back(x);
  const std::vector<float> before = values;
  table().soft_cap(values.data(), values.size(), 30.0F);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(values[i], 30.0 * std::tanh(before[i] / 30.0), 2e-5);
  }
}

TEST_P(Reductions, ScaleTouchesNoMoreThanAsked) {
  for (std::size_t n = 0; n < 40; ++n) {
    std::vector<float> values(n + 1, 3.0F);
    table().scale(values.data(), n, 0.5F);
    for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(values[i], 1.5F);
    ASSERT_EQ(values[n], 3.0F);
  }
}

TEST_P(Reductions, HadamardGivesTheBitsOfTheReference) {
  for (const int dim : testing::kHeadDims) {
    const std::vector<float> rows = testing::random_rows(3, dim, 1);
    std::vector<float> expected = rows;
    table_named("scalar").hadamard(expected.data(), 3, dim);
    std::vector<float> got = rows;
    got.push_back(5.0F);
    table().hadamard(got.data(), 3, dim);
    ASSERT_EQ(got.back(), 5.0F);
    got.pop_back();
    ASSERT_EQ(got, expected) << dim;
  }
}

TEST_P(Reductions, RotateGivesTheBitsOfTheReference) {
  for (const int dim : testing::kHeadDims) {
    const std::vector<float> rows = testing::random_rows(3, dim, 1);
    const std::vector<float> matrix = testing::random_rows(dim, dim, 2);
    std::vector<float> expected = rows;
    table_named("scalar").rotate(matrix.data(), expected.data(), 3, dim);
    std::vector<float> got = rows;
    got.push_back(5.0F);
    table().rotate(matrix.data(), got.data(), 3, dim);
    ASSERT_EQ(got.back(), 5.0F);
    got.pop_back();
    ASSERT_EQ(got, expected) << dim;
    const auto n = static_cast<std::size_t>(dim);
    double sum = 0.0;
    for (std::size_t d = 0; d < n; ++d) sum += double{rows[n + d]} * matrix[d * n + n - 1];
    ASSERT_NEAR(got[2 * n - 1], sum, 1e-4 * std::sqrt(n));
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, Reductions, ::testing::ValuesIn(testing::level_names()));

}  // namespace
}  // namespace kvpool::kernels
