#include "calibration/eigen.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvpool::calibration {
namespace {

/// Sweeps at most, and the part of the diagonal's square that the rest may be at the end.
constexpr int kMaxSweeps = 50;
constexpr double kTolerance = 1e-22;

/// Jacobi's rotations (Golub, Van Loan, Matrix Computations, 8.5).
class Jacobi {
 public:
  Jacobi(std::vector<double> matrix, std::size_t n) : n_(n), a_(std::move(matrix)), v_(n * n) {
    for (std::size_t i = 0; i < n; ++i) v_[i * n + i] = 1.0;
  }

  void run() {
    for (int sweep = 0; sweep < kMaxSweeps && !is_done(); ++sweep) {
      for (std::size_t p = 0; p < n_; ++p) {
        for (std::size_t q = p + 1; q < n_; ++q) clear(p, q);
      }
    }
  }

  double value(std::size_t i) const noexcept { return a_[i * n_ + i]; }
  const double* vector(std::size_t i) const noexcept { return v_.data() + i * n_; }

 private:
  bool is_done() const {
    double on = 0.0;
    double off = 0.0;
    for (std::size_t i = 0; i < n_; ++i) {
      for (std::size_t j = 0; j < n_; ++j) {
        (i == j ? on : off) += a_[i * n_ + j] * a_[i * n_ + j];
      }
    }
    return off <= kTolerance * on;
  }

  /// Turns rows and columns p and q so that the element at (p, q) becomes 0.
  void clear(std::size_t p, std::size_t q) {
    const double apq = a_[p * n_ + q];
    if (apq == 0.0) return;
    const double tau = (a_[q * n_ + q] - a_[p * n_ + p]) / (2.0 * apq);
    const double t = std::copysign(1.0, tau) / (std::abs(tau) + std::hypot(1.0, tau));
    const double c = 1.0 / std::hypot(1.0, t);
    const double s = t * c;
    for (std::size_t i = 0; i < n_; ++i) turn(a_[i * n_ + p], a_[i * n_ + q], c, s);
    for (std::size_t i = 0; i < n_; ++i) turn(a_[p * n_ + i], a_[q * n_ + i], c, s);
    for (std::size_t i = 0; i < n_; ++i) turn(v_[p * n_ + i], v_[q * n_ + i], c, s);
  }

  static void turn(double& x, double& y, double c, double s) noexcept {
    const double before = x;
    x = c * before - s * y;
    y = s * before + c * y;
  }

  std::size_t n_;
  std::vector<double> a_;
  std::vector<double> v_;  // Vectors as rows.
};

}  // namespace

Eigen eigen(std::vector<double> matrix, std::size_t n) {
  Jacobi jacobi(std::move(matrix), n);
  jacobi.run();
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t i, std::size_t j) {
    return jacobi.value(i) > jacobi.value(j);
  });
  Eigen sorted;
  for (const std::size_t i : order) {
    sorted.values.push_back(jacobi.value(i));
    sorted.vectors.insert(sorted.vectors.end(), jacobi.vector(i), jacobi.vector(i) + n);
  }
  return sorted;
}

}  // namespace kvpool::calibration
