#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/integer_layout.h"
#include "kernels/kernels.h"
#include "kernels/x86/run.h"

namespace kvpool::kernels::avx2 {

using x86::Ahead;
using x86::for_query_chunks;

inline __m256 load_halves(const std::byte* halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}

inline float sum_of(__m256 x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline __m256 abs(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x); }

inline __m256 round(__m256 x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline float largest_of(__m256 x) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

}  // namespace kvpool::kernels::avx2
