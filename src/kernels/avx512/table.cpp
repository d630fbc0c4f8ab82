#include <limits>

#include "kernels/avx2/avx2.h"
#include "kernels/avx512/avx512.h"
#include "kernels/avx512/common.h"

namespace kvpool::kernels::avx512 {
namespace {

/// Max gives its second operand where one is NaN: that is the largest so far.
float max(const float* values, std::size_t n) {
  const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 a = none;
  __m512 b = none;
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    a = _mm512_max_ps(_mm512_loadu_ps(values + i), a);
    b = _mm512_max_ps(_mm512_loadu_ps(values + i + 16), b);
  }
  for (; i < n; i += 16) {
    const __mmask16 mask = first_lanes(static_cast<int>(n - i));
    a = _mm512_max_ps(_mm512_mask_loadu_ps(none, mask, values + i), a);
  }
  return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
}

/// 2^x for x <= 0, to 2e-7 of it; 0 where it would be less than 2^-149; NaN of NaN, which max
/// passes on as its second operand.
__m512 exp2(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-160.0F), x);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  // Minimax on [-1/2, 1/2], but for the last.
  __m512 p = _mm512_set1_ps(1.327646779931226e-3F);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.675541248286255e-3F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550713286647641e-2F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402211972657263e-1F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931469670586844e-1F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F));
  return _mm512_scalef_ps(p, n);
}

constexpr float kLog2E = 1.44269504088896341F;

float exp_sum(float* values, std::size_t n, float shift) {
  const __m512 by = _mm512_set1_ps(shift);
  const __m512 log2_e = _mm512_set1_ps(kLog2E);
  __m512 sum = _mm512_setzero_ps();
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(values + i), by);
    const __m512 e = exp2(_mm512_mul_ps(x, log2_e));
    _mm512_storeu_ps(values + i, e);
    sum = _mm512_add_ps(sum, e);
  }
  if (i < n) {
    const __mmask16 mask = first_lanes(static_cast<int>(n - i));
    const __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, values + i), by);
    const __m512 e = _mm512_maskz_mov_ps(mask, exp2(_mm512_mul_ps(x, log2_e)));
    _mm512_mask_storeu_ps(values + i, mask, e);
    sum = _mm512_add_ps(sum, e);
  }
  return _mm512_reduce_add_ps(sum);
}

/// tanh(x) = sign(x) * (1 - 2 e / (1 + e)) with e = exp(-2 |x|).
void soft_cap(float* values, std::size_t n, float cap) {
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 largest = _mm512_set1_ps(cap);
  const __m512 sign_bit = _mm512_set1_ps(-0.0F);
  for (std::size_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(static_cast<int>(n - i));
    const __m512 value = _mm512_maskz_loadu_ps(mask, values + i);
    const __m512 x = _mm512_abs_ps(_mm512_div_ps(value, largest));
    const __m512 e = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-2.0F * kLog2E)));
    const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __m512 sign = _mm512_and_ps(value, sign_bit);
    _mm512_mask_storeu_ps(values + i, mask, _mm512_or_ps(_mm512_mul_ps(tanh, largest), sign));
  }
}

void scale(float* values, std::size_t n, float factor) {
  const __m512 by = _mm512_set1_ps(factor);
  for (std::size_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(static_cast<int>(n - i));
    const __m512 x = _mm512_maskz_loadu_ps(mask, values + i);
    _mm512_mask_storeu_ps(values + i, mask, _mm512_mul_ps(x, by));
  }
}

}  // namespace

const KernelTable& table() {
  using enum Layout;
  static const KernelTable kTable = {
      .name = "avx512",
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
      .hadamard = avx2::hadamard,
      .rotate = avx2::rotate,
  };
  return kTable;
}

}  // namespace kvpool::kernels::avx512
