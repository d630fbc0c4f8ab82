#pragma once

#include <mlx/array.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/mlx_buffer_pool.h"
#include "storage/segments.h"

namespace kvpool::detail {

class BlockMemory;

/// The bytes of one block. They stay where they are until the last reference goes; then the place is
/// the next taker's, whose ops come later in the chain than all that read this block.
class BlockBytes {
 public:
  BlockBytes(std::shared_ptr<BlockMemory> memory, Place place) noexcept;
  ~BlockBytes();
  BlockBytes(const BlockBytes&) = delete;
  BlockBytes& operator=(const BlockBytes&) = delete;

  std::byte* address() const noexcept { return address_; }
  /// Where these bytes were encoded to, if that is still held and they have not changed since.
  /// Forks that seal the same block share the result.
  std::shared_ptr<BlockBytes> sealed() const noexcept { return sealed_.lock(); }
  void set_sealed(const std::shared_ptr<BlockBytes>& bytes) noexcept { sealed_ = bytes; }

  /// Keeps the segment from being freed or handed on.
  const std::shared_ptr<mlx::core::array::Data>& buffer() const noexcept {
    return place_.segment->version.data_shared_ptr();
  }

 private:
  const std::shared_ptr<BlockMemory> memory_;
  const Place place_;
  std::byte* const address_;
  std::weak_ptr<BlockBytes> sealed_;
};

/// Buffers that must outlive an op.
using Buffers = std::vector<std::shared_ptr<mlx::core::array::Data>>;

/// Adds the buffer that `bytes` lies in, if it is not there yet.
void keep(Buffers& buffers, const std::shared_ptr<BlockBytes>& bytes);

/// The places that blocks lie in, and the order of all ops on them. Thread-safe.
///
/// The order is a chain of one-byte arrays: an op on blocks takes the latest as its first input and
/// leaves the next as its first output, so that MLX runs them one after the other, however late and
/// on whichever stream.
class BlockMemory : public std::enable_shared_from_this<BlockMemory> {
 public:
  explicit BlockMemory(std::shared_ptr<MlxBufferPool> buffers);

  std::shared_ptr<BlockBytes> take(std::size_t bytes, Stay stay = Stay::kLong);
  std::size_t resident_bytes() const;
  /// As PagedStorage::recover().
  std::int64_t recover();

  /// Puts `make_op(latest)` in the place of the latest link, with no other op coming between.
  template <typename MakeOp>
  void extend_chain(MakeOp make_op) {
    const std::lock_guard guard(chain_mutex_);
    chain_ = make_op(chain_);
  }
  mlx::core::array latest_link() const {
    const std::lock_guard guard(chain_mutex_);
    return chain_;
  }

 private:
  friend class BlockBytes;
  void give_back(const Place& place) noexcept;

  mutable std::mutex places_mutex_;
  SegmentList places_;
  mutable std::mutex chain_mutex_;
  mlx::core::array chain_;
};

}  // namespace kvpool::detail
