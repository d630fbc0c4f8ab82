#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/integer_layout.h"
#include "kernels/kernels.h"

// Where the codes of vector layouts lie in a part; codec.h describes it.
// Functions are static: a copy compiled for one instruction set must not serve another.
namespace kvpool::kernels {

static constexpr int n_subs(int sub_dim, int head_dim) noexcept { return head_dim / sub_dim; }

/// Bytes of the low 8 bits of a part's codes; of 12-bit codes the high ones come after them.
static constexpr std::size_t low_bytes(int sub_dim, const PartShape& shape) noexcept {
  return as_size(n_subs(sub_dim, shape.head_dim)) * as_size(shape.block_size);
}
/// Bytes of the high 4 bits of one sub-vector's codes.
static constexpr std::size_t high_row_bytes(const PartShape& shape) noexcept {
  return ceil_div(as_size(shape.block_size), 2);
}

static constexpr std::size_t vector_bytes(int sub_dim, int bits, const PartShape& shape) noexcept {
  const std::size_t low = low_bytes(sub_dim, shape);
  if (bits == 8) return low;
  return low + as_size(n_subs(sub_dim, shape.head_dim)) * high_row_bytes(shape);
}

/// The code of a token's sub-vector.
template <int kSubDim, int kBits>
static std::size_t read_vector_code(const PartShape& shape, const std::byte* part, int sub,
                                    int token) noexcept {
  const std::size_t row = as_size(sub) * as_size(shape.block_size);
  const auto low = std::to_integer<std::size_t>(part[row + as_size(token)]);
  if constexpr (kBits == 8) return low;
  const std::byte* const high =
      part + low_bytes(kSubDim, shape) + as_size(sub) * high_row_bytes(shape);
  const auto pair = std::to_integer<std::size_t>(high[token / 2]);
  return low | (pair >> (token % 2 * 4) & 15U) << 8U;
}

/// Sets a code whose high bits are 0 so far.
template <int kSubDim, int kBits>
static void write_vector_code(const PartShape& shape, std::byte* part, int sub, int token,
                              std::uint32_t code) noexcept {
  const std::size_t row = as_size(sub) * as_size(shape.block_size);
  part[row + as_size(token)] = static_cast<std::byte>(code & 255U);
  if constexpr (kBits == 12) {
    std::byte* const high = part + low_bytes(kSubDim, shape) + as_size(sub) * high_row_bytes(shape);
    high[token / 2] |= static_cast<std::byte>(code >> 8U << (token % 2 * 4));
  }
}

}  // namespace kvpool::kernels
