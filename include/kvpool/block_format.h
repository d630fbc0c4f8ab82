#pragma once

#include <mlx/dtype.h>

#include <cstdint>
#include <string_view>

namespace kvpool {

/// How one element lies in a block of MLXBlockStorage.
struct BlockFormat {
  /// Of what read() gives and write() takes: a float type, or uint8 for codes.
  mlx::core::Dtype dtype;
  /// Bits an element takes in memory.
  int bits;

  bool is_code() const noexcept { return dtype == mlx::core::uint8; }
  /// Bytes of a row of `width` elements; each row starts at a byte.
  std::int64_t row_bytes(std::int64_t width) const noexcept { return (width * bits + 7) / 8; }

  bool operator==(const BlockFormat&) const = default;
};

/// The format of a tag: "fp32", "fp16", "bf16" or "int1" to "int8".
/// @throws std::invalid_argument naming the tag and what is allowed.
BlockFormat block_format(std::string_view tag);

}  // namespace kvpool
