#include "kernels/avx2/avx2.h"
#include "kernels/avx2/fixed_point.h"

namespace kvpool::kernels::avx2 {
namespace {

using codec::Role;

/// What prepare() makes of one query, behind the fp32 queries.
struct Query {
  float steps[codec::kMaxHeadDim / 32];  // Of each group's fixed-point numbers.
  float sums[codec::kMaxHeadDim / 32];   // Of each group's elements.
  alignas(32) std::int32_t pairs[codec::kMaxHeadDim / 16][kPairs];
};

std::size_t prepared_bytes(const PartShape& shape, int n_queries) {
  return scalar::query_bytes(shape, n_queries) + as_size(n_queries) * sizeof(Query);
}

template <int kBits>
void prepare(const PartShape& shape, const float* queries, int n_queries, std::byte* prepared) {
  scalar::copy_queries(shape, queries, n_queries, prepared);
  auto* query = reinterpret_cast<Query*>(prepared + scalar::query_bytes(shape, n_queries));
  const int dim = shape.head_dim;
  for (int q = 0; q < n_queries; ++q, ++query, queries += dim) {
    for (int g = 0; g < n_groups(shape); ++g) {
      const int first = g * shape.group_size;
      const int end = first + shape.group_size < dim ? first + shape.group_size : dim;
      __m256 largest = _mm256_setzero_ps();
      __m256 sum = _mm256_setzero_ps();
      for (int d = first; d < end; d += 8) {
        const __m256 x = _mm256_loadu_ps(queries + d);
        largest = _mm256_max_ps(largest, abs(x));
        sum = _mm256_add_ps(sum, x);
      }
      query->sums[g] = sum_of(sum);
      query->steps[g] = at_least(largest_of(largest)) / kLargest;
      const __m256 per_step = _mm256_set1_ps(1.0F / query->steps[g]);
      for (int d = first; d < end; d += 16) {
        const __m256 a = _mm256_loadu_ps(queries + d);
        const __m256 b = d + 8 < end ? _mm256_loadu_ps(queries + d + 8) : _mm256_setzero_ps();
        store_pairs<kBits>(_mm256_mul_ps(a, per_step), _mm256_mul_ps(b, per_step),
                           query->pairs[d / 16]);
      }
    }
  }
}

template <int kBits, int kQueries>
void score_tile(const PartShape& shape, const std::byte* tile, const Query* queries, float* scores,
                std::size_t stride) {
  const int n_words = static_cast<int>(key_words(kBits, shape.head_dim));
  const int group_vectors = shape.group_size / 16;
  const std::byte* scales = tile + code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
  const std::byte* biases = scales + group_bytes(shape, kTileTokens) / 2;
  __m256 sums[kQueries][2];
  for (auto& of_query : sums) of_query[0] = of_query[1] = _mm256_setzero_ps();
  int first_word = 0;
  for (int g = 0; g < n_groups(shape); ++g, scales += 32, biases += 32) {
    ProductSums<kBits, kQueries> products;
    for (int v = g * group_vectors; v < (g + 1) * group_vectors && first_word < n_words; ++v) {
      products.add(tile + as_size(first_word) * 64, 64, n_words - first_word,
                   [&](int q) { return queries[q].pairs[v]; });
      first_word += kWords<kBits>;
    }
    for (int i = 0; i < 2; ++i) {
      const __m256 scale = load_halves(scales + 16 * i);
      const __m256 bias = load_halves(biases + 16 * i);
      for (int q = 0; q < kQueries; ++q) {
        const __m256 step = _mm256_mul_ps(scale, _mm256_set1_ps(queries[q].steps[g]));
        sums[q][i] = _mm256_fmadd_ps(step, products.total(q, i), sums[q][i]);
        sums[q][i] = _mm256_fmadd_ps(bias, _mm256_set1_ps(queries[q].sums[g]), sums[q][i]);
      }
    }
  }
  for (int q = 0; q < kQueries; ++q, scores += stride) {
    _mm256_storeu_ps(scores, sums[q][0]);
    _mm256_storeu_ps(scores + 8, sums[q][1]);
  }
}

template <int kBits, int kQueries>
void score_chunk(const PartShape& shape, const PartRun& run, const float* fp32_queries,
                 const Query* queries, float* scores, std::size_t stride, Ahead& ahead) {
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    const int n_tokens = run.n_tokens[p];
    const std::byte* tile = run.parts[p];
    int t = 0;
    for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
      ahead.fetch(tile_bytes);
      score_tile<kBits, kQueries>(shape, tile, queries, scores + t, stride);
      tile += tile_bytes;
    }
    if (t < n_tokens) {
      score_rest(shape, run.parts[p], t, n_tokens - t,
                 scalar::affine_keys(kAffineLayout<kBits>).decode, fp32_queries, kQueries,
                 scores + t, stride);
    }
    scores += n_tokens;
  }
}

template <int kBits>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* const fp32_queries = reinterpret_cast<const float*>(prepared);
  const auto* const queries =
      reinterpret_cast<const Query*>(prepared + scalar::query_bytes(shape, n_queries));
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    score_chunk<kBits, n()>(shape, run, fp32_queries + first * shape.head_dim, queries + first,
                            out + as_size(first) * stride, stride, ahead);
  });
}

template <int kBits>
KeyKernels keys_of(Layout layout) {
  KeyKernels kernels = scalar::affine_keys(layout);
  kernels.encode = key_encoder(layout);
  kernels.prepared_bytes = prepared_bytes;
  kernels.prepare = prepare<kBits>;
  kernels.scores = scores<kBits>;
  return kernels;
}

}  // namespace

KeyKernels affine_keys(Layout layout) {
  if (layout == Layout::kAffine8) return keys_of<8>(layout);
  return layout == Layout::kAffine4 ? keys_of<4>(layout) : keys_of<2>(layout);
}

}  // namespace kvpool::kernels::avx2
