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
/// each vector of channels goes through the tiles in registers.
/// What rounding takes from one number is carried over to the same lane of the next tile, so that
/// many small weights do not vanish. Codes of 8 bits are made signed, with the bias of the middle
/// code.
template <int kBits, int kQueries>
class Sums {
 public:
  explicit Sums(const PartShape& shape) : shape_(shape) {
    for (int g = 0; g < n_groups(shape); ++g) {
      for (__m512& bias : biases_[g]) bias = _mm512_setzero_ps();
    }
    for (auto& values : values_) {
      for (int d = 0; d < shape.head_dim; d += 16) _mm512_store_ps(values + d, _mm512_setzero_ps());
    }
  }

  /// Adds a full tile of which the tokens in `mask` count.
  void add(const std::byte* tile, const float* weights, std::size_t stride, __mmask16 mask) {
    for (int q = 0; q < kQueries; ++q) {
      weights_[q][n_tiles_] = _mm512_maskz_loadu_ps(mask, weights + as_size(q) * stride);
    }
    tiles_[n_tiles_++] = tile;
    if (n_tiles_ == kMostTiles) flush();
  }

  void add_to(float* out) {
    flush();
    const std::size_t dim = as_size(shape_.head_dim);
    for (int q = 0; q < kQueries; ++q, out += dim) {
      for (int g = 0; g < n_groups(shape_); ++g) {
        const float bias = _mm512_reduce_add_ps(biases_[g][q]);
        const std::size_t end = as_size((g + 1) * shape_.group_size);
        for (std::size_t d = as_size(g * shape_.group_size); d < dim && d < end; ++d) {
          out[d] += values_[q][d] + bias;
        }
      }
    }
  }

 private:
  static constexpr float kMiddle = kBits == 8 ? 128.0F : 0.0F;
  /// What is carried over at last counts as if of a middle code.
  static constexpr float kMiddleLeft = kBits == 8 ? 0.0F : 0.5F * ((1 << kBits) - 1);
  /// Of an unsigned number, with room for rounding.
  static constexpr float kMostSteps = 65530.0F;

  /// Keeps reciprocals finite where there is nothing to add.
  static float at_least(float x) { return x > 1e-30F ? x : 1e-30F; }

  void flush() {
    if (n_tiles_ == 0) return;
    __m512 part_of_largest[kQueries][kMostTiles];
    float largest_weight[kQueries];
    for (int q = 0; q < kQueries; ++q) {
      __m512 largest = weights_[q][0];
      for (int i = 1; i < n_tiles_; ++i) largest = _mm512_max_ps(largest, weights_[q][i]);
      largest_weight[q] = at_least(_mm512_reduce_max_ps(largest));
      const __m512 inverse = _mm512_set1_ps(1.0F / largest_weight[q]);
      for (int i = 0; i < n_tiles_; ++i) {
        part_of_largest[q][i] = _mm512_mul_ps(weights_[q][i], inverse);
      }
    }
    const std::size_t scales = code_bytes(Role::kValues, kBits, kTileTokens, shape_.head_dim);
    const std::size_t biases = scales + group_bytes(shape_, kTileTokens) / 2;
    for (int g = 0; g < n_groups(shape_); ++g) {
      add_group(g, scales + as_size(g) * 32, biases + as_size(g) * 32, part_of_largest,
                largest_weight);
    }
    n_tiles_ = 0;
  }

  void add_group(int g, std::size_t scales, std::size_t biases,
                 const __m512 (&part_of_largest)[kQueries][kMostTiles],
                 const float (&largest_weight)[kQueries]) {
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < n_tiles_; ++i) {
      const auto* const halves = reinterpret_cast<const __m256i*>(tiles_[i] + scales);
      most = _mm256_max_epu16(most, _mm256_loadu_si256(halves));
    }
    const float largest_scale = at_least(largest_half(most));
    const __m512 inverse = _mm512_set1_ps(kMostSteps / largest_scale);
    float steps[kQueries];
    for (int q = 0; q < kQueries; ++q) {
      steps[q] = largest_weight[q] * largest_scale * (1.0F / kMostSteps);
    }
    __m512 carried[kQueries];
    for (__m512& x : carried) x = _mm512_setzero_ps();
    alignas(64) std::int32_t digits[kMostTiles][kQueries][kDigitWords];
    for (int i = 0; i < n_tiles_; ++i) {
      const __m512 scale = load_halves(tiles_[i] + scales);
      const __m512 bias =
          _mm512_fmadd_ps(scale, _mm512_set1_ps(kMiddle), load_halves(tiles_[i] + biases));
      const __m512 number = _mm512_mul_ps(scale, inverse);
      for (int q = 0; q < kQueries; ++q) {
        const __m512 exact = _mm512_fmadd_ps(part_of_largest[q][i], number, carried[q]);
        store_unsigned_digits<kBits>(exact, digits[i][q]);
        carried[q] = _mm512_sub_ps(exact, _mm512_roundscale_ps(exact, _MM_FROUND_TO_NEAREST_INT));
        biases_[g][q] = _mm512_fmadd_ps(weights_[q][i], bias, biases_[g][q]);
      }
    }
    for (int q = 0; q < kQueries; ++q) {
      biases_[g][q] =
          _mm512_fmadd_ps(carried[q], _mm512_set1_ps(kMiddleLeft * steps[q]), biases_[g][q]);
    }
    const int dim = shape_.head_dim;
    const int end = (g + 1) * shape_.group_size < dim ? (g + 1) * shape_.group_size : dim;
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
    DigitSums<kVectors> products[kQueries];
    for (int i = 0; i < n_tiles_; ++i) {
      const std::byte* const at = tiles_[i] + 4 * d;
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
  int n_tiles_ = 0;
  const std::byte* tiles_[kMostTiles];
  __m512 weights_[kQueries][kMostTiles];
  /// Of weight * bias, a lane a token.
  __m512 biases_[kMostGroups][kQueries];
  alignas(64) float values_[kQueries][codec::kMaxHeadDim];
};

template <int kBits, int kQueries>
void accumulate_chunk(const PartShape& shape, const PartRun& run, const float* weights,
                      std::size_t stride, float* out, Ahead& ahead) {
  const std::size_t tile_bytes = affine_tile_bytes(Role::kValues, kBits, shape, kTileTokens);
  Sums<kBits, kQueries> sums(shape);
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    const int n_tokens = run.n_tokens[p];
    int t = 0;
    for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
      ahead.fetch(tile_bytes);
      sums.add(run.parts[p] + as_size(t / kTileTokens) * tile_bytes, weights + t, stride,
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
  Ahead ahead(run);
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
