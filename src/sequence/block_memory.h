#pragma once

#include <cstddef>
#include <memory>

#include "storage/stay.h"

namespace kvpool::detail {

/// A hold on the place that a block's bytes lie in; what the place is, the backend knows. With the
/// last reference it goes back.
class BlockBytes {
 public:
  BlockBytes() = default;
  virtual ~BlockBytes() = default;
  BlockBytes(const BlockBytes&) = delete;
  BlockBytes& operator=(const BlockBytes&) = delete;

  /// Where these bytes were encoded to, if that is still held and they have not changed since.
  /// Forks that seal the same block share the result.
  std::shared_ptr<BlockBytes> sealed() const noexcept { return sealed_.lock(); }
  void set_sealed(const std::shared_ptr<BlockBytes>& bytes) noexcept { sealed_ = bytes; }

 private:
  std::weak_ptr<BlockBytes> sealed_;
};

/// Where blocks' places come from. Thread-safe.
class BlockMemory {
 public:
  virtual ~BlockMemory() = default;
  virtual std::shared_ptr<BlockBytes> take(std::size_t bytes, Stay stay = Stay::kLong) = 0;
};

}  // namespace kvpool::detail
