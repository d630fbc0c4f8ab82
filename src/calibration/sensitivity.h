#pragma once

#include <mlx/array.h>

#include <cstdint>

namespace kvpool::calibration {

/// What errors of stored tokens cost in the output of attention, to first order, as squares of the
/// output's error: an error e of a token's key adds sum over queries q of p^2 |v - o|^2 (q . e)^2,
/// one of its value sum of p^2 |e|^2, where q is scaled as for scores, p is what the query gives
/// the token of its attention, v the token's value and o the output. Float32, evaluated.
struct Sensitivity {
  mlx::core::array keys;    ///< (B, n_kv_heads, S): sum of p^2 |v - o|^2 |q|^2 for each token.
  mlx::core::array values;  ///< (B, n_kv_heads, S): sum of p^2.
  mlx::core::array
      channels;  ///< (n_kv_heads, head_dim): sum of p^2 |v - o|^2 q[d]^2 over tokens, too.
};

/// By the queries at least `window` tokens after a token, those of all heads of its group. Causal.
/// @param queries  (B, n_heads, S, head_dim)
/// @param keys, values  (B, n_kv_heads, S, head_dim)
Sensitivity sensitivity(const mlx::core::array& queries, const mlx::core::array& keys,
                        const mlx::core::array& values, float scale, std::int64_t window);

}  // namespace kvpool::calibration
