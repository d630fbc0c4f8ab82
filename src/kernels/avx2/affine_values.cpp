#include "kernels/avx2/avx2.h"
#include "kernels/avx2/fixed_point.h"

namespace kvpool::kernels::avx2 {
namespace {

using codec::Role;

constexpr int kMostGroups = codec::kMaxHeadDim / 32;

/// Tiles that share the steps of their numbers: as many as 32 bits can sum, see kLargest.
constexpr int kMostTiles = 16;

/// The largest of 16 fp16 >= 0.
float largest_half(__m256i halves) {
  const __m128i most =
      _mm_max_epu16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  const __m128i ones = _mm_set1_epi16(-1);
  const __m128i least_of_flipped = _mm_minpos_epu16(_mm_xor_si128(most, ones));
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_xor_si128(least_of_flipped, ones)));
}

/// The first n floats, 0 for the others, which are not read.
__m256 load_first(const float* from, int n) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
}

/// Sums for kQueries queries, many tiles at a time. Products of weights and scales become numbers
/// in steps of the largest weight times the largest scale, what rounding takes from one being
/// carried over to the same lane of the next tile, so that many small weights do not vanish; then
/// each two vectors of channels go through the tiles in registers.
template <int kBits, int kQueries>
class Sums {
 public:
  explicit Sums(const PartShape& shape) : shape_(shape) {
    for (int g = 0; g < n_groups(shape); ++g) {
      for (__m256& bias : biases_[g]) bias = _mm256_setzero_ps();
    }
    for (auto& values : values_) {
      for (int d = 0; d < shape.head_dim; d += 8) _mm256_store_ps(values + d, _mm256_setzero_ps());
    }
  }

  /// Adds a full tile of which the first n_tokens count.
  void add(const std::byte* tile, const float* weights, std::size_t stride, int n_tokens) {
    for (int q = 0; q < kQueries; ++q, weights += stride) {
      auto& to = weights_[q][n_tiles_];
      if (n_tokens >= kTileTokens) {
        to[0] = _mm256_loadu_ps(weights);
        to[1] = _mm256_loadu_ps(weights + 8);
      } else {
        to[0] = load_first(weights, n_tokens);
        to[1] = load_first(weights + 8, n_tokens - 8);
      }
    }
    tiles_[n_tiles_++] = tile;
    if (n_tiles_ == kMostTiles) flush();
  }

  void add_to(float* out) {
    flush();
    const int dim = shape_.head_dim;
    for (int q = 0; q < kQueries; ++q, out += dim) {
      for (int g = 0; g < n_groups(shape_); ++g) {
        const float bias = sum_of(biases_[g][q]);
        for (int d = g * shape_.group_size; d < dim && d < (g + 1) * shape_.group_size; ++d) {
          out[d] += values_[q][d] + bias;
        }
      }
    }
  }

 private:
  /// What is carried over at last counts as if of a middle code.
  static constexpr float kMiddle = 0.5F * ((1 << kBits) - 1);

  void flush() {
    if (n_tiles_ == 0) return;
    float largest_weights[kQueries];
    for (int q = 0; q < kQueries; ++q) {
      __m256 largest = _mm256_setzero_ps();
      for (int i = 0; i < n_tiles_; ++i) {
        largest = _mm256_max_ps(largest, _mm256_max_ps(weights_[q][i][0], weights_[q][i][1]));
      }
      largest_weights[q] = largest_of(largest);
    }
    for (int g = 0; g < n_groups(shape_); ++g) add_group(g, largest_weights);
    n_tiles_ = 0;
  }

  void add_group(int g, const float (&largest_weights)[kQueries]) {
    const std::size_t scales =
        code_bytes(Role::kValues, kBits, kTileTokens, shape_.head_dim) + as_size(g) * 32;
    const std::size_t biases = scales + group_bytes(shape_, kTileTokens) / 2;
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < n_tiles_; ++i) {
      most = _mm256_max_epu16(most, load_words(tiles_[i] + scales));
    }
    const float largest_scale = largest_half(most);
    float steps[kQueries];
    __m256 per_step[kQueries];
    for (int q = 0; q < kQueries; ++q) {
      steps[q] = at_least(largest_weights[q] * largest_scale / kLargest);
      per_step[q] = _mm256_set1_ps(1.0F / steps[q]);
    }
    __m256 carried[kQueries][2];
    for (auto& of_query : carried) of_query[0] = of_query[1] = _mm256_setzero_ps();
    for (int i = 0; i < n_tiles_; ++i) {
      const std::byte* const at = tiles_[i] + scales;
      const __m256 scale[] = {load_halves(at), load_halves(at + 16)};
      const __m256 bias[] = {load_halves(tiles_[i] + biases), load_halves(tiles_[i] + biases + 16)};
      for (int q = 0; q < kQueries; ++q) {
        __m256 numbers[2];
        for (int j = 0; j < 2; ++j) {
          const __m256 weights = weights_[q][i][j];
          const __m256 product = _mm256_mul_ps(weights, scale[j]);
          const __m256 exact = _mm256_fmadd_ps(product, per_step[q], carried[q][j]);
          numbers[j] = round(exact);
          carried[q][j] = _mm256_sub_ps(exact, numbers[j]);
          biases_[g][q] = _mm256_fmadd_ps(weights, bias[j], biases_[g][q]);
        }
        store_pairs<kBits>(numbers[0], numbers[1], pairs_[i][q]);
      }
    }
    for (int q = 0; q < kQueries; ++q) {
      const __m256 left = _mm256_add_ps(carried[q][0], carried[q][1]);
      biases_[g][q] = _mm256_fmadd_ps(left, _mm256_set1_ps(kMiddle * steps[q]), biases_[g][q]);
    }
    const int end = (g + 1) * shape_.group_size;
    for (int d = g * shape_.group_size; d < end && d < shape_.head_dim; d += 16) {
      add_vectors(d, steps);
    }
  }

  /// Adds 16 channels from d on. The last 8 may lie beyond the head: there it reads what follows
  /// the codes and sums what nobody asks for.
  void add_vectors(int d, const float (&steps)[kQueries]) {
    const std::size_t row_bytes = 4 * as_size(shape_.head_dim);
    ProductSums<kBits, kQueries> products;
    for (int i = 0; i < n_tiles_; ++i) {
      products.add(tiles_[i] + 4 * d, row_bytes, kWords<kBits>,
                   [&](int q) { return pairs_[i][q]; });
    }
    for (int q = 0; q < kQueries; ++q) {
      for (int v = 0; v < 2; ++v) {
        float* const sum = values_[q] + d + 8 * v;
        _mm256_store_ps(sum, _mm256_fmadd_ps(products.total(q, v), _mm256_set1_ps(steps[q]),
                                             _mm256_load_ps(sum)));
      }
    }
  }

  const PartShape& shape_;
  int n_tiles_ = 0;
  const std::byte* tiles_[kMostTiles];
  __m256 weights_[kQueries][kMostTiles][2];
  /// Of weight * bias, a lane a token.
  __m256 biases_[kMostGroups][kQueries];
  alignas(32) std::int32_t pairs_[kMostTiles][kQueries][kPairs];
  alignas(32) float values_[kQueries][codec::kMaxHeadDim + 8];
};

template <int kBits, int kQueries>
void accumulate_chunk(const PartShape& shape, const PartRun& run, const float* weights,
                      std::size_t stride, float* out, Ahead& ahead) {
  const std::size_t tile_bytes = affine_tile_bytes(Role::kValues, kBits, shape, kTileTokens);
  const auto decode = scalar::affine_values(kAffineLayout<kBits>).decode;
  Sums<kBits, kQueries> sums(shape);
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    const int n_tokens = run.n_tokens[p];
    const std::byte* tile = run.parts[p];
    int t = 0;
    for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
      ahead.fetch(tile_bytes);
      sums.add(tile, weights + t, stride, n_tokens - t);
      tile += tile_bytes;
    }
    float row[codec::kMaxHeadDim];
    for (; t < n_tokens; ++t) {
      decode(shape, run.parts[p], t, 1, row);
      for (int q = 0; q < kQueries; ++q) {
        const float weight = weights[as_size(q) * stride + as_size(t)];
        for (int d = 0; d < shape.head_dim; ++d) out[q * shape.head_dim + d] += weight * row[d];
      }
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
                                 out + first * shape.head_dim, ahead);
  });
}

template <int kBits>
ValueKernels values_of(Layout layout) {
  ValueKernels kernels = scalar::affine_values(layout);
  kernels.encode = value_encoder(layout);
  kernels.accumulate = accumulate<kBits>;
  return kernels;
}

}  // namespace

ValueKernels affine_values(Layout layout) {
  if (layout == Layout::kAffine8) return values_of<8>(layout);
  return layout == Layout::kAffine4 ? values_of<4>(layout) : values_of<2>(layout);
}

}  // namespace kvpool::kernels::avx2
