// Packed parts to fp32 rows, a full tile at a time; the reference does what is left of one.

#include "kernels/avx512/decode.h"

#include "kernels/avx512/common.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx512 {
namespace {

using codec::Role;

/// Rows of a tile that are wanted, and where the first of these goes.
struct Rows {
  int first;
  int end;
  float* out;
  std::size_t stride;

  void store(int token, int channel, __mmask16 mask, __m512 values) const {
    if (token < first || token >= end) return;
    _mm512_mask_storeu_ps(out + as_size(token - first) * stride + as_size(channel), mask, values);
  }
};

/// Element j of vector i goes to element i of vector j.
void transpose(__m512 (&x)[16]) {
  __m512 pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  __m512 quads[16];
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(pairs[i + j]);
      const __m512d b = _mm512_castps_pd(pairs[i + j + 2]);
      quads[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      quads[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 low = _mm512_shuffle_f32x4(quads[j], quads[j + 4], 0x44);
    const __m512 low2 = _mm512_shuffle_f32x4(quads[j + 8], quads[j + 12], 0x44);
    const __m512 high = _mm512_shuffle_f32x4(quads[j], quads[j + 4], 0xEE);
    const __m512 high2 = _mm512_shuffle_f32x4(quads[j + 8], quads[j + 12], 0xEE);
    x[j] = _mm512_shuffle_f32x4(low, low2, 0x88);
    x[j + 4] = _mm512_shuffle_f32x4(low, low2, 0xDD);
    x[j + 8] = _mm512_shuffle_f32x4(high, high2, 0x88);
    x[j + 12] = _mm512_shuffle_f32x4(high, high2, 0xDD);
  }
}

/// scale * code + bias in two roundings, as the reference does.
__m512 affine(__m512i code, __m512 scale, __m512 bias) {
  return _mm512_add_ps(_mm512_mul_ps(scale, _mm512_cvtepi32_ps(code)), bias);
}

template <int kBits>
__m512i code_in(__m512i words, int index) {
  return _mm512_and_si512(_mm512_srli_epi32(words, static_cast<unsigned>(kBits * index)),
                          _mm512_set1_epi32((1 << kBits) - 1));
}

/// A tile of keys; affine_of(channel) gives scale and bias of the 16 tokens.
template <int kBits, typename AffineOf>
void decode_key_tile(const PartShape& shape, const std::byte* codes, const AffineOf& affine_of,
                     const Rows& rows) {
  constexpr int kPerWord = 32 / kBits;
  for (int first = 0; first < shape.head_dim; first += 16) {
    const int n = shape.head_dim - first < 16 ? shape.head_dim - first : 16;
    __m512 x[16];
    for (int c = 0; c < 16; ++c) {
      x[c] = _mm512_setzero_ps();
      if (c >= n) continue;
      const int channel = first + c;
      const __m512i words = _mm512_loadu_si512(codes + as_size(channel / kPerWord) * 64);
      const auto [scale, bias] = affine_of(channel);
      x[c] = affine(code_in<kBits>(words, channel % kPerWord), scale, bias);
    }
    transpose(x);
    for (int t = 0; t < 16; ++t) rows.store(t, first, first_lanes(n), x[t]);
  }
}

template <int kBits>
void decode_value_tile(const PartShape& shape, const std::byte* tile, const Rows& rows) {
  constexpr int kPerWord = 32 / kBits;
  const int dim = shape.head_dim;
  const std::byte* const scales = tile + code_bytes(Role::kValues, kBits, kTileTokens, dim);
  const std::byte* const biases = scales + group_bytes(shape, kTileTokens) / 2;
  for (int d = 0; d < dim; d += 16) {
    const __mmask16 mask = first_lanes(dim - d);
    const std::size_t group = as_size(d / shape.group_size) * 32;
    alignas(64) float scale[16];
    alignas(64) float bias[16];
    _mm512_store_ps(scale, load_halves(scales + group));
    _mm512_store_ps(bias, load_halves(biases + group));
    for (int word = 0; word < kWords<kBits>; ++word) {
      const __m512i words = _mm512_maskz_loadu_epi32(mask, tile + 4 * as_size(word * dim + d));
      for (int i = 0; i < kPerWord; ++i) {
        const int token = word * kPerWord + i;
        rows.store(token, d, mask,
                   affine(code_in<kBits>(words, i), _mm512_set1_ps(scale[token]),
                          _mm512_set1_ps(bias[token])));
      }
    }
  }
}

/// Full tiles by `tile(index, rows)`, the rest by the reference.
template <typename DecodeTile>
void for_tiles(const PartShape& shape, const std::byte* part, int first_token, int n_tokens,
               float* out, scalar::Decode reference, const DecodeTile& decode_tile) {
  const std::size_t dim = as_size(shape.head_dim);
  const int end = first_token + n_tokens;
  for (int token = first_token; token < end;) {
    const Tile tile = tile_at(shape, token / kTileTokens);
    const int first = token % kTileTokens;
    const int left = end - token;
    const int n = left < tile.n_tokens - first ? left : tile.n_tokens - first;
    if (tile.n_tokens == kTileTokens) {
      decode_tile(as_size(tile.index), Rows{first, first + n, out, dim});
    } else {
      reference(shape, part, token, n, out);
    }
    token += n;
    out += as_size(n) * dim;
  }
}

template <int kBits>
void decode_affine_keys(const PartShape& shape, const std::byte* part, int first_token,
                        int n_tokens, float* out) {
  const auto reference = scalar::affine_keys(kAffineLayout<kBits>).decode;
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  for_tiles(shape, part, first_token, n_tokens, out, reference,
            [&](std::size_t index, const Rows& rows) {
              const std::byte* const tile = part + index * tile_bytes;
              const std::byte* const scales =
                  tile + code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
              const std::byte* const biases = scales + group_bytes(shape, kTileTokens) / 2;
              const auto affine_of = [&](int channel) {
                struct {
                  __m512 scale, bias;
                } result;
                const std::size_t group = as_size(channel / shape.group_size) * 32;
                result.scale = load_halves(scales + group);
                result.bias = load_halves(biases + group);
                return result;
              };
              decode_key_tile<kBits>(shape, tile, affine_of, rows);
            });
}

template <int kBits>
void decode_channel_keys(const PartShape& shape, const std::byte* part, int first_token,
                         int n_tokens, float* out) {
  const auto reference =
      scalar::channel_keys(kBits == 4 ? Layout::kChannel4 : Layout::kChannel2).decode;
  alignas(64) float scales[codec::kMaxHeadDim];
  alignas(64) float biases[codec::kMaxHeadDim];
  for (int d = 0; d < shape.head_dim; d += 16) {
    const __mmask16 mask = first_lanes(shape.head_dim - d);
    _mm512_store_ps(scales + d, load_halves(part + 2 * d, mask));
    _mm512_store_ps(biases + d, load_halves(part + channel_bytes(shape) / 2 + 2 * d, mask));
  }
  const std::size_t tile_bytes = code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
  for_tiles(shape, part, first_token, n_tokens, out, reference,
            [&](std::size_t index, const Rows& rows) {
              const auto affine_of = [&](int channel) {
                struct {
                  __m512 scale, bias;
                } result;
                result.scale = _mm512_set1_ps(scales[channel]);
                result.bias = _mm512_set1_ps(biases[channel]);
                return result;
              };
              decode_key_tile<kBits>(shape, part + channel_bytes(shape) + index * tile_bytes,
                                     affine_of, rows);
            });
}

template <int kBits>
void decode_affine_values(const PartShape& shape, const std::byte* part, int first_token,
                          int n_tokens, float* out) {
  const auto reference = scalar::affine_values(kAffineLayout<kBits>).decode;
  const std::size_t tile_bytes = affine_tile_bytes(Role::kValues, kBits, shape, kTileTokens);
  for_tiles(shape, part, first_token, n_tokens, out, reference,
            [&](std::size_t index, const Rows& rows) {
              decode_value_tile<kBits>(shape, part + index * tile_bytes, rows);
            });
}

}  // namespace

Decode key_decoder(Layout layout) {
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

Decode value_decoder(Layout layout) {
  if (layout == Layout::kAffine8) return decode_affine_values<8>;
  return layout == Layout::kAffine4 ? decode_affine_values<4> : decode_affine_values<2>;
}

}  // namespace kvpool::kernels::avx512
