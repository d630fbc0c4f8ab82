#include "kernels/avx2/avx2.h"
#include "kernels/avx2/fixed_point.h"

namespace kvpool::kernels::avx2 {
namespace {

using codec::Role;

/// While many are scaled together, the latency of one hides behind the others.
constexpr std::size_t kPartsAtOnce = 4;

/// A query times the scales of a part, and its product with the biases.
struct ScaledQuery {
  float step;
  float bias;
  alignas(32) std::int32_t pairs[codec::kMaxHeadDim / 16][kPairs];
};

template <int kBits, int kQueries>
void scale_queries(const PartShape& shape, const std::byte* part, const float* queries,
                   ScaledQuery (&scaled)[kQueries]) {
  const std::byte* const biases_at = part + channel_bytes(shape) / 2;
  const int dim = shape.head_dim;
  __m256 products[kQueries][codec::kMaxHeadDim / 8 + 1];
  __m256 largest[kQueries];
  __m256 biases[kQueries];
  for (int q = 0; q < kQueries; ++q) {
    products[q][dim / 8] = largest[q] = biases[q] = _mm256_setzero_ps();
  }
  for (int d = 0; d < dim; d += 8) {
    const __m256 scale = load_halves(part + 2 * d);
    const __m256 bias = load_halves(biases_at + 2 * d);
    for (int q = 0; q < kQueries; ++q) {
      const __m256 x = _mm256_loadu_ps(queries + q * dim + d);
      products[q][d / 8] = _mm256_mul_ps(x, scale);
      largest[q] = _mm256_max_ps(largest[q], abs(products[q][d / 8]));
      biases[q] = _mm256_fmadd_ps(x, bias, biases[q]);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    scaled[q].step = at_least(largest_of(largest[q])) / kLargest;
    scaled[q].bias = sum_of(biases[q]);
    const __m256 per_step = _mm256_set1_ps(1.0F / scaled[q].step);
    for (int d = 0; d < dim; d += 16) {
      store_pairs<kBits>(_mm256_mul_ps(products[q][d / 8], per_step),
                         _mm256_mul_ps(products[q][d / 8 + 1], per_step), scaled[q].pairs[d / 16]);
    }
  }
}

template <int kBits, int kQueries>
void score_tile(const PartShape& shape, const std::byte* tile, const ScaledQuery* queries,
                float* scores, std::size_t stride) {
  const int n_words = static_cast<int>(key_words(kBits, shape.head_dim));
  ProductSums<kBits, kQueries> products;
  for (int word = 0; word < n_words; word += kWords<kBits>) {
    products.add(tile + as_size(word) * 64, 64, n_words - word,
                 [&](int q) { return queries[q].pairs[word / kWords<kBits>]; });
  }
  for (int q = 0; q < kQueries; ++q, scores += stride) {
    for (int i = 0; i < 2; ++i) {
      _mm256_storeu_ps(scores + 8 * i,
                       _mm256_fmadd_ps(products.total(q, i), _mm256_set1_ps(queries[q].step),
                                       _mm256_set1_ps(queries[q].bias)));
    }
  }
}

template <int kBits, int kQueries>
void score_part(const PartShape& shape, const std::byte* part, int n_tokens,
                const float* fp32_queries, const ScaledQuery* queries, float* scores,
                std::size_t stride, Ahead& ahead) {
  const std::size_t tile_bytes = code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
  const std::byte* tile = part + channel_bytes(shape);
  int t = 0;
  for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
    // Values have scales and biases in each tile.
    ahead.fetch(tile_bytes + group_bytes(shape, kTileTokens));
    score_tile<kBits, kQueries>(shape, tile, queries, scores + t, stride);
    tile += tile_bytes;
  }
  if (t < n_tokens) {
    score_rest(shape, part, t, n_tokens - t,
               scalar::channel_keys(kBits == 4 ? Layout::kChannel4 : Layout::kChannel2).decode,
               fp32_queries, kQueries, scores + t, stride);
  }
}

template <int kBits>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const float* const queries = reinterpret_cast<const float*>(prepared) + first * shape.head_dim;
    float* to = out + as_size(first) * stride;
    ScaledQuery scaled[kPartsAtOnce][n()];
    for (std::size_t p = 0; p < run.n_parts; p += kPartsAtOnce) {
      const std::size_t end = p + kPartsAtOnce < run.n_parts ? p + kPartsAtOnce : run.n_parts;
      for (std::size_t i = p; i < end; ++i) {
        scale_queries<kBits, n()>(shape, run.parts[i], queries, scaled[i - p]);
      }
      for (std::size_t i = p; i < end; ++i) {
        score_part<kBits, n()>(shape, run.parts[i], run.n_tokens[i], queries, scaled[i - p], to,
                               stride, ahead);
        to += run.n_tokens[i];
      }
    }
  });
}

template <int kBits>
KeyKernels keys_of(Layout layout) {
  KeyKernels kernels = scalar::channel_keys(layout);
  kernels.encode = key_encoder(layout);
  kernels.scores = scores<kBits>;
  return kernels;
}

}  // namespace

KeyKernels channel_keys(Layout layout) {
  return layout == Layout::kChannel4 ? keys_of<4>(layout) : keys_of<2>(layout);
}

}  // namespace kvpool::kernels::avx2
