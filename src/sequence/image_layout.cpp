#include "sequence/image_layout.h"

namespace kvpool::detail {

Stretch stretch_of(const LayerFormat& format, const TokenBlock& block, int role) {
  const std::size_t part = codec::part_bytes(format.part(role, block.format[role]));
  if (!block.format[role].is_raw()) return {part, part};
  return {part, part / static_cast<std::size_t>(format.raw[role].block_size) *
                    static_cast<std::size_t>(block.n_tokens)};
}

std::size_t image_bytes(const LayerFormat& format, std::span<const TokenBlock> blocks, int role) {
  std::size_t bytes = 0;
  for (const TokenBlock& block : blocks) {
    bytes += stretch_of(format, block, role).in_image * static_cast<std::size_t>(format.n_kv_heads);
  }
  return bytes;
}

}  // namespace kvpool::detail
