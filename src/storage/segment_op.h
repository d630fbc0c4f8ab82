#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <cstddef>
#include <cstdint>

#include "kvpool/block_format.h"

namespace kvpool::detail {

/// Where a block lies in its segment and how its rows lie in the block: a run of rows a head.
struct BlockPlace {
  std::size_t offset;  ///< Of the block in the segment, in bytes.
  BlockFormat format;
  std::int64_t n_heads;
  std::int64_t block_size;
  std::int64_t width;  ///< Elements of a row.

  std::size_t row_bytes() const noexcept {
    return static_cast<std::size_t>(format.row_bytes(width));
  }
  std::size_t block_bytes() const noexcept {
    return static_cast<std::size_t>(n_heads * block_size) * row_bytes();
  }
};

// Each op takes the segment's present version and puts the next one in its place. The versions share
// one buffer and form a chain, so that MLX runs what touches a segment in the order in which it was
// asked for, however late and on whichever streams.

/// Zeroes the whole block.
void clear_block(mlx::core::array& segment, const BlockPlace& place, mlx::core::Stream stream);

/// Writes rows from `first` on. `rows` is (n_heads, n, width) of the format's dtype.
void write_rows(mlx::core::array& segment, const BlockPlace& place, std::int64_t first,
                const mlx::core::array& rows, mlx::core::Stream stream);

/// The first `n` rows, (n_heads, n, width) of the format's dtype.
mlx::core::array read_rows(mlx::core::array& segment, const BlockPlace& place, std::int64_t n,
                           mlx::core::Stream stream);

/// All rows as they lie: (n_heads, block_size, width) for floats, (n_heads, block_size, row bytes)
/// of uint8 for codes.
mlx::core::array read_packed(mlx::core::array& segment, const BlockPlace& place,
                             mlx::core::Stream stream);

}  // namespace kvpool::detail
