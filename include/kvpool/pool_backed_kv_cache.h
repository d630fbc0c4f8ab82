#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvpool/block_pool.h"

namespace kvpool {

/// The key-value cache of one attention layer as mlx_lm has it, with its growth drawn from a pool.
///
/// Keys and values lie in one contiguous buffer each that grows by `step` tokens. The token slots
/// of both, over all rows of the batch, are blocks of the pool: taken before the buffer grows,
/// given back by release() or with the cache, shared by a fork until one side writes.
///
/// If the owner's blocks are freed elsewhere (a sibling's release(), free_all()) the cache is empty
/// from then on, and its memory goes with it.
///
/// Never evaluates an array. Not thread-safe; the pool may be shared between threads.
class PoolBackedKVCache {
 public:
  using KeysAndValues = std::pair<mlx::core::array, mlx::core::array>;

  /// Tokens by which mlx_lm's own cache grows.
  static constexpr std::int64_t kStockStep = 256;

  /// @param owner  to whom the blocks are checked out; the caches of one request share one.
  /// @param step  tokens by which the buffers grow; max(block size, kStockStep) if not given.
  /// @throws std::invalid_argument if `pool` is null or `step` < 1.
  explicit PoolBackedKVCache(std::shared_ptr<BlockPoolAllocator> pool, Owner owner = -1,
                             std::optional<std::int64_t> step = std::nullopt);
  ~PoolBackedKVCache();
  PoolBackedKVCache(const PoolBackedKVCache&) = delete;
  PoolBackedKVCache& operator=(const PoolBackedKVCache&) = delete;

  /// Appends S tokens to each row.
  /// @param keys, values  (B, n_kv_heads, S, head_dim); B, S equal, head dims may differ. Later calls
  ///        keep B, heads and head dims, and are cast to the type of the first.
  /// @return keys and values of all tokens, (B, n_kv_heads, offset(), head_dim).
  /// @throws BlockPoolExhaustedError, std::invalid_argument: nothing has changed, keys nor values.
  KeysAndValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values);

  /// Frees every block of the owner, and the memory of this cache and of those linked to it.
  void release();

  /// Tokens a row.
  std::int64_t offset() const noexcept;
  std::int64_t size() const noexcept { return offset(); }
  bool empty() const noexcept { return !held(); }

  /// Forgets up to `n` of the last tokens; the buffers stay.
  /// @return how many; 0 for a negative `n`.
  std::int64_t trim(std::int64_t n);

  /// Keys and values of all tokens, or nothing if the cache is empty.
  std::optional<KeysAndValues> state() const;
  /// Replaces what the cache holds; no value empties it.
  /// @throws as update_and_fetch(): the cache is as it was.
  void set_state(const std::optional<KeysAndValues>& state);

  /// Bytes of both buffers, at capacity.
  std::size_t nbytes() const noexcept;

  /// Takes over the tokens of `other`, a cache of the same pool and another owner, in place of its
  /// own. Blocks and memory are shared until one side appends; that side then takes its own.
  /// @throws std::invalid_argument if the pools differ or the owners do not.
  void fork_from(PoolBackedKVCache& other);

  /// Makes release() of either empty both. For the layers of one request, which share an owner.
  void link(PoolBackedKVCache& other);

  const std::shared_ptr<BlockPoolAllocator>& pool() const noexcept { return pool_; }
  Owner owner() const noexcept { return owner_; }
  std::int64_t step() const noexcept { return step_; }

 private:
  struct Blocks {
    std::vector<Block> keys;
    std::vector<Block> values;
  };
  using Group = std::vector<PoolBackedKVCache*>;

  bool held() const noexcept;
  void forget() noexcept;
  std::int64_t capacity() const noexcept;
  std::int64_t n_blocks(std::int64_t n_tokens, std::int64_t n_rows) const noexcept;
  Blocks allocate(std::int64_t n_blocks) const;
  bool own_blocks(std::int64_t n);
  void mark_used(std::int64_t low, std::int64_t high, std::int64_t end);

  std::shared_ptr<BlockPoolAllocator> pool_;
  Owner owner_;
  std::int64_t step_;
  Blocks blocks_;
  bool shared_ = false;  ///< Whether a fork may still hold the blocks too.
  std::optional<KeysAndValues> buffers_;
  std::int64_t offset_ = 0;
  std::shared_ptr<Group> group_;
};

}  // namespace kvpool
