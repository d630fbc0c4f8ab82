#include <mlx/ops.h>

#include <vector>

#include "backend/ops/blocks.h"
#include "backend/ops/ops_backend.h"
#include "sequence/image_layout.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

/// Consecutive blocks of one shelf that lie alike in the image.
struct AlikeBlocks {
  Shelf* shelf;
  Stretch stretch;
  std::vector<std::uint32_t> places;
};

std::vector<AlikeBlocks> alike(const LayerFormat& format, std::span<const TokenBlock> blocks,
                               int role) {
  std::vector<AlikeBlocks> groups;
  for (const TokenBlock& block : blocks) {
    const ShelfBytes& bytes = on_shelf(block.bytes[role]);
    const Stretch stretch = stretch_of(format, block, role);
    if (groups.empty() || groups.back().shelf != &bytes.shelf() ||
        groups.back().stretch.in_image != stretch.in_image) {
      groups.push_back({&bytes.shelf(), stretch, {}});
    }
    groups.back().places.push_back(bytes.place());
  }
  return groups;
}

mx::array read(const LayerFormat& format, std::span<const TokenBlock> blocks, int role) {
  std::vector<mx::array> pieces{mx::zeros({0}, mx::uint8)};
  for (const AlikeBlocks& group : alike(format, blocks, role)) {
    const auto n = static_cast<mx::ShapeElem>(group.places.size());
    const mx::array parts =
        mx::reshape(group.shelf->read(group.places), {n, format.n_kv_heads, -1});
    pieces.push_back(
        mx::flatten(cut(parts, 2, 0, static_cast<std::int64_t>(group.stretch.in_image))));
  }
  return mx::concatenate(pieces, 0);
}

void write(const LayerFormat& format, std::span<const TokenBlock> blocks, int role,
           const mx::array& image) {
  std::int64_t at = 0;
  for (const TokenBlock& block : blocks) on_shelf(block.bytes[role]).shelf().fit();
  for (const AlikeBlocks& group : alike(format, blocks, role)) {
    const auto n = static_cast<mx::ShapeElem>(group.places.size());
    const auto bytes = static_cast<mx::ShapeElem>(group.stretch.in_image);
    const std::int64_t end = at + std::int64_t{n} * format.n_kv_heads * bytes;
    const mx::array parts = mx::reshape(cut(image, 0, at, end), {n, format.n_kv_heads, bytes});
    const int missing = static_cast<int>(group.stretch.in_memory) - bytes;
    group.shelf->write(
        group.places,
        mx::reshape(missing == 0 ? parts : mx::pad(parts, {{0, 0}, {0, 0}, {0, missing}}),
                    {n, -1}));
    at = end;
  }
}

}  // namespace

OpsBackend::KeysAndValues OpsBackend::read_image(const LayerFormat& format,
                                                 std::vector<TokenBlock> blocks) {
  return {read(format, blocks, 0), read(format, blocks, 1)};
}

void OpsBackend::write_image(const LayerFormat& format, std::span<const TokenBlock> blocks,
                             const mx::array& keys, const mx::array& values) {
  write(format, blocks, 0, keys);
  write(format, blocks, 1, values);
}

}  // namespace kvpool::detail
