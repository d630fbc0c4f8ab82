#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/attention.h"
#include "sequence/sequence.h"

namespace kvpool::detail {

/// What a query sees, beside the tokens of its own sequence.
struct Visibility {
  bool causal = false;
  std::int64_t window = 0;
  std::optional<mlx::core::array> mask;   ///< bool or float, broadcastable to (B, n_heads, S, L).
  std::optional<mlx::core::array> sinks;  ///< (n_heads,)
  float soft_cap = 0.0F;
};

/// One row, and the absolute position of the first query.
struct AttendRow {
  std::shared_ptr<const AttendView> view;
  std::int64_t query_position;
  std::int64_t length;
};

/// Attention of `queries` (B, n_heads, S, key dim) over blocks where they lie: (B, n_heads, S,
/// value dim) of the queries' type. The next link of the chain. Lazy.
/// @throws std::invalid_argument naming what does not fit.
mlx::core::array attend(BlockMemory& memory, const LayerFormat& format,
                        const std::vector<AttendRow>& rows, const mlx::core::array& queries,
                        float scale, const Visibility& visibility);

}  // namespace kvpool::detail
