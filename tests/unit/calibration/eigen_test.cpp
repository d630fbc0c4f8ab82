#include "calibration/eigen.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace kvpool::calibration {
namespace {

TEST(Eigen, VectorsAreOrthonormalAndDiagonalise) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (const std::size_t n : {1U, 8U, 64U}) {
    std::vector<double> matrix(n * n);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j <= i; ++j) matrix[i * n + j] = matrix[j * n + i] = normal(random);
    }
    const auto [values, vectors] = eigen(matrix, n);
    for (std::size_t a = 0; a < n; ++a) {
      if (a > 0) {
        EXPECT_GE(values[a - 1], values[a]);
      }
      for (std::size_t i = 0; i < n; ++i) {
        double turned = 0.0;
        for (std::size_t j = 0; j < n; ++j) turned += matrix[i * n + j] * vectors[a * n + j];
        ASSERT_NEAR(turned, values[a] * vectors[a * n + i], 1e-9);
      }
      for (std::size_t b = 0; b < n; ++b) {
        double product = 0.0;
        for (std::size_t i = 0; i < n; ++i) product += vectors[a * n + i] * vectors[b * n + i];
        ASSERT_NEAR(product, a == b ? 1.0 : 0.0, 1e-12);
      }
    }
  }
}

TEST(Eigen, OfADiagonalMatrixIsTheMatrix) {
  const auto [values, vectors] = eigen({1, 0, 0, 0, 3, 0, 0, 0, 0}, 3);
  EXPECT_EQ(values, (std::vector<double>{3, 1, 0}));
  EXPECT_EQ(vectors, (std::vector<double>{0, 1, 0, 1, 0, 0, 0, 0, 1}));
}

}  // namespace
}  // namespace kvpool::calibration
