#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvpool::codec {

/// Centroids that sub-vectors are coded with. Immutable once made, by make_codebook(); heads and layers
/// may share one.
///
/// Centroid c, channel j, is scale * centroids[c * sub_dim + j]: whole numbers with one scale, so
/// that every kernel and backend decodes alike.
struct Codebook {
  int sub_dim = 4;    ///< Channels to a code: 2, 4 or 8.
  int code_bits = 8;  ///< 8, or 12 with sub_dim 8.
  float scale = 1.0F;
  std::vector<std::int8_t> centroids;  ///< (n_codes, sub_dim), each -127 to 127.
  std::vector<std::int8_t> planes;     ///< The same, (sub_dim, n_codes), for codes of 8 bits.

  std::size_t n_codes() const noexcept { return std::size_t{1} << code_bits; }
};

/// @throws std::invalid_argument naming what does not fit, and what is allowed.
std::shared_ptr<const Codebook> make_codebook(int sub_dim, int code_bits, float scale,
                                              std::vector<std::int8_t> centroids);

/// What is coded of one head's row x: hadamard((x - mean) / smooth), channel by channel; without the
/// transform if `hadamard` is false.
struct HeadTransform {
  std::vector<float> smooth;  ///< (head_dim,), > 0. VecInfer's lambda, and the scale of the head.
  std::vector<float> mean;    ///< (head_dim,)
  bool hadamard = true;
};

/// How one layer's keys, or its values, are product-quantised (Jegou et al. 2011; VecInfer,
/// arXiv:2510.06175, Section 3). One entry a KV head in both.
struct VectorQuantizer {
  std::vector<HeadTransform> transforms;
  std::vector<std::shared_ptr<const Codebook>> codebooks;
};

}  // namespace kvpool::codec
