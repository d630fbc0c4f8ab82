#pragma once

#include <mlx/array.h>

#include <map>
#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "backend/ops/blocks.h"
#include "backend/ops/shelf.h"

namespace kvpool::detail {

/// A shelf for each size of block. Thread-safe.
class ShelfMemory final : public BlockMemory {
 public:
  std::shared_ptr<BlockBytes> take(std::size_t bytes, Stay stay) override;
  std::size_t resident_bytes() const;
  /// Packs the shelves and adds the versions that MLX has not finished.
  void add_pending(std::vector<mlx::core::array>& versions);

 private:
  mutable std::mutex mutex_;
  std::map<std::size_t, std::shared_ptr<Shelf>> shelves_;
};

/// MLX's own ops, composed: on any device that MLX has, on the stream in use.
///
/// Each cache has shelves of its own, so that the next step of a layer writes in place while MLX
/// still reads those of other layers.
class OpsBackend final : public Backend {
 public:
  std::string_view level() const override;
  std::shared_ptr<BlockMemory> memory_for_cache() override;
  std::size_t resident_bytes() const override;
  mlx::core::array pending() override;
  /// Evaluates what is pending; replaces nothing.
  std::int64_t recover() override;

  void append(const LayerFormat& format, const AppendTasks& tasks, const mlx::core::array& keys,
              const mlx::core::array& values) override;
  KeysAndValues gather(const LayerFormat& format, std::vector<RowBlocks> rows,
                       mlx::core::Dtype dtype) override;
  mlx::core::array attend(const LayerFormat& format, std::span<const AttendRow> rows,
                          const mlx::core::array& queries, float scale,
                          const Visibility& visibility) override;
  KeysAndValues read_image(const LayerFormat& format, std::vector<TokenBlock> blocks) override;
  void write_image(const LayerFormat& format, std::span<const TokenBlock> blocks,
                   const mlx::core::array& keys, const mlx::core::array& values) override;

 private:
  std::vector<std::shared_ptr<ShelfMemory>> memories() const;
  OpsFormat with_vectors(const LayerFormat& format);

  mutable std::mutex mutex_;
  mutable std::vector<std::weak_ptr<ShelfMemory>> memories_;
  /// Of the quantizers in use: all caches of a layer share one.
  std::map<std::weak_ptr<const codec::VectorQuantizer>, std::shared_ptr<const VectorParts>,
           std::owner_less<>>
      vector_parts_;
};

}  // namespace kvpool::detail
