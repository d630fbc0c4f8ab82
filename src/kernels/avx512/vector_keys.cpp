#include "kernels/avx2/avx2.h"
#include "kernels/avx512/code_chunks.h"
#include "kernels/avx512/vector.h"

namespace kvpool::kernels::avx512 {
namespace {

/// Four channels of kColumns keys as unsigned bytes, 128 too large; a dword has those of one key.
/// Vector k has the columns 4 k ... 4 k + 3 of each sixteen.
struct Quad {
  __m512i keys[4];
};

Quad interleave(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab_low = _mm512_unpacklo_epi8(a, b);
  const __m512i ab_high = _mm512_unpackhi_epi8(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi8(c, d);
  const __m512i cd_high = _mm512_unpackhi_epi8(c, d);
  return {{_mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
           _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)}};
}

constexpr int kMostQuads = codec::kMaxHeadDim / 4;

/// Decodes kColumns keys, once for all queries.
template <int kSubDim>
void decode_columns(const codec::Codebook& book, const ChunkCodes& codes, int column, int n_quads,
                    Quad* quads) {
  constexpr char kFlip = -128;
  const std::int8_t* const planes = book.planes.data();
  // With 8 channels to a code, the tables of 4 at a time fit the registers.
  constexpr int kHalves = kSubDim == 8 ? 2 : 1;
  for (int half = 0; half < kHalves; ++half) {
    const ByteTable a(planes + 1024 * half, kFlip);
    const ByteTable b(planes + 1024 * half + 256, kFlip);
    if constexpr (kSubDim == 2) {
      for (int i = 0; i < n_quads; ++i) {
        const __m512i first = codes.at(2 * i, column);
        const __m512i second = codes.at(2 * i + 1, column);
        const __mmask64 first_high = _mm512_movepi8_mask(first);
        const __mmask64 second_high = _mm512_movepi8_mask(second);
        quads[i] = interleave(a(first, first_high), b(first, first_high), a(second, second_high),
                              b(second, second_high));
      }
    } else {
      const ByteTable c(planes + 1024 * half + 512, kFlip);
      const ByteTable d(planes + 1024 * half + 768, kFlip);
      for (int i = half; i < n_quads; i += kHalves) {
        const __m512i code = codes.at(i / kHalves, column);
        const __mmask64 high = _mm512_movepi8_mask(code);
        quads[i] = interleave(a(code, high), b(code, high), c(code, high), d(code, high));
      }
    }
  }
}

/// Adds the products of bytes, four to a lane. With the intrinsic GCC 12 copies the sums to other
/// registers and back.
void add_products(__m512i& sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}

/// Scores of n of the decoded keys, of which half at a time, so that the sums fit the registers.
template <int kQueries>
void score_columns(const Quad* quads, int n_quads, const DigitQuery* queries, float scale, int n,
                   float* scores, std::size_t stride, Ahead& ahead) {
  __m512 sums[kQueries][4];
  for (int half = 0; half < 4; half += 2) {
    __m512i low[kQueries][2];
    __m512i high[kQueries][2];
    for (int q = 0; q < kQueries; ++q) {
      for (int k = 0; k < 2; ++k) {
        low[q][k] = _mm512_setzero_si512();
        high[q][k] = _mm512_setzero_si512();
      }
    }
    for (int i = 0; i < n_quads; ++i) {
      ahead.fetch(kColumns);
      const __m512i keys[2] = {quads[i].keys[half], quads[i].keys[half + 1]};
      for (int q = 0; q < kQueries; ++q) {
        const __m512i low_digits = _mm512_set1_epi32(queries[q].low[i]);
        const __m512i high_digits = _mm512_set1_epi32(queries[q].high[i]);
        for (int k = 0; k < 2; ++k) {
          add_products(low[q][k], keys[k], low_digits);
          add_products(high[q][k], keys[k], high_digits);
        }
      }
    }
    for (int q = 0; q < kQueries; ++q) {
      const __m512i bias = _mm512_set1_epi32(128 * queries[q].sum);
      const __m512 step = _mm512_set1_ps(scale * queries[q].scale);
      for (int k = 0; k < 2; ++k) {
        const __m512i total = _mm512_add_epi32(_mm512_slli_epi32(high[q][k], 8), low[q][k]);
        sums[q][half + k] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(total, bias)), step);
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) store_in_order(sums[q], n, scores + as_size(q) * stride);
}

template <int kSubDim>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* const queries = reinterpret_cast<const DigitQuery*>(prepared);
  const int n_quads = shape.head_dim / 4;
  ChunkCodes codes;
  alignas(64) Quad quads[kMostQuads];
  Ahead ahead(run, 16 * as_size(n_subs(kSubDim, shape.head_dim)));
  for_code_chunks<kSubDim>(shape, run, codes, [&](int n_in_chunk) {
    for (int column = 0; column < n_in_chunk; column += kColumns, out += kColumns) {
      decode_columns<kSubDim>(*shape.codebook, codes, column, n_quads, quads);
      const int n_columns = std::min(n_in_chunk - column, kColumns);
      for_query_chunks(n_queries, [&](int first, auto n) {
        score_columns<n()>(quads, n_quads, queries + first, shape.codebook->scale, n_columns,
                           out + as_size(first) * stride, stride, ahead);
      });
    }
  });
}

template <int kSubDim>
KeyKernels keys_of(Layout layout) {
  KeyKernels kernels = avx2::vector_keys(layout);
  kernels.encode = VectorEncoder<Lanes, kSubDim, 8>::encode;
  kernels.prepared_bytes = digit_query_bytes;
  kernels.prepare = prepare_digit_queries;
  kernels.scores = scores<kSubDim>;
  return kernels;
}

}  // namespace

std::size_t digit_query_bytes(const PartShape& /*shape*/, int n_queries) {
  return as_size(n_queries) * sizeof(DigitQuery);
}

void prepare_digit_queries(const PartShape& shape, const float* queries, int n_queries,
                           std::byte* prepared) {
  const int dim = shape.head_dim;
  auto* to = reinterpret_cast<DigitQuery*>(prepared);
  for (int q = 0; q < n_queries; ++q, ++to, queries += dim) {
    const float largest = largest_of(queries, dim);
    to->scale = largest / kLargest;
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30F ? kLargest / largest : 0.0F);
    __m512i sum = _mm512_setzero_si512();
    for (int d = 0; d < dim; d += 16) {
      const __mmask16 mask = first_lanes(dim - d);
      const __m512 query = _mm512_maskz_loadu_ps(mask, queries + d);
      const __m512i numbers = _mm512_cvtps_epi32(_mm512_mul_ps(query, inverse));
      // The high digit is rounded, since the low one is signed.
      const __m512i highs = _mm512_srai_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(128)), 8);
      _mm_store_si128(reinterpret_cast<__m128i*>(to->low + d / 4), _mm512_cvtepi32_epi8(numbers));
      _mm_store_si128(reinterpret_cast<__m128i*>(to->high + d / 4), _mm512_cvtepi32_epi8(highs));
      sum = _mm512_add_epi32(sum, numbers);
    }
    to->sum = _mm512_reduce_add_epi32(sum);
  }
}

KeyKernels vector_keys(Layout layout) {
  if (layout == Layout::kVector8Wide) return wide_vector_keys();
  return layout == Layout::kVector2 ? keys_of<2>(layout) : table_keys(layout);
}

}  // namespace kvpool::kernels::avx512
