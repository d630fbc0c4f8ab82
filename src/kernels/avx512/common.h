#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/integer_layout.h"
#include "kernels/kernels.h"
#include "kernels/x86/run.h"

namespace kvpool::kernels::avx512 {

using x86::Ahead;
using x86::for_query_chunks;
using x86::kMostQueries;

/// fp32 rows are worked on, and queries kept, in steps of this many elements; the last is filled
/// up with zeros.
inline constexpr std::size_t kStep = 32;
inline std::size_t n_steps(const PartShape& shape) {
  return ceil_div(as_size(shape.head_dim), kStep);
}

/// Where a run of rows in fp32 stands in for tiles that are not full.
std::size_t fp32_query_bytes(const PartShape& shape, int n_queries);
void prepare_fp32_queries(const PartShape& shape, const float* queries, int n_queries,
                          std::byte* prepared);
void score_fp32_rows(const PartShape& shape, const float* rows, int n_rows,
                     const std::byte* prepared, int n_queries, float* scores, std::size_t stride);
void accumulate_fp32_rows(const PartShape& shape, const float* rows, int n_rows,
                          const float* weights, std::size_t stride, int n_queries, float* out);

KeyKernels raw_keys(Layout layout);
ValueKernels raw_values(Layout layout);
KeyKernels affine_keys(Layout layout);
ValueKernels affine_values(Layout layout);
KeyKernels channel_keys(Layout layout);
KeyKernels vector_keys(Layout layout);
ValueKernels vector_values(Layout layout);

inline __m512 load_halves(const std::byte* halves) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}
inline __m512 load_halves(const std::byte* halves, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, halves));
}

inline __mmask16 first_lanes(int n) {
  return n >= 16 ? __mmask16{0xFFFF} : static_cast<__mmask16>((1U << n) - 1U);
}

/// Added to numbers before they are rounded, token by token, so that many small ones do not vanish:
/// of any x, about the fraction x of these take it past the next whole number. Always less than a
/// half, which leaves zeros zeros.
struct Dither {
  static constexpr int kTokens = 256;
  alignas(64) float of[kTokens] = {};
  constexpr Dither() {
    // Multiples of the golden ratio: evenly spread, however few are taken.
    std::uint32_t fraction = 0;
    for (float& x : of) {
      fraction += 0x9E3779B9U;
      x = static_cast<float>(fraction >> 9U) * 0x1p-23F - 0.4999999F;
    }
  }
  __m512 at(int token) const { return _mm512_load_ps(of + token % kTokens); }
};
inline constexpr Dither kDither;

// Products of codes with numbers in fixed point.
//
// A number x of 16 bits is 256 * high + low, both signed bytes, so that vpdpbusd multiplies four
// unsigned codes with four digits at a time. The 16 numbers that go with the codes of one vector of
// 16 channels (keys) or tokens (values) are 8 words of digits, low[4] then high[4], in the order in
// which bytes of codes come out of the 32-bit words: first by word, then by shift.

inline constexpr std::size_t kDigitWords = 8;
/// The largest signed number, with room for rounding.
inline constexpr float kLargest = 32630.0F;

template <int kBits>
inline constexpr Layout kAffineLayout = kBits == 8   ? Layout::kAffine8
                                        : kBits == 4 ? Layout::kAffine4
                                                     : Layout::kAffine2;

/// 32-bit words of 16 codes, and vectors of bytes in such a word.
template <int kBits>
inline constexpr int kWords = kBits / 2;
template <int kBits>
inline constexpr int kShifts = 8 / kBits;

/// For each of the digits' bytes, the byte of the 16 dwords that it comes from.
template <int kBits>
struct DigitOrder {
  alignas(64) std::uint8_t from[64] = {};
  constexpr DigitOrder() {
    for (int word = 0; word < kWords<kBits>; ++word) {
      for (int shift = 0; shift < kShifts<kBits>; ++shift) {
        for (int byte = 0; byte < 4; ++byte) {
          const int number = word * (32 / kBits) + byte * kShifts<kBits> + shift;
          const int to = 4 * (word * kShifts<kBits> + shift) + byte;
          from[to] = static_cast<std::uint8_t>(4 * number);
          from[16 + to] = static_cast<std::uint8_t>(4 * number + 1);
        }
      }
    }
  }
};
template <int kBits>
inline constexpr DigitOrder<kBits> kDigitOrder{};

/// Digits of 16 numbers that are at most kLargest, rounded.
template <int kBits>
inline void store_digits(__m512 numbers_plus_128, std::int32_t* digits) {
  // 128 more makes the low digit unsigned and rounds the high one.
  const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(kDigitOrder<kBits>.from),
                                                _mm512_cvtps_epi32(numbers_plus_128));
  const __m256i middles = _mm256_zextsi128_si256(_mm_set1_epi8(-128));
  _mm256_store_si256(reinterpret_cast<__m256i*>(digits),
                     _mm256_xor_si256(_mm512_castsi512_si256(bytes), middles));
}

/// The same with both digits unsigned, of numbers from 0 to 65535.
template <int kBits>
inline void store_unsigned_digits(__m512 numbers, std::int32_t* digits) {
  const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(kDigitOrder<kBits>.from),
                                                _mm512_cvtps_epi32(numbers));
  _mm256_store_si256(reinterpret_cast<__m256i*>(digits), _mm512_castsi512_si256(bytes));
}

/// The codes at `shift` of 16 words, a code a byte.
template <int kBits>
inline __m512i codes_at(__m512i words, int shift) {
  if constexpr (kBits == 8) return words;
  constexpr auto kMask = static_cast<char>((1 << kBits) - 1);
  return _mm512_and_si512(_mm512_srli_epi32(words, static_cast<unsigned>(kBits * shift)),
                          _mm512_set1_epi8(kMask));
}

/// Sums of products of kVectors vectors of codes with the same digits, which are loaded once.
template <int kVectors>
struct DigitSums {
  __m512i low[kVectors];
  __m512i high[kVectors];

  DigitSums() {
    for (__m512i& sum : low) sum = _mm512_setzero_si512();
    for (__m512i& sum : high) sum = _mm512_setzero_si512();
  }

  void add(const __m512i (&codes)[kVectors], const std::int32_t* digits, int word) {
    const __m512i low_digits = _mm512_set1_epi32(digits[word]);
    const __m512i high_digits = _mm512_set1_epi32(digits[word + 4]);
    for (int v = 0; v < kVectors; ++v) {
      low[v] = _mm512_dpbusd_epi32(low[v], codes[v], low_digits);
      high[v] = _mm512_dpbusd_epi32(high[v], codes[v], high_digits);
    }
  }
  /// With unsigned digits and signed codes.
  void add_unsigned(const std::int32_t* digits, int word, const __m512i (&codes)[kVectors]) {
    const __m512i low_digits = _mm512_set1_epi32(digits[word]);
    const __m512i high_digits = _mm512_set1_epi32(digits[word + 4]);
    for (int v = 0; v < kVectors; ++v) {
      low[v] = _mm512_dpbusd_epi32(low[v], low_digits, codes[v]);
      high[v] = _mm512_dpbusd_epi32(high[v], high_digits, codes[v]);
    }
  }
  __m512 total(int vector) const {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[vector], 8), low[vector]));
  }
};

}  // namespace kvpool::kernels::avx512
