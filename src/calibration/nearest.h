#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvpool::calibration {

/// Points in tiles of 16, channel by channel.
class TiledPoints {
 public:
  static constexpr std::size_t kTile = 16;

  /// @param rows  (n, dim); what the last tile lacks is zeros.
  TiledPoints(std::span<const float> rows, int dim);

  std::size_t size() const noexcept { return size_; }
  std::size_t dim() const noexcept { return dim_; }
  std::size_t n_tiles() const noexcept { return (size_ + kTile - 1) / kTile; }
  const float* tile(std::size_t index) const noexcept {
    return tiles_.data() + index * kTile * dim_;
  }
  float at(std::size_t point, std::size_t channel) const noexcept {
    return tile(point / kTile)[channel * kTile + point % kTile];
  }

 private:
  std::size_t size_;
  std::size_t dim_;
  std::vector<float> tiles_;
};

/// For each point the first of its nearest `centroids` (n, dim), and the squared distance to it,
/// not below 0. The points' dim is 2, 4 or 8. Every level of kernels finds the same. Thread-safe.
void nearest(const TiledPoints& points, std::span<const float> centroids,
             std::span<std::int32_t> codes, std::span<float> squared_distances);

}  // namespace kvpool::calibration
