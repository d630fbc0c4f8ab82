#pragma once

#include <cstddef>
#include <span>

#include "sequence/sequence.h"

namespace kvpool::detail {

/// How the bytes of a block lie in memory and in an image of its row: a stretch a head. Of a raw
/// block an image has only its tokens' rows.
struct Stretch {
  std::size_t in_memory;  ///< From one head to the next.
  std::size_t in_image;   ///< Copied of each.
};
Stretch stretch_of(const LayerFormat& format, const TokenBlock& block, int role);

/// Bytes that the image of `blocks` has for keys (role 0) or values (role 1).
std::size_t image_bytes(const LayerFormat& format, std::span<const TokenBlock> blocks, int role);

}  // namespace kvpool::detail
