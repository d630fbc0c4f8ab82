#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <memory>
#include <span>

#include "backend/ops/vector_parts.h"
#include "sequence/sequence.h"

namespace kvpool::detail {

/// A layer's format, and what codes its vecinfer blocks: null for other formats.
struct OpsFormat {
  const LayerFormat& layer;
  std::shared_ptr<const VectorParts> vectors[2];
};

/// The type of raw rows.
mlx::core::Dtype dtype_of(const codec::Format& raw);

/// Keys (role 0) or values of tokens `from` to `to`, which `blocks` have: (n_kv_heads, tokens, dim)
/// of `dtype`; after hadamard() if `turned`.
mlx::core::array tokens_of(const OpsFormat& format, int role, std::span<const TokenBlock> blocks,
                           std::int64_t from, std::int64_t to, mlx::core::Dtype dtype,
                           bool turned = false);

/// Whether some of `blocks` are stored after hadamard().
bool any_turned(std::span<const TokenBlock> blocks, int role) noexcept;

/// mx::slice of one axis.
mlx::core::array cut(const mlx::core::array& a, int axis, std::int64_t from, std::int64_t to);

}  // namespace kvpool::detail
