#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <deque>

#include "kvpool/kv_cache.h"
#include "kvpool/paged_kv_cache.h"

namespace kvpool {

/// One head's tokens in a PagedKVCache of its own, with any of its formats: packed for real, attended
/// where they lie. Vectors are kept as fp16 until they are encoded. Lazy: evaluates no array.
class StandaloneKVCache final : public KVCache {
 public:
  /// @param config  formats, window and sink; see PagedKVCacheConfig.
  /// @param block_size  tokens a block: those that KIVI's keys share a scale with.
  /// @throws std::invalid_argument naming the argument, its value and what is allowed.
  StandaloneKVCache(std::int64_t head_dim, const PagedKVCacheConfig& config,
                    std::int64_t block_size = 32);

  /// @throws std::invalid_argument if the vector is not (head_dim,).
  void append_key(const mlx::core::array& k) override;
  /// Completes the oldest key without a value.
  /// @throws std::invalid_argument if there is none, or the vector is not (head_dim,).
  void append_value(const mlx::core::array& v) override;
  /// Over the tokens that have both; fp16.
  /// @throws std::invalid_argument if there is none, or `q` is not (head_dim,).
  mlx::core::array attend(const mlx::core::array& q) override;
  /// Bytes of the blocks, and of keys without a value.
  std::int64_t memory_bytes() const override;
  void reset() override;
  std::int64_t size() const override { return cache_.size(); }
  bool drop_last_key() override;

  std::int64_t head_dim() const noexcept { return head_dim_; }
  const PagedKVCacheConfig& config() const noexcept { return cache_.config(); }

 private:
  mlx::core::array checked(const char* what, const mlx::core::array& vector) const;

  const std::int64_t head_dim_;
  PagedKVCache cache_;
  std::deque<mlx::core::array> keys_without_value_;
};

}  // namespace kvpool
