#include "codec/half.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <limits>

namespace kvpool::codec {
namespace {

bool is_nan_half(std::uint16_t half) { return (half & 0x7FFFU) > 0x7C00U; }

/// sign, exponent and mantissa put together in double.
double value_of(std::uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(Half, EachValueIsReadExactlyAndComesBack) {
  for (unsigned i = 0; i < 65536; ++i) {
    const auto half = static_cast<std::uint16_t>(i);
    const float value = half_to_float(half);
    if (is_nan_half(half)) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_TRUE(is_nan_half(float_to_half(value)));
      continue;
    }
    if ((half & 0x7FFFU) == 0x7C00U) {
      EXPECT_TRUE(std::isinf(value));
    } else {
      ASSERT_EQ(value, value_of(half));
    }
    ASSERT_EQ(float_to_half(value), half);
  }
}

TEST(Half, RoundsTiesToEvenAndOverflowToInfinity) {
  EXPECT_EQ(float_to_half(1.0F + 0x1p-11F), float_to_half(1.0F));
  EXPECT_EQ(half_to_float(float_to_half(1.0F + 3 * 0x1p-11F)), 1.0F + 0x1p-9F);
  EXPECT_EQ(float_to_half(0x1p-25F), 0);
  EXPECT_EQ(float_to_half(0x1.8p-25F), 1);
  EXPECT_EQ(half_to_float(float_to_half(65519.0F)), 65504.0F);
  EXPECT_EQ(float_to_half(-65520.0F), 0xFC00);
}

RC_GTEST_PROP(Half, IsTheNearestOfThoseBelowAndAbove, ()) {
  const auto bits = *rc::gen::arbitrary<std::uint32_t>();
  const float value = std::bit_cast<float>(bits);
  RC_PRE(std::fabs(value) < kHalfMax);
  const double below = value_of(half_below(value));
  const double above = value_of(half_above(value));
  const double nearest = value_of(float_to_half(value));
  RC_ASSERT(below <= value);
  RC_ASSERT(above >= value);
  RC_ASSERT(above - below <= std::max(std::fabs(double{value}) * 0x1p-10, 0x1p-24));
  RC_ASSERT(std::fabs(nearest - value) == std::min(value - below, above - value));
}

TEST(Half, BoundsOfWhatIsTooLargeAreTheLargest) {
  EXPECT_EQ(half_to_float(half_below(1e9F)), 65504.0F);
  EXPECT_EQ(half_to_float(half_below(-1e9F)), -65504.0F);
  EXPECT_EQ(half_to_float(half_above(std::numeric_limits<float>::infinity())), 65504.0F);
  EXPECT_EQ(half_to_float(half_above(-1e9F)), -65504.0F);
}

TEST(Bf16, RoundsTiesToEvenAndKeepsNanAndInfinity) {
  EXPECT_EQ(bf16_to_float(float_to_bf16(1.0F + 0x1p-8F)), 1.0F);
  EXPECT_EQ(bf16_to_float(float_to_bf16(1.0F + 3 * 0x1p-8F)), 1.0F + 0x1p-6F);
  EXPECT_EQ(bf16_to_float(float_to_bf16(-3.1415927F)), -3.140625F);
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7F800001U)))));
  EXPECT_TRUE(std::isinf(bf16_to_float(float_to_bf16(std::numeric_limits<float>::max()))));
}

}  // namespace
}  // namespace kvpool::codec
