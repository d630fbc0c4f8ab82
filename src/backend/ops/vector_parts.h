#pragma once

#include <mlx/array.h>

#include <optional>

#include "codec/vector_quantizer.h"

namespace kvpool::detail {

/// One quantizer composed of MLX's ops, for the parts of all its KV heads at once. Parts decode to
/// what codec::decode() reads, but for rounding; a sub-vector as near to two centroids as rounding
/// can tell may get another code than codec::encode() gives it. Lazy; on the stream in use.
class VectorParts {
 public:
  /// The codebooks must be of one kind.
  explicit VectorParts(const codec::VectorQuantizer& quantizer);

  /// Parts (n_heads, n, part bytes), of uint8, of fp32 rows (n_heads, n, block_size, head_dim).
  mlx::core::array encode(const mlx::core::array& rows) const;
  /// The rows of such parts.
  mlx::core::array decode(const mlx::core::array& parts, int block_size) const;

 private:
  // codec::Space on rows of all heads.
  mlx::core::array enter_space(const mlx::core::array& rows) const;
  mlx::core::array leave_space(const mlx::core::array& rows) const;

  mlx::core::array turn(const mlx::core::array& rows) const;
  mlx::core::array turn_back(const mlx::core::array& rows) const;

  mlx::core::array nearest(const mlx::core::array& vectors) const;
  mlx::core::array pack(const mlx::core::array& codes) const;
  mlx::core::array unpack(const mlx::core::array& parts, int block_size) const;

  const int sub_dim_;
  const int code_bits_;
  const int head_dim_;
  const bool hadamard_;
  // Per head, (n_heads, 1, 1, head_dim) or (n_heads, 1, 1, 1).
  const mlx::core::array smooth_, mean_, scale_;
  /// (n_heads, 1, head_dim, head_dim); none if all heads are turned by Hadamard, or none is.
  const std::optional<mlx::core::array> rotation_, back_;
  const mlx::core::array first_centroid_;  ///< Of the head's codebook, in centroids_.
  const mlx::core::array centroids_;       ///< (all centroids, sub_dim) of int8.
};

}  // namespace kvpool::detail
