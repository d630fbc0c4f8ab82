#include "kernels/avx2/avx2.h"
#include "kernels/avx512/common.h"
#include "kernels/avx512/decode.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx512 {
namespace {

using codec::Role;

/// While many are scaled together, the latency of one hides behind the others.
constexpr std::size_t kPartsAtOnce = 4;

int n_vectors(const PartShape& shape) { return (shape.head_dim + 15) / 16; }

/// A query times the scales of a part, and its product with the biases.
struct ScaledQuery {
  float step;
  float bias;
  alignas(64) std::int32_t digits[codec::kMaxHeadDim / 16][kDigitWords];
};

template <int kBits, int kQueries>
void scale_queries(const PartShape& shape, const std::byte* part, const float* queries,
                   ScaledQuery (&scaled)[kQueries]) {
  const std::size_t query_stride = n_steps(shape) * kStep;
  const std::byte* const biases_at = part + channel_bytes(shape) / 2;
  const int n = n_vectors(shape);
  __m512 products[kQueries][codec::kMaxHeadDim / 16];
  __m512 largest[kQueries];
  __m512 biases[kQueries];
  for (int q = 0; q < kQueries; ++q) {
    largest[q] = _mm512_set1_ps(1e-30F);
    biases[q] = _mm512_setzero_ps();
  }
  for (int v = 0; v < n; ++v) {
    const __mmask16 mask = first_lanes(shape.head_dim - 16 * v);
    const __m512 scale = load_halves(part + 32 * v, mask);
    const __m512 bias = load_halves(biases_at + 32 * v, mask);
    for (int q = 0; q < kQueries; ++q) {
      const __m512 x = _mm512_load_ps(queries + as_size(q) * query_stride + as_size(16 * v));
      products[q][v] = _mm512_mul_ps(x, scale);
      largest[q] = _mm512_max_ps(largest[q], _mm512_abs_ps(products[q][v]));
      biases[q] = _mm512_fmadd_ps(x, bias, biases[q]);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    scaled[q].step = _mm512_reduce_max_ps(largest[q]) / kLargest;
    scaled[q].bias = _mm512_reduce_add_ps(biases[q]);
    const __m512 per_step = _mm512_set1_ps(1.0F / scaled[q].step);
    for (int v = 0; v < n; ++v) {
      store_digits<kBits>(_mm512_fmadd_ps(products[q][v], per_step, _mm512_set1_ps(128.0F)),
                          scaled[q].digits[v]);
    }
  }
}

/// Scores of kTiles full tiles, one behind the other.
template <int kBits, int kQueries, int kTiles>
void score_tiles(const PartShape& shape, const std::byte* tiles, std::size_t tile_bytes,
                 const ScaledQuery* queries, float* scores, std::size_t stride) {
  const int n_words = static_cast<int>(key_words(kBits, shape.head_dim));
  DigitSums<kTiles> products[kQueries];
  for (int v = 0; v < n_vectors(shape); ++v) {
    for (int word = 0; word < kWords<kBits>; ++word) {
      const int at = v * kWords<kBits> + word;
      if (at >= n_words) break;
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
                       _mm512_fmadd_ps(products[q].total(i), _mm512_set1_ps(queries[q].step),
                                       _mm512_set1_ps(queries[q].bias)));
    }
  }
}

template <int kBits, int kQueries>
void score_part(const PartShape& shape, const std::byte* part, int n_tokens,
                const std::byte* fp32_queries, const ScaledQuery* scaled, float* to,
                std::size_t stride, Ahead& ahead) {
  const std::size_t tile_bytes = code_bytes(Role::kKeys, kBits, kTileTokens, shape.head_dim);
  // Values have scales and biases in each tile.
  const std::size_t value_tile_bytes = tile_bytes + group_bytes(shape, kTileTokens);
  const std::byte* tile = part + channel_bytes(shape);
  int t = 0;
  for (; t + kTileTokens < n_tokens && t + 2 * kTileTokens <= shape.block_size;
       t += 2 * kTileTokens) {
    ahead.fetch(2 * value_tile_bytes);
    score_tiles<kBits, kQueries, 2>(shape, tile, tile_bytes, scaled, to + t, stride);
    tile += 2 * tile_bytes;
  }
  if (t < n_tokens && t + kTileTokens <= shape.block_size) {
    ahead.fetch(value_tile_bytes);
    score_tiles<kBits, kQueries, 1>(shape, tile, tile_bytes, scaled, to + t, stride);
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
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const std::byte* const queries = prepared + fp32_query_bytes(shape, first);
    float* to = out + as_size(first) * stride;
    ScaledQuery scaled[kPartsAtOnce][n()];
    for (std::size_t p = 0; p < run.n_parts; p += kPartsAtOnce) {
      const std::size_t end = p + kPartsAtOnce < run.n_parts ? p + kPartsAtOnce : run.n_parts;
      for (std::size_t i = p; i < end; ++i) {
        scale_queries<kBits, n()>(shape, run.parts[i], reinterpret_cast<const float*>(queries),
                                  scaled[i - p]);
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
