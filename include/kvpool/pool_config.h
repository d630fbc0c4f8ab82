#pragma once

#include <cstdint>
#include <optional>

namespace kvpool {

/// Size and behaviour of a BlockPoolAllocator. Plain data; the pool validates it.
struct PoolConfig {
  /// Token slots in one block; at least 1.
  std::int64_t block_size = 16;
  /// Blocks the pool starts with, over all streams; at least 1. An odd one goes to the keys.
  std::int64_t n_blocks = 1024;
  /// Keys and values draw from free lists of their own; else both draw from one.
  bool separate_kv = true;
  /// A stream without enough free blocks grows by what is missing instead of raising.
  bool grow_on_exhaustion = false;
  /// Blocks over all streams that growth may reach; no value: no bound.
  std::optional<std::int64_t> max_blocks = std::nullopt;

  /// @throws std::invalid_argument naming the field, its value and what is allowed.
  void validate() const;

  bool operator==(const PoolConfig&) const = default;
};

}  // namespace kvpool
