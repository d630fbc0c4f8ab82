#pragma once

#include <utility>

#include "kernels/avx2/common.h"
#include "kernels/scalar/scalar.h"

// Products of codes with numbers in fixed point.
//
// Elements of queries and weights become numbers of 16 bits, so that vpmaddwd multiplies two codes
// of each 32-bit lane with two numbers. The 16 numbers that go with the codes of 16 channels (keys)
// or tokens (values) are 8 pairs, in the order in which pairs of codes come out of the 32-bit
// words: first by word, then by shift.
namespace kvpool::kernels::avx2 {

inline constexpr std::size_t kPairs = 8;

/// The largest number, with room for rounding: 256 products with codes of 8 bits fit 32 bits.
inline constexpr float kLargest = 32760.0F;

template <int kBits>
inline constexpr Layout kAffineLayout = kBits == 8   ? Layout::kAffine8
                                        : kBits == 4 ? Layout::kAffine4
                                                     : Layout::kAffine2;

/// 32-bit words of 16 codes, and pairs of codes in such a word.
template <int kBits>
inline constexpr int kWords = kBits / 2;
template <int kBits>
inline constexpr int kShifts = 16 / kBits;

/// Keeps reciprocals finite where all is 0.
inline float at_least(float x) { return x > 1e-30F ? x : 1e-30F; }

/// Rounds 16 numbers and stores them in pairs.
template <int kBits>
inline void store_pairs(__m256 first_8, __m256 last_8, std::int32_t* pairs) {
  const __m256i a = _mm256_cvtps_epi32(first_8);
  const __m256i b = _mm256_cvtps_epi32(last_8);
  __m256i low = a;
  __m256i high = b;
  if constexpr (kBits == 4) {
    low = _mm256_permute2x128_si256(a, b, 0x20);
    high = _mm256_permute2x128_si256(a, b, 0x31);
  } else if constexpr (kBits == 8) {
    low = _mm256_permute4x64_epi64(_mm256_unpacklo_epi64(a, b), 0xD8);
    high = _mm256_permute4x64_epi64(_mm256_unpackhi_epi64(a, b), 0xD8);
  }
  _mm256_store_si256(reinterpret_cast<__m256i*>(pairs),
                     _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xAA));
}

inline __m256i load_words(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

/// The codes at kShift of 8 words, a pair a word.
template <int kBits, int kShift>
inline __m256i codes_at(__m256i words) {
  __m256i codes = words;
  if constexpr (kShift > 0) codes = _mm256_srli_epi16(codes, kBits * kShift);
  if constexpr (kShift + 1 < kShifts<kBits>) {
    codes = _mm256_and_si256(codes, _mm256_set1_epi16((1 << kBits) - 1));
  }
  return codes;
}

/// Sums of products for kQueries queries and two vectors, an integer a lane.
template <int kBits, int kQueries>
struct ProductSums {
  __m256i lanes[kQueries][2];

  ProductSums() {
    for (auto& of_query : lanes) of_query[0] = of_query[1] = _mm256_setzero_si256();
  }

  /// Adds the first n_words words, at words + i * word_bytes for one vector and 32 bytes on for the
  /// other, times pairs_of(query).
  template <typename PairsOf>
  void add(const std::byte* words, std::size_t word_bytes, int n_words, const PairsOf& pairs_of) {
    for (int word = 0; word < kWords<kBits> && word < n_words; ++word, words += word_bytes) {
      const __m256i a = load_words(words);
      const __m256i b = load_words(words + 32);
      add_word(a, b, word, pairs_of, std::make_integer_sequence<int, kShifts<kBits>>());
    }
  }
  __m256 total(int query, int vector) const { return _mm256_cvtepi32_ps(lanes[query][vector]); }

 private:
  template <typename PairsOf, int... kShift>
  void add_word(__m256i a, __m256i b, int word, const PairsOf& pairs_of,
                std::integer_sequence<int, kShift...>) {
    (add_codes(codes_at<kBits, kShift>(a), codes_at<kBits, kShift>(b),
               word * kShifts<kBits> + kShift, pairs_of),
     ...);
  }
  template <typename PairsOf>
  void add_codes(__m256i a, __m256i b, int pair, const PairsOf& pairs_of) {
    for (int q = 0; q < kQueries; ++q) {
      const __m256i numbers = _mm256_set1_epi32(pairs_of(q)[pair]);
      lanes[q][0] = _mm256_add_epi32(lanes[q][0], _mm256_madd_epi16(a, numbers));
      lanes[q][1] = _mm256_add_epi32(lanes[q][1], _mm256_madd_epi16(b, numbers));
    }
  }
};

/// Scores of what is left of a part after its full tiles, by way of the reference.
inline void score_rest(const PartShape& shape, const std::byte* part, int first, int n,
                       scalar::Decode decode, const float* queries, int n_queries, float* scores,
                       std::size_t stride) {
  float rows[kTileTokens * codec::kMaxHeadDim];
  decode(shape, part, first, n, rows);
  for (int q = 0; q < n_queries; ++q, queries += shape.head_dim, scores += stride) {
    const float* row = rows;
    for (int t = 0; t < n; ++t, row += shape.head_dim) {
      __m256 sum = _mm256_setzero_ps();
      for (int d = 0; d < shape.head_dim; d += 8) {
        sum = _mm256_fmadd_ps(_mm256_loadu_ps(queries + d), _mm256_loadu_ps(row + d), sum);
      }
      scores[t] = sum_of(sum);
    }
  }
}

}  // namespace kvpool::kernels::avx2
