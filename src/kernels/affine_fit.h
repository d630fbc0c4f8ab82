#pragma once

#include <cmath>
#include <cstdint>

#include "codec/half.h"

namespace kvpool::kernels {

/// scale and bias in fp16.
struct Affine {
  std::uint16_t scale;
  std::uint16_t bias;
};

/// The grid bias + scale * 0 ... n_steps that covers [low, high]. Bias is rounded down and scale
/// up, so that nothing is clipped; a range too small for fp16 gets its smallest step, a flat one
/// that fp16 holds gets scale 0.
inline Affine fit(float low, float high, int n_steps) noexcept {
  const std::uint16_t bias = codec::half_below(low + 0.0F);
  const float range = high - codec::half_to_float(bias);
  return {codec::half_above(range / static_cast<float>(n_steps)), bias};
}

inline std::uint8_t quantize(float value, float scale, float bias, int n_steps) noexcept {
  const float code = std::nearbyint((value - bias) / scale);
  if (!(code > 0.0F)) return 0;  // Also where scale is 0 or value is NaN.
  return static_cast<std::uint8_t>(
      code < static_cast<float>(n_steps) ? code : static_cast<float>(n_steps));
}

}  // namespace kvpool::kernels
