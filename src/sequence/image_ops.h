#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "sequence/sequence.h"

namespace kvpool::detail {

/// The bytes of a row's blocks one behind the other, keys and values: two uint8 vectors. A block that
/// is not full has only its tokens' rows. Lazy and no link of the chain, like gather().
std::pair<mlx::core::array, mlx::core::array> read_image(BlockMemory& memory,
                                                         const LayerFormat& format,
                                                         std::vector<TokenBlock> blocks);

/// Fills `blocks` from such bytes, as the next link of the chain. Lazy.
void write_image(BlockMemory& memory, const LayerFormat& format,
                 std::span<const TokenBlock> blocks, const mlx::core::array& keys,
                 const mlx::core::array& values);

/// Bytes that read_image() has for keys (role 0) or values (role 1).
std::size_t image_bytes(const LayerFormat& format, std::span<const TokenBlock> blocks, int role);

}  // namespace kvpool::detail
