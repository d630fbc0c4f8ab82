#include <cmath>
#include <cstring>

#include "kernels/avx2/avx2.h"
#include "kernels/avx512/code_chunks.h"
#include "kernels/avx512/vector.h"

// Keys of 4 or 8 channels a code by tables: a query's products with all centroids, once for each of
// its sub-vectors, as numbers of 16 bits, whose bytes are looked up by the codes. Two look-ups a
// code cost less than the products of its channels, however few the queries.

namespace kvpool::kernels::avx512 {
namespace {

/// Sub-vectors whose numbers add up to 16 bits; beyond them sums have 32.
constexpr int kGroupSubs = 4;

/// The tables of a sub-vector.
struct alignas(64) SubTables {
  std::int8_t low[256];
  std::int8_t high[256];
};

/// Of a float each query: the sum n of all numbers stands for the score step * n.
std::size_t header_bytes(int n_queries) {
  return ceil_div(as_size(n_queries) * sizeof(float), 64) * 64;
}

template <int kSubDim>
std::size_t prepared_bytes(const PartShape& shape, int n_queries) {
  return header_bytes(n_queries) +
         as_size(n_queries * n_subs(kSubDim, shape.head_dim)) * sizeof(SubTables);
}

/// The centroids by pairs of channels, 16 bits each, with what bounds their products.
template <int kSubDim>
struct Planes {
  alignas(64) std::int32_t pairs[kSubDim / 2][256];
  float largest[kSubDim];  ///< Of each channel.
  float length;            ///< Of the longest.

  explicit Planes(const codec::Codebook& book) {
    __m512i squares[16];
    for (__m512i& sum : squares) sum = _mm512_setzero_si512();
    __m512i most[kSubDim];
    for (__m512i& x : most) x = _mm512_setzero_si512();
    for (int j = 0; j < kSubDim; j += 2) {
      for (int i = 0; i < 16; ++i) {
        const __m512i even = numbers(book, j, i);
        const __m512i odd = numbers(book, j + 1, i);
        const __m512i both = _mm512_mask_blend_epi16(0xAAAAAAAA, even, _mm512_slli_epi32(odd, 16));
        _mm512_store_si512(pairs[j / 2] + 16 * i, both);
        squares[i] = _mm512_dpwssd_epi32(squares[i], both, both);
        most[j] = _mm512_max_epi32(most[j], _mm512_abs_epi32(even));
        most[j + 1] = _mm512_max_epi32(most[j + 1], _mm512_abs_epi32(odd));
      }
    }
    for (int j = 0; j < kSubDim; ++j) {
      largest[j] = static_cast<float>(_mm512_reduce_max_epi32(most[j]));
    }
    for (int i = 1; i < 16; ++i) squares[0] = _mm512_max_epi32(squares[0], squares[i]);
    length = std::sqrt(static_cast<float>(_mm512_reduce_max_epi32(squares[0])));
  }
  /// No product with a centroid is larger.
  float bound(const float* query) const {
    float sum = 0.0F;
    float squares = 0.0F;
    for (int j = 0; j < kSubDim; ++j) {
      sum += std::fabs(query[j]) * largest[j];
      squares += query[j] * query[j];
    }
    return std::min(sum, std::sqrt(squares) * length);
  }

 private:
  static __m512i numbers(const codec::Codebook& book, int channel, int sixteen) {
    const auto* const at =
        reinterpret_cast<const __m128i*>(book.planes.data() + 256 * channel + 16 * sixteen);
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(at));
  }
};

/// Steps of a channel's factor to one of the tables' numbers.
constexpr float kFraction = 256.0F;

/// The 16-bit numbers nearest to factor * row.
void store_numbers(const float* row, int n, float factor, std::int16_t* to) {
  for (int d = 0; d < n; d += 16) {
    const __mmask16 mask = first_lanes(n - d);
    const __m512 numbers =
        _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, row + d), _mm512_set1_ps(factor));
    _mm512_mask_cvtepi32_storeu_epi16(to + d, mask, _mm512_cvtps_epi32(numbers));
  }
}

__m512i pair_at(const std::int16_t* numbers) {
  std::int32_t pair = 0;
  std::memcpy(&pair, numbers, sizeof pair);
  return _mm512_set1_epi32(pair);
}

/// Fills a query's tables.
template <int kSubDim>
void fill(const Planes<kSubDim>& planes, const std::int16_t* factors, int subs, SubTables* tables) {
  constexpr int kPairs = kSubDim / 2;
  const __m512i half = _mm512_set1_epi32(static_cast<int>(kFraction) / 2);
  for (int i = 0; i < 256; i += 64) {
    __m512i pairs[4][kPairs];
    for (int k = 0; k < 4; ++k) {
      for (int p = 0; p < kPairs; ++p) {
        pairs[k][p] = _mm512_load_si512(planes.pairs[p] + i + 16 * k);
      }
    }
    for (int sub = 0; sub < subs; ++sub) {
      __m512i numbers[4];
      for (int k = 0; k < 4; ++k) {
        numbers[k] = half;
        for (int p = 0; p < kPairs; ++p) {
          const __m512i factor = pair_at(factors + kSubDim * sub + 2 * p);
          numbers[k] = _mm512_dpwssd_epi32(numbers[k], pairs[k][p], factor);
        }
      }
      store_bytes<1>(numbers, tables[sub].low + i, tables[sub].high + i);
    }
  }
}

template <int kSubDim>
void prepare(const PartShape& shape, const float* queries, int n_queries, std::byte* prepared) {
  const Planes<kSubDim> planes(*shape.codebook);
  const int subs = n_subs(kSubDim, shape.head_dim);
  auto* step = reinterpret_cast<float*>(prepared);
  auto* tables = reinterpret_cast<SubTables*>(prepared + header_bytes(n_queries));
  for (int q = 0; q < n_queries; ++q, ++step, tables += subs, queries += shape.head_dim) {
    // Sums of a group's numbers have 16 bits, and so have factors. NaN stays.
    float most = std::max(kFraction * largest_of(queries, shape.head_dim), 1e-30F);
    for (int first = 0; first < subs; first += kGroupSubs) {
      float group = 0.0F;
      for (int sub = first; sub < std::min(subs, first + kGroupSubs); ++sub) {
        group += planes.bound(queries + sub * kSubDim);
      }
      most = std::max(most, group);
    }
    // Less what rounding may add, of factors and of numbers.
    constexpr float kLargestSum = 32767.0F - 4 * kGroupSubs;
    const float inverse = kLargestSum / most;
    *step = shape.codebook->scale / inverse;
    std::int16_t factors[codec::kMaxHeadDim];
    store_numbers(queries, shape.head_dim, kFraction * inverse, factors);
    fill(planes, factors, subs, tables);
  }
}

/// Sums of 16-bit numbers: of each lane's first, and of its second.
struct PairSums {
  __m512i first = _mm512_setzero_si512();
  __m512i second = _mm512_setzero_si512();

  void add(__m512i numbers) {
    first = _mm512_dpwssd_epi32(first, numbers, _mm512_set1_epi32(1));
    second = _mm512_dpwssd_epi32(second, numbers, _mm512_set1_epi32(1 << 16));
  }
  /// Times `step`, in order: the eights of lanes 0 and 1 of 128 bits, or of 2 and 3.
  __m512 eights(int half, float step) const {
    const __m512i order =
        _mm512_add_epi32(_mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0),
                         _mm512_set1_epi32(8 * half));
    const __m512i numbers = _mm512_permutex2var_epi32(first, order, second);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(numbers), _mm512_set1_ps(step));
  }
};

/// Writes n of 64 columns' scores; up to 15 more may be written.
[[gnu::always_inline]] inline void store_scores(const PairSums& low_eights,
                                                const PairSums& high_eights, float step, int n,
                                                float* scores) {
  for (int half = 0; half < 2 && 32 * half < n; ++half, scores += 32) {
    const __m512 low = low_eights.eights(half, step);
    const __m512 high = high_eights.eights(half, step);
    _mm256_storeu_ps(scores, _mm512_castps512_ps256(low));
    _mm256_storeu_ps(scores + 8, _mm512_castps512_ps256(high));
    if (n - 32 * half <= 16) break;
    _mm256_storeu_ps(scores + 16, _mm512_extractf32x8_ps(low, 1));
    _mm256_storeu_ps(scores + 24, _mm512_extractf32x8_ps(high, 1));
  }
}

/// Scores of kBlocks times 64 columns, of which n count.
template <int kBlocks>
void score_blocks(const ChunkCodes& codes, int subs, int first_column, int n,
                  const SubTables* tables, float step, float* scores, Ahead& ahead,
                  std::size_t ahead_bytes) {
  // Columns 0 to 7, 16 to 23, ... are the low eights.
  PairSums low_sums[kBlocks];
  PairSums high_sums[kBlocks];
  for (int first = 0; first < subs; first += kGroupSubs) {
    __m512i low_eights[kBlocks];
    __m512i high_eights[kBlocks];
    ahead.fetch(kBlocks * kGroupSubs * ahead_bytes);
    for (int b = 0; b < kBlocks; ++b) low_eights[b] = high_eights[b] = _mm512_setzero_si512();
    for (int sub = first; sub < std::min(subs, first + kGroupSubs); ++sub) {
      const ByteTable low(tables[sub].low);
      const ByteTable high(tables[sub].high);
      for (int b = 0; b < kBlocks; ++b) {
        const __m512i code = codes.at(sub, first_column + b * kColumns);
        const __mmask64 high_bit = _mm512_movepi8_mask(code);
        const __m512i low_bytes = low(code, high_bit);
        const __m512i high_bytes = high(code, high_bit);
        low_eights[b] =
            _mm512_add_epi16(low_eights[b], _mm512_unpacklo_epi8(low_bytes, high_bytes));
        high_eights[b] =
            _mm512_add_epi16(high_eights[b], _mm512_unpackhi_epi8(low_bytes, high_bytes));
      }
    }
    for (int b = 0; b < kBlocks; ++b) {
      low_sums[b].add(low_eights[b]);
      high_sums[b].add(high_eights[b]);
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    store_scores(low_sums[b], high_sums[b], step, n - b * kColumns, scores + b * kColumns);
  }
}

template <int kSubDim>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* const steps = reinterpret_cast<const float*>(prepared);
  const int subs = n_subs(kSubDim, shape.head_dim);
  // For each sub-vector of 64 columns that a query looks up.
  const auto ahead_bytes = as_size(kColumns / n_queries);
  ChunkCodes codes;
  Ahead ahead(run, 16 * as_size(subs));
  for_code_chunks<kSubDim>(shape, run, codes, [&](int n) {
    const auto* tables = reinterpret_cast<const SubTables*>(prepared + header_bytes(n_queries));
    for (int q = 0; q < n_queries; ++q, tables += subs) {
      float* const to = out + as_size(q) * stride;
      int column = 0;
      for (; column + kColumns < n; column += 2 * kColumns) {
        score_blocks<2>(codes, subs, column, n - column, tables, steps[q], to + column, ahead,
                        ahead_bytes);
      }
      if (column < n) {
        score_blocks<1>(codes, subs, column, n - column, tables, steps[q], to + column, ahead,
                        ahead_bytes);
      }
    }
    out += n;
  });
}

template <int kSubDim>
KeyKernels keys_of(Layout layout) {
  KeyKernels kernels = avx2::vector_keys(layout);
  kernels.encode = VectorEncoder<Lanes, kSubDim, 8>::encode;
  kernels.prepared_bytes = prepared_bytes<kSubDim>;
  kernels.prepare = prepare<kSubDim>;
  kernels.scores = scores<kSubDim>;
  return kernels;
}

}  // namespace

KeyKernels table_keys(Layout layout) {
  return layout == Layout::kVector8 ? keys_of<8>(layout) : keys_of<4>(layout);
}

}  // namespace kvpool::kernels::avx512
