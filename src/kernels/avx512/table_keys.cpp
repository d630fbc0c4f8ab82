#include <cmath>

#include "kernels/avx2/avx2.h"
#include "kernels/avx512/vector.h"

// Keys of 4 or 8 channels a code by tables: a query's products with all centroids, once for each of
// its sub-vectors, as numbers of 16 bits, whose bytes are looked up by the codes. Two look-ups a
// code cost less than the products of its channels, however few the queries.

namespace kvpool::kernels::avx512 {
namespace {

/// Sub-vectors whose numbers add up to 16 bits; beyond them sums have 32.
constexpr int kGroupSubs = 4;

/// The sum n of all numbers stands for the score step * n - base.
struct QueryTables {
  float step;
  float base;
};
/// The tables of a sub-vector.
struct alignas(64) SubTables {
  std::int8_t low[256];
  std::int8_t high[256];
};

std::size_t header_bytes(int n_queries) {
  return ceil_div(as_size(n_queries) * sizeof(QueryTables), 64) * 64;
}

template <int kSubDim>
std::size_t prepared_bytes(const PartShape& shape, int n_queries) {
  return header_bytes(n_queries) +
         as_size(n_queries * n_subs(kSubDim, shape.head_dim)) * sizeof(SubTables);
}

/// The centroids as numbers by channel, with what bounds their products.
template <int kSubDim>
struct Planes {
  alignas(64) float numbers[kSubDim][256];
  float largest[kSubDim];  ///< Of each channel.
  float length;            ///< Of the longest.

  explicit Planes(const codec::Codebook& book) {
    __m512 squares[16];
    for (__m512& sum : squares) sum = _mm512_setzero_ps();
    for (int j = 0; j < kSubDim; ++j) {
      __m512 most = _mm512_setzero_ps();
      for (int i = 0; i < 16; ++i) {
        const auto* const at =
            reinterpret_cast<const __m128i*>(book.planes.data() + 256 * j + 16 * i);
        const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        _mm512_store_ps(numbers[j] + 16 * i, x);
        most = _mm512_max_ps(most, _mm512_abs_ps(x));
        squares[i] = _mm512_fmadd_ps(x, x, squares[i]);
      }
      largest[j] = _mm512_reduce_max_ps(most);
    }
    for (int i = 1; i < 16; ++i) squares[0] = _mm512_max_ps(squares[0], squares[i]);
    length = std::sqrt(_mm512_reduce_max_ps(squares[0]));
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
};

template <int kSubDim>
void fill(const Planes<kSubDim>& planes, const float* query, float bound, float inverse,
          SubTables& tables) {
  const __m512 offset = _mm512_set1_ps(bound * inverse);
  __m512 factors[kSubDim];
  for (int j = 0; j < kSubDim; ++j) factors[j] = _mm512_set1_ps(query[j] * inverse);
  for (int i = 0; i < 256; i += 64) {
    __m512i numbers[4];
    for (int k = 0; k < 4; ++k) {
      __m512 product = offset;
      for (int j = 0; j < kSubDim; ++j) {
        product =
            _mm512_fmadd_ps(factors[j], _mm512_load_ps(planes.numbers[j] + i + 16 * k), product);
      }
      numbers[k] = _mm512_max_epi32(_mm512_cvtps_epi32(product), _mm512_setzero_si512());
    }
    store_bytes(numbers, tables.low + i, tables.high + i);
  }
}

template <int kSubDim>
void prepare(const PartShape& shape, const float* queries, int n_queries, std::byte* prepared) {
  const Planes<kSubDim> planes(*shape.codebook);
  const int subs = n_subs(kSubDim, shape.head_dim);
  auto* header = reinterpret_cast<QueryTables*>(prepared);
  auto* tables = reinterpret_cast<SubTables*>(prepared + header_bytes(n_queries));
  for (int q = 0; q < n_queries; ++q, ++header, queries += shape.head_dim) {
    float bounds[codec::kMaxHeadDim / kSubDim];
    float total = 0.0F;
    float most = 1e-30F;
    for (int first = 0; first < subs; first += kGroupSubs) {
      float group = 0.0F;
      for (int sub = first; sub < std::min(subs, first + kGroupSubs); ++sub) {
        bounds[sub] = planes.bound(queries + sub * kSubDim);
        group += bounds[sub];
      }
      total += group;
      most = std::max(most, group);
    }
    // Rounding may add a half for each sub-vector, and to the bound itself.
    const float inverse = (65535.0F - 4 * kGroupSubs) / (2.0F * most);
    header->step = shape.codebook->scale / inverse;
    header->base = shape.codebook->scale * total;
    for (int sub = 0; sub < subs; ++sub) {
      fill(planes, queries + sub * kSubDim, bounds[sub], inverse, *tables++);
    }
  }
}

/// 32-bit sums of 16-bit numbers. A lane takes two: both, the second times 2^16, modulo 2^32, and
/// the second alone.
struct PairSums {
  __m512i both = _mm512_setzero_si512();
  __m512i second = _mm512_setzero_si512();

  void add(__m512i numbers) {
    both = _mm512_add_epi32(both, numbers);
    second = _mm512_add_epi32(second, _mm512_srli_epi32(numbers, 16));
  }
  __m512i first() const { return _mm512_sub_epi32(both, _mm512_slli_epi32(second, 16)); }
};

/// Scores of kBlocks times 64 columns, of which n count.
template <int kBlocks>
void score_blocks(const ChunkCodes& codes, int subs, int first_column, int n,
                  const SubTables* tables, const QueryTables& query, float* scores, Ahead& ahead,
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
  for (int b = 0; b < kBlocks; ++b, n -= kColumns, scores += kColumns) {
    const __m512i first[2] = {low_sums[b].first(), high_sums[b].first()};
    const __m512i second[2] = {low_sums[b].second, high_sums[b].second};
    __m512 sums[4];
    for (int k = 0; k < 4; ++k) {
      const __m512i numbers = k % 2 == 0 ? _mm512_unpacklo_epi32(first[k / 2], second[k / 2])
                                         : _mm512_unpackhi_epi32(first[k / 2], second[k / 2]);
      sums[k] = _mm512_fmsub_ps(_mm512_cvtepi32_ps(numbers), _mm512_set1_ps(query.step),
                                _mm512_set1_ps(query.base));
    }
    store_in_order(sums, n, scores);
  }
}

template <int kSubDim>
void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* const header = reinterpret_cast<const QueryTables*>(prepared);
  const int subs = n_subs(kSubDim, shape.head_dim);
  // For each sub-vector of 64 columns that a query looks up.
  const auto ahead_bytes = as_size(kColumns / n_queries);
  ChunkCodes codes;
  Ahead ahead(run, 16 * as_size(subs));
  for_chunks<kChunkColumns>(run, [&](const Chunk<kChunkColumns>& chunk) {
    codes.gather<kSubDim>(shape, chunk);
    const int n = chunk.n_columns;
    const auto* tables = reinterpret_cast<const SubTables*>(prepared + header_bytes(n_queries));
    for (int q = 0; q < n_queries; ++q, tables += subs) {
      float* const to = out + as_size(q) * stride;
      int column = 0;
      for (; column + kColumns < n; column += 2 * kColumns) {
        score_blocks<2>(codes, subs, column, n - column, tables, header[q], to + column, ahead,
                        ahead_bytes);
      }
      if (column < n) {
        score_blocks<1>(codes, subs, column, n - column, tables, header[q], to + column, ahead,
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
