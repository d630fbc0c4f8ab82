#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kvpool/block_pool.h"
#include "kvpool/mlx_buffer_pool.h"

namespace kvpool {

namespace detail {
class Backend;
}  // namespace detail

/// What the paged caches of all layers and requests share: the pool that counts their blocks and the
/// memory that the blocks lie in. Its own members are thread-safe. Ops on its blocks hang together, and
/// MLX's streams belong to threads: caches of one storage are used by one thread at a time, and handed
/// over after mx::eval(cache.pending()).
class PagedStorage {
 public:
  /// @param buffers  where kernels' memory comes from; a pool of its own if null. `ops` takes MLX's.
  /// @throws std::invalid_argument if `pool` is null, or KVPOOL_KERNELS names no level that runs here.
  explicit PagedStorage(std::shared_ptr<BlockPoolAllocator> pool,
                        std::shared_ptr<MlxBufferPool> buffers = nullptr);

  const std::shared_ptr<BlockPoolAllocator>& pool() const noexcept { return pool_; }
  /// What runs the caches' ops, chosen for the stream in use when this was made: a level of kernels
  /// ("scalar", "avx2", "avx512"), or "ops", MLX's own on whatever device is in use. KVPOOL_KERNELS
  /// forces one.
  std::string level() const;
  /// Bytes held for blocks.
  std::size_t resident_bytes() const;

  /// After an evaluation has failed: evaluates all pending work, with NaN in place of keys, values
  /// and queries that cannot be computed, so that the other requests can go on. The request that
  /// gave them should be released, or trimmed to before them.
  /// @return how many appends, attends and loads were given NaN.
  /// @throws what MLX throws if an op fails though all its inputs can be computed; with level
  ///         "ops", which replaces nothing, if anything does.
  std::int64_t recover();

  /// For the library's own use.
  const std::shared_ptr<detail::Backend>& backend() const noexcept { return backend_; }

 private:
  std::shared_ptr<BlockPoolAllocator> pool_;
  std::shared_ptr<detail::Backend> backend_;
};

}  // namespace kvpool
