// Codes become fp32 in registers: tokens in lanes for keys, channels in lanes for values.

#include "kernels/avx2/avx2.h"
#include "kernels/avx2/common.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx2 {
namespace {

using codec::Role;

template <int kBits>
__m256 code_in(__m256i words, int index) {
  return _mm256_cvtepi32_ps(
      _mm256_and_si256(_mm256_srlv_epi32(words, _mm256_set1_epi32(kBits * index)),
                       _mm256_set1_epi32((1 << kBits) - 1)));
}

__m256i load_words(const std::byte* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

/// Codes of channels [first, end) times queries, for 8 tokens of a full tile.
template <int kBits, int kQueries>
void add_products(const std::byte* codes, int first, int end, const float* queries, int dim,
                  __m256 (&sums)[kQueries]) {
  constexpr int kPerWord = 32 / kBits;
  for (int word_channel = first; word_channel < end; word_channel += kPerWord) {
    const __m256i words = load_words(codes + as_size(word_channel / kPerWord) * 64);
    const int n = end - word_channel < kPerWord ? end - word_channel : kPerWord;
    for (int i = 0; i < n; ++i) {
      const __m256 code = code_in<kBits>(words, i);
      for (int q = 0; q < kQueries; ++q) {
        const __m256 query = _mm256_set1_ps(queries[q * dim + word_channel + i]);
        sums[q] = _mm256_fmadd_ps(code, query, sums[q]);
      }
    }
  }
}

/// What is left of a part after its full tiles, by way of the reference.
void score_rest(const PartShape& shape, const std::byte* part, int first, int n,
                scalar::Decode decode, const float* queries, int n_queries, float* scores,
                std::size_t stride) {
  float rows[kTileTokens * codec::kMaxHeadDim];
  decode(shape, part, first, n, rows);
  for (int q = 0; q < n_queries; ++q) {
    for (int t = 0; t < n; ++t) {
      float sum = 0.0F;
      for (int d = 0; d < shape.head_dim; ++d) {
        sum += queries[q * shape.head_dim + d] * rows[t * shape.head_dim + d];
      }
      scores[as_size(q) * stride + as_size(t)] = sum;
    }
  }
}

template <int kBits, int kQueries>
void score_affine_tile(const PartShape& shape, const std::byte* tile, const float* queries,
                       const float (&query_sums)[kQueries][codec::kMaxHeadDim / 32], float* scores,
                       std::size_t stride) {
  const int dim = shape.head_dim;
  const std::byte* const scales = tile + code_bytes(Role::kKeys, kBits, kTileTokens, dim);
  const std::byte* const biases = scales + group_bytes(shape, kTileTokens) / 2;
  for (int half = 0; half < 2; ++half) {
    __m256 sums[kQueries];
    for (__m256& sum : sums) sum = _mm256_setzero_ps();
    for (int g = 0; g < n_groups(shape); ++g) {
      const int first = g * shape.group_size;
      const int end = first + shape.group_size < dim ? first + shape.group_size : dim;
      __m256 products[kQueries];
      for (__m256& product : products) product = _mm256_setzero_ps();
      add_products<kBits>(tile + 32 * half, first, end, queries, dim, products);
      const __m256 scale = load_halves(scales + 32 * g + 16 * half);
      const __m256 bias = load_halves(biases + 32 * g + 16 * half);
      for (int q = 0; q < kQueries; ++q) {
        sums[q] = _mm256_fmadd_ps(scale, products[q], sums[q]);
        sums[q] = _mm256_fmadd_ps(bias, _mm256_set1_ps(query_sums[q][g]), sums[q]);
      }
    }
    for (int q = 0; q < kQueries; ++q) {
      _mm256_storeu_ps(scores + as_size(q) * stride + as_size(8 * half), sums[q]);
    }
  }
}

template <int kBits>
void affine_scores(const PartShape& shape, const PartRun& run, const std::byte* prepared,
                   int n_queries, float* out, std::size_t stride) {
  constexpr Layout kLayout = kBits == 8   ? Layout::kAffine8
                             : kBits == 4 ? Layout::kAffine4
                                          : Layout::kAffine2;
  const int dim = shape.head_dim;
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const float* const queries = reinterpret_cast<const float*>(prepared) + first * dim;
    float query_sums[n()][codec::kMaxHeadDim / 32] = {};
    for (int q = 0; q < n(); ++q) {
      for (int d = 0; d < dim; ++d) query_sums[q][d / shape.group_size] += queries[q * dim + d];
    }
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const int n_tokens = run.n_tokens[p];
      int t = 0;
      for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
        ahead.fetch(tile_bytes);
        score_affine_tile<kBits>(shape, run.parts[p] + as_size(t / kTileTokens) * tile_bytes,
                                 queries, query_sums, to + t, stride);
      }
      if (t < n_tokens) {
        score_rest(shape, run.parts[p], t, n_tokens - t, scalar::affine_keys(kLayout).decode,
                   queries, n(), to + t, stride);
      }
      to += n_tokens;
    }
  });
}

template <int kBits>
void channel_scores(const PartShape& shape, const PartRun& run, const std::byte* prepared,
                    int n_queries, float* out, std::size_t stride) {
  const int dim = shape.head_dim;
  const std::size_t tile_bytes = code_bytes(Role::kKeys, kBits, kTileTokens, dim);
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const float* const queries = reinterpret_cast<const float*>(prepared) + first * dim;
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      alignas(32) float scaled[n() * codec::kMaxHeadDim];
      float biases[n()];
      for (int q = 0; q < n(); ++q) {
        __m256 bias = _mm256_setzero_ps();
        for (int d = 0; d < dim; d += 8) {
          const __m256 query = _mm256_loadu_ps(queries + q * dim + d);
          _mm256_storeu_ps(scaled + q * dim + d,
                           _mm256_mul_ps(query, load_halves(run.parts[p] + 2 * d)));
          bias = _mm256_fmadd_ps(
              query, load_halves(run.parts[p] + channel_bytes(shape) / 2 + 2 * d), bias);
        }
        biases[q] = sum_of(bias);
      }
      const int n_tokens = run.n_tokens[p];
      const std::byte* tile = run.parts[p] + channel_bytes(shape);
      int t = 0;
      for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
        ahead.fetch(tile_bytes + group_bytes(shape, kTileTokens));
        for (int half = 0; half < 2; ++half) {
          __m256 sums[n()];
          for (int q = 0; q < n(); ++q) sums[q] = _mm256_set1_ps(biases[q]);
          add_products<kBits>(tile + 32 * half, 0, dim, scaled, dim, sums);
          for (int q = 0; q < n(); ++q) {
            _mm256_storeu_ps(to + as_size(q) * stride + as_size(t + 8 * half), sums[q]);
          }
        }
        tile += tile_bytes;
      }
      if (t < n_tokens) {
        score_rest(shape, run.parts[p], t, n_tokens - t,
                   scalar::channel_keys(kBits == 4 ? Layout::kChannel4 : Layout::kChannel2).decode,
                   queries, n(), to + t, stride);
      }
      to += n_tokens;
    }
  });
}

/// Adds a full tile, of which the first n_tokens count.
template <int kBits, int kQueries>
void add_tile(const PartShape& shape, const std::byte* tile, const float* weights,
              std::size_t stride, int n_tokens, float* out) {
  constexpr int kPerWord = 32 / kBits;
  const int dim = shape.head_dim;
  const std::byte* const scales = tile + code_bytes(Role::kValues, kBits, kTileTokens, dim);
  const std::byte* const biases = scales + group_bytes(shape, kTileTokens) / 2;
  alignas(32) float weight[kQueries][kTileTokens] = {};
  for (int q = 0; q < kQueries; ++q) {
    for (int t = 0; t < n_tokens; ++t) weight[q][t] = weights[as_size(q) * stride + as_size(t)];
  }
  for (int g = 0; g < n_groups(shape); ++g) {
    alignas(32) float scaled[kQueries][kTileTokens];
    float bias[kQueries];
    for (int q = 0; q < kQueries; ++q) {
      __m256 sum = _mm256_setzero_ps();
      for (int t = 0; t < kTileTokens; t += 8) {
        const __m256 w = _mm256_load_ps(weight[q] + t);
        _mm256_store_ps(scaled[q] + t, _mm256_mul_ps(w, load_halves(scales + 32 * g + 2 * t)));
        sum = _mm256_fmadd_ps(w, load_halves(biases + 32 * g + 2 * t), sum);
      }
      bias[q] = sum_of(sum);
    }
    for (int d = g * shape.group_size; d < dim && d < (g + 1) * shape.group_size; d += 8) {
      __m256 sums[kQueries];
      for (int q = 0; q < kQueries; ++q) {
        sums[q] = _mm256_add_ps(_mm256_set1_ps(bias[q]), _mm256_loadu_ps(out + q * dim + d));
      }
      for (int word = 0; word < kBits / 2; ++word) {
        const __m256i words = load_words(tile + 4 * as_size(word * dim + d));
        for (int i = 0; i < kPerWord; ++i) {
          const __m256 code = code_in<kBits>(words, i);
          for (int q = 0; q < kQueries; ++q) {
            sums[q] =
                _mm256_fmadd_ps(code, _mm256_set1_ps(scaled[q][word * kPerWord + i]), sums[q]);
          }
        }
      }
      for (int q = 0; q < kQueries; ++q) _mm256_storeu_ps(out + q * dim + d, sums[q]);
    }
  }
}

template <int kBits>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  constexpr Layout kLayout = kBits == 8   ? Layout::kAffine8
                             : kBits == 4 ? Layout::kAffine4
                                          : Layout::kAffine2;
  const std::size_t tile_bytes = affine_tile_bytes(Role::kValues, kBits, shape, kTileTokens);
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    float* const sums = out + first * shape.head_dim;
    const float* from = weights + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const int n_tokens = run.n_tokens[p];
      int t = 0;
      for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
        ahead.fetch(tile_bytes);
        const int left = n_tokens - t;
        add_tile<kBits, n()>(shape, run.parts[p] + as_size(t / kTileTokens) * tile_bytes, from + t,
                             stride, left < kTileTokens ? left : kTileTokens, sums);
      }
      float row[codec::kMaxHeadDim];
      for (; t < n_tokens; ++t) {
        scalar::affine_values(kLayout).decode(shape, run.parts[p], t, 1, row);
        for (int q = 0; q < n(); ++q) {
          const float weight = from[as_size(q) * stride + as_size(t)];
          for (int d = 0; d < shape.head_dim; ++d) sums[q * shape.head_dim + d] += weight * row[d];
        }
      }
      from += n_tokens;
    }
  });
}

KeyKernels with_scores(KeyKernels kernels, decltype(KeyKernels::scores) scores) {
  kernels.scores = scores;
  return kernels;
}

ValueKernels with_accumulate(ValueKernels kernels, decltype(ValueKernels::accumulate) accumulate) {
  kernels.accumulate = accumulate;
  return kernels;
}

}  // namespace

KeyKernels integer_keys(Layout layout) {
  switch (layout) {
    case Layout::kAffine8:
      return with_scores(scalar::affine_keys(layout), affine_scores<8>);
    case Layout::kAffine4:
      return with_scores(scalar::affine_keys(layout), affine_scores<4>);
    case Layout::kAffine2:
      return with_scores(scalar::affine_keys(layout), affine_scores<2>);
    case Layout::kChannel4:
      return with_scores(scalar::channel_keys(layout), channel_scores<4>);
    default:
      return with_scores(scalar::channel_keys(layout), channel_scores<2>);
  }
}

ValueKernels integer_values(Layout layout) {
  const ValueKernels reference = scalar::affine_values(layout);
  if (layout == Layout::kAffine8) return with_accumulate(reference, accumulate<8>);
  return with_accumulate(reference, layout == Layout::kAffine4 ? accumulate<4> : accumulate<2>);
}

}  // namespace kvpool::kernels::avx2
