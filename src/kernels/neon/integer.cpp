// Codes become fp32 in registers: tokens in lanes for keys, channels in lanes for values. A last
// tile of less than 16 tokens is decoded to fp32 rows.

#include <cstring>

#include "kernels/neon/common.h"
#include "kernels/neon/decode.h"
#include "kernels/neon/neon.h"

namespace kvpool::kernels::neon {
namespace {

using codec::Role;

/// Vectors of 4 tokens in a full tile.
constexpr int kVectors = kTileTokens / 4;

/// sums += codes of channels [first, end) times queries, over the tokens of a full tile.
template <int kBits, int kQueries>
void add_products(const std::byte* codes, int first, int end, const float* queries, int dim,
                  float32x4_t (&sums)[kQueries][kVectors]) {
  constexpr int kPerWord = 32 / kBits;
  for (int word_channel = first; word_channel < end; word_channel += kPerWord) {
    const std::byte* const at = codes + as_size(word_channel / kPerWord) * 4 * kTileTokens;
    uint32x4_t words[kVectors];
    for (int v = 0; v < kVectors; ++v) words[v] = load_words(at + 16 * v);
    const int n = end - word_channel < kPerWord ? end - word_channel : kPerWord;
    for (int i = 0; i < n; ++i) {
      float32x4_t code[kVectors];
      for (int v = 0; v < kVectors; ++v) code[v] = vcvtq_f32_u32(code_in<kBits>(words[v], i));
      for (int q = 0; q < kQueries; ++q) {
        const float query = queries[q * dim + word_channel + i];
        for (int v = 0; v < kVectors; ++v) sums[q][v] = vfmaq_n_f32(sums[q][v], code[v], query);
      }
    }
  }
}

template <int kQueries>
void store_scores(const float32x4_t (&sums)[kQueries][kVectors], float* scores,
                  std::size_t stride) {
  for (std::size_t q = 0; q < kQueries; ++q) {
    for (std::size_t v = 0; v < kVectors; ++v) vst1q_f32(scores + q * stride + 4 * v, sums[q][v]);
  }
}

/// Scores of n_tokens that are no full tile.
void score_rest(const PartShape& shape, const std::byte* part, int first, int n_tokens,
                scalar::Decode decode, const float* queries, int n_queries, float* scores,
                std::size_t stride) {
  float rows[kTileTokens * codec::kMaxHeadDim];
  decode(shape, part, first, n_tokens, rows);
  const auto* const bytes = reinterpret_cast<const std::byte*>(rows);
  raw_keys(Layout::kFp32)
      .scores(shape, {&bytes, &n_tokens, 1}, reinterpret_cast<const std::byte*>(queries), n_queries,
              scores, stride);
}

/// Of affine keys: the queries as they come, then the sum of each group of each query.
std::size_t affine_prepared_bytes(const PartShape& shape, int n_queries) {
  return scalar::query_bytes(shape, n_queries) +
         as_size(n_queries * n_groups(shape)) * sizeof(float);
}

void prepare_affine(const PartShape& shape, const float* queries, int n_queries,
                    std::byte* prepared) {
  scalar::copy_queries(shape, queries, n_queries, prepared);
  auto* sums = reinterpret_cast<float*>(prepared + scalar::query_bytes(shape, n_queries));
  for (int q = 0; q < n_queries; ++q, queries += shape.head_dim) {
    for (int first = 0; first < shape.head_dim; first += shape.group_size) {
      float32x4_t sum = vdupq_n_f32(0.0F);
      for (int d = first; d < shape.head_dim && d < first + shape.group_size; d += 4) {
        sum = vaddq_f32(sum, vld1q_f32(queries + d));
      }
      *sums++ = vaddvq_f32(sum);
    }
  }
}

template <int kBits, int kQueries>
void score_affine_tile(const PartShape& shape, const std::byte* tile, const float* queries,
                       const float* query_sums, float* scores, std::size_t stride) {
  const int dim = shape.head_dim;
  const std::byte* scales = tile + code_bytes(Role::kKeys, kBits, kTileTokens, dim);
  const std::byte* biases = scales + group_bytes(shape, kTileTokens) / 2;
  float32x4_t sums[kQueries][kVectors];
  for (auto& of_query : sums) {
    for (float32x4_t& sum : of_query) sum = vdupq_n_f32(0.0F);
  }
  for (int g = 0; g < n_groups(shape); ++g) {
    const int first = g * shape.group_size;
    const int end = first + shape.group_size < dim ? first + shape.group_size : dim;
    float32x4_t products[kQueries][kVectors];
    for (auto& of_query : products) {
      for (float32x4_t& product : of_query) product = vdupq_n_f32(0.0F);
    }
    add_products<kBits>(tile, first, end, queries, dim, products);
    for (int v = 0; v < kVectors; ++v, scales += 8, biases += 8) {
      const float32x4_t scale = load_halves(scales);
      const float32x4_t bias = load_halves(biases);
      for (int q = 0; q < kQueries; ++q) {
        sums[q][v] = vfmaq_f32(sums[q][v], scale, products[q][v]);
        sums[q][v] = vfmaq_n_f32(sums[q][v], bias, query_sums[q * n_groups(shape) + g]);
      }
    }
  }
  store_scores(sums, scores, stride);
}

template <int kBits>
void affine_scores(const PartShape& shape, const PartRun& run, const std::byte* prepared,
                   int n_queries, float* out, std::size_t stride) {
  const std::size_t tile_bytes = affine_tile_bytes(Role::kKeys, kBits, shape, kTileTokens);
  const auto* const all_queries = reinterpret_cast<const float*>(prepared);
  const auto* const all_sums =
      reinterpret_cast<const float*>(prepared + scalar::query_bytes(shape, n_queries));
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const float* const queries = all_queries + first * shape.head_dim;
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      const int n_tokens = run.n_tokens[p];
      int t = 0;
      for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
        ahead.fetch(tile_bytes);
        score_affine_tile<kBits, n()>(shape, run.parts[p] + as_size(t / kTileTokens) * tile_bytes,
                                      queries, all_sums + first * n_groups(shape), to + t, stride);
      }
      if (t < n_tokens) {
        score_rest(shape, run.parts[p], t, n_tokens - t, key_decoder(kAffineLayout<kBits>), queries,
                   n(), to + t, stride);
      }
      to += n_tokens;
    }
  });
}

/// The queries times the part's scales; returns in `biases` the queries' products with its biases.
template <int kQueries>
void scale_queries(const PartShape& shape, const std::byte* part, const float* queries,
                   float* scaled, float (&biases)[kQueries]) {
  for (int q = 0; q < kQueries; ++q, queries += shape.head_dim, scaled += shape.head_dim) {
    float32x4_t bias = vdupq_n_f32(0.0F);
    for (int d = 0; d < shape.head_dim; d += 4) {
      const float32x4_t query = vld1q_f32(queries + d);
      vst1q_f32(scaled + d, vmulq_f32(query, load_halves(part + 2 * d)));
      bias = vfmaq_f32(bias, query, load_halves(part + channel_bytes(shape) / 2 + 2 * d));
    }
    biases[q] = vaddvq_f32(bias);
  }
}

template <int kBits>
void channel_scores(const PartShape& shape, const PartRun& run, const std::byte* prepared,
                    int n_queries, float* out, std::size_t stride) {
  constexpr Layout kLayout = kBits == 4 ? Layout::kChannel4 : Layout::kChannel2;
  const int dim = shape.head_dim;
  const std::size_t tile_bytes = code_bytes(Role::kKeys, kBits, kTileTokens, dim);
  Ahead ahead(run);
  for_query_chunks(n_queries, [&](int first, auto n) {
    const float* const queries = reinterpret_cast<const float*>(prepared) + first * dim;
    float* to = out + as_size(first) * stride;
    for (std::size_t p = 0; p < run.n_parts; ++p) {
      float scaled[n() * codec::kMaxHeadDim];
      float biases[n()];
      scale_queries<n()>(shape, run.parts[p], queries, scaled, biases);
      ahead.fetch(channel_bytes(shape));
      const int n_tokens = run.n_tokens[p];
      const std::byte* tile = run.parts[p] + channel_bytes(shape);
      int t = 0;
      for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
        ahead.fetch(tile_bytes);
        float32x4_t sums[n()][kVectors];
        for (int q = 0; q < n(); ++q) {
          for (float32x4_t& sum : sums[q]) sum = vdupq_n_f32(biases[q]);
        }
        add_products<kBits>(tile, 0, dim, scaled, dim, sums);
        store_scores(sums, to + t, stride);
        tile += tile_bytes;
      }
      if (t < n_tokens) {
        score_rest(shape, run.parts[p], t, n_tokens - t, key_decoder(kLayout), queries, n(), to + t,
                   stride);
      }
      to += n_tokens;
    }
  });
}

/// out += codes of kWide * 4 channels times the tokens' weights, and the bias.
template <int kBits, int kQueries, int kWide>
void add_channels(const std::byte* words_at, int dim, const float (&weights)[kQueries][kTileTokens],
                  const float (&biases)[kQueries], float* out) {
  constexpr int kPerWord = 32 / kBits;
  float32x4_t sums[kQueries][kWide];
  for (int q = 0; q < kQueries; ++q) {
    for (int v = 0; v < kWide; ++v) {
      sums[q][v] = vaddq_f32(vdupq_n_f32(biases[q]), vld1q_f32(out + q * dim + 4 * v));
    }
  }
  for (int word = 0; word < kTileTokens / kPerWord; ++word, words_at += 4 * dim) {
    uint32x4_t words[kWide];
    for (int v = 0; v < kWide; ++v) words[v] = load_words(words_at + 16 * v);
    for (int i = 0; i < kPerWord; ++i) {
      float32x4_t code[kWide];
      for (int v = 0; v < kWide; ++v) code[v] = vcvtq_f32_u32(code_in<kBits>(words[v], i));
      for (int q = 0; q < kQueries; ++q) {
        const float weight = weights[q][word * kPerWord + i];
        for (int v = 0; v < kWide; ++v) sums[q][v] = vfmaq_n_f32(sums[q][v], code[v], weight);
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    for (int v = 0; v < kWide; ++v) vst1q_f32(out + q * dim + 4 * v, sums[q][v]);
  }
}

/// Adds a full tile, of which the first n_tokens count.
template <int kBits, int kQueries>
void add_tile(const PartShape& shape, const std::byte* tile, const float* weights,
              std::size_t stride, int n_tokens, float* out) {
  const int dim = shape.head_dim;
  const std::byte* scales = tile + code_bytes(Role::kValues, kBits, kTileTokens, dim);
  const std::byte* biases = scales + group_bytes(shape, kTileTokens) / 2;
  float weight[kQueries][kTileTokens] = {};
  for (std::size_t q = 0; q < kQueries; ++q) {
    std::memcpy(weight[q], weights + q * stride, as_size(n_tokens) * sizeof(float));
  }
  for (int g = 0; g < n_groups(shape); ++g) {
    float scaled[kQueries][kTileTokens];
    float32x4_t bias_sums[kQueries];
    for (float32x4_t& sum : bias_sums) sum = vdupq_n_f32(0.0F);
    for (int t = 0; t < kTileTokens; t += 4, scales += 8, biases += 8) {
      const float32x4_t scale = load_halves(scales);
      const float32x4_t bias = load_halves(biases);
      for (int q = 0; q < kQueries; ++q) {
        const float32x4_t w = vld1q_f32(weight[q] + t);
        vst1q_f32(scaled[q] + t, vmulq_f32(w, scale));
        bias_sums[q] = vfmaq_f32(bias_sums[q], w, bias);
      }
    }
    float bias[kQueries];
    for (int q = 0; q < kQueries; ++q) bias[q] = vaddvq_f32(bias_sums[q]);
    const int first = g * shape.group_size;
    const int end = first + shape.group_size < dim ? first + shape.group_size : dim;
    int d = first;
    for (; d + 16 <= end; d += 16) {
      add_channels<kBits, kQueries, 4>(tile + 4 * d, dim, scaled, bias, out + d);
    }
    if (d < end) add_channels<kBits, kQueries, 2>(tile + 4 * d, dim, scaled, bias, out + d);
  }
}

template <int kBits>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
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
      if (t < n_tokens) {
        const int left = n_tokens - t;
        float rows[kTileTokens * codec::kMaxHeadDim];
        value_decoder(kAffineLayout<kBits>)(shape, run.parts[p], t, left, rows);
        const auto* const bytes = reinterpret_cast<const std::byte*>(rows);
        raw_values(Layout::kFp32)
            .accumulate(shape, {&bytes, &left, 1}, from + t, stride, n(), sums);
      }
      from += n_tokens;
    }
  });
}

template <int kBits>
KeyKernels affine_keys() {
  KeyKernels kernels = scalar::affine_keys(kAffineLayout<kBits>);
  kernels.decode = key_decoder(kAffineLayout<kBits>);
  kernels.prepared_bytes = affine_prepared_bytes;
  kernels.prepare = prepare_affine;
  kernels.scores = affine_scores<kBits>;
  return kernels;
}

template <int kBits>
KeyKernels channel_keys(Layout layout) {
  KeyKernels kernels = scalar::channel_keys(layout);
  kernels.decode = key_decoder(layout);
  kernels.scores = channel_scores<kBits>;
  return kernels;
}

template <int kBits>
ValueKernels affine_values() {
  ValueKernels kernels = scalar::affine_values(kAffineLayout<kBits>);
  kernels.decode = value_decoder(kAffineLayout<kBits>);
  kernels.accumulate = accumulate<kBits>;
  return kernels;
}

}  // namespace

KeyKernels integer_keys(Layout layout) {
  switch (layout) {
    case Layout::kAffine8:
      return affine_keys<8>();
    case Layout::kAffine4:
      return affine_keys<4>();
    case Layout::kAffine2:
      return affine_keys<2>();
    case Layout::kChannel4:
      return channel_keys<4>(layout);
    default:
      return channel_keys<2>(layout);
  }
}

ValueKernels integer_values(Layout layout) {
  if (layout == Layout::kAffine8) return affine_values<8>();
  return layout == Layout::kAffine4 ? affine_values<4>() : affine_values<2>();
}

}  // namespace kvpool::kernels::neon
