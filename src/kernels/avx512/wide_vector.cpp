#include <cstring>

#include "kernels/avx2/avx2.h"
#include "kernels/avx512/code_chunks.h"
#include "kernels/avx512/vector.h"

// Codes of 12 bits: too many for tables in registers. Each is looked up in the codebook itself,
// once for all queries, and the 8 bytes of its centroid written out.

namespace kvpool::kernels::avx512 {
namespace {

constexpr int kSubDim = 8;
constexpr int kWideColumns = 128;

/// Centroids of a chunk, [sub][column][channel], with zeros up to a multiple of 16 columns.
class ChunkCentroids {
 public:
  void gather(const PartShape& shape, const Chunk<kWideColumns>& chunk) {
    const int n_padded = (chunk.n_columns + 15) / 16 * 16;
    for (int sub = 0; sub < n_subs(kSubDim, shape.head_dim); ++sub) {
      std::int8_t* to = bytes_ + sub * kWideColumns * kSubDim;
      for (const Piece& piece : chunk.all()) {
        write_row(shape, piece, sub, to);
        to += piece.n_tokens * kSubDim;
      }
      std::memset(to, 0, as_size((n_padded - chunk.n_columns) * kSubDim));
    }
  }

  /// The centroids of 8 columns.
  __m512i at(int sub, int column) const {
    return _mm512_load_si512(bytes_ + (sub * kWideColumns + column) * kSubDim);
  }

 private:
  static void write_row(const PartShape& shape, const Piece& piece, int sub, std::int8_t* to) {
    const std::int8_t* const centroids = shape.codebook->centroids.data();
    const int end = piece.first_token + piece.n_tokens;
    int t = piece.first_token;
    if (t % 2 == 0) {
      const std::byte* const low = piece.part + as_size(sub) * as_size(shape.block_size);
      const std::byte* const high =
          piece.part + low_bytes(kSubDim, shape) + as_size(sub) * high_row_bytes(shape);
      for (; t + 16 <= end; t += 16, to += 16 * kSubDim) {
        alignas(32) std::uint16_t codes[16];
        _mm256_store_si256(reinterpret_cast<__m256i*>(codes), sixteen_codes(low + t, high + t / 2));
        for (int i = 0; i < 16; ++i) {
          std::memcpy(to + i * kSubDim, centroids + codes[i] * kSubDim, kSubDim);
        }
      }
    }
    for (; t < end; ++t, to += kSubDim) {
      const std::size_t code = read_vector_code<kSubDim, 12>(shape, piece.part, sub, t);
      std::memcpy(to, centroids + code * kSubDim, kSubDim);
    }
  }

  static __m256i sixteen_codes(const std::byte* low, const std::byte* high) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high));
    const __m256i twice = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(pairs, pairs));
    // The high nibble is the odd token's.
    const __m256i nibbles = _mm256_and_si256(_mm256_srlv_epi16(twice, _mm256_set1_epi32(4 << 16)),
                                             _mm256_set1_epi16(15));
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    return _mm256_or_si256(_mm256_slli_epi16(nibbles, 8), _mm256_cvtepu8_epi16(bytes));
  }

  alignas(64) std::int8_t bytes_[codec::kMaxHeadDim * kWideColumns];
};

__m512i eight_bytes(const void* from) {
  std::int64_t bytes = 0;
  std::memcpy(&bytes, from, 8);
  return _mm512_set1_epi64(bytes);
}

/// Sums of neighbouring lanes: those of `a`, then those of `b`.
__m512 pair_sums(__m512 a, __m512 b) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

/// Scores of 16 columns.
template <int kQueries>
void score_columns(const ChunkCentroids& keys, int subs, int column, const DigitQuery* queries,
                   float scale, float* scores, std::size_t stride) {
  __m512i low[kQueries][2];
  __m512i high[kQueries][2];
  for (int q = 0; q < kQueries; ++q) {
    for (int i = 0; i < 2; ++i) {
      low[q][i] = _mm512_setzero_si512();
      high[q][i] = _mm512_setzero_si512();
    }
  }
  const __m512i flip = _mm512_set1_epi8(-128);
  for (int sub = 0; sub < subs; ++sub) {
    const __m512i eights[2] = {_mm512_xor_si512(keys.at(sub, column), flip),
                               _mm512_xor_si512(keys.at(sub, column + 8), flip)};
    for (int q = 0; q < kQueries; ++q) {
      const __m512i low_digits = eight_bytes(queries[q].low + 2 * sub);
      const __m512i high_digits = eight_bytes(queries[q].high + 2 * sub);
      for (int i = 0; i < 2; ++i) {
        low[q][i] = _mm512_dpbusd_epi32(low[q][i], eights[i], low_digits);
        high[q][i] = _mm512_dpbusd_epi32(high[q][i], eights[i], high_digits);
      }
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    const __m512 sums =
        pair_sums(digit_total(low[q][0], high[q][0]), digit_total(low[q][1], high[q][1]));
    const auto bias = static_cast<float>(128 * queries[q].sum);
    _mm512_storeu_ps(scores + as_size(q) * stride,
                     _mm512_mul_ps(_mm512_sub_ps(sums, _mm512_set1_ps(bias)),
                                   _mm512_set1_ps(scale * queries[q].scale)));
  }
}

void scores(const PartShape& shape, const PartRun& run, const std::byte* prepared, int n_queries,
            float* out, std::size_t stride) {
  const auto* const queries = reinterpret_cast<const DigitQuery*>(prepared);
  const int subs = n_subs(kSubDim, shape.head_dim);
  ChunkCentroids keys;
  Ahead ahead(run, 24 * as_size(subs));
  for_chunks<kWideColumns>(run, [&](const Chunk<kWideColumns>& chunk) {
    ahead.fetch(as_size(subs * chunk.n_columns * 3 / 2));
    keys.gather(shape, chunk);
    for (int column = 0; column < chunk.n_columns; column += 16) {
      for_query_chunks(n_queries, [&](int first, auto n) {
        score_columns<n()>(keys, subs, column, queries + first, shape.codebook->scale,
                           out + as_size(first) * stride + column, stride);
      });
    }
    out += chunk.n_columns;
  });
}

/// Adds the weighted values of a chunk: four tokens of a channel to a lane.
template <int kQueries>
void add_columns(const ChunkCentroids& values, int subs, int n_columns, const WeightDigits* weights,
                 float scale, std::size_t dim, float* out) {
  alignas(64) static constexpr auto kByChannel = [] {
    std::array<std::uint8_t, 64> from{};
    for (std::size_t i = 0; i < 64; ++i) {
      const std::size_t channel = i / 8;
      const std::size_t token = i % 8;
      from[i] = static_cast<std::uint8_t>(8 * token + channel);
    }
    return from;
  }();
  const __m512i by_channel = _mm512_load_si512(kByChannel.data());
  for (int sub = 0; sub < subs; ++sub) {
    __m512i low[kQueries];
    __m512i high[kQueries];
    for (int q = 0; q < kQueries; ++q) {
      low[q] = _mm512_setzero_si512();
      high[q] = _mm512_setzero_si512();
    }
    for (int column = 0; column < n_columns; column += 8) {
      const __m512i eight = _mm512_permutexvar_epi8(by_channel, values.at(sub, column));
      for (int q = 0; q < kQueries; ++q) {
        low[q] = _mm512_dpbusd_epi32(low[q], eight_bytes(weights[q].low + column), eight);
        high[q] = _mm512_dpbusd_epi32(high[q], eight_bytes(weights[q].high + column), eight);
      }
    }
    for (int q = 0; q < kQueries; ++q) {
      const __m512 total = digit_total(low[q], high[q]);
      const __m256 sums = _mm512_castps512_ps256(pair_sums(total, total));
      float* const sum = out + as_size(q) * dim + as_size(sub * kSubDim);
      const __m256 step = _mm256_set1_ps(weights[q].step * scale);
      _mm256_storeu_ps(sum, _mm256_fmadd_ps(sums, step, _mm256_loadu_ps(sum)));
    }
  }
}

void accumulate(const PartShape& shape, const PartRun& run, const float* weights,
                std::size_t stride, int n_queries, float* out) {
  const int subs = n_subs(kSubDim, shape.head_dim);
  const auto dim = as_size(shape.head_dim);
  ChunkCentroids values;
  WeightDigits digits[kMostQueries];
  Ahead ahead(run, 24 * as_size(subs));
  for_chunks<kWideColumns>(run, [&](const Chunk<kWideColumns>& chunk) {
    ahead.fetch(as_size(subs * chunk.n_columns * 3 / 2));
    values.gather(shape, chunk);
    for_query_chunks(n_queries, [&](int first, auto n) {
      for (int q = 0; q < n(); ++q) {
        digits[q].set(weights + as_size(first + q) * stride, chunk.n_columns);
      }
      add_columns<n()>(values, subs, chunk.n_columns, digits, shape.codebook->scale, dim,
                       out + as_size(first) * dim);
    });
    weights += chunk.n_columns;
  });
}

}  // namespace

KeyKernels wide_vector_keys() {
  KeyKernels kernels = avx2::vector_keys(Layout::kVector8Wide);
  kernels.encode = VectorEncoder<Lanes, kSubDim, 12>::encode;
  kernels.prepared_bytes = digit_query_bytes;
  kernels.prepare = prepare_digit_queries;
  kernels.scores = scores;
  return kernels;
}

ValueKernels wide_vector_values() {
  return {VectorEncoder<Lanes, kSubDim, 12>::encode,
          avx2::vector_values(Layout::kVector8Wide).decode, accumulate};
}

}  // namespace kvpool::kernels::avx512
