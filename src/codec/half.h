#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace kvpool::codec {

/// The largest finite fp16.
inline constexpr float kHalfMax = 65504.0F;

inline float half_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) return std::bit_cast<float>(sign | 0x7F800000U | (magnitude << 13));
  // Shifted into place the exponent is 112 too small; a multiplication also normalises subnormals.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
}

/// Rounds to nearest, ties to even; what is too large becomes infinity, a NaN stays one.
inline std::uint16_t float_to_half(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) {
    return static_cast<std::uint16_t>(sign | 0x7E00U | ((magnitude >> 13) & 0x3FFU));
  }
  if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);
  std::uint32_t half = 0;
  if (magnitude < 0x38800000U) {  // The result is subnormal: let the addition round it.
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
  } else {
    half = (magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

/// The largest finite fp16 that is not above `value`, or -kHalfMax.
inline std::uint16_t half_below(float value) noexcept {
  if (value >= kHalfMax) return 0x7BFFU;
  if (value <= -kHalfMax) return 0xFBFFU;
  const std::uint16_t nearest = float_to_half(value);
  if (half_to_float(nearest) <= value) return nearest;
  return static_cast<std::uint16_t>((nearest & 0x8000U) != 0 ? nearest + 1U : nearest - 1U);
}

/// The smallest finite fp16 that is not below `value`, or kHalfMax.
inline std::uint16_t half_above(float value) noexcept {
  return static_cast<std::uint16_t>(half_below(-value) ^ 0x8000U);
}

inline float bf16_to_float(std::uint16_t value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

/// Rounds to nearest, ties to even; a NaN stays one.
inline std::uint16_t float_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace kvpool::codec
