#include "kernels/scalar/bit_pack.h"

namespace kvpool::kernels::scalar {

void pack_bits(const std::uint8_t* codes, std::size_t n, int bits, std::uint8_t* packed) noexcept {
  const std::uint32_t mask = (1U << bits) - 1;
  std::uint32_t pending = 0;
  int n_pending = 0;
  for (std::size_t i = 0; i < n; ++i) {
    pending |= (codes[i] & mask) << n_pending;
    n_pending += bits;
    if (n_pending >= 8) {
      *packed++ = static_cast<std::uint8_t>(pending);
      pending >>= 8;
      n_pending -= 8;
    }
  }
  if (n_pending > 0) *packed = static_cast<std::uint8_t>(pending);
}

void unpack_bits(const std::uint8_t* packed, std::size_t n, int bits,
                 std::uint8_t* codes) noexcept {
  const std::uint32_t mask = (1U << bits) - 1;
  std::uint32_t pending = 0;
  int n_pending = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (n_pending < bits) {
      pending |= static_cast<std::uint32_t>(*packed++) << n_pending;
      n_pending += 8;
    }
    codes[i] = static_cast<std::uint8_t>(pending & mask);
    pending >>= bits;
    n_pending -= bits;
  }
}

}  // namespace kvpool::kernels::scalar
