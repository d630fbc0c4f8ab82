#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/integer_layout.h"
#include "kernels/kernels.h"

namespace kvpool::kernels::neon {

/// Queries that a kernel takes at a time.
inline constexpr int kMostQueries = 4;

/// Calls run(first query, its count as a constant) over n_queries.
template <typename Run>
inline void for_query_chunks(int n_queries, const Run& run) {
  int first = 0;
  for (; first + kMostQueries <= n_queries; first += kMostQueries) {
    run(first, std::integral_constant<int, kMostQueries>());
  }
  switch (n_queries - first) {
    case 3:
      return run(first, std::integral_constant<int, 3>());
    case 2:
      return run(first, std::integral_constant<int, 2>());
    case 1:
      return run(first, std::integral_constant<int, 1>());
    default:
      return;
  }
}

/// Fetches what a run names as ahead, in step with the work on the run.
class Ahead {
 public:
  explicit Ahead(const PartRun& run) : run_(run) {}

  /// Asks for the next n_bytes.
  void fetch(std::size_t n_bytes) {
    for (std::size_t n = 0; n < n_bytes && part_ < run_.n_ahead; n += 64) {
      __builtin_prefetch(run_.ahead[part_] + offset_, 0, 2);
      offset_ += 64;
      if (offset_ >= run_.ahead_bytes) {
        offset_ = 0;
        ++part_;
      }
    }
  }

 private:
  const PartRun& run_;
  std::size_t part_ = 0;
  std::size_t offset_ = 0;
};

// Parts have no alignment: they are loaded as bytes.

inline float32x4_t load_floats(const std::byte* at) {
  return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(at)));
}
inline uint32x4_t load_words(const std::byte* at) {
  return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(at)));
}
/// 8 fp16 or bf16.
inline uint16x8_t load_8_halves(const std::byte* at) {
  return vreinterpretq_u16_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(at)));
}
/// 4 fp16 as fp32.
inline float32x4_t load_halves(const std::byte* at) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(at))));
}

/// Of each vector its sum, in the same order.
inline float32x4_t sums_of(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

template <int kBits>
inline constexpr Layout kAffineLayout = kBits == 8   ? Layout::kAffine8
                                        : kBits == 4 ? Layout::kAffine4
                                                     : Layout::kAffine2;

/// The code at `index` of each word.
template <int kBits>
uint32x4_t code_in(uint32x4_t words, int index) {
  return vandq_u32(vshlq_u32(words, vdupq_n_s32(-kBits * index)), vdupq_n_u32((1U << kBits) - 1));
}

}  // namespace kvpool::kernels::neon
