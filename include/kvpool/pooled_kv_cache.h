#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvpool/block_pool.h"
#include "kvpool/kv_cache.h"

namespace kvpool {

/// A cache whose tokens are accounted for in a pool, whatever the cache inside stores and how.
///
/// Keys and values check out a block when the last one is full. A call that fails leaves pool and
/// cache as they were; append() is one such call for both streams. Blocks go back with release(),
/// reset() or the cache. Not thread-safe; the pool may be shared between threads.
class PooledKVCache final : public KVCache {
 public:
  /// @param owner  to whom the blocks are checked out; each cache frees only its own blocks.
  /// @param format  recorded on the blocks, for those who look at the pool.
  /// @throws std::invalid_argument if `inner` or `pool` is null.
  PooledKVCache(std::shared_ptr<KVCache> inner, std::shared_ptr<BlockPoolAllocator> pool,
                Owner owner = -1, std::string format = "fp16");
  ~PooledKVCache() override;
  PooledKVCache(const PooledKVCache&) = delete;
  PooledKVCache& operator=(const PooledKVCache&) = delete;

  /// @throws BlockPoolExhaustedError, or what the inner cache throws; nothing has changed.
  void append_key(const mlx::core::array& k) override;
  /// As append_key().
  void append_value(const mlx::core::array& v) override;
  /// As append_key(), for both. An inner cache that refuses the value and cannot take its key back
  /// keeps the key, and this cache its slot.
  void append(const mlx::core::array& k, const mlx::core::array& v) override;
  mlx::core::array attend(const mlx::core::array& q) override;
  std::int64_t memory_bytes() const override;
  bool drop_last_key() override;

  /// Gives all blocks back. Tokens stay; the next append checks out blocks for all of them.
  void release() noexcept;
  /// release(), and the inner cache forgets its tokens.
  void reset() override;
  std::int64_t size() const override { return values_.n_tokens; }
  /// Blocks of keys and of values together that nobody has freed elsewhere.
  std::int64_t n_blocks_held() const noexcept;

  const std::shared_ptr<KVCache>& inner() const noexcept { return inner_; }
  Owner owner() const noexcept { return owner_; }

 private:
  struct Lane {
    Stream stream;
    std::vector<Block> blocks;
    std::int64_t n_tokens = 0;
  };

  /// Tokens without a slot once one more comes: none while the last block has room.
  std::int64_t tokens_to_check_out(Lane& lane);
  void advance(Lane& lane, std::span<const Block> blocks) noexcept;
  void mark_last(const Lane& lane) noexcept;
  void append_to(Lane& lane, auto append_inner);

  std::shared_ptr<KVCache> inner_;
  std::shared_ptr<BlockPoolAllocator> pool_;
  Owner owner_;
  std::string format_;
  Lane keys_{Stream::kKey, {}, 0};
  Lane values_{Stream::kValue, {}, 0};
};

}  // namespace kvpool
