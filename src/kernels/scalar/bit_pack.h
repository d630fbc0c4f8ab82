#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool::kernels::scalar {

/// Packs `n` codes of `bits` (1 to 8) bits, lowest bit first, into ceil(n * bits / 8) bytes.
/// Higher bits of a code are dropped; the bits after the last code are zero.
void pack_bits(const std::uint8_t* codes, std::size_t n, int bits, std::uint8_t* packed) noexcept;

/// The inverse of pack_bits().
void unpack_bits(const std::uint8_t* packed, std::size_t n, int bits, std::uint8_t* codes) noexcept;

}  // namespace kvpool::kernels::scalar
