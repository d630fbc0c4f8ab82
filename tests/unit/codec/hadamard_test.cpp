#include <bit>

#include "unit/kernels/testing.h"

namespace kvpool::codec {
namespace {

class Hadamard : public ::testing::TestWithParam<int> {};

TEST_P(Hadamard, IsTheSignMatrixOnEachBlock) {
  const int dim = GetParam();
  const int size = dim & -dim;
  const std::vector<float> rows = testing::random_rows(3, dim, 1);
  std::vector<float> turned = rows;
  hadamard(turned.data(), 3, dim);
  for (int i = 0; i < 3 * dim; ++i) {
    const int first = i / size * size;
    double expected = 0.0;
    for (int j = 0; j < size; ++j) {
      const bool minus = std::popcount(static_cast<unsigned>((i - first) & j)) % 2 != 0;
      const double value = rows[static_cast<std::size_t>(first + j)];
      expected += minus ? -value : value;
    }
    EXPECT_NEAR(turned[static_cast<std::size_t>(i)], expected / std::sqrt(size), 1e-4);
  }
}

TEST_P(Hadamard, TwiceChangesNothing) {
  const int dim = GetParam();
  const std::vector<float> rows = testing::random_rows(2, dim, 2);
  std::vector<float> turned = rows;
  hadamard(turned.data(), 2, dim);
  hadamard(turned.data(), 2, dim);
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_NEAR(turned[i], rows[i], 1e-4);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Hadamard, ::testing::ValuesIn(testing::kHeadDims));

}  // namespace
}  // namespace kvpool::codec
