#include "codec/space.h"

#include <cstddef>
#include <iterator>
#include <numeric>

#include "codec/vector_quantizer.h"
#include "kernels/kernels.h"

namespace kvpool::codec {
namespace {

/// Calls change(element, channel) over rows.
template <typename Change>
void for_elements(float* rows, int n_rows, int dim, const Change& change) {
  for (int row = 0; row < n_rows; ++row, rows += dim) {
    for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) change(rows[d], d);
  }
}

/// With sums of their own for every eighth product, which do not wait for each other.
float dot(const float* a, const float* b, int n) {
  constexpr int kSums = 8;
  float sums[kSums] = {};
  int i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int k = 0; k < kSums; ++k) sums[k] += a[i + k] * b[i + k];
  }
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return std::accumulate(std::begin(sums), std::end(sums), 0.0F);
}

}  // namespace

Space::Space(const Format& format, int kv_head) noexcept : hadamard_(format.hadamard) {
  if (format.quantizer == nullptr) return;
  transform_ = &format.quantizer->transforms[static_cast<std::size_t>(kv_head)];
  rotates_ = !transform_->rotation.empty();
  hadamard_ = transform_->hadamard && !rotates_;
}

void Space::enter(float* rows, int n_rows, int dim) const {
  if (transform_ != nullptr) {
    const HeadTransform& t = *transform_;
    for_elements(rows, n_rows, dim,
                 [&](float& x, std::size_t d) { x = (x - t.mean[d]) / t.smooth[d]; });
  }
  turn(rows, n_rows, dim);
}

void Space::leave(float* rows, int n_rows, int dim) const {
  turn_back(rows, n_rows, dim);
  if (transform_ == nullptr) return;
  const HeadTransform& t = *transform_;
  for_elements(rows, n_rows, dim,
               [&](float& x, std::size_t d) { x = x * t.smooth[d] + t.mean[d]; });
}

void Space::enter_queries(float* queries, int n_rows, int dim, float* offsets) const {
  if (transform_ != nullptr) {
    const HeadTransform& t = *transform_;
    for (int row = 0; row < n_rows; ++row) {
      float* const query = queries + row * dim;
      offsets[row] = dot(query, t.mean.data(), dim);
      for_elements(query, 1, dim, [&](float& x, std::size_t d) { x *= t.smooth[d]; });
    }
  }
  turn(queries, n_rows, dim);
}

void Space::leave_sums(float* sums, int n_rows, int dim, const float* weights) const {
  turn_back(sums, n_rows, dim);
  if (transform_ == nullptr) return;
  const HeadTransform& t = *transform_;
  for (int row = 0; row < n_rows; ++row) {
    for_elements(sums + row * dim, 1, dim,
                 [&](float& x, std::size_t d) { x = x * t.smooth[d] + weights[row] * t.mean[d]; });
  }
}

void Space::turn(float* rows, int n_rows, int dim) const {
  if (hadamard_) hadamard(rows, n_rows, dim);
  if (rotates_) kernels::active().rotate(transform_->rotation.data(), rows, n_rows, dim);
}

void Space::turn_back(float* rows, int n_rows, int dim) const {
  if (hadamard_) hadamard(rows, n_rows, dim);
  if (rotates_) kernels::active().rotate(transform_->back.data(), rows, n_rows, dim);
}

}  // namespace kvpool::codec
