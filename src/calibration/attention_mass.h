#pragma once

#include <mlx/array.h>

#include <cstdint>

namespace kvpool::calibration {

/// The attention that each token gets from the queries at least `window` tokens later, summed over
/// them and the heads of its group. Causal.
/// @param queries  (B, n_heads, S, head_dim)
/// @param keys  (B, n_kv_heads, S, head_dim)
/// @return (B, n_kv_heads, S), float32, evaluated.
mlx::core::array attention_mass(const mlx::core::array& queries, const mlx::core::array& keys,
                                float scale, std::int64_t window);

}  // namespace kvpool::calibration
