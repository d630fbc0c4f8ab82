#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"
#include "codec/half.h"

namespace kvpool::attention {

/// Reads n elements of `dtype` from element `offset` on as fp32.
inline void load_elements(DType dtype, const void* array, std::int64_t offset, std::size_t n,
                          float* out) noexcept {
  if (dtype == DType::kFp32) {
    const float* const from = static_cast<const float*>(array) + offset;
    for (std::size_t i = 0; i < n; ++i) out[i] = from[i];
    return;
  }
  const std::uint16_t* const from = static_cast<const std::uint16_t*>(array) + offset;
  for (std::size_t i = 0; i < n; ++i) {
    out[i] = dtype == DType::kFp16 ? codec::half_to_float(from[i]) : codec::bf16_to_float(from[i]);
  }
}

inline void store_elements(DType dtype, const float* elements, std::size_t n, void* array,
                           std::int64_t offset) noexcept {
  if (dtype == DType::kFp32) {
    float* const to = static_cast<float*>(array) + offset;
    for (std::size_t i = 0; i < n; ++i) to[i] = elements[i];
    return;
  }
  std::uint16_t* const to = static_cast<std::uint16_t*>(array) + offset;
  for (std::size_t i = 0; i < n; ++i) {
    to[i] = dtype == DType::kFp16 ? codec::float_to_half(elements[i])
                                  : codec::float_to_bf16(elements[i]);
  }
}

}  // namespace kvpool::attention
