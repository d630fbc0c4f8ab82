#pragma once

#include <mlx/array.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/block_pool.h"
#include "kvpool/mlx_buffer_pool.h"

namespace kvpool {

/// The memory behind the blocks of a BlockPoolAllocator.
///
/// A block's memory is taken at first use, in the format that the block was allocated with, and
/// stays where it is while the block lives. It is kept when the block is freed, for the id's next
/// life, until release() or until a block of another format needs it. A block shows only what was
/// written in its present life: other rows are zero.
///
/// Memory comes in segments of power-of-two bytes from an MlxBufferPool; a segment goes back when
/// none of its places is taken.
///
/// Formats: "fp32", "fp16", "bf16", and codes "int1" to "int8", bit-packed, each row from a byte on.
///
/// Writes and reads are lazy and happen in the order in which they are asked for, on the caller's
/// stream if that is on the CPU, else on the CPU's default one (MLX's memory is one for both).
/// Nothing here evaluates an array.
///
/// Thread-safe; each thread's blocks lie in segments of their own, since MLX runs lazy work only in
/// the thread that asked for it. A block passes from one thread to another once the first has
/// evaluated what it wrote and read: before that every call on it throws std::runtime_error.
class MLXBlockStorage {
 public:
  /// @param buffers  where segments come from; a pool of its own if null.
  /// @throws std::invalid_argument if `pool` is null, or `head_dim` or `n_kv_heads` is below 1 or a
  ///         block of them has more than 2^30 bytes in fp32.
  explicit MLXBlockStorage(std::shared_ptr<BlockPoolAllocator> pool, std::int64_t head_dim,
                           std::int64_t n_kv_heads = 1,
                           std::shared_ptr<MlxBufferPool> buffers = nullptr);
  ~MLXBlockStorage();
  MLXBlockStorage(const MLXBlockStorage&) = delete;
  MLXBlockStorage& operator=(const MLXBlockStorage&) = delete;

  // Every call on a block throws std::invalid_argument if the block is freed, stale or of another
  // pool, or its format is none of the above. With n_kv_heads = 1, rows have no axis for heads.

  /// All rows of the block as they lie in memory: (n_kv_heads, block_size, head_dim) of the float
  /// type, or (n_kv_heads, block_size, ceil(head_dim * bits / 8)) of uint8, packed. A copy: what it
  /// shows stays, whatever happens to the block.
  mlx::core::array buffer_for(const Block& block);

  /// Writes `values`, (n_kv_heads, n, head_dim), at slots offset to offset + n. Floats are cast to
  /// the block's type; for codes `values` must be of an integer type, and the low bits count.
  /// @throws std::invalid_argument if `values` has another shape or type, or does not fit.
  void write(const Block& block, std::int64_t offset, const mlx::core::array& values);

  /// The slots in use, (n_kv_heads, block.n_used(), head_dim): floats, or codes as uint8.
  mlx::core::array read(const Block& block);

  /// Bytes of all segments held.
  std::size_t resident_bytes() const;

  /// Gives back the memory of a freed block. Does nothing if the block has none, or if its id was
  /// handed on to another owner.
  /// @throws std::invalid_argument if the block is still held through this handle.
  void release(const Block& block);

  const std::shared_ptr<BlockPoolAllocator>& pool() const noexcept { return pool_; }
  std::int64_t head_dim() const noexcept { return head_dim_; }
  std::int64_t n_kv_heads() const noexcept { return n_kv_heads_; }

 private:
  class Segments;
  const std::shared_ptr<BlockPoolAllocator> pool_;
  const std::int64_t head_dim_;
  const std::int64_t n_kv_heads_;
  const std::unique_ptr<Segments> segments_;
};

}  // namespace kvpool
