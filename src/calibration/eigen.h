#pragma once

#include <cstddef>
#include <vector>

namespace kvpool::calibration {

/// Of a symmetric matrix: eigenvalues, largest first, and their orthonormal vectors as rows.
struct Eigen {
  std::vector<double> values;   ///< (n,)
  std::vector<double> vectors;  ///< (n, n)
};

/// @param matrix  (n, n), symmetric, finite.
Eigen eigen(std::vector<double> matrix, std::size_t n);

}  // namespace kvpool::calibration
