#include "kernels/avx512/common.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx512 {
namespace {

using codec::Role;

constexpr int kMostGroups = codec::kMaxHeadDim / 32;

/// Sums over a run, of kQueries queries.
template <int kQueries>
struct Sums {
  alignas(64) float values[kQueries][codec::kMaxHeadDim] = {};
  /// Of weight * bias, a lane a token.
  __m512 biases[kMostGroups][kQueries];

  Sums() {
    for (auto& group : biases) {
      for (__m512& bias : group) bias = _mm512_setzero_ps();
    }
  }
};

/// Adds a full tile of which the tokens in `mask` count. Weights times scales become fixed-point
/// numbers in steps of the largest weight times the largest scale, per query and group.
template <int kBits, int kQueries>
void add_tile(const PartShape& shape, const std::byte* tile, const float* weights,
              std::size_t stride, __mmask16 mask, Sums<kQueries>& sums) {
  const int dim = shape.head_dim;
  const std::byte* const scales = tile + code_bytes(Role::kValues, kBits, kTileTokens, dim);
  const std::byte* const biases = scales + group_bytes(shape, kTileTokens) / 2;
  const __m512 least = _mm512_set1_ps(1e-30F);
  __m512 weight[kQueries];
  __m512 largest_weight[kQueries];
  __m512 part_of_largest[kQueries];
  for (int q = 0; q < kQueries; ++q) {
    weight[q] = _mm512_maskz_loadu_ps(mask, weights + as_size(q) * stride);
    largest_weight[q] = max_in_all(_mm512_max_ps(weight[q], least));
    part_of_largest[q] = _mm512_mul_ps(weight[q], reciprocal(largest_weight[q]));
  }
  for (int g = 0; g < n_groups(shape); ++g) {
    const __m512 scale = load_halves(scales + g * 32);
    const __m512 bias = load_halves(biases + g * 32);
    const __m512 largest_scale = max_in_all(_mm512_max_ps(scale, least));
    const __m512 number = _mm512_mul_ps(
        scale, _mm512_mul_ps(reciprocal(largest_scale), _mm512_set1_ps(kLargest)));
    const __m512 step = _mm512_mul_ps(largest_scale, _mm512_set1_ps(1.0F / kLargest));
    alignas(64) std::int32_t digits[kQueries][kDigitWords];
    for (int q = 0; q < kQueries; ++q) {
      store_digits<kBits>(
          _mm512_fmadd_ps(part_of_largest[q], number, _mm512_set1_ps(128.0F)), digits[q]);
      sums.biases[g][q] = _mm512_fmadd_ps(weight[q], bias, sums.biases[g][q]);
    }
    for (int d = g * shape.group_size; d < dim && d < (g + 1) * shape.group_size; d += 16) {
      DigitSums products[kQueries];
      for (int word = 0; word < kWords<kBits>; ++word) {
        const std::byte* const at = tile + 4 * as_size(word * dim + d);
        const __m512i words = d + 16 <= dim ? _mm512_loadu_si512(at)
                                            : _mm512_maskz_loadu_epi32(first_lanes(dim - d), at);
        for (int shift = 0; shift < kShifts<kBits>; ++shift) {
          const __m512i codes = codes_at<kBits>(words, shift);
          for (int q = 0; q < kQueries; ++q) {
            products[q].add(codes, digits[q], word * kShifts<kBits> + shift);
          }
        }
      }
      for (int q = 0; q < kQueries; ++q) {
        float* const sum = sums.values[q] + d;
        _mm512_store_ps(sum, _mm512_fmadd_ps(products[q].total(),
                                             _mm512_mul_ps(step, largest_weight[q]),
                                             _mm512_load_ps(sum)));
      }
    }
  }
}

template <int kBits, int kQueries>
void accumulate_chunk(const PartShape& shape, const PartRun& run, const float* weights,
                      std::size_t stride, float* out) {
  constexpr Layout kLayout = kBits == 8   ? Layout::kAffine8
                             : kBits == 4 ? Layout::kAffine4
                                          : Layout::kAffine2;
  const std::size_t tile_bytes = affine_tile_bytes(Role::kValues, kBits, shape, kTileTokens);
  const std::size_t dim = as_size(shape.head_dim);
  Sums<kQueries> sums;
  for (std::size_t p = 0; p < run.n_parts; ++p) {
    const int n_tokens = run.n_tokens[p];
    int t = 0;
    for (; t < n_tokens && t + kTileTokens <= shape.block_size; t += kTileTokens) {
      add_tile<kBits>(shape, run.parts[p] + as_size(t / kTileTokens) * tile_bytes, weights + t,
                      stride, first_lanes(n_tokens - t), sums);
    }
    if (t < n_tokens) {
      float rows[kTileTokens * codec::kMaxHeadDim];
      scalar::affine_values(kLayout).decode(shape, run.parts[p], t, n_tokens - t, rows);
      accumulate_fp32_rows(shape, rows, n_tokens - t, weights + t, stride, kQueries, out);
    }
    weights += n_tokens;
  }
  for (int q = 0; q < kQueries; ++q, out += dim) {
    for (int g = 0; g < n_groups(shape); ++g) {
      const float bias = _mm512_reduce_add_ps(sums.biases[g][q]);
      const std::size_t end = as_size((g + 1) * shape.group_size);
      for (std::size_t d = as_size(g * shape.group_size); d < dim && d < end; ++d) {
        out[d] += sums.values[q][d] + bias;
      }
    }
  }
}

template <int kBits>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  for_query_chunks(n_queries, [&](int first, auto n) {
    accumulate_chunk<kBits, n()>(shape, run, weights + as_size(first) * stride, stride,
                                 out + as_size(first) * as_size(shape.head_dim));
  });
}

template <int kBits>
ValueKernels values_of(Layout layout) {
  ValueKernels kernels = scalar::affine_values(layout);
  kernels.accumulate = accumulate<kBits>;
  return kernels;
}

}  // namespace

ValueKernels affine_values(Layout layout) {
  if (layout == Layout::kAffine8) return values_of<8>(layout);
  return layout == Layout::kAffine4 ? values_of<4>(layout) : values_of<2>(layout);
}

}  // namespace kvpool::kernels::avx512
