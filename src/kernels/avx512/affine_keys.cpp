#include "kernels/avx512/common.h"
#include "kernels/avx512/decode.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx512 {
namespace {

using codec::Role;

/// Channels are worked on 16 at a time.
int n_vectors(const PartShape& shape) { return (shape.head_dim + 15) / 16; }

/// What prepare() makes of one query, behind the fp32 queries.
struct Query {
  float steps[codec::kMaxHeadDim / 32];  // Of each group's fixed-point numbers.
  float sums[codec::kMaxHeadDim / 32];   // Of each group's elements.
  alignas(64) std::int32_t digits[codec::kMaxHeadDim / 16][kDigitWords];
};

std::size_t prepared_bytes(const PartShape& shape, int n_queries) {
  return fp32_query_bytes(shape, n_queries) + as_size(n_queries) * sizeof(Query);
}

template <int kBits>
void prepare(const PartShape& shape, const float* queries, int n_queries, std::byte* prepared) {
  prepare_fp32_queries(shape, queries, n_queries, prepared);
  auto* query = reinterpret_cast<Query*>(prepared + fp32_query_bytes(shape, n_queries));
  const int dim = shape.head_dim;
  for (int q = 0; q < n_queries; ++q, ++query, queries += dim) {
    for (int g = 0; g < n_groups(shape); ++g) {
      const int first = g * shape.group_size;
      const int end = first + shape.group_size < dim ? first + shape.group_size : dim;
      __m512 largest = _mm512_set1_ps(1e-30F);
      __m512 sum = _mm512_setzero_ps();
      for (int d = first; d < end; d += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(first_lanes(end - d), queries + d);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
        sum = _mm512_add_ps(sum, x);
      }
      query->sums[g] = _mm512_reduce_add_ps(sum);
      query->steps[g] = _mm512_reduce_max_ps(largest) / kLargest;
      const __m512 per_step = _mm512_set1_ps(1.0F / query->steps[g]);
      for (int d = first; d < end; d += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(first_lanes(end - d), queries + d);
        store_digits<kBits>(_mm512_fmadd_ps(x, per_step, _mm512_set1_ps(128.0F)),
                            query->digits[d / 16]);
      }
    }
  }
}

/// Scores of a full tile.
template <int kBits, int kQueries>
void score_tile(const PartShape& shape, const std::byte* tile, const Query* queries,
                float* scores, std::size_t stride) {
  const int n_words = static_cast<int>(key_words(kBits, shape.head_dim));
  const int group_vectors = shape.group_size / 16;
  const std::byte* const scales =
      tile + code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
  const std::byte* const biases = scales + group_bytes(shape, kTileTokens) / 2;
  __m512 sums[kQueries];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (int g = 0; g < n_groups(shape); ++g) {
    DigitSums products[kQueries];
    for (int v = g * group_vectors; v < n_vectors(shape) && v < (g + 1) * group_vectors; ++v) {
      for (int word = 0; word < kWords<kBits>; ++word) {
        const int at = v * kWords<kBits> + word;
        if (at >= n_words) break;
        const __m512i words = _mm512_loadu_si512(tile + as_size(at) * 64);
        for (int shift = 0; shift < kShifts<kBits>; ++shift) {
          const __m512i codes = codes_at<kBits>(words, shift);
          for (int q = 0; q < kQueries; ++q) {
            products[q].add(codes, queries[q].digits[v], word * kShifts<kBits> + shift);
          }
        }
      }
    }
    const __m512 scale = load_halves(scales + g * 32);
    const __m512 bias = load_halves(biases + g * 32);
    for (int q = 0; q < kQueries; ++q) {
      const __m512 step = _mm512_mul_ps(scale, _mm512_set1_ps(queries[q].steps[g]));
      sums[q] = _mm512_fmadd_ps(step, products[q].total(), sums[q]);
      sums[q] = _mm512_fmadd_ps(bias, _mm512_set1_ps(queries[q].sums[g]), sums[q]);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    _mm512_storeu_ps(scores + as_size(q) * stride, sums[q]);
  }
}

template <int kBits>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* const all_queries =
      reinterpret_cast<const Query*>(prepared + fp32_query_bytes(shape, n_queries));
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const std::byte* const fp32_queries = prepared + fp32_query_bytes(shape, first);
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const int n_tokens = run.n_tokens[p];
      int t = 0;
      for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
        ahead.fetch(tile_bytes);
        score_tile<kBits, n()>(shape, run.parts[p] + as_size(t / kTileTokens) * tile_bytes,
                               all_queries + first, to + t, stride);
      }
      if (t < n_tokens) {
        float rows[kTileTokens * codec::kMaxHeadDim];
        scalar::affine_keys(kAffineLayout<kBits>).decode(shape, run.parts[p], t, n_tokens - t, rows);
        score_fp32_rows(shape, rows, n_tokens - t, fp32_queries, n(), to + t, stride);
      }
      to += n_tokens;
    }
  });
}

template <int kBits>
KeyKernels keys_of() {
  KeyKernels kernels = scalar::affine_keys(kAffineLayout<kBits>);
  kernels.prepared_bytes = prepared_bytes;
  kernels.prepare = prepare<kBits>;
  kernels.scores = scores<kBits>;
  kernels.decode = key_decoder(kAffineLayout<kBits>);
  return kernels;
}

}  // namespace

KeyKernels affine_keys(Layout layout) {
  if (layout == Layout::kAffine8) return keys_of<8>();
  return layout == Layout::kAffine4 ? keys_of<4>() : keys_of<2>();
}

}  // namespace kvpool::kernels::avx512
