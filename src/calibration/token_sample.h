#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "calibration/random.h"

namespace kvpool::calibration {

/// What is kept of the tokens of one layer: of `max_tokens` at most, each seen as likely to be
/// among them as any other (reservoir sampling). Rows are kept in fp16.
class TokenSample {
 public:
  /// A token has `n_rows` rows of `dim` channels, and `n_weights` numbers that say what it counts.
  TokenSample(std::size_t n_rows, std::size_t dim, std::size_t n_weights, std::size_t max_tokens,
              std::uint64_t seed)
      : n_rows_(n_rows), dim_(dim), n_weights_(n_weights), max_tokens_(max_tokens), random_(seed) {}

  std::size_t n_tokens() const noexcept { return halves_.size() / (n_rows_ * dim_); }

  /// Offers a token; `rows` holds the start of each of its rows.
  void offer(std::span<const float* const> rows, std::span<const float> weights);

  /// Row `index` of `n` of the tokens kept, evenly spread, as fp32 (n, dim); and weight `index` of
  /// the same tokens.
  std::vector<float> rows(std::size_t index, std::size_t n) const;
  std::vector<float> weights(std::size_t index, std::size_t n) const;

 private:
  std::size_t n_rows_;
  std::size_t dim_;
  std::size_t n_weights_;
  std::size_t max_tokens_;
  std::size_t n_seen_ = 0;
  std::vector<std::uint16_t> halves_;
  std::vector<float> weights_;
  Random random_;
};

}  // namespace kvpool::calibration
