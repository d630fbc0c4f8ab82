#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "codec/codec.h"

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
  VectorCode code() const noexcept { return {sub_dim, code_bits}; }
  std::size_t nbytes() const noexcept { return centroids.size() + planes.size() + sizeof scale; }
};

/// @throws std::invalid_argument naming what does not fit, and what is allowed.
std::shared_ptr<const Codebook> make_codebook(int sub_dim, int code_bits, float scale,
                                              std::vector<std::int8_t> centroids);

/// What is coded of one head's row x: (x - mean) / smooth, channel by channel, then rotated, or put
/// through hadamard(), or as it is.
struct HeadTransform {
  std::vector<float> smooth;  ///< (head_dim,), > 0. VecInfer's lambda, and the scale of the head.
  std::vector<float> mean;    ///< (head_dim,)
  bool hadamard = true;       ///< If there is no rotation.
  /// (head_dim, head_dim), orthonormal: a row becomes row * rotation. Or empty.
  std::vector<float> rotation;
  std::vector<float> back;  ///< Its transpose.

  std::size_t nbytes() const noexcept {
    return (smooth.size() + mean.size() + rotation.size() + back.size()) * sizeof(float);
  }
};

/// Makes the rotation whose transpose has these rows, once they are orthonormal: (dim, dim) whole
/// numbers, each row in turn cleared of those before it (Gram-Schmidt). The same everywhere.
/// @throws std::invalid_argument if the rows are not as many as channels, or depend on each other.
void set_rotation(HeadTransform& transform, std::span<const std::int8_t> rows);

/// How one layer's keys, or its values, are product-quantised (Jegou et al. 2011; VecInfer,
/// arXiv:2510.06175, Section 3). One entry a KV head in both; all codebooks have one code.
struct VectorQuantizer {
  std::vector<HeadTransform> transforms;
  std::vector<std::shared_ptr<const Codebook>> codebooks;
};

}  // namespace kvpool::codec
