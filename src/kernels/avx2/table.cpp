#include <limits>

#include "kernels/avx2/avx2.h"
#include "kernels/avx2/common.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::avx2 {
namespace {

/// Max gives its second operand where one is NaN: that is the largest so far.
float max(const float* values, std::size_t n) {
  float result = -std::numeric_limits<float>::infinity();
  __m256 most = _mm256_set1_ps(result);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) most = _mm256_max_ps(_mm256_loadu_ps(values + i), most);
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, most);
  for (const float lane : lanes) result = lane > result ? lane : result;
  for (; i < n; ++i) result = values[i] > result ? values[i] : result;
  return result;
}

/// 2^x for x <= 0, to 2e-7 of it; 0 where it would be subnormal; NaN of NaN, which max passes on as
/// its second operand.
__m256 exp2(__m256 x) {
  const __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0F), _CMP_NLT_UQ);
  x = _mm256_max_ps(_mm256_set1_ps(-126.0F), x);
  const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 r = _mm256_sub_ps(x, n);
  // Minimax on [-1/2, 1/2].
  __m256 p = _mm256_set1_ps(1.535336188319500e-4F);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.339887440266574e-3F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(9.618437357674640e-3F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.550332471162809e-2F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(2.402264791363012e-1F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(6.931472028550421e-1F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0F));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const __m256i result = _mm256_add_epi32(_mm256_castps_si256(p), exponent);
  return _mm256_and_ps(normal, _mm256_castsi256_ps(result));
}

constexpr float kLog2E = 1.44269504088896341F;

float exp_sum(float* values, std::size_t n, float shift) {
  __m256 sum = _mm256_setzero_ps();
  const __m256 by = _mm256_set1_ps(shift);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_sub_ps(_mm256_loadu_ps(values + i), by);
    const __m256 e = exp2(_mm256_mul_ps(x, _mm256_set1_ps(kLog2E)));
    _mm256_storeu_ps(values + i, e);
    sum = _mm256_add_ps(sum, e);
  }
  return sum_of(sum) + scalar::table().exp_sum(values + i, n - i, shift);
}

/// tanh(x) = sign(x) * (1 - e) / (1 + e) with e = exp(-2 |x|).
void soft_cap(float* values, std::size_t n, float cap) {
  const __m256 one = _mm256_set1_ps(1.0F);
  const __m256 largest = _mm256_set1_ps(cap);
  const __m256 sign_bit = _mm256_set1_ps(-0.0F);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 value = _mm256_loadu_ps(values + i);
    const __m256 x = _mm256_andnot_ps(sign_bit, _mm256_div_ps(value, largest));
    const __m256 e = exp2(_mm256_mul_ps(x, _mm256_set1_ps(-2.0F * kLog2E)));
    const __m256 tanh = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    _mm256_storeu_ps(values + i,
                     _mm256_or_ps(_mm256_mul_ps(tanh, largest), _mm256_and_ps(value, sign_bit)));
  }
  scalar::table().soft_cap(values + i, n - i, cap);
}

void scale(float* values, std::size_t n, float factor) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(values + i,
                     _mm256_mul_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(factor)));
  }
  for (; i < n; ++i) values[i] *= factor;
}

}  // namespace

const KernelTable& table() {
  using enum Layout;
  static const KernelTable kTable = {
      .name = "avx2",
      .keys = {raw_keys(kFp32), raw_keys(kFp16), raw_keys(kBf16), affine_keys(kAffine8),
               affine_keys(kAffine4), affine_keys(kAffine2), channel_keys(kChannel4),
               channel_keys(kChannel2), vector_keys(kVector2), vector_keys(kVector4),
               vector_keys(kVector8), vector_keys(kVector8Wide)},
      .values = {raw_values(kFp32),
                 raw_values(kFp16),
                 raw_values(kBf16),
                 affine_values(kAffine8),
                 affine_values(kAffine4),
                 affine_values(kAffine2),
                 {},
                 {},
                 vector_values(kVector2),
                 vector_values(kVector4),
                 vector_values(kVector8),
                 vector_values(kVector8Wide)},
      .max = max,
      .exp_sum = exp_sum,
      .soft_cap = soft_cap,
      .scale = scale,
      .hadamard = hadamard,
      .rotate = rotate,
  };
  return kTable;
}

}  // namespace kvpool::kernels::avx2
