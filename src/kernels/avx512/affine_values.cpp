#include <algorithm>

#include "kernels/avx2/avx2.h"
#include "kernels/avx512/common.h"
#include "kernels/avx512/decode.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx512 {
namespace {

using codec::Role;

constexpr int kMostGroups = codec::kMaxHeadDim / 32;

/// Tiles that share the steps of their fixed-point numbers: as many as 32 bits can sum, since 256
/// products of 65530 and 128 fit.
constexpr int kMostTiles = 16;

/// The largest of 16 fp16 >= 0.
float largest_half(__m256i halves) {
  const __m128i most =
      _mm_max_epu16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  const __m128i ones = _mm_set1_epi16(-1);
  const __m128i least_of_flipped = _mm_minpos_epu16(_mm_xor_si128(most, ones));
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_xor_si128(least_of_flipped, ones)));
}

/// Sums for kQueries queries, a few tiles at a time. Products of weights and scales become
/// numbers of 16 bits, unsigned here, in steps of the largest weight times the largest scale; then
/// each vector of channels goes through the tiles in registers. Codes of 8 bits are made signed,
/// with the bias of the middle code.
template <int kBits, int kQueries>
class Sums {
 public:
  /// `stride` lies between the weights of one query and the next.
  Sums(const PartShape& shape, std::size_t stride, Ahead& ahead)
      : shape_(shape), stride_(stride), ahead_(ahead) {
    for (int g = 0; g < n_groups(shape); ++g) {
      for (__m512& bias : biases_[g]) bias = _mm512_setzero_ps();
    }
    for (auto& values : values_) {
      for (int d = 0; d < shape.head_dim; d += 16) _mm512_store_ps(values + d, _mm512_setzero_ps());
    }
  }

  /// Adds a full tile of which the tokens in `mask` count. The weights must stay until add_to().
  void add(const std::byte* tile, const float* weights, __mmask16 mask) {
    tiles_[n_tiles_++] = {tile, weights, mask};
    if (n_tiles_ == kMostTiles) flush();
  }

  void add_to(float* out) {
    flush();
    const int dim = shape_.head_dim;
    for (int q = 0; q < kQueries; ++q, out += dim) {
      for (int g = 0; g < n_groups(shape_); ++g) {
        const __m512 bias = _mm512_set1_ps(_mm512_reduce_add_ps(biases_[g][q]));
        const int end = std::min(dim, (g + 1) * shape_.group_size);
        for (int d = g * shape_.group_size; d < end; d += 16) {
          const __mmask16 mask = first_lanes(end - d);
          const __m512 sum = _mm512_add_ps(_mm512_load_ps(values_[q] + d), bias);
          _mm512_mask_storeu_ps(out + d, mask,
                                _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out + d), sum));
        }
      }
    }
  }

 private:
  struct Tile {
    const std::byte* at;
    const float* weights;
    __mmask16 mask;
  };

  /// Of an unsigned number, with room for rounding.
  static constexpr float kMostSteps = 65530.0F;

  /// What is less counts as this, so that reciprocals stay finite.
  static constexpr float kLeastWeight = 1e-25F;
  static constexpr float kLeastScale = 0x1p-24F;

  __m512 weights(const Tile& tile, int query) const {
    return _mm512_maskz_loadu_ps(tile.mask, tile.weights + as_size(query) * stride_);
  }

  void flush() {
    if (n_tiles_ == 0) return;
    float largest_weight[kQueries];
    for (int q = 0; q < kQueries; ++q) {
      __m512 largest = _mm512_set1_ps(kLeastWeight);
      for (int i = 0; i < n_tiles_; ++i) largest = _mm512_max_ps(largest, weights(tiles_[i], q));
      largest_weight[q] = _mm512_reduce_max_ps(largest);
    }
    const std::size_t scales = code_bytes(Role::kValues, kBits, kTileTokens, shape_.head_dim);
    const std::size_t biases = scales + group_bytes(shape_, kTileTokens) / 2;
    for (int g = 0; g < n_groups(shape_); ++g) {
      add_group(g, scales + as_size(g) * 32, biases + as_size(g) * 32, largest_weight);
    }
    n_tiles_ = 0;
  }

  void add_group(int g, std::size_t scales, std::size_t biases,
                 const float (&largest_weight)[kQueries]) {
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < n_tiles_; ++i) {
      const auto* const halves = reinterpret_cast<const __m256i*>(tiles_[i].at + scales);
      most = _mm256_max_epu16(most, _mm256_loadu_si256(halves));
    }
    const float largest_scale = std::max(largest_half(most), kLeastScale);
    float steps[kQueries];
    __m512 per_step[kQueries];
    for (int q = 0; q < kQueries; ++q) {
      steps[q] = largest_weight[q] * largest_scale * (1.0F / kMostSteps);
      per_step[q] = _mm512_set1_ps(kMostSteps / largest_scale / largest_weight[q]);
    }
    alignas(64) std::int32_t digits[kMostTiles][kQueries][kDigitWords];
    for (int i = 0; i < n_tiles_; ++i) {
      const __m512 scale = load_halves(tiles_[i].at + scales);
      __m512 bias = load_halves(tiles_[i].at + biases);
      if constexpr (kBits == 8) bias = _mm512_fmadd_ps(scale, _mm512_set1_ps(128.0F), bias);
      const __m512 dither = kDither.at(i * kTileTokens);
      for (int q = 0; q < kQueries; ++q) {
        const __m512 weight = weights(tiles_[i], q);
        const __m512 scaled = _mm512_mul_ps(scale, weight);
        store_unsigned_digits<kBits>(_mm512_fmadd_ps(scaled, per_step[q], dither), digits[i][q]);
        biases_[g][q] = _mm512_fmadd_ps(weight, bias, biases_[g][q]);
      }
    }
    const int dim = shape_.head_dim;
    const int end = std::min(dim, (g + 1) * shape_.group_size);
    const auto load = [](const std::byte* at) { return _mm512_loadu_si512(at); };
    int d = g * shape_.group_size;
    for (; d + 32 <= end; d += 32) add_vectors<2>(d, load, digits, steps);
    for (; d + 16 <= end; d += 16) add_vectors<1>(d, load, digits, steps);
    if (d < end) {
      const __mmask16 mask = first_lanes(end - d);
      add_vectors<1>(
          d, [mask](const std::byte* at) { return _mm512_maskz_loadu_epi32(mask, at); }, digits,
          steps);
    }
  }

  /// Adds kVectors times 16 channels from d on.
  template <int kVectors, typename Load>
  void add_vectors(int d, const Load& load,
                   const std::int32_t (&digits)[kMostTiles][kQueries][kDigitWords],
                   const float (&steps)[kQueries]) {
    const std::size_t row_bytes = 4 * as_size(shape_.head_dim);
    const std::size_t tile_bytes = affine_tile_bytes(Role::kValues, kBits, shape_, kTileTokens);
    const std::size_t bytes_read = tile_bytes * 16 * kVectors / as_size(shape_.head_dim);
    DigitSums<kVectors> products[kQueries];
    for (int i = 0; i < n_tiles_; ++i) {
      ahead_.fetch(bytes_read);
      const std::byte* const at = tiles_[i].at + 4 * d;
      for (int word = 0; word < kWords<kBits>; ++word) {
        __m512i words[kVectors];
        for (int v = 0; v < kVectors; ++v) {
          words[v] = load(at + as_size(word) * row_bytes + as_size(64 * v));
        }
        for (int shift = 0; shift < kShifts<kBits>; ++shift) {
          __m512i codes[kVectors];
          for (int v = 0; v < kVectors; ++v) {
            codes[v] = codes_at<kBits>(words[v], shift);
            if constexpr (kBits == 8) {
              codes[v] = _mm512_xor_si512(codes[v], _mm512_set1_epi8(-128));
            }
          }
          for (int q = 0; q < kQueries; ++q) {
            products[q].add_unsigned(digits[i][q], word * kShifts<kBits> + shift, codes);
          }
        }
      }
    }
    for (int q = 0; q < kQueries; ++q) {
      for (int v = 0; v < kVectors; ++v) {
        float* const sum = values_[q] + d + 16 * v;
        _mm512_store_ps(sum, _mm512_fmadd_ps(products[q].total(v), _mm512_set1_ps(steps[q]),
                                             _mm512_load_ps(sum)));
      }
    }
  }

  const PartShape& shape_;
  std::size_t stride_;
  Ahead& ahead_;
  int n_tiles_ = 0;
  Tile tiles_[kMostTiles];
  /// Of weight * bias, a lane a token.
  __m512 biases_[kMostGroups][kQueries];
  alignas(64) float values_[kQueries][codec::kMaxHeadDim];
};

template <int kBits, int kQueries>
void accumulate_chunk(const PartShape& shape, const PartRun& run, const float* weights,
                      std::size_t stride, float* out, Ahead& ahead) {
  const std::size_t tile_bytes = affine_tile_bytes(Role::kValues, kBits, shape, kTileTokens);
  Sums<kBits, kQueries> sums(shape, stride, ahead);
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    const int n_tokens = run.n_tokens[p];
    int t = 0;
    for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
      sums.add(run.parts[p] + as_size(t / kTileTokens) * tile_bytes, weights + t,
               first_lanes(n_tokens - t));
    }
    if (t < n_tokens) {
      float rows[kTileTokens * codec::kMaxHeadDim];
      scalar::affine_values(kAffineLayout<kBits>)
          .decode(shape, run.parts[p], t, n_tokens - t, rows);
      accumulate_fp32_rows(shape, rows, n_tokens - t, weights + t, stride, kQueries, out);
    }
    weights += n_tokens;
  }
  sums.add_to(out);
}

template <int kBits>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  Ahead ahead(run, affine_tile_bytes(Role::kValues, kBits, shape, kTileTokens));
  for_query_chunks(n_queries, [&](int first, auto n) {
    accumulate_chunk<kBits, n()>(shape, run, weights + as_size(first) * stride, stride,
                                 out + as_size(first) * as_size(shape.head_dim), ahead);
  });
}

template <int kBits>
ValueKernels values_of(Layout layout) {
  ValueKernels kernels = scalar::affine_values(layout);
  kernels.encode = avx2::value_encoder(layout);
  kernels.accumulate = accumulate<kBits>;
  kernels.decode = value_decoder(layout);
  return kernels;
}

}  // namespace

ValueKernels affine_values(Layout layout) {
  if (layout == Layout::kAffine8) return values_of<8>(layout);
  return layout == Layout::kAffine4 ? values_of<4>(layout) : values_of<2>(layout);
}

}  // namespace kvpool::kernels::avx512
