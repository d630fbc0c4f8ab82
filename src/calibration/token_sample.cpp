#include "calibration/token_sample.h"

#include <algorithm>

#include "codec/half.h"

namespace kvpool::calibration {

void TokenSample::offer(std::span<const float* const> rows, std::span<const float> weights) {
  const std::size_t place = n_seen_ < max_tokens_ ? n_seen_ : random_.next() % (n_seen_ + 1);
  ++n_seen_;
  if (place >= max_tokens_) return;
  const std::size_t size = n_rows_ * dim_;
  if (halves_.size() < (place + 1) * size) {
    halves_.resize((place + 1) * size);
    weights_.resize((place + 1) * n_weights_);
  }
  std::copy(weights.begin(), weights.end(),
            weights_.begin() + static_cast<std::ptrdiff_t>(place * n_weights_));
  std::uint16_t* to = halves_.data() + place * size;
  for (const float* const row : rows) {
    for (std::size_t d = 0; d < dim_; ++d) *to++ = codec::float_to_half(row[d]);
  }
}

std::vector<float> TokenSample::rows(std::size_t index, std::size_t n) const {
  std::vector<float> rows;
  rows.reserve(n * dim_);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint16_t* const from =
        halves_.data() + (i * n_tokens() / n * n_rows_ + index) * dim_;
    for (std::size_t d = 0; d < dim_; ++d) rows.push_back(codec::half_to_float(from[d]));
  }
  return rows;
}

std::vector<float> TokenSample::weights(std::size_t index, std::size_t n) const {
  std::vector<float> weights;
  weights.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    weights.push_back(weights_[i * n_tokens() / n * n_weights_ + index]);
  }
  return weights;
}

}  // namespace kvpool::calibration
