#include "calibration/nearest.h"

#include <algorithm>

#include "calibration/nearest_tile.h"
#include "kernels/kernels.h"

namespace kvpool::calibration {
namespace {

/// Of the level of kernels in use.
const TileSearches& searches() {
#if defined(__x86_64__)
  const std::string_view level = kernels::active().name;
  if (level == "avx512") return kTileSearchesAvx512;
  if (level == "avx2") return kTileSearchesAvx2;
#endif
  return kTileSearches;
}

TileSearch::Run search_of(std::size_t dim) {
  const TileSearches& all = searches();
  return dim == 2 ? all.of2 : dim == 4 ? all.of4 : all.of8;
}

}  // namespace

TiledPoints::TiledPoints(std::span<const float> rows, int dim)
    : size_(rows.size() / static_cast<std::size_t>(dim)),
      dim_(static_cast<std::size_t>(dim)),
      tiles_(n_tiles() * kTile * dim_) {
  for (std::size_t i = 0; i < size_; ++i) {
    float* const to = tiles_.data() + i / kTile * kTile * dim_ + i % kTile;
    for (std::size_t j = 0; j < dim_; ++j) to[j * kTile] = rows[i * dim_ + j];
  }
}

void nearest(const TiledPoints& points, std::span<const float> centroids,
             std::span<std::int32_t> codes, std::span<float> squared_distances) {
  constexpr std::size_t kTile = TiledPoints::kTile;
  const std::size_t dim = points.dim();
  std::vector<float> half_norms(centroids.size() / dim);
  for (std::size_t i = 0; i < centroids.size(); ++i) {
    half_norms[i / dim] += 0.5F * centroids[i] * centroids[i];
  }
  const TileSearch search{centroids.data(), half_norms.data(),
                          static_cast<std::int32_t>(half_norms.size())};
  const TileSearch::Run run = search_of(dim);
  for (std::size_t t = 0; t < points.n_tiles(); ++t) {
    std::int32_t tile_codes[kTile];
    float tile_distances[kTile];
    run(search, points.tile(t), tile_codes, tile_distances);
    const std::size_t first = t * kTile;
    for (std::size_t i = 0; i < std::min(kTile, points.size() - first); ++i) {
      codes[first + i] = tile_codes[i];
      squared_distances[first + i] = std::max(0.0F, tile_distances[i]);
    }
  }
}

}  // namespace kvpool::calibration
