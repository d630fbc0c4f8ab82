#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

// Where codes, scales and biases of integer formats lie in a part; codec.h describes it.
// Functions are static: a copy compiled for one instruction set must not serve another.
namespace kvpool::kernels {

inline constexpr int kTileTokens = 16;

static constexpr std::size_t ceil_div(std::size_t a, std::size_t b) noexcept {
  return (a + b - 1) / b;
}
static constexpr std::size_t as_size(int value) noexcept { return static_cast<std::size_t>(value); }

static constexpr int n_groups(const PartShape& shape) noexcept {
  return (shape.head_dim + shape.group_size - 1) / shape.group_size;
}

/// 32-bit words that hold the codes of one key in a full tile.
static constexpr std::size_t key_words(int bits, int head_dim) noexcept {
  return ceil_div(as_size(head_dim * bits), 32);
}
/// Bytes that hold the codes of one token in a tile that is not full.
static constexpr std::size_t row_bytes(int bits, int head_dim) noexcept {
  return ceil_div(as_size(head_dim * bits), 8);
}

static constexpr std::size_t code_bytes(codec::Role role, int bits, int n_tile,
                                        int head_dim) noexcept {
  if (n_tile < kTileTokens) return as_size(n_tile) * row_bytes(bits, head_dim);
  if (role == codec::Role::kKeys) return 4 * kTileTokens * key_words(bits, head_dim);
  return as_size(kTileTokens * bits * head_dim / 8);
}

/// Bytes of a tile's scales and of its biases, one after the other, where these are by group.
static constexpr std::size_t group_bytes(const PartShape& shape, int n_tile) noexcept {
  return as_size(2 * 2 * n_groups(shape) * n_tile);
}

/// Bytes of the scales and biases before the first tile, where these are by channel.
static constexpr std::size_t channel_bytes(const PartShape& shape) noexcept {
  return as_size(2 * 2 * shape.head_dim);
}

static constexpr std::size_t affine_tile_bytes(codec::Role role, int bits, const PartShape& shape,
                                               int n_tile) noexcept {
  return code_bytes(role, bits, n_tile, shape.head_dim) + group_bytes(shape, n_tile);
}

/// A tile of a part: `index` * kTileTokens is its first token.
struct Tile {
  int index;
  int n_tokens;
};
static constexpr int n_tiles(int block_size) noexcept {
  return (block_size + kTileTokens - 1) / kTileTokens;
}
static constexpr Tile tile_at(const PartShape& shape, int index) noexcept {
  const int left = shape.block_size - index * kTileTokens;
  return {index, left < kTileTokens ? left : kTileTokens};
}

/// The lowest bit of a code, from the start of its tile.
struct CodePlace {
  std::size_t byte;
  int shift;
};
static constexpr CodePlace code_place(codec::Role role, int bits, int n_tile, int head_dim,
                                      int token, int channel) noexcept {
  if (n_tile < kTileTokens) {
    const int bit = channel * bits;
    return {as_size(token) * row_bytes(bits, head_dim) + as_size(bit / 8), bit % 8};
  }
  const bool keys = role == codec::Role::kKeys;
  const int bit = (keys ? channel : token) * bits;
  const int lane = keys ? token : channel;
  const int n_lanes = keys ? kTileTokens : head_dim;
  return {4 * (as_size(bit / 32) * as_size(n_lanes) + as_size(lane)) + as_size(bit % 32 / 8),
          bit % 8};
}

}  // namespace kvpool::kernels
