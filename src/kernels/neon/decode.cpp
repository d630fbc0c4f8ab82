// Packed parts to fp32 rows, a full tile at a time; the reference does what is left of one.

#include "kernels/neon/decode.h"

#include "kernels/neon/common.h"

namespace kvpool::kernels::neon {
namespace {

using codec::Role;

/// Rows of a tile that are wanted, and where the first of these goes.
struct Rows {
  int first;
  int end;
  float* out;
  int stride;

  void store(int token, int channel, float32x4_t values) const {
    if (token < first || token >= end) return;
    vst1q_f32(out + (token - first) * stride + channel, values);
  }
};

/// Element j of vector i goes to element i of vector j.
void transpose(float32x4_t (&x)[4]) {
  const auto pairs = [](float32x4_t a, float32x4_t b, bool high) {
    const float64x2_t wide_a = vreinterpretq_f64_f32(a);
    const float64x2_t wide_b = vreinterpretq_f64_f32(b);
    return vreinterpretq_f32_f64(high ? vzip2q_f64(wide_a, wide_b) : vzip1q_f64(wide_a, wide_b));
  };
  const float32x4_t even_low = vtrn1q_f32(x[0], x[1]);
  const float32x4_t odd_low = vtrn2q_f32(x[0], x[1]);
  const float32x4_t even_high = vtrn1q_f32(x[2], x[3]);
  const float32x4_t odd_high = vtrn2q_f32(x[2], x[3]);
  x[0] = pairs(even_low, even_high, false);
  x[1] = pairs(odd_low, odd_high, false);
  x[2] = pairs(even_low, even_high, true);
  x[3] = pairs(odd_low, odd_high, true);
}

/// scale * code + bias in two roundings, as the reference does.
float32x4_t affine(uint32x4_t code, float32x4_t scale, float32x4_t bias) {
  return vaddq_f32(vmulq_f32(scale, vcvtq_f32_u32(code)), bias);
}

struct Affine4 {
  float32x4_t scale;
  float32x4_t bias;
};

/// A tile of keys; affine_of(channel, token) gives scale and bias of 4 tokens.
template <int kBits, typename AffineOf>
void decode_key_tile(const PartShape& shape, const std::byte* codes, const AffineOf& affine_of,
                     const Rows& rows) {
  constexpr int kPerWord = 32 / kBits;
  for (int token = rows.first / 4 * 4; token < rows.end; token += 4) {
    for (int first = 0; first < shape.head_dim; first += 4) {
      float32x4_t x[4];
      for (int i = 0; i < 4; ++i) {
        const int channel = first + i;
        const uint32x4_t words =
            load_words(codes + 4 * as_size(channel / kPerWord * kTileTokens + token));
        const Affine4 of = affine_of(channel, token);
        x[i] = affine(code_in<kBits>(words, channel % kPerWord), of.scale, of.bias);
      }
      transpose(x);
      for (int i = 0; i < 4; ++i) rows.store(token + i, first, x[i]);
    }
  }
}

template <int kBits>
void decode_value_tile(const PartShape& shape, const std::byte* tile, const Rows& rows) {
  constexpr int kPerWord = 32 / kBits;
  const int dim = shape.head_dim;
  const std::byte* const scales = tile + code_bytes(Role::kValues, kBits, kTileTokens, dim);
  const std::byte* const biases = scales + group_bytes(shape, kTileTokens) / 2;
  for (int g = 0; g < n_groups(shape); ++g) {
    float scale[kTileTokens];
    float bias[kTileTokens];
    for (int t = 0; t < kTileTokens; t += 4) {
      vst1q_f32(scale + t, load_halves(scales + 2 * (g * kTileTokens + t)));
      vst1q_f32(bias + t, load_halves(biases + 2 * (g * kTileTokens + t)));
    }
    for (int d = g * shape.group_size; d < dim && d < (g + 1) * shape.group_size; d += 4) {
      for (int word = 0; word < kTileTokens / kPerWord; ++word) {
        const uint32x4_t words = load_words(tile + 4 * as_size(word * dim + d));
        for (int i = 0; i < kPerWord; ++i) {
          const int token = word * kPerWord + i;
          rows.store(token, d,
                     affine(code_in<kBits>(words, i), vdupq_n_f32(scale[token]),
                            vdupq_n_f32(bias[token])));
        }
      }
    }
  }
}

/// Full tiles by `decode_tile(index, rows)`, the rest by the reference.
template <typename DecodeTile>
void for_tiles(const PartShape& shape, const std::byte* part, int first_token, int n_tokens,
               float* out, scalar::Decode reference, const DecodeTile& decode_tile) {
  const int end = first_token + n_tokens;
  for (int token = first_token; token < end;) {
    const Tile tile = tile_at(shape, token / kTileTokens);
    const int first = token % kTileTokens;
    const int left = end - token;
    const int n = left < tile.n_tokens - first ? left : tile.n_tokens - first;
    if (tile.n_tokens == kTileTokens) {
      decode_tile(as_size(tile.index), Rows{first, first + n, out, shape.head_dim});
    } else {
      reference(shape, part, token, n, out);
    }
    token += n;
    out += n * shape.head_dim;
  }
}

template <int kBits>
void decode_affine_keys(const PartShape& shape, const std::byte* part, int first_token,
                        int n_tokens, float* out) {
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  for_tiles(
      shape, part, first_token, n_tokens, out, scalar::affine_keys(kAffineLayout<kBits>).decode,
      [&](std::size_t index, const Rows& rows) {
        const std::byte* const tile = part + index * tile_bytes;
        const std::byte* const scales =
            tile + code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
        const std::byte* const biases = scales + group_bytes(shape, kTileTokens) / 2;
        const auto affine_of = [&](int channel, int token) {
          const std::size_t at = 2 * as_size(channel / shape.group_size * kTileTokens + token);
          return Affine4{load_halves(scales + at), load_halves(biases + at)};
        };
        decode_key_tile<kBits>(shape, tile, affine_of, rows);
      });
}

template <int kBits>
void decode_channel_keys(const PartShape& shape, const std::byte* part, int first_token,
                         int n_tokens, float* out) {
  const auto reference =
      scalar::channel_keys(kBits == 4 ? Layout::kChannel4 : Layout::kChannel2).decode;
  float scales[codec::kMaxHeadDim];
  float biases[codec::kMaxHeadDim];
  for (int d = 0; d < shape.head_dim; d += 4) {
    vst1q_f32(scales + d, load_halves(part + 2 * d));
    vst1q_f32(biases + d, load_halves(part + channel_bytes(shape) / 2 + 2 * d));
  }
  const std::size_t tile_bytes = code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
  for_tiles(shape, part, first_token, n_tokens, out, reference,
            [&](std::size_t index, const Rows& rows) {
              const auto affine_of = [&](int channel, int /*token*/) {
                return Affine4{vdupq_n_f32(scales[channel]), vdupq_n_f32(biases[channel])};
              };
              decode_key_tile<kBits>(shape, part + channel_bytes(shape) + index * tile_bytes,
                                     affine_of, rows);
            });
}

template <int kBits>
void decode_affine_values(const PartShape& shape, const std::byte* part, int first_token,
                          int n_tokens, float* out) {
  const std::size_t tile_bytes = affine_tile_bytes(Role::kValues, kBits, shape, kTileTokens);
  for_tiles(shape, part, first_token, n_tokens, out,
            scalar::affine_values(kAffineLayout<kBits>).decode,
            [&](std::size_t index, const Rows& rows) {
              decode_value_tile<kBits>(shape, part + index * tile_bytes, rows);
            });
}

}  // namespace

scalar::Decode key_decoder(Layout layout) {
  switch (layout) {
    case Layout::kAffine8:
      return decode_affine_keys<8>;
    case Layout::kAffine4:
      return decode_affine_keys<4>;
    case Layout::kAffine2:
      return decode_affine_keys<2>;
    case Layout::kChannel4:
      return decode_channel_keys<4>;
    default:
      return decode_channel_keys<2>;
  }
}

scalar::Decode value_decoder(Layout layout) {
  if (layout == Layout::kAffine8) return decode_affine_values<8>;
  return layout == Layout::kAffine4 ? decode_affine_values<4> : decode_affine_values<2>;
}

}  // namespace kvpool::kernels::neon
