#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvpool::calibration {

/// The search in one tile of 16 points (dim, 16), as `nearest()` wants it.
struct TileSearch {
  const float* centroids;   ///< (n_centroids, dim)
  const float* half_norms;  ///< Half of each one's squared length.
  std::int32_t n_centroids;

  using Run = void (*)(const TileSearch&, const float* tile, std::int32_t* codes,
                       float* squared_distances);
};

/// Of dim 2, 4 and 8.
struct TileSearches {
  TileSearch::Run of2, of4, of8;
};
extern const TileSearches kTileSearches;
extern const TileSearches kTileSearchesAvx2;
extern const TileSearches kTileSearchesAvx512;

namespace {

/// The nearest centroid is the one of the largest x . c - |c|^2 / 2. Compiled once an instruction
/// set.
template <int kDim>
void search_tile(const TileSearch& search, const float* tile, std::int32_t* codes,
                 float* squared_distances) {
  using Lanes = float __attribute__((vector_size(64)));
  using Codes = std::int32_t __attribute__((vector_size(64)));
  Lanes x[kDim];
  std::memcpy(x, tile, sizeof x);
  Lanes best = {};
  Codes code = {};
  for (std::int32_t c = 0; c < search.n_centroids; ++c) {
    const float* const centroid = search.centroids + static_cast<std::ptrdiff_t>(c) * kDim;
    Lanes score = x[0] * centroid[0] - search.half_norms[c];
    for (int j = 1; j < kDim; ++j) score += x[j] * centroid[j];
    const Codes better = c == 0 ? Codes{} - 1 : score > best;
    best = better ? score : best;
    code = better ? Codes{} + c : code;
  }
  Lanes norm = x[0] * x[0];
  for (int j = 1; j < kDim; ++j) norm += x[j] * x[j];
  const Lanes distance = norm - 2.0F * best;
  std::memcpy(codes, &code, sizeof code);
  std::memcpy(squared_distances, &distance, sizeof distance);
}

}  // namespace

}  // namespace kvpool::calibration
