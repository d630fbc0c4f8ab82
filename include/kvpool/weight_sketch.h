#pragma once

#include <mlx/array.h>

namespace kvpool {

/// `size` numbers that stand for a weight: a^T W b for random vectors a and b of signs, the same
/// for every weight of its shape, over the root of its elements. Weights that differ by a part of
/// their length have sketches that differ by about that part of theirs.
/// @param weight  (out, in), any floating type.
/// @return (size,), float32. Lazy.
/// @throws std::invalid_argument naming what does not fit.
mlx::core::array weight_sketch(const mlx::core::array& weight, int size);

}  // namespace kvpool
