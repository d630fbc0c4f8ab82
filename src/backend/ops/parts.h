#pragma once

#include <mlx/array.h>

#include "backend/ops/vector_parts.h"
#include "codec/codec.h"

namespace kvpool::detail {

// The packed codecs composed of MLX's ops: the bytes that codec::encode() writes and
// codec::decode() reads (of vecinfer as VectorParts says), for n parts of each KV head at once.
// Lazy; on the stream in use. `vectors` is that of the geometry's quantizer, if it has one.

/// Parts of fp32 rows (n_heads, n, block_size, head_dim): (n_heads, n, part bytes) of uint8.
mlx::core::array encode_parts(const codec::PartGeometry& geometry, const VectorParts* vectors,
                              const mlx::core::array& rows);

/// The fp32 rows of such parts.
mlx::core::array decode_parts(const codec::PartGeometry& geometry, const VectorParts* vectors,
                              const mlx::core::array& parts);

/// codec::hadamard() along the last axis.
mlx::core::array hadamard(const mlx::core::array& rows);

}  // namespace kvpool::detail
