#include <limits>

#include "kernels/neon/common.h"
#include "kernels/neon/neon.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::neon {
namespace {

float max(const float* values, std::size_t n) {
  float result = -std::numeric_limits<float>::infinity();
  float32x4_t most = vdupq_n_f32(result);
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) most = vmaxnmq_f32(most, vld1q_f32(values + i));
  result = vmaxnmvq_f32(most);
  for (; i < n; ++i) result = values[i] > result ? values[i] : result;
  return result;
}

/// 2^x for x <= 0, to 2e-7 of it; 0 where it would be subnormal.
float32x4_t exp2(float32x4_t x) {
  const uint32x4_t normal = vmvnq_u32(vcltq_f32(x, vdupq_n_f32(-126.0F)));
  x = vmaxq_f32(x, vdupq_n_f32(-126.0F));
  const float32x4_t n = vrndnq_f32(x);
  const float32x4_t r = vsubq_f32(x, n);
  // Minimax on [-1/2, 1/2].
  float32x4_t p = vdupq_n_f32(1.535336188319500e-4F);
  p = vfmaq_f32(vdupq_n_f32(1.339887440266574e-3F), p, r);
  p = vfmaq_f32(vdupq_n_f32(9.618437357674640e-3F), p, r);
  p = vfmaq_f32(vdupq_n_f32(5.550332471162809e-2F), p, r);
  p = vfmaq_f32(vdupq_n_f32(2.402264791363012e-1F), p, r);
  p = vfmaq_f32(vdupq_n_f32(6.931472028550421e-1F), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0F), p, r);
  const int32x4_t exponent = vshlq_n_s32(vcvtq_s32_f32(n), 23);
  const int32x4_t result = vaddq_s32(vreinterpretq_s32_f32(p), exponent);
  return vreinterpretq_f32_u32(vandq_u32(normal, vreinterpretq_u32_s32(result)));
}

constexpr float kLog2E = 1.44269504088896341F;

float exp_sum(float* values, std::size_t n, float shift) {
  float32x4_t sum = vdupq_n_f32(0.0F);
  const float32x4_t by = vdupq_n_f32(shift);
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const float32x4_t e = exp2(vmulq_n_f32(vsubq_f32(vld1q_f32(values + i), by), kLog2E));
    vst1q_f32(values + i, e);
    sum = vaddq_f32(sum, e);
  }
  return vaddvq_f32(sum) + scalar::table().exp_sum(values + i, n - i, shift);
}

/// tanh(x) = sign(x) * (1 - e) / (1 + e) with e = exp(-2 |x|).
void soft_cap(float* values, std::size_t n, float cap) {
  const float32x4_t one = vdupq_n_f32(1.0F);
  const float32x4_t largest = vdupq_n_f32(cap);
  const uint32x4_t sign_bit = vdupq_n_u32(0x80000000U);
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const float32x4_t value = vld1q_f32(values + i);
    const float32x4_t x = vabsq_f32(vdivq_f32(value, largest));
    const float32x4_t e = exp2(vmulq_n_f32(x, -2.0F * kLog2E));
    const float32x4_t tanh = vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e));
    vst1q_f32(values + i, vbslq_f32(sign_bit, value, vmulq_f32(tanh, largest)));
  }
  scalar::table().soft_cap(values + i, n - i, cap);
}

void scale(float* values, std::size_t n, float factor) {
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) vst1q_f32(values + i, vmulq_n_f32(vld1q_f32(values + i), factor));
  for (; i < n; ++i) values[i] *= factor;
}

}  // namespace

const KernelTable& table() {
  using enum Layout;
  static const KernelTable kTable = {
      .name = "neon",
      .keys = {raw_keys(kFp32), raw_keys(kFp16), raw_keys(kBf16), integer_keys(kAffine8),
               integer_keys(kAffine4), integer_keys(kAffine2), integer_keys(kChannel4),
               integer_keys(kChannel2), scalar::vector_keys(kVector2),
               scalar::vector_keys(kVector4), scalar::vector_keys(kVector8),
               scalar::vector_keys(kVector8Wide)},
      .values = {raw_values(kFp32),
                 raw_values(kFp16),
                 raw_values(kBf16),
                 integer_values(kAffine8),
                 integer_values(kAffine4),
                 integer_values(kAffine2),
                 {},
                 {},
                 scalar::vector_values(kVector2),
                 scalar::vector_values(kVector4),
                 scalar::vector_values(kVector8),
                 scalar::vector_values(kVector8Wide)},
      .max = max,
      .exp_sum = exp_sum,
      .soft_cap = soft_cap,
      .scale = scale,
      .hadamard = scalar::table().hadamard,
      .rotate = scalar::table().rotate,
  };
  return kTable;
}

}  // namespace kvpool::kernels::neon
