#include <cstring>

#include "kernels/avx512/common.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx512 {
namespace {

using codec::Role;

/// Channels are worked on 16 at a time.
int n_vectors(const PartShape& shape) { return (shape.head_dim + 15) / 16; }

/// What prepare() makes of one query, behind the fp32 queries.
struct Query {
  float step;  // Of the fixed-point numbers.
  float sums[codec::kMaxHeadDim / 32];  // Of each group's elements, in steps.
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
    __m512 largest = _mm512_set1_ps(1e-30F);
    for (int v = 0; v < n_vectors(shape); ++v) {
      const __m512 x = _mm512_maskz_loadu_ps(first_lanes(dim - 16 * v), queries + 16 * v);
      largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
    }
    query->step = _mm512_cvtss_f32(max_in_all(largest)) / kLargest;
    const __m512 per_step = _mm512_set1_ps(1.0F / query->step);
    for (int v = 0; v < n_vectors(shape); ++v) {
      const __m512 x = _mm512_maskz_loadu_ps(first_lanes(dim - 16 * v), queries + 16 * v);
      store_digits<kBits>(_mm512_fmadd_ps(x, per_step, _mm512_set1_ps(128.0F)), query->digits[v]);
    }
    for (int g = 0; g < n_groups(shape); ++g) {
      float sum = 0.0F;
      for (int d = g * shape.group_size; d < dim && d < (g + 1) * shape.group_size; ++d) {
        sum += queries[d];
      }
      query->sums[g] = sum / query->step;
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
      sums[q] = _mm512_fmadd_ps(scale, products[q].total(), sums[q]);
      sums[q] = _mm512_fmadd_ps(bias, _mm512_set1_ps(queries[q].sums[g]), sums[q]);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    _mm512_storeu_ps(scores + as_size(q) * stride,
                     _mm512_mul_ps(sums[q], _mm512_set1_ps(queries[q].step)));
  }
}

template <int kBits, scalar::Decode kDecode>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* const all_queries =
      reinterpret_cast<const Query*>(prepared + fp32_query_bytes(shape, n_queries));
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const std::byte* const fp32_queries = prepared + fp32_query_bytes(shape, first);
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const int n_tokens = run.n_tokens[p];
      int t = 0;
      for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
        score_tile<kBits, n()>(shape, run.parts[p] + as_size(t / kTileTokens) * tile_bytes,
                               all_queries + first, to + t, stride);
      }
      if (t < n_tokens) {
        float rows[kTileTokens * codec::kMaxHeadDim];
        kDecode(shape, run.parts[p], t, n_tokens - t, rows);
        score_fp32_rows(shape, rows, n_tokens - t, fp32_queries, n(), to + t, stride);
      }
      to += n_tokens;
    }
  });
}
