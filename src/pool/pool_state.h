#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kvpool/block_pool.h"
#include "pool/backoff_mutex.h"
#include "pool/owner_table.h"

namespace kvpool::detail {

/// One owner's hold on one block. `generation` is 0 while the hold is unused.
struct BlockHold {
  std::atomic<std::uint64_t> generation{0};
  BlockRecord* record = nullptr;
  OwnerEntry* entry = nullptr;
  BlockHold* previous = nullptr;
  BlockHold* next = nullptr;  ///< Next of the owner's; of the spare holds while unused.
};

/// One block the pool manages. Its address stays for the life of the pool.
struct BlockRecord {
  BlockHold first;  ///< Of the owner that allocated it.
  std::atomic<std::int64_t> n_used{0};
  std::int64_t n_holds = 0;  ///< 0: free.
  std::uint64_t life = 0;    ///< Generation of the hold that took it off the free list.
  BlockId id = 0;
  PoolState* pool = nullptr;
  const std::string* format = nullptr;
  BlockRecord* next_free = nullptr;
  Stream stream = Stream::kKeyValue;

  /// Whoever reads the new value sees also that every holding before this one has ended.
  void set_n_used(std::int64_t n) noexcept { n_used.store(n, std::memory_order_release); }
};

/// What BlockPoolAllocator keeps, and the lock around it.
class PoolState {
 public:
  explicit PoolState(const PoolConfig& config);

  void register_owner(Owner owner);
  void release_owner(Owner owner);
  Owner new_owner();
  std::vector<Block> allocate(Stream stream, std::int64_t n_tokens, Owner owner,
                              std::string_view format);
  std::pair<std::vector<Block>, std::vector<Block>> allocate_kv(std::int64_t n_tokens, Owner owner,
                                                                std::string_view format);
  std::vector<Block> share(std::span<const Block> blocks, Owner owner);
  void free(std::span<const Block> blocks);
  void release(std::span<const Block> blocks) noexcept;
  void free_all(Owner owner);
  std::vector<Block> blocks_for(Owner owner) const;
  std::int64_t ref_count(const Block& block) const;
  bool is_held(const Block& block) const;
  std::int64_t n_free(Stream stream) const;
  std::int64_t shrink(Stream stream, std::int64_t target_free);
  /// @param argument  what the caller calls `n_tokens`.
  void mark_used(std::span<const Block> blocks, std::int64_t n_tokens, const char* argument);
  AllocationStats stats() const;
  std::vector<AllocationStats> history() const;

  /// Needs no lock.
  static bool is_live(const Block& block) noexcept {
    return block.hold_ != nullptr &&
           block.hold_->generation.load(std::memory_order_acquire) == block.generation_;
  }

 private:
  /// Blocks of one stream that nobody holds: a stack of those handed out before, and a count of
  /// those that never were and have no record yet.
  struct FreeList {
    BlockRecord* top = nullptr;
    std::int64_t n_recycled = 0;
    std::int64_t n_fresh = 0;
    BlockId next_fresh = 0;  ///< Ids of fresh blocks run from here; growth starts a new range.
    std::int64_t n_free() const noexcept { return n_recycled + n_fresh; }
  };

  enum class Standing { kLive, kFreed, kStale, kForeign };

  // Phase one: may throw, changes nothing that shows.
  Stream resolve(Stream stream) const;
  std::int64_t blocks_needed(std::int64_t n_tokens) const;
  Standing standing(const Block& block) const noexcept;
  void require_passable(std::span<const Block> blocks, const char* verb) const;
  const std::string* intern(std::string_view format);
  /// Blocks that growth may still add.
  std::int64_t growth_room() const noexcept;
  [[noreturn]] void throw_exhausted(Stream stream, std::int64_t n_needed, std::int64_t n_tokens);
  struct Draw {
    Stream stream;
    std::int64_t n_blocks;
    std::int64_t n_tokens;
    std::vector<Block>* out;
  };
  void take(std::span<Draw> draws, Owner owner, std::string_view format);

  // Phase two: cannot fail.
  void hand_out(const Draw& draw, OwnerEntry& entry, const std::string* format) noexcept;
  BlockRecord& pop(FreeList& list, Stream stream) noexcept;
  void grow(FreeList& list, std::int64_t n_blocks) noexcept;
  void link(BlockHold& hold, BlockRecord& record, OwnerEntry& entry) noexcept;
  void let_go(BlockHold& hold) noexcept;
  void end(BlockHold& hold) noexcept;
  void give_back(BlockRecord& record) noexcept;
  void drop_if_idle(OwnerEntry& entry) noexcept;
  void let_go_of_live(std::span<const Block> blocks) noexcept;
  void set_used(BlockRecord& record, std::int64_t n_used) noexcept;
  void record_history() noexcept;

  bool is_full(const BlockRecord& record) const noexcept {
    return record.n_used.load(std::memory_order_relaxed) >= config_.block_size;
  }
  FreeList& list(Stream stream) noexcept { return lists_[static_cast<std::size_t>(stream)]; }
  const FreeList& list(Stream stream) const noexcept {
    return lists_[static_cast<std::size_t>(stream)];
  }
  void reserve_records(std::int64_t n_blocks);
  void reserve_holds(std::size_t n_holds);

  const PoolConfig config_;
  mutable BackoffMutex mutex_;
  std::array<FreeList, 3> lists_;
  OwnerTable owners_;
  std::deque<BlockRecord> records_;
  BlockRecord* spare_records_ = nullptr;  ///< Without a block: new, or of one retired.
  std::int64_t n_spare_records_ = 0;
  std::deque<BlockHold> holds_;
  BlockHold* spare_holds_ = nullptr;
  std::size_t n_spare_holds_ = 0;
  std::unordered_set<std::string> formats_;
  const std::string* last_format_ = nullptr;
  std::uint64_t last_generation_ = 0;
  BlockId next_id_ = 0;
  Owner next_owner_ = -2;
  AllocationStats stats_;
  std::vector<AllocationStats> history_;
  std::size_t history_next_ = 0;
};

}  // namespace kvpool::detail

namespace kvpool {

inline Block::Block(detail::BlockRecord& record, detail::BlockHold& hold) noexcept
    : record_(&record),
      hold_(&hold),
      generation_(hold.generation.load(std::memory_order_relaxed)),
      life_(record.life),
      id_(record.id),
      owner_(hold.entry->owner),
      format_(record.format),
      stream_(record.stream),
      has_owner_(true),
      ever_allocated_(true) {}

}  // namespace kvpool
