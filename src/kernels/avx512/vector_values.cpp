#include "kernels/avx2/avx2.h"
#include "kernels/avx512/code_chunks.h"
#include "kernels/avx512/vector.h"

namespace kvpool::kernels::avx512 {
namespace {

/// The sums of sixteen vectors.
__m512 sums_of(const __m512* vectors) {
  __m512 eights[8];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = vectors[2 * i];
    const __m512 b = vectors[2 * i + 1];
    eights[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  __m512 fours[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = eights[2 * i];
    const __m512 b = eights[2 * i + 1];
    fours[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  }
  __m512 twos[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = fours[2 * i];
    const __m512 b = fours[2 * i + 1];
    twos[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(twos[0], twos[1], 0x88),
                       _mm512_shuffle_f32x4(twos[0], twos[1], 0xDD));
}

/// Channels that are summed up together.
constexpr int kChannels = 16;

/// Sums of two channels of a sub-vector over all columns, before their lanes are added: a code
/// gives both, and vpdpbusd adds four tokens a lane.
template <int kQueries>
[[gnu::always_inline]] inline void add_columns(const ChunkCodes& codes, int sub, int n_columns,
                                               const ByteTable& even, const ByteTable& odd,
                                               const WeightDigits* weights, int channel,
                                               __m512 (&totals)[kQueries][kChannels]) {
  __m512i low[kQueries][2];
  __m512i high[kQueries][2];
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < 2; ++i) {
      low[q][i] = _mm512_setzero_si512();
      high[q][i] = _mm512_setzero_si512();
    }
  }
  for (int column = 0; column < n_columns; column += kColumns) {
    const __m512i code = codes.at(sub, column);
    const __mmask64 high_bit = _mm512_movepi8_mask(code);
    const __m512i values[2] = {even(code, high_bit), odd(code, high_bit)};
    for (int q = 0; q < kQueries; ++q) {
      const __m512i low_digits = _mm512_load_si512(weights[q].low + column);
      const __m512i high_digits = _mm512_load_si512(weights[q].high + column);
      for (int i = 0; i < 2; ++i) {
        low[q][i] = _mm512_dpbusd_epi32(low[q][i], low_digits, values[i]);
        high[q][i] = _mm512_dpbusd_epi32(high[q][i], high_digits, values[i]);
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    totals[q][channel] = digit_total(low[q][0], high[q][0]);
    totals[q][channel + 1] = digit_total(low[q][1], high[q][1]);
  }
}

template <int kSubDim, int kQueries>
void accumulate_chunk(const PartShape& shape, const ChunkCodes& codes, int n_columns,
                      const WeightDigits* weights, float* out, Ahead& ahead) {
  const std::int8_t* const planes = shape.codebook->planes.data();
  const int dim = shape.head_dim;
  for (int first = 0; first < dim; first += kChannels) {
    const int n = std::min(kChannels, dim - first);
    __m512 totals[kQueries][kChannels];
    for (auto& of_query : totals) {
      for (int d = n; d < kChannels; ++d) of_query[d] = _mm512_setzero_ps();
    }
    for (int pair = 0; pair < kSubDim; pair += 2) {
      const ByteTable even(planes + 256 * pair);
      const ByteTable odd(planes + 256 * (pair + 1));
      for (int d = 0; d < n; d += kSubDim) {
        ahead.fetch(as_size(2 * n_columns / kSubDim));
        add_columns<kQueries>(codes, (first + d) / kSubDim, n_columns, even, odd, weights, d + pair,
                              totals);
      }
    }
    const __mmask16 mask = first_lanes(n);
    for (int q = 0; q < kQueries; ++q) {
      const __m512 step = _mm512_set1_ps(weights[q].step * shape.codebook->scale);
      float* const sum = out + q * dim + first;
      const __m512 before = _mm512_maskz_loadu_ps(mask, sum);
      _mm512_mask_storeu_ps(sum, mask, _mm512_fmadd_ps(sums_of(totals[q]), step, before));
    }
  }
}

template <int kSubDim>
void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  ChunkCodes codes;
  WeightDigits digits[kMostQueries];
  Ahead ahead(run, 16 * as_size(n_subs(kSubDim, shape.head_dim)));
  for_code_chunks<kSubDim>(shape, run, codes, [&](int n_columns) {
    for_query_chunks(n_queries, [&](int first, auto n) {
      for (int q = 0; q < n(); ++q) {
        digits[q].set(weights + as_size(first + q) * stride, n_columns);
      }
      accumulate_chunk<kSubDim, n()>(shape, codes, n_columns, digits,
                                     out + as_size(first) * as_size(shape.head_dim), ahead);
    });
    weights += n_columns;
  });
}

template <int kSubDim>
ValueKernels values_of(Layout layout) {
  return {VectorEncoder<Lanes, kSubDim, 8>::encode, avx2::vector_values(layout).decode,
          accumulate<kSubDim>};
}

}  // namespace

ValueKernels vector_values(Layout layout) {
  if (layout == Layout::kVector8Wide) return wide_vector_values();
  if (layout == Layout::kVector8) return values_of<8>(layout);
  return layout == Layout::kVector4 ? values_of<4>(layout) : values_of<2>(layout);
}

}  // namespace kvpool::kernels::avx512
