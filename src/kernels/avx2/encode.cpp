// Rows to packed parts, the Hadamard transform and rotations, 8 channels at a time: the bits of the reference.

#include <cstring>

#include "codec/half.h"
#include "kernels/avx2/avx2.h"
#include "kernels/avx2/common.h"

namespace kvpool::kernels::avx2 {
namespace {

using codec::Role;

constexpr int kLanes = 8;

/// The grids of 8 ranges, as fit() makes them: n_steps steps from low to high.
struct Grids {
  __m128i scales;
  __m128i biases;

  Grids(__m256 low, __m256 high, int n_steps) {
    const __m256 most = _mm256_set1_ps(codec::kHalfMax);
    const __m256 least = _mm256_set1_ps(-codec::kHalfMax);
    const __m256 start = _mm256_add_ps(low, _mm256_setzero_ps());
    biases = _mm256_cvtps_ph(_mm256_min_ps(_mm256_max_ps(start, least), most),
                             _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m256 range = _mm256_sub_ps(high, _mm256_cvtph_ps(biases));
    const __m256 step = _mm256_div_ps(range, _mm256_set1_ps(static_cast<float>(n_steps)));
    scales = _mm256_cvtps_ph(_mm256_min_ps(step, most), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  }
};

/// As quantize(); max gives its second operand where the first is no number.
__m256i codes_of(__m256 x, __m256 scale, __m256 bias, int n_steps) {
  const __m256 code = _mm256_round_ps(_mm256_div_ps(_mm256_sub_ps(x, bias), scale),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 bounded = _mm256_min_ps(_mm256_max_ps(code, _mm256_setzero_ps()),
                                       _mm256_set1_ps(static_cast<float>(n_steps)));
  return _mm256_cvtps_epi32(bounded);
}

/// Writes 8 codes, lowest bits first, as kBits bytes.
template <int kBits>
void pack(__m256i codes, std::byte* to) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  __m128i bytes = _mm_packus_epi16(words, words);
  if constexpr (kBits == 4) {
    const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
    bytes = _mm_packus_epi16(pairs, pairs);
  } else if constexpr (kBits == 2) {
    const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x0401));
    const __m128i quads = _mm_madd_epi16(pairs, _mm_set1_epi32(0x100001));
    bytes = _mm_packus_epi16(_mm_packs_epi32(quads, quads), quads);
  }
  const std::int64_t packed = _mm_cvtsi128_si64(bytes);
  std::memcpy(to, &packed, kBits);
}

/// Writes the codes of a tile's tokens; affine_of(channel) gives scales and biases of 8 channels.
template <int kBits, Role kRole>
class TileWriter {
 public:
  TileWriter(std::byte* codes, int n_tokens, int dim)
      : codes_(codes), n_tokens_(n_tokens), dim_(dim) {
    std::memset(codes, 0, code_bytes(kRole, kBits, n_tokens, dim));
  }

  template <typename AffineOf>
  void write(int token, const float* row, const AffineOf& affine_of) const {
    const bool in_words = n_tokens_ == kTileTokens;
    std::byte packed[codec::kMaxHeadDim] = {};
    for (int d = 0; d < dim_; d += kLanes) {
      const auto [scale, bias] = affine_of(d);
      const __m256i codes = codes_of(_mm256_loadu_ps(row + d), scale, bias, (1 << kBits) - 1);
      if (kRole == Role::kValues && in_words) {
        add_to_words(token, d, codes);
      } else {
        pack<kBits>(codes, packed + d * kBits / 8);
      }
    }
    if (!in_words) {
      const std::size_t n = row_bytes(kBits, dim_);
      std::memcpy(codes_ + as_size(token) * n, packed, n);
    } else if (kRole == Role::kKeys) {
      for (std::size_t word = 0; word < key_words(kBits, dim_); ++word) {
        std::memcpy(codes_ + 4 * (word * kTileTokens + as_size(token)), packed + 4 * word, 4);
      }
    }
  }

 private:
  void add_to_words(int token, int channel, __m256i codes) const {
    const int bit = token * kBits;
    auto* const to = reinterpret_cast<__m256i*>(codes_ + 4 * as_size(bit / 32 * dim_ + channel));
    const __m256i shifted = _mm256_sll_epi32(codes, _mm_cvtsi32_si128(bit % 32));
    _mm256_storeu_si256(to, _mm256_or_si256(_mm256_loadu_si256(to), shifted));
  }

  std::byte* codes_;
  int n_tokens_;
  int dim_;
};

struct Affines {
  __m256 scale;
  __m256 bias;
};

/// The least and the largest of channels [first, end) of a row.
void range_of(const float* row, int first, int end, float& low, float& high) {
  __m256 least = _mm256_loadu_ps(row + first);
  __m256 most = least;
  for (int d = first + kLanes; d < end; d += kLanes) {
    const __m256 x = _mm256_loadu_ps(row + d);
    least = _mm256_min_ps(least, x);
    most = _mm256_max_ps(most, x);
  }
  // As one vector of four: the least, and the largest negated.
  const __m256 negated = _mm256_xor_ps(most, _mm256_set1_ps(-0.0F));
  const __m256 both = _mm256_min_ps(_mm256_permute2f128_ps(least, negated, 0x20),
                                    _mm256_permute2f128_ps(least, negated, 0x31));
  const __m256 pairs = _mm256_min_ps(both, _mm256_permute_ps(both, 0x4E));
  const __m256 result = _mm256_min_ps(pairs, _mm256_permute_ps(pairs, 0xB1));
  low = _mm256_cvtss_f32(result);
  high = -_mm_cvtss_f32(_mm256_extractf128_ps(result, 1));
}

template <int kBits, Role kRole>
void encode_affine(const PartShape& shape, const float* rows, int /*first_token*/, int /*n_tokens*/,
                   std::byte* part) {
  const int dim = shape.head_dim;
  for (int i = 0; i < n_tiles(shape.block_size); ++i) {
    const Tile tile = tile_at(shape, i);
    const int n = tile.n_tokens;
    std::byte* const scales = part + code_bytes(kRole, kBits, n, dim);
    std::byte* const biases = scales + group_bytes(shape, n) / 2;
    alignas(32) float scale_of[codec::kMaxHeadDim / 32][kTileTokens];
    alignas(32) float bias_of[codec::kMaxHeadDim / 32][kTileTokens];
    for (int g = 0; g < n_groups(shape); ++g) {
      const int first = g * shape.group_size;
      const int end = first + shape.group_size < dim ? first + shape.group_size : dim;
      alignas(32) float low[kTileTokens] = {};
      alignas(32) float high[kTileTokens] = {};
      for (int t = 0; t < n; ++t) range_of(rows + t * dim, first, end, low[t], high[t]);
      for (int t = 0; t < n; t += kLanes) {
        const Grids grids(_mm256_load_ps(low + t), _mm256_load_ps(high + t), (1 << kBits) - 1);
        const std::size_t n_bytes = 2 * as_size(n - t < kLanes ? n - t : kLanes);
        const std::size_t at = 2 * as_size(g * n + t);
        std::memcpy(scales + at, &grids.scales, n_bytes);
        std::memcpy(biases + at, &grids.biases, n_bytes);
        _mm256_store_ps(scale_of[g] + t, _mm256_cvtph_ps(grids.scales));
        _mm256_store_ps(bias_of[g] + t, _mm256_cvtph_ps(grids.biases));
      }
    }
    const TileWriter<kBits, kRole> writer(part, n, dim);
    for (int t = 0; t < n; ++t, rows += dim) {
      writer.write(t, rows, [&](int channel) {
        const int g = channel / shape.group_size;
        return Affines{_mm256_set1_ps(scale_of[g][t]), _mm256_set1_ps(bias_of[g][t])};
      });
    }
    part = biases + group_bytes(shape, n) / 2;
  }
}

template <int kBits>
void encode_channel(const PartShape& shape, const float* rows, int /*first_token*/,
                    int /*n_tokens*/, std::byte* part) {
  const int dim = shape.head_dim;
  std::byte* const biases = part + channel_bytes(shape) / 2;
  for (int d = 0; d < dim; d += kLanes) {
    __m256 low = _mm256_loadu_ps(rows + d);
    __m256 high = low;
    for (int t = 1; t < shape.block_size; ++t) {
      const __m256 x = _mm256_loadu_ps(rows + t * dim + d);
      low = _mm256_min_ps(low, x);
      high = _mm256_max_ps(high, x);
    }
    const Grids grids(low, high, (1 << kBits) - 1);
    std::memcpy(part + 2 * d, &grids.scales, sizeof grids.scales);
    std::memcpy(biases + 2 * d, &grids.biases, sizeof grids.biases);
  }
  std::byte* codes = part + channel_bytes(shape);
  for (int i = 0; i < n_tiles(shape.block_size); ++i) {
    const int n = tile_at(shape, i).n_tokens;
    const TileWriter<kBits, Role::kKeys> writer(codes, n, dim);
    for (int t = 0; t < n; ++t, rows += dim) {
      writer.write(t, rows, [&](int channel) {
        return Affines{load_halves(part + 2 * channel), load_halves(biases + 2 * channel)};
      });
    }
    codes += code_bytes(Role::kKeys, kBits, n, dim);
  }
}

/// Sums of lanes and their partners; differences, from the partner, where kDifferences has a bit.
template <int kDifferences>
__m256 butterfly(__m256 x, __m256 partner) {
  return _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), kDifferences);
}

/// Columns `first` to first + kLanes * kVectors of row * matrix.
template <int kVectors>
void rotate_columns(const float* matrix, const float* row, int dim, int first, float* to) {
  __m256 sums[kVectors];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  const float* from = matrix + first;
  for (int d = 0; d < dim; ++d, from += dim) {
    const __m256 x = _mm256_broadcast_ss(row + d);
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = _mm256_add_ps(sums[v], _mm256_mul_ps(x, _mm256_loadu_ps(from + kLanes * v)));
    }
  }
  for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(to + first + kLanes * v, sums[v]);
}

}  // namespace

Encode key_encoder(Layout layout) {
  switch (layout) {
    case Layout::kAffine8:
      return encode_affine<8, Role::kKeys>;
    case Layout::kAffine4:
      return encode_affine<4, Role::kKeys>;
    case Layout::kAffine2:
      return encode_affine<2, Role::kKeys>;
    case Layout::kChannel4:
      return encode_channel<4>;
    default:
      return encode_channel<2>;
  }
}

Encode value_encoder(Layout layout) {
  if (layout == Layout::kAffine8) return encode_affine<8, Role::kValues>;
  return layout == Layout::kAffine4 ? encode_affine<4, Role::kValues>
                                    : encode_affine<2, Role::kValues>;
}

void hadamard(float* rows, int n_rows, int dim) {
  const int size = dim & -dim;
  const __m256 scale =
      _mm256_div_ps(_mm256_set1_ps(1.0F), _mm256_sqrt_ps(_mm256_set1_ps(static_cast<float>(size))));
  const std::size_t n = as_size(n_rows) * as_size(dim);
  for (float* block = rows; block < rows + n; block += size) {
    for (int i = 0; i < size; i += kLanes) {
      __m256 x = _mm256_loadu_ps(block + i);
      x = butterfly<0xAA>(x, _mm256_permute_ps(x, 0xB1));
      x = butterfly<0xCC>(x, _mm256_permute_ps(x, 0x4E));
      x = butterfly<0xF0>(x, _mm256_permute2f128_ps(x, x, 0x01));
      _mm256_storeu_ps(block + i, size == kLanes ? _mm256_mul_ps(x, scale) : x);
    }
    for (int half = kLanes; half < size; half *= 2) {
      const __m256 by = 2 * half == size ? scale : _mm256_set1_ps(1.0F);
      for (int i = 0; i < size; i += 2 * half) {
        for (int j = i; j < i + half; j += kLanes) {
          const __m256 a = _mm256_loadu_ps(block + j);
          const __m256 b = _mm256_loadu_ps(block + j + half);
          _mm256_storeu_ps(block + j, _mm256_mul_ps(_mm256_add_ps(a, b), by));
          _mm256_storeu_ps(block + j + half, _mm256_mul_ps(_mm256_sub_ps(a, b), by));
        }
      }
    }
  }
}

void rotate(const float* matrix, float* rows, int n_rows, int dim) {
  constexpr int kVectors = 8;
  float row[codec::kMaxHeadDim];
  for (int i = 0; i < n_rows; ++i, rows += dim) {
    std::memcpy(row, rows, as_size(dim) * sizeof(float));
    int first = 0;
    for (; first + kLanes * kVectors <= dim; first += kLanes * kVectors) {
      rotate_columns<kVectors>(matrix, row, dim, first, rows);
    }
    for (; first < dim; first += kLanes) rotate_columns<1>(matrix, row, dim, first, rows);
  }
}

}  // namespace kvpool::kernels::avx2
