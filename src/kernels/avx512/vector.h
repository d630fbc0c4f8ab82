#pragma once

#include <algorithm>
#include <array>

#include "kernels/avx512/code_chunks.h"
#include "kernels/avx512/common.h"
#include "kernels/vector_search.h"

namespace kvpool::kernels::avx512 {

/// A table of 256 bytes in registers.
class ByteTable {
 public:
  ByteTable() = default;
  /// With `flip`, each byte x becomes x ^ flip.
  explicit ByteTable(const std::int8_t* bytes, char flip = 0) {
    for (int i = 0; i < 4; ++i) {
      __m512i quarter =
          _mm512_xor_si512(_mm512_loadu_si512(bytes + 64 * i), _mm512_set1_epi8(flip));
      asm("" : "+v"(quarter));  // Or it would be read from memory wherever it is used.
      quarters_[i] = quarter;
    }
  }
  /// `high` is the highest bit of each code.
  __m512i operator()(__m512i codes, __mmask64 high) const {
    return _mm512_mask_blend_epi8(high, _mm512_permutex2var_epi8(quarters_[0], codes, quarters_[1]),
                                  _mm512_permutex2var_epi8(quarters_[2], codes, quarters_[3]));
  }

 private:
  __m512i quarters_[4];
};

/// Low and high bytes of 64 numbers of 16 bits, the byte kFirst of each lane and the next.
template <int kFirst = 0>
inline void store_bytes(const __m512i (&numbers)[4], void* low, void* high) {
  alignas(64) static constexpr auto kBytes = [] {
    std::array<std::uint8_t, 64> from{};
    for (std::size_t i = 0; i < 32; ++i) {
      from[i] = static_cast<std::uint8_t>(4 * i + kFirst);
      from[32 + i] = static_cast<std::uint8_t>(4 * i + kFirst + 1);
    }
    return from;
  }();
  const __m512i order = _mm512_load_si512(kBytes.data());
  const __m512i first = _mm512_permutex2var_epi8(numbers[0], order, numbers[1]);
  const __m512i second = _mm512_permutex2var_epi8(numbers[2], order, numbers[3]);
  _mm512_store_si512(low, _mm512_shuffle_i64x2(first, second, 0x44));
  _mm512_store_si512(high, _mm512_shuffle_i64x2(first, second, 0xEE));
}

/// A row of weights as unsigned digits: weight = step * (256 * high + low).
struct WeightDigits {
  float step;
  alignas(64) std::uint8_t low[kChunkColumns];
  alignas(64) std::uint8_t high[kChunkColumns];

  /// Zeros follow the n weights, up to a multiple of 64.
  void set(const float* weights, int n) {
    __m512 most[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    int at = 0;
    for (; at + 32 <= n; at += 32) {
      most[0] = _mm512_max_ps(most[0], _mm512_loadu_ps(weights + at));
      most[1] = _mm512_max_ps(most[1], _mm512_loadu_ps(weights + at + 16));
    }
    for (; at < n; at += 16) {
      most[0] = _mm512_max_ps(most[0], _mm512_maskz_loadu_ps(first_lanes(n - at), weights + at));
    }
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(most[0], most[1]));
    constexpr float kMostSteps = 65530.0F;
    step = largest / kMostSteps;
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30F ? kMostSteps / largest : 0.0F);
    const auto all = [](int) { return __mmask16{0xFFFF}; };
    const auto some = [n](int column) { return first_lanes(std::max(0, n - column)); };
    int i = 0;
    for (; i + 64 <= n; i += 64) set_columns(weights, i, inverse, all);
    if (i < n) set_columns(weights, i, inverse, some);
  }

 private:
  /// Digits of 64 columns, of which those in the masks count.
  template <typename MaskAt>
  void set_columns(const float* weights, int first, __m512 inverse, const MaskAt& mask_at) {
    __m512i numbers[4];
    for (int k = 0; k < 4; ++k) {
      const int column = first + 16 * k;
      const __m512 weight = _mm512_maskz_loadu_ps(mask_at(column), weights + column);
      numbers[k] = _mm512_cvtps_epi32(_mm512_fmadd_ps(weight, inverse, kDither.at(column)));
    }
    store_bytes(numbers, low + first, high + first);
  }
};

/// Sums with both digits as numbers.
inline __m512 digit_total(__m512i low, __m512i high) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}

/// Writes n of 64 columns' scores, of which vector k has the columns 4 k ... 4 k + 3 of each
/// sixteen; up to 15 more may be written.
inline void store_in_order(const __m512 (&sums)[4], int n, float* scores) {
  const __m512 a = _mm512_shuffle_f32x4(sums[0], sums[1], 0x44);
  const __m512 b = _mm512_shuffle_f32x4(sums[2], sums[3], 0x44);
  const __m512 c = _mm512_shuffle_f32x4(sums[0], sums[1], 0xEE);
  const __m512 d = _mm512_shuffle_f32x4(sums[2], sums[3], 0xEE);
  const __m512 in_order[4] = {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD),
                              _mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD)};
  for (int k = 0; k < 4 && 16 * k < n; ++k) _mm512_storeu_ps(scores + 16 * k, in_order[k]);
}

/// The largest magnitude; NaN if there is one.
inline float largest_of(const float* row, int n) {
  __m512i most = _mm512_setzero_si512();
  for (int d = 0; d < n; d += 16) {
    const __m512 x = _mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(n - d), row + d));
    // Bits of numbers >= 0 are in their order, with NaN above infinity.
    most = _mm512_max_epi32(most, _mm512_castps_si512(x));
  }
  return _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epi32(most))));
}

/// Queries as digits; a query's number n stands for scale * n.
struct DigitQuery {
  float scale;
  std::int32_t sum;  ///< Of the numbers.
  /// Of channels 4 i ... 4 i + 3: low[i], high[i], a signed byte each.
  alignas(64) std::int32_t low[codec::kMaxHeadDim / 4];
  alignas(64) std::int32_t high[codec::kMaxHeadDim / 4];
};
std::size_t digit_query_bytes(const PartShape& shape, int n_queries);
void prepare_digit_queries(const PartShape& shape, const float* queries, int n_queries,
                           std::byte* prepared);

struct Lanes {
  static constexpr int kLanes = 16;
  using Float = __m512;
  using Int = __m512i;
  static Float load(const float* from) { return _mm512_load_ps(from); }
  static Float broadcast(float x) { return _mm512_set1_ps(x); }
  static Int broadcast(std::int32_t x) { return _mm512_set1_epi32(x); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static __mmask16 above(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static Float select(__mmask16 mask, Float a, Float b) { return _mm512_mask_mov_ps(b, mask, a); }
  static Int select(__mmask16 mask, Int a, Int b) { return _mm512_mask_mov_epi32(b, mask, a); }
  static void store(std::int32_t* to, Int x) { _mm512_store_si512(to, x); }
};

/// Of kVector4 and kVector8.
KeyKernels table_keys(Layout layout);
KeyKernels wide_vector_keys();
ValueKernels wide_vector_values();

}  // namespace kvpool::kernels::avx512
