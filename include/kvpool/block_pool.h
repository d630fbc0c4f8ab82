#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/allocation_stats.h"
#include "kvpool/block.h"
#include "kvpool/errors.h"
#include "kvpool/pool_config.h"

namespace kvpool {

/// Hands out fixed-size blocks of token slots to owners (requests) and takes them back.
///
/// The pool keeps books: which blocks are free, who holds which, how full each is. It has no memory
/// behind its blocks; MLXBlockStorage adds that. Free lists are LIFO, so that the block freed last,
/// which is warm in cache, is used first (vLLM's PagedAttention, Kwon et al. 2023, section 4.2).
///
/// A block can have several owners (share()); it is free when the last one lets go.
///
/// Every call either does all it says or throws and changes nothing but `n_exhausted`.
/// Calls take time in proportion to the blocks they move, list or mark; all others but history()
/// are constant.
///
/// Thread-safe, every member.
class BlockPoolAllocator {
 public:
  /// Snapshots that history() keeps.
  static constexpr std::size_t kHistorySize = 256;

  /// @throws std::invalid_argument if `config` does not validate.
  explicit BlockPoolAllocator(PoolConfig config = {});
  ~BlockPoolAllocator();
  BlockPoolAllocator(const BlockPoolAllocator&) = delete;
  BlockPoolAllocator& operator=(const BlockPoolAllocator&) = delete;

  const PoolConfig& config() const noexcept { return config_; }

  /// Marks `owner` active, so that an id used twice is noticed.
  /// @throws OwnerAlreadyActiveError if it is registered or holds blocks.
  void register_owner(Owner owner);
  /// Undoes register_owner(). Frees nothing: an owner that holds blocks stays active.
  void release_owner(Owner owner);
  /// An owner id that is not active and that no earlier call returned.
  Owner new_owner();

  /// Takes blocks for `n_tokens` slots, all or none; registers `owner` if it is new.
  /// All blocks come full but the last, which has what is left of `n_tokens`.
  /// @param stream  ignored by a pool that does not separate keys and values.
  /// @throws BlockPoolExhaustedError when too few are free and growth cannot help.
  /// @throws std::invalid_argument if `n_tokens` < 1 or `stream` is not one of the pool's.
  std::vector<Block> allocate(Stream stream, std::int64_t n_tokens, Owner owner,
                              std::string_view format = "fp16");

  /// allocate() for keys and for values in one step: both or neither.
  std::pair<std::vector<Block>, std::vector<Block>> allocate_kv(std::int64_t n_tokens, Owner owner,
                                                                std::string_view format = "fp16");

  /// Adds `owner` to the owners of live blocks; one that holds a block already holds it twice.
  /// @return new handles, through which `owner` holds them, in the order of `blocks`.
  /// @throws std::invalid_argument if a handle is freed, stale or not of this pool.
  std::vector<Block> share(std::span<const Block> blocks, Owner owner);

  /// Lets go of what these handles hold. What a handle has already freed is passed over and counts
  /// nothing, also when it stands in `blocks` twice.
  /// @throws std::invalid_argument if a handle's block was freed and is held anew since, or is not
  ///         of this pool: nothing is freed.
  void free(std::span<const Block> blocks);
  /// free() for destructors: lets go of what these handles still hold, and passes over the others.
  void release(std::span<const Block> blocks) noexcept;
  /// Lets go of all that `owner` holds, and of the owner; an unknown owner is a no-op.
  void free_all(Owner owner);

  /// What `owner` holds, in the order in which it got it.
  std::vector<Block> blocks_for(Owner owner) const;
  /// Handles that hold the handle's block, it among them; 0 if the handle is freed.
  std::int64_t ref_count(const Block& block) const;
  /// Whether anyone holds the block in the life that this handle is of, through it or not.
  bool is_held(const Block& block) const;
  /// @throws std::invalid_argument if `stream` is not one of the pool's.
  std::int64_t n_free(Stream stream = Stream::kKey) const;

  /// Retires free blocks of `stream` for good until `target_free` are left, and those first that
  /// were handed out before, since only they have memory behind them. Blocks in use stay.
  /// @return how many were retired.
  /// @throws std::invalid_argument if `target_free` < 0 or `stream` is not one of the pool's.
  std::int64_t shrink(Stream stream, std::int64_t target_free);

  /// Says how many slots of a block are in use, to all who share it. A freed handle is passed over.
  /// @throws std::invalid_argument if `n_used` is not in 0..block_size, or as free() does.
  void mark_used(const Block& block, std::int64_t n_used);
  /// Spreads `n_tokens` over `blocks` in order: full blocks, then what is left, then empty ones.
  /// @throws std::invalid_argument if `n_tokens` does not fit them, or as free() does.
  void mark_used(std::span<const Block> blocks, std::int64_t n_tokens);

  AllocationStats stats() const;
  /// Counters after each of the last kHistorySize calls that allocated, found too few blocks, freed
  /// or retired, oldest first.
  std::vector<AllocationStats> history() const;

 private:
  PoolConfig config_;
  std::unique_ptr<detail::PoolState> state_;
};

}  // namespace kvpool
