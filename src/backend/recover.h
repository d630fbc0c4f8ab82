#pragma once

#include <mlx/array.h>

#include <cstdint>

namespace kvpool::detail {

/// Evaluates a chain of ops, whose first inputs and first outputs are its links, up to `last`. What
/// else an op takes and cannot be evaluated becomes NaN.
/// @return of how many ops.
/// @throws what MLX throws if an op fails though all its inputs can be evaluated.
std::int64_t recover_chain(mlx::core::array last);

}  // namespace kvpool::detail
