#pragma once

#include <mlx/array.h>

#include "codec/codec.h"

namespace kvpool::detail {

// The integer codecs composed of MLX's ops: the same bytes as codec::encode() writes and
// codec::decode() reads, for n parts at once. Lazy; on the stream in use.

/// Parts of fp32 rows (n, block_size, head_dim): (n, part bytes) of uint8.
mlx::core::array encode_parts(const codec::PartGeometry& geometry, const mlx::core::array& rows);

/// codec::hadamard() along the last axis.
mlx::core::array hadamard(const mlx::core::array& rows);

/// The fp32 rows (n, block_size, head_dim) of parts (n, part bytes).
mlx::core::array decode_parts(const codec::PartGeometry& geometry, const mlx::core::array& parts);

}  // namespace kvpool::detail
