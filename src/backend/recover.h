#pragma once

#include <mlx/array.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace kvpool::detail {

/// Inputs of an op that are to fail together.
using InputGroups = std::vector<std::vector<std::size_t>>;

/// Evaluates a chain of ops, whose first inputs and first outputs are its links, up to `last`. A
/// group of inputs of which one cannot be evaluated becomes NaN.
/// @param groups_of  of the op that a link comes from.
/// @return for how many ops.
/// @throws what MLX throws if an op fails though all its inputs can be evaluated.
std::int64_t recover_chain(
    mlx::core::array last,
    const std::function<InputGroups(const mlx::core::array& link)>& groups_of);

}  // namespace kvpool::detail
