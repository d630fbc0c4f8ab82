#pragma once

#include <mlx/array.h>
#include <mlx/device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvpool/errors.h"

namespace kvpool {

namespace detail {
class BufferPoolState;
struct BufferEntry;
}  // namespace detail

/// A handle to a buffer that an MlxBufferPool handed out. A small value, cheap to copy; every copy
/// goes stale together when the buffer is released or the pool is reset. Thread-safe.
class MlxBuffer {
 public:
  /// Bytes asked for.
  std::size_t byte_len() const noexcept { return byte_len_; }
  mlx::core::Dtype dtype() const noexcept { return dtype_; }
  const mlx::core::Shape& shape() const noexcept { return shape_; }
  /// Bytes held: the next power of two of byte_len(), or the one after it.
  std::size_t capacity() const noexcept { return capacity_; }
  /// Whether the buffer is still this handle's.
  bool live() const noexcept;
  /// An array of shape() and dtype() over the buffer, without a copy. While it or anything that is
  /// computed from it lazily is alive, the buffer is not handed out again, released or not.
  /// @throws StaleBufferError if the buffer was released, or the pool reset.
  mlx::core::array array() const;

 private:
  friend class detail::BufferPoolState;
  MlxBuffer(const std::shared_ptr<detail::BufferPoolState>& pool, detail::BufferEntry& entry,
            std::size_t byte_len, mlx::core::Dtype dtype, mlx::core::Shape&& shape);

  std::shared_ptr<detail::BufferPoolState> pool_;
  detail::BufferEntry* entry_;
  std::uint64_t hand_out_;
  std::size_t byte_len_;
  std::size_t capacity_;
  mlx::core::Dtype dtype_;
  mlx::core::Shape shape_;
};

/// What alloc_batch() takes one of for each buffer.
struct BufferRequest {
  std::size_t byte_len;
  mlx::core::Dtype dtype;
  mlx::core::Shape shape;
};

/// An arena of MLX buffers by power-of-two size, reused from step to step.
///
/// A request takes the free buffer of its size class that was used last, or of the class above,
/// never a larger one. Fresh memory is zero; a reused buffer shows what was there. Free buffers are
/// kept up to a cap; those unused for longest go first.
///
/// Two ways to give back: release() for one buffer, reset() for all that are out. They mix.
///
/// Thread-safe. Never evaluates an array.
class MlxBufferPool {
 public:
  static constexpr std::size_t kDefaultMaxFreeBytes = std::size_t{1} << 30;

  /// @param max_free_bytes  bytes that free buffers may keep.
  explicit MlxBufferPool(std::size_t max_free_bytes = kDefaultMaxFreeBytes);
  ~MlxBufferPool();
  MlxBufferPool(const MlxBufferPool&) = delete;
  MlxBufferPool& operator=(const MlxBufferPool&) = delete;

  /// @param byte_len  1 or more, and at least what `shape` of `dtype` needs.
  /// @throws std::invalid_argument if the arguments do not fit; std::bad_alloc or
  ///         what MLX throws when out of memory.
  MlxBuffer alloc(mlx::core::Device device, std::size_t byte_len, mlx::core::Dtype dtype,
                  mlx::core::Shape shape);
  /// alloc() for a whole step: all buffers, in order, or an exception and none.
  std::vector<MlxBuffer> alloc_batch(mlx::core::Device device,
                                     std::span<const BufferRequest> requests);

  /// Gives one buffer back. Doing it twice is a no-op.
  /// @throws StaleBufferError if the buffer was handed on since or the pool was reset;
  ///         std::invalid_argument if it is of another pool.
  void release(const MlxBuffer& buffer);
  /// Gives back all buffers that are out. Their handles are stale from here on.
  void reset();
  /// Returns the memory of the free buffers to MLX. Buffers that are out stay.
  void clear();

  std::size_t free_count() const;
  std::size_t free_bytes() const;
  std::size_t in_use_count() const;
  /// Bytes of all buffers ever made, a measure of what reuse saved.
  std::size_t created_bytes() const;
  std::size_t max_free_bytes() const;

 private:
  std::shared_ptr<detail::BufferPoolState> state_;
};

}  // namespace kvpool
