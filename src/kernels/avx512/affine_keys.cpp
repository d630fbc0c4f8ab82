#include "kernels/avx2/avx2.h"
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

/// A full tile and where the scores of its tokens go.
struct KeyTile {
  const std::byte* at;
  float* scores;
};

template <int kBits, int kQueries, int kTiles>
void score_tiles(const PartShape& shape, const KeyTile* tiles, const Query* queries,
                 std::size_t stride, Ahead& ahead) {
  const int n_words = static_cast<int>(key_words(kBits, shape.head_dim));
  const int group_vectors = shape.group_size / 16;
  const std::size_t scales = code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
  const std::size_t biases = scales + group_bytes(shape, kTileTokens) / 2;
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  __m512 sums[kQueries][kTiles];
  for (auto& of_query : sums) {
    for (__m512& sum : of_query) sum = _mm512_setzero_ps();
  }
  for (int g = 0; g < n_groups(shape); ++g) {
    DigitSums<kTiles> products[kQueries];
    for (int v = g * group_vectors; v < n_vectors(shape) && v < (g + 1) * group_vectors; ++v) {
      for (int word = 0; word < kWords<kBits>; ++word) {
        const int at = v * kWords<kBits> + word;
        if (at >= n_words) break;
        ahead.fetch(kTiles * tile_bytes / as_size(n_words));
        __m512i words[kTiles];
        for (int i = 0; i < kTiles; ++i) {
          words[i] = _mm512_loadu_si512(tiles[i].at + as_size(at) * 64);
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
    for (int i = 0; i < kTiles; ++i) {
      const __m512 scale = load_halves(tiles[i].at + scales + g * 32);
      const __m512 bias = load_halves(tiles[i].at + biases + g * 32);
      for (int q = 0; q < kQueries; ++q) {
        const __m512 step = _mm512_mul_ps(scale, _mm512_set1_ps(queries[q].steps[g]));
        sums[q][i] = _mm512_fmadd_ps(step, products[q].total(i), sums[q][i]);
        sums[q][i] = _mm512_fmadd_ps(bias, _mm512_set1_ps(queries[q].sums[g]), sums[q][i]);
      }
    }
  }
  // In order: what a tile writes after its tokens, the next one overwrites.
  for (int i = 0; i < kTiles; ++i) {
    for (int q = 0; q < kQueries; ++q) {
      _mm512_storeu_ps(tiles[i].scores + as_size(q) * stride, sums[q][i]);
    }
  }
}

template <int kBits, int kQueries>
void score_chunk(const PartShape& shape, const PartRun& run, const std::byte* fp32_queries,
                 const Query* queries, float* scores, std::size_t stride, Ahead& ahead) {
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  KeyTile pair[2];
  int n_pending = 0;
  const auto score_pending = [&] {
    if (n_pending == 1) score_tiles<kBits, kQueries, 1>(shape, pair, queries, stride, ahead);
    n_pending = 0;
  };
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    const int n_tokens = run.n_tokens[p];
    int t = 0;
    for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
      pair[n_pending++] = {run.parts[p] + as_size(t / kTileTokens) * tile_bytes, scores + t};
      if (n_pending == 2) {
        score_tiles<kBits, kQueries, 2>(shape, pair, queries, stride, ahead);
        n_pending = 0;
      }
    }
    if (t < n_tokens) {
      score_pending();
      float rows[kTileTokens * codec::kMaxHeadDim];
      scalar::affine_keys(kAffineLayout<kBits>).decode(shape, run.parts[p], t, n_tokens - t, rows);
      score_fp32_rows(shape, rows, n_tokens - t, fp32_queries, kQueries, scores + t, stride);
    }
    scores += n_tokens;
  }
  score_pending();
}

template <int kBits>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* const queries =
      reinterpret_cast<const Query*>(prepared + fp32_query_bytes(shape, n_queries));
  Ahead ahead(run, affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens));
  for_query_chunks(n_queries, [&](int first, auto n) {
    score_chunk<kBits, n()>(shape, run, prepared + fp32_query_bytes(shape, first), queries + first,
                            out + as_size(first) * stride, stride, ahead);
  });
}

template <int kBits>
KeyKernels keys_of() {
  KeyKernels kernels = scalar::affine_keys(kAffineLayout<kBits>);
  kernels.encode = avx2::key_encoder(kAffineLayout<kBits>);
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
