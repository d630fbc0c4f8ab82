#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/integer_layout.h"

namespace kvpool::kernels::scalar {

template <int kBits>
std::uint8_t read_code(const std::byte* tile, CodePlace place) noexcept {
  constexpr int kMask = (1 << kBits) - 1;
  return static_cast<std::uint8_t>(std::to_integer<int>(tile[place.byte]) >> place.shift & kMask);
}

/// Sets the bits of a code in a tile where they are 0.
inline void write_code(std::byte* tile, CodePlace place, std::uint8_t code) noexcept {
  tile[place.byte] |= static_cast<std::byte>(code << place.shift);
}

inline std::uint16_t read_half(const std::byte* halves, std::size_t i) noexcept {
  std::uint16_t half = 0;
  std::memcpy(&half, halves + 2 * i, 2);
  return half;
}

inline void write_half(std::byte* halves, std::size_t i, std::uint16_t half) noexcept {
  std::memcpy(halves + 2 * i, &half, 2);
}

}  // namespace kvpool::kernels::scalar
