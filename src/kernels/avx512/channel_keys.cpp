#include "kernels/avx2/avx2.h"
#include "kernels/avx512/common.h"
#include "kernels/avx512/decode.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx512 {
namespace {

using codec::Role;

/// Parts whose queries are scaled together, so that the latency of one hides behind the others.
constexpr std::size_t kPartsAtOnce = 4;
constexpr int kMostVectors = codec::kMaxHeadDim / 16;

int n_vectors(const PartShape& shape) { return (shape.head_dim + 15) / 16; }

/// A query times the scales of a part, in its run's steps, and its product with the biases.
struct ScaledQuery {
  float bias;
  alignas(64) std::int32_t digits[kMostVectors][kDigitWords];
};

/// The largest scale of each channel in a run.
struct LargestScales {
  __m512 of[kMostVectors];

  LargestScales(const PartShape& shape, const PartRun& run) {
    for (int v = 0; v < n_vectors(shape); ++v) {
      const __mmask16 mask = first_lanes(shape.head_dim - 16 * v);
      __m256i most = _mm256_setzero_si256();
      for (std::size_t p = 0; p < run.n_parts; ++p) {
        most = _mm256_max_epu16(most, _mm256_maskz_loadu_epi16(mask, run.parts[p] + 32 * v));
      }
      of[v] = _mm512_cvtph_ps(most);
    }
  }
};

/// Queries in steps that make their largest product with a scale of the run kLargest. One step for
/// all parts: what is rounded off is small beside the largest score.
template <int kQueries>
struct RunQueries {
  const float* queries;
  std::size_t stride;
  float steps[kQueries];
  __m512 in_steps[kQueries][kMostVectors];

  RunQueries(const PartShape& shape, const LargestScales& scales, const float* fp32_queries)
      : queries(fp32_queries), stride(n_steps(shape) * kStep) {
    for (int q = 0; q < kQueries; ++q) {
      __m512 largest = _mm512_set1_ps(1e-30F);
      for (int v = 0; v < n_vectors(shape); ++v) {
        largest = _mm512_max_ps(largest, _mm512_mul_ps(_mm512_abs_ps(at(q, v)), scales.of[v]));
      }
      steps[q] = _mm512_reduce_max_ps(largest) / kLargest;
      const __m512 per_step = _mm512_set1_ps(1.0F / steps[q]);
      for (int v = 0; v < n_vectors(shape); ++v) {
        in_steps[q][v] = _mm512_mul_ps(at(q, v), per_step);
      }
    }
  }

  __m512 at(int q, int v) const {
    return _mm512_load_ps(queries + as_size(q) * stride + as_size(16 * v));
  }
};

/// The sums of four vectors.
__m128 sums_of(const __m512 (&vectors)[kPartsAtOnce]) {
  const __m512 twos[2] = {_mm512_add_ps(_mm512_unpacklo_ps(vectors[0], vectors[1]),
                                        _mm512_unpackhi_ps(vectors[0], vectors[1])),
                          _mm512_add_ps(_mm512_unpacklo_ps(vectors[2], vectors[3]),
                                        _mm512_unpackhi_ps(vectors[2], vectors[3]))};
  const __m512 fours = _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x44),
                                     _mm512_shuffle_ps(twos[0], twos[1], 0xEE));
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/// Scales the queries for n parts, at most kPartsAtOnce.
template <int kBits, int kQueries>
void scale_queries(const PartShape& shape, const std::byte* const* parts, std::size_t n,
                   const RunQueries<kQueries>& queries,
                   ScaledQuery (&scaled)[kPartsAtOnce][kQueries]) {
  const std::size_t biases_at = channel_bytes(shape) / 2;
  __m512 biases[kQueries][kPartsAtOnce];
  for (auto& of_query : biases) {
    for (__m512& bias : of_query) bias = _mm512_setzero_ps();
  }
  for (int v = 0; v < n_vectors(shape); ++v) {
    const __mmask16 mask = first_lanes(shape.head_dim - 16 * v);
    for (std::size_t i = 0; i < kPartsAtOnce; ++i) {
      if (i >= n) break;
      const __m512 scale = load_halves(parts[i] + 32 * v, mask);
      const __m512 bias = load_halves(parts[i] + biases_at + 32 * v, mask);
      for (int q = 0; q < kQueries; ++q) {
        store_digits<kBits>(_mm512_fmadd_ps(queries.in_steps[q][v], scale, _mm512_set1_ps(128.0F)),
                            scaled[i][q].digits[v]);
        biases[q][i] = _mm512_fmadd_ps(queries.at(q, v), bias, biases[q][i]);
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    alignas(16) float sums[kPartsAtOnce];
    _mm_store_ps(sums, sums_of(biases[q]));
    for (std::size_t i = 0; i < n; ++i) scaled[i][q].bias = sums[i];
  }
}

/// Scores of kTiles full tiles, one behind the other.
template <int kBits, int kQueries, int kTiles>
void score_tiles(const PartShape& shape, const std::byte* tiles, std::size_t tile_bytes,
                 const ScaledQuery* queries, const float* steps, float* scores, std::size_t stride,
                 Ahead& ahead) {
  const int n_words = static_cast<int>(key_words(kBits, shape.head_dim));
  DigitSums<kTiles> products[kQueries];
  for (int v = 0; v < n_vectors(shape); ++v) {
    for (int word = 0; word < kWords<kBits>; ++word) {
      const int at = v * kWords<kBits> + word;
      if (at >= n_words) break;
      ahead.fetch(kTiles * tile_bytes / as_size(n_words));
      __m512i words[kTiles];
      for (int i = 0; i < kTiles; ++i) {
        words[i] = _mm512_loadu_si512(tiles + as_size(i) * tile_bytes + as_size(at) * 64);
      }
      for (int shift = 0; shift < kShifts<kBits>; ++shift) {
        __m512i codes[kTiles];
        for (int i = 0; i < kTiles; ++i) codes[i] = codes_at<kBits>(words[i], shift);
        for (int q = 0; q < kQueries; ++q) {
          products[q].add(codes, queries[q].digits[v], word * kShifts<kBits> + shift);
        }
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < kTiles; ++i) {
      _mm512_storeu_ps(scores + as_size(q) * stride + as_size(i * kTileTokens),
                       _mm512_fmadd_ps(products[q].total(i), _mm512_set1_ps(steps[q]),
                                       _mm512_set1_ps(queries[q].bias)));
    }
  }
}

template <int kBits, int kQueries>
void score_part(const PartShape& shape, const std::byte* part, int n_tokens,
                const std::byte* fp32_queries, const ScaledQuery* scaled, const float* steps,
                float* to, std::size_t stride, Ahead& ahead) {
  const std::size_t tile_bytes = code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
  const std::byte* tile = part + channel_bytes(shape);
  int t = 0;
  for (; t + kTileTokens < n_tokens && t + 2 * kTileTokens <= shape.block_size;
       t += 2 * kTileTokens) {
    score_tiles<kBits, kQueries, 2>(shape, tile, tile_bytes, scaled, steps, to + t, stride, ahead);
    tile += 2 * tile_bytes;
  }
  if (t < n_tokens && t + kTileTokens <= shape.block_size) {
    score_tiles<kBits, kQueries, 1>(shape, tile, tile_bytes, scaled, steps, to + t, stride, ahead);
    t += kTileTokens;
  }
  if (t < n_tokens) {
    float rows[kTileTokens * codec::kMaxHeadDim];
    scalar::channel_keys(kBits == 4 ? Layout::kChannel4 : Layout::kChannel2)
        .decode(shape, part, t, n_tokens - t, rows);
    score_fp32_rows(shape, rows, n_tokens - t, fp32_queries, kQueries, to + t, stride);
  }
}

template <int kBits>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const LargestScales scales(shape, run);
  Ahead ahead(run, code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim));
  for_query_chunks(n_queries, [&](int first, auto n) {
    const std::byte* const fp32_queries = prepared + fp32_query_bytes(shape, first);
    const RunQueries<n()> queries(shape, scales, reinterpret_cast<const float*>(fp32_queries));
    float* to = out + as_size(first) * stride;
    ScaledQuery scaled[kPartsAtOnce][n()];
    for (std::size_t p = 0; p < run.n_parts; p += kPartsAtOnce) {
      const std::size_t end = p + kPartsAtOnce < run.n_parts ? p + kPartsAtOnce : run.n_parts;
      scale_queries<kBits, n()>(shape, run.parts + p, end - p, queries, scaled);
      for (std::size_t i = p; i < end; ++i) {
        score_part<kBits, n()>(shape, run.parts[i], run.n_tokens[i], fp32_queries, scaled[i - p],
                               queries.steps, to, stride, ahead);
        to += run.n_tokens[i];
      }
    }
  });
}

template <int kBits>
KeyKernels keys_of(Layout layout) {
  KeyKernels kernels = scalar::channel_keys(layout);
  kernels.encode = avx2::key_encoder(layout);
  kernels.prepared_bytes = fp32_query_bytes;
  kernels.prepare = prepare_fp32_queries;
  kernels.scores = scores<kBits>;
  kernels.decode = key_decoder(layout);
  return kernels;
}

}  // namespace

KeyKernels channel_keys(Layout layout) {
  return layout == Layout::kChannel4 ? keys_of<4>(layout) : keys_of<2>(layout);
}

}  // namespace kvpool::kernels::avx512
