#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/decode.h"

/// Where the elements of a sealed part lie. A part is of one KV head, keys or values; it is made of
/// tiles of 16 tokens, in order:
///
///   affine keys, values   [codes of the tile][(scale, bias) fp16 pairs, 16 tokens x groups]
///   kivi keys             scale[channel], bias[channel] fp16, then [codes] a tile; the scale is
///                         stored times 2^kivi_scale_exponent(channel)
///   kivi values           as affine values
///                         (values' pairs are stored times powers of two, too: see below)
///   kVector               [codes] a tile
///
/// The codes of a tile are laid out by lane of the warp that reads it: lane l = 4g + c has
/// head_dim * bits / 16 bytes, in chunks of 16 (or one of 8 or 4): chunk i of lane l is at
/// (i * 32 + l) * 16. Which tokens and channels are a lane's is what the matrix instructions want,
/// so that no element moves between lanes:
///
///   keys    tokens g and g + 8 of the tile
///   values  tokens 2c, 2c + 1, 2c + 8, 2c + 9; channels 64i + 8g ... 64i + 8g + 7
///
/// The functions below say which bit. x is near scale * code + bias.
namespace kvpool::cuda {

template <Sealed kFormat>
struct Traits;
template <>
struct Traits<Sealed::kInt8> {
  static constexpr int kBits = 8;
};
template <>
struct Traits<Sealed::kInt4> {
  static constexpr int kBits = 4;
};
template <>
struct Traits<Sealed::kInt2> {
  static constexpr int kBits = 2;
};
template <>
struct Traits<Sealed::kKivi4> {
  static constexpr int kBits = 4;
};
template <>
struct Traits<Sealed::kKivi2> {
  static constexpr int kBits = 2;
};

__host__ __device__ constexpr bool is_kivi(Sealed f) {
  return f == Sealed::kKivi4 || f == Sealed::kKivi2;
}
__host__ __device__ constexpr bool is_affine(Sealed f) {
  return f == Sealed::kInt8 || f == Sealed::kInt4 || f == Sealed::kInt2;
}
__host__ __device__ constexpr int bits_of(Sealed f) {
  return f == Sealed::kInt8 ? 8 : f == Sealed::kInt4 || f == Sealed::kKivi4 ? 4 : 2;
}
__host__ __device__ constexpr int code_bytes(Sealed f, int dim) {
  return kTileTokens * dim * bits_of(f) / 8;
}
__host__ __device__ constexpr int scale_bytes(int dim, int group) {
  return kTileTokens * (dim / group) * 4;
}
__host__ __device__ constexpr int key_header_bytes(Sealed f, int dim) {
  return is_kivi(f) ? dim * 4 : 0;
}
__host__ __device__ constexpr int key_tile_bytes(Sealed f, int dim, int group, int sub) {
  if (f == Sealed::kVector) return kTileTokens * dim / sub;
  return code_bytes(f, dim) + (is_affine(f) ? scale_bytes(dim, group) : 0);
}
__host__ __device__ constexpr int value_tile_bytes(Sealed f, int dim, int group, int sub) {
  if (f == Sealed::kVector) return kTileTokens * dim / sub;
  return code_bytes(f, dim) + scale_bytes(dim, group);
}

/// Byte of `word` of a lane within a tile's codes.
__host__ __device__ constexpr int word_offset(int lane, int word, int lane_bytes) {
  return lane_bytes >= 16 ? ((word / 4) * 32 + lane) * 16 + (word % 4) * 4
                          : lane * lane_bytes + word * 4;
}

/// A code: `bits` from bit `shift` of the 32-bit word at `offset` of a tile.
struct CodePlace {
  int offset;
  int shift;
};

__host__ __device__ inline CodePlace affine_key(int bits, int dim, int token, int d) {
  const int s = d / 32, hi = (d % 32) / 16, c = (d % 16) / 4, b = d % 4;
  const int lane = (token % 8) * 4 + c, th = token / 8;
  const int bytes = dim * bits / 16;
  if (bits == 8) return {word_offset(lane, s * 4 + hi * 2 + th, bytes), 8 * b};
  if (bits == 4) return {word_offset(lane, s * 2 + th, bytes), 8 * b + 4 * hi};
  return {word_offset(lane, (s / 2) * 2 + th, bytes), 8 * b + 2 * ((s % 2) * 2 + hi)};
}
/// A pair of codes is read where it lies as two subnormal fp16 numbers, or, if it reaches over bit
/// 9 (or 25), moved down to bit 0: the bit that pair p of a word is read at.
__host__ __device__ constexpr int kivi_field_shift(int bits, int p) {
  return p % (16 / bits) % (bits == 4 ? 2 : 5) * bits;
}
/// Makes up for that bit: 8 less it.
__host__ __device__ constexpr int kivi_scale_exponent(int bits, int d) {
  const int step = (d / 32) * 2 + (d % 8) / 4, half = (d % 4) / 2;
  return 8 - kivi_field_shift(bits, step * 2 + half);
}
/// Pairs of channels 16 bits apart.
__host__ __device__ inline CodePlace kivi_key(int bits, int dim, int token, int d) {
  const int c = (d / 8) % 4, step = (d / 32) * 2 + (d % 8) / 4, half = (d % 4) / 2;
  const int lane = (token % 8) * 4 + c, th = token / 8;
  const int bytes = dim * bits / 16;
  const int steps = bits == 4 ? 2 : 4;  // To a word.
  return {word_offset(lane, (step / steps) * 2 + th, bytes),
          bits * ((step % steps) * 2 + half) + 16 * (d % 2)};
}
__host__ __device__ inline CodePlace affine_value(int bits, int dim, int token, int d) {
  const int i = d / 64, g = (d % 64) / 8, e = d % 8;
  const int lane = g * 4 + (token % 8) / 2, tok = (token / 8) * 2 + token % 2;
  const int bytes = dim * bits / 16;
  if (bits == 8) return {word_offset(lane, (i * 4 + tok) * 2 + e / 4, bytes), 8 * (e % 4)};
  if (bits == 4) return {word_offset(lane, i * 4 + tok, bytes), 4 * (e / 2) + 16 * (e % 2)};
  if (dim == 64) {
    return {word_offset(lane, tok / 2, bytes), 2 * (e / 2 * 2 + tok % 2) + 16 * (e % 2)};
  }
  return {word_offset(lane, tok, bytes), 2 * (e / 2 * 2 + i) + 16 * (e % 2)};
}
/// Codes of values are read as subnormal fp16 numbers too, so their scales and biases are stored
/// times a power of two: scales of 2-bit groups must be under 64, of 4-bit groups under 16.
__host__ __device__ constexpr int value_scale_exponent(int bits, int dim, int token, int d) {
  return bits == 8 ? 0 : bits == 4 ? 12 : (dim == 64 ? token % 2 : d / 64 % 2) ? 8 : 10;
}
__host__ __device__ constexpr int value_bias_exponent(int bits) {
  return bits == 8 ? 0 : bits == 4 ? -6 : -8;
}
/// Byte within a tile's codes of sub-vector j, which is `sub` channels from sub * j on.
__host__ __device__ inline int vector_key(int sub, int dim, int token, int j) {
  const int lane = token % 8 * 4, th = token / 8, bytes = dim / (2 * sub);
  if (sub == 2) {
    const int i = j / 16, hi = j % 16 / 8, c = j % 8 / 2;
    return word_offset(lane + c, 2 * i + th, bytes) + hi * 2 + j % 2;
  }
  if (sub == 4) {
    const int i = j / 8, hi = j % 8 / 4, c = j % 4;
    return word_offset(lane + c, i, bytes) + hi * 2 + th;
  }
  const int i = j / 4, c = j % 4;
  return word_offset(lane + c, i / 2, bytes) + i % 2 * 2 + th;
}
__host__ __device__ inline int vector_value(int sub, int dim, int token, int j) {
  const int n = 8 / sub, i = j / (8 * n), g = j % (8 * n) / n;
  return word_offset(g * 4 + token % 8 / 2, i * n + j % n, dim / (2 * sub)) + token / 8 * 2 +
         token % 2;
}
/// Index among a tile's (scale, bias) pairs.
__host__ __device__ inline int key_scale_index(int dim, int group, int token, int d) {
  return token * (dim / group) + d / group;
}
/// A lane's groups lie side by side: with groups of 32, the even ones first.
__host__ __device__ inline int value_scale_index(int dim, int group, int token, int d) {
  const int k = d / group;
  return token * (dim / group) + (group == 32 ? (k % 2) * (dim / 64) + k / 2 : k);
}

}  // namespace kvpool::cuda
