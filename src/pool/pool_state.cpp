#include "pool/pool_state.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kvpool/errors.h"
#include "util/concat.h"

namespace kvpool::detail {

namespace {

using Guard = std::lock_guard<BackoffMutex>;

std::string message(const auto&... parts) { return concat("BlockPoolAllocator: ", parts...); }

/// Block tables hold 32-bit indices.
constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

/// What a call reserves for its result before it takes the lock.
constexpr std::int64_t kReservedUnlocked = 4096;

}  // namespace

PoolState::PoolState(const PoolConfig& config) : config_(config) {
  config_.validate();
  const auto add_stream = [this](Stream stream, std::int64_t n_blocks) {
    list(stream).n_fresh = n_blocks;
    list(stream).next_fresh = next_id_;
    next_id_ += n_blocks;
  };
  if (config_.separate_kv) {
    add_stream(Stream::kKey, config_.n_blocks - config_.n_blocks / 2);
    add_stream(Stream::kValue, config_.n_blocks / 2);
  } else {
    add_stream(Stream::kKeyValue, config_.n_blocks);
  }
  stats_.n_blocks = config_.n_blocks;
  history_.reserve(BlockPoolAllocator::kHistorySize);
}

// Private members are `inline` here because position-independent code does not inline others.

// Phase one ------------------------------------------------------------------------------------

inline Stream PoolState::resolve(Stream stream) const {
  if (!config_.separate_kv) return Stream::kKeyValue;
  if (stream == Stream::kKey || stream == Stream::kValue) return stream;
  throw std::invalid_argument(message("stream must be 'k' or 'v', got '", to_string(stream), "'"));
}

inline std::int64_t PoolState::blocks_needed(std::int64_t n_tokens) const {
  if (n_tokens < 1) throw std::invalid_argument(message("n_tokens must be > 0, got ", n_tokens));
  return n_tokens / config_.block_size + (n_tokens % config_.block_size != 0);
}

inline PoolState::Standing PoolState::standing(const Block& block) const noexcept {
  const BlockRecord* record = block.record_;
  if (record == nullptr || record->pool != this) return Standing::kForeign;
  if (is_live(block)) return Standing::kLive;
  const bool held_anew =
      record->id == block.id_ && record->n_holds > 0 && block.life_ != record->life;
  return held_anew ? Standing::kStale : Standing::kFreed;
}

inline void PoolState::require_passable(std::span<const Block> blocks, const char* verb) const {
  for (const Block& block : blocks) {
    switch (standing(block)) {
      case Standing::kForeign:
        throw std::invalid_argument(
            message("cannot ", verb, " block ", block.id_, ": it is not of this pool"));
      case Standing::kStale:
        throw std::invalid_argument(
            message("cannot ", verb, " block ", block.id_, ": this handle was freed, and owner ",
                    block.record_->first.entry ? std::to_string(block.record_->first.entry->owner)
                                               : std::string("another"),
                    " holds the block since"));
      case Standing::kLive:
      case Standing::kFreed:
        break;
    }
  }
}

inline const std::string* PoolState::intern(std::string_view format) {
  if (last_format_ == nullptr || *last_format_ != format) {
    last_format_ = &*formats_.emplace(format).first;
  }
  return last_format_;
}

void PoolState::reserve_records(std::int64_t n_blocks) {
  for (; n_spare_records_ < n_blocks; ++n_spare_records_) {
    BlockRecord& record = records_.emplace_back();
    record.pool = this;
    record.next_free = spare_records_;
    spare_records_ = &record;
  }
}

void PoolState::reserve_holds(std::size_t n_holds) {
  for (; n_spare_holds_ < n_holds; ++n_spare_holds_) {
    BlockHold& hold = holds_.emplace_back();
    hold.next = spare_holds_;
    spare_holds_ = &hold;
  }
}

inline std::int64_t PoolState::growth_room() const noexcept {
  if (!config_.grow_on_exhaustion) return 0;
  const std::int64_t ceiling = std::min(config_.max_blocks.value_or(kMostBlocks), kMostBlocks);
  return std::min(ceiling - stats_.n_blocks, kMostBlocks - next_id_);
}

void PoolState::throw_exhausted(Stream stream, std::int64_t n_needed, std::int64_t n_tokens) {
  ++stats_.n_exhausted;
  record_history();
  std::string growth;
  if (config_.grow_on_exhaustion) {
    growth = concat(" and can grow to ", stats_.n_blocks + growth_room());
  }
  throw BlockPoolExhaustedError(
      message(n_tokens, " token(s) need ", n_needed, " block(s) of stream '", to_string(stream),
              "', ", list(stream).n_free(), " are free; the pool has ", stats_.n_blocks, growth));
}

inline void PoolState::take(std::span<Draw> draws, Owner owner, std::string_view format) {
  std::array<std::int64_t, 3> wanted{};
  for (const Draw& draw : draws) {
    std::int64_t& sum = wanted[static_cast<std::size_t>(draw.stream)];
    sum = draw.n_blocks > kMost - sum ? kMost : sum + draw.n_blocks;
  }
  std::int64_t n_fresh = 0;
  std::int64_t room = growth_room();
  for (const Draw& draw : draws) {
    const std::int64_t n_wanted = std::exchange(wanted[static_cast<std::size_t>(draw.stream)], 0);
    const FreeList& from = list(draw.stream);
    const std::int64_t n_missing = std::max<std::int64_t>(0, n_wanted - from.n_free());
    if (n_missing > room) throw_exhausted(draw.stream, n_wanted, draw.n_tokens);
    room -= n_missing;
    n_fresh += std::max<std::int64_t>(0, n_wanted - from.n_recycled);
  }
  for (const Draw& draw : draws) draw.out->reserve(static_cast<std::size_t>(draw.n_blocks));
  reserve_records(n_fresh);
  const std::string* tag = intern(format);
  OwnerEntry* entry = owners_.find(owner);
  if (entry == nullptr) owners_.reserve_one();

  if (entry == nullptr) entry = &owners_.insert(owner);
  for (const Draw& draw : draws) hand_out(draw, *entry, tag);
  stats_.peak_blocks_in_use = std::max(stats_.peak_blocks_in_use, stats_.blocks_in_use());
  record_history();
}

// Phase two ------------------------------------------------------------------------------------

inline void PoolState::hand_out(const Draw& draw, OwnerEntry& entry,
                                const std::string* format) noexcept {
  FreeList& from = list(draw.stream);
  std::int64_t n_left = draw.n_tokens;
  for (std::int64_t i = 0; i < draw.n_blocks; ++i) {
    if (from.n_free() == 0) grow(from, draw.n_blocks - i);
    BlockRecord& record = pop(from, draw.stream);
    record.format = format;
    record.set_n_used(std::min(n_left, config_.block_size));
    n_left -= config_.block_size;
    record.life = last_generation_ + 1;
    link(record.first, record, entry);
    draw.out->push_back(Block(record, record.first));
  }
  stats_.n_allocations += draw.n_blocks;
  if (n_left < 0) ++stats_.fragmented_count;
}

inline BlockRecord& PoolState::pop(FreeList& list, Stream stream) noexcept {
  if (BlockRecord* record = list.top) {
    list.top = record->next_free;
    --list.n_recycled;
    ++stats_.n_reused;
    return *record;
  }
  BlockRecord& record = *spare_records_;
  spare_records_ = record.next_free;
  --n_spare_records_;
  record.id = list.next_fresh++;
  record.stream = stream;
  --list.n_fresh;
  return record;
}

void PoolState::grow(FreeList& list, std::int64_t n_blocks) noexcept {
  list.next_fresh = next_id_;
  list.n_fresh = n_blocks;
  next_id_ += n_blocks;
  stats_.n_blocks += n_blocks;
  stats_.n_grown += n_blocks;
}

inline void PoolState::link(BlockHold& hold, BlockRecord& record, OwnerEntry& entry) noexcept {
  hold.record = &record;
  hold.entry = &entry;
  hold.previous = entry.last;
  hold.next = nullptr;
  (entry.last != nullptr ? entry.last->next : entry.first) = &hold;
  entry.last = &hold;
  ++entry.n_holds;
  ++record.n_holds;
  hold.generation.store(++last_generation_, std::memory_order_release);
}

inline void PoolState::let_go(BlockHold& hold) noexcept {
  OwnerEntry& entry = *hold.entry;
  (hold.previous != nullptr ? hold.previous->next : entry.first) = hold.next;
  (hold.next != nullptr ? hold.next->previous : entry.last) = hold.previous;
  --entry.n_holds;
  end(hold);
}

/// let_go() that leaves the owner's list as it is.
inline void PoolState::end(BlockHold& hold) noexcept {
  BlockRecord& record = *hold.record;
  hold.generation.store(0, std::memory_order_release);
  hold.entry = nullptr;
  if (&hold != &record.first) {
    hold.next = spare_holds_;
    spare_holds_ = &hold;
    ++n_spare_holds_;
  }
  if (--record.n_holds == 0) give_back(record);
}

inline void PoolState::give_back(BlockRecord& record) noexcept {
  if (!is_full(record)) --stats_.fragmented_count;
  record.set_n_used(0);
  FreeList& to = list(record.stream);
  record.next_free = to.top;
  to.top = &record;
  ++to.n_recycled;
  ++stats_.n_frees;
}

inline void PoolState::drop_if_idle(OwnerEntry& entry) noexcept {
  if (entry.n_holds == 0 && !entry.registered) owners_.erase(entry);
}

inline void PoolState::let_go_of_live(std::span<const Block> blocks) noexcept {
  bool changed = false;
  for (const Block& block : blocks) {
    if (standing(block) != Standing::kLive) continue;
    OwnerEntry& entry = *block.hold_->entry;
    let_go(*block.hold_);
    drop_if_idle(entry);
    changed = true;
  }
  if (changed) record_history();
}

inline void PoolState::set_used(BlockRecord& record, std::int64_t n_used) noexcept {
  const bool was_full = is_full(record);
  record.set_n_used(n_used);
  stats_.fragmented_count += static_cast<int>(was_full) - static_cast<int>(is_full(record));
}

inline void PoolState::record_history() noexcept {
  if (history_.size() < BlockPoolAllocator::kHistorySize) {
    history_.push_back(stats_);
  } else {
    history_[history_next_] = stats_;
  }
  history_next_ = (history_next_ + 1) % BlockPoolAllocator::kHistorySize;
}

// The calls ------------------------------------------------------------------------------------

void PoolState::register_owner(Owner owner) {
  const Guard guard(mutex_);
  if (owners_.find(owner) != nullptr) {
    throw OwnerAlreadyActiveError(message("owner ", owner,
                                          " is already active: it is registered or holds blocks; "
                                          "use another id, or free_all() it first"));
  }
  owners_.reserve_one();
  owners_.insert(owner).registered = true;
}

void PoolState::release_owner(Owner owner) {
  const Guard guard(mutex_);
  if (OwnerEntry* entry = owners_.find(owner)) {
    entry->registered = false;
    drop_if_idle(*entry);
  }
}

Owner PoolState::new_owner() {
  const Guard guard(mutex_);
  while (owners_.find(next_owner_) != nullptr) --next_owner_;
  return next_owner_--;
}

std::vector<Block> PoolState::allocate(Stream stream, std::int64_t n_tokens, Owner owner,
                                       std::string_view format) {
  std::vector<Block> blocks;
  Draw draw{resolve(stream), blocks_needed(n_tokens), n_tokens, &blocks};
  blocks.reserve(static_cast<std::size_t>(std::min(draw.n_blocks, kReservedUnlocked)));
  const Guard guard(mutex_);
  take({&draw, 1}, owner, format);
  return blocks;
}

std::pair<std::vector<Block>, std::vector<Block>> PoolState::allocate_kv(std::int64_t n_tokens,
                                                                         Owner owner,
                                                                         std::string_view format) {
  std::pair<std::vector<Block>, std::vector<Block>> blocks;
  const std::int64_t n_blocks = blocks_needed(n_tokens);
  std::array<Draw, 2> draws{Draw{resolve(Stream::kKey), n_blocks, n_tokens, &blocks.first},
                            Draw{resolve(Stream::kValue), n_blocks, n_tokens, &blocks.second}};
  for (const Draw& draw : draws) {
    draw.out->reserve(static_cast<std::size_t>(std::min(n_blocks, kReservedUnlocked)));
  }
  const Guard guard(mutex_);
  take(draws, owner, format);
  return blocks;
}

std::vector<Block> PoolState::share(std::span<const Block> blocks, Owner owner) {
  std::vector<Block> shared;
  shared.reserve(blocks.size());
  const Guard guard(mutex_);
  require_passable(blocks, "share");
  for (const Block& block : blocks) {
    if (!is_live(block)) {
      throw std::invalid_argument(
          message("cannot share block ", block.id_, ": this handle was freed"));
    }
  }
  if (blocks.empty()) return shared;
  reserve_holds(blocks.size());
  OwnerEntry* entry = owners_.find(owner);
  if (entry == nullptr) {
    owners_.reserve_one();
    entry = &owners_.insert(owner);
  }
  for (const Block& block : blocks) {
    BlockHold& hold = *spare_holds_;
    spare_holds_ = hold.next;
    --n_spare_holds_;
    link(hold, *block.record_, *entry);
    shared.push_back(Block(*block.record_, hold));
  }
  return shared;
}

void PoolState::free(std::span<const Block> blocks) {
  const Guard guard(mutex_);
  require_passable(blocks, "free");
  let_go_of_live(blocks);
}

void PoolState::release(std::span<const Block> blocks) noexcept {
  const Guard guard(mutex_);
  let_go_of_live(blocks);
}

void PoolState::free_all(Owner owner) {
  const Guard guard(mutex_);
  OwnerEntry* entry = owners_.find(owner);
  if (entry == nullptr) return;
  const bool changed = entry->first != nullptr;
  for (BlockHold* hold = entry->first; hold != nullptr;) end(*std::exchange(hold, hold->next));
  owners_.erase(*entry);
  if (changed) record_history();
}

std::vector<Block> PoolState::blocks_for(Owner owner) const {
  const Guard guard(mutex_);
  std::vector<Block> blocks;
  if (const OwnerEntry* entry = owners_.find(owner)) {
    blocks.reserve(static_cast<std::size_t>(entry->n_holds));
    for (BlockHold* hold = entry->first; hold != nullptr; hold = hold->next) {
      blocks.push_back(Block(*hold->record, *hold));
    }
  }
  return blocks;
}

std::int64_t PoolState::ref_count(const Block& block) const {
  const Guard guard(mutex_);
  return standing(block) == Standing::kLive ? block.record_->n_holds : 0;
}

bool PoolState::is_held(const Block& block) const {
  const BlockRecord* record = block.record_;
  const Guard guard(mutex_);
  return record != nullptr && record->pool == this && record->n_holds > 0 &&
         record->life == block.life_;
}

std::int64_t PoolState::n_free(Stream stream) const {
  const Stream resolved = resolve(stream);
  const Guard guard(mutex_);
  return list(resolved).n_free();
}

std::int64_t PoolState::shrink(Stream stream, std::int64_t target_free) {
  if (target_free < 0) {
    throw std::invalid_argument(message("target_free must be >= 0, got ", target_free));
  }
  const Stream resolved = resolve(stream);
  const Guard guard(mutex_);
  FreeList& from = list(resolved);
  const std::int64_t n_retired = std::max<std::int64_t>(0, from.n_free() - target_free);
  if (n_retired == 0) return 0;
  const std::int64_t n_recycled = std::min(n_retired, from.n_recycled);
  for (std::int64_t i = 0; i < n_recycled; ++i) {
    BlockRecord* record = from.top;
    from.top = record->next_free;
    record->next_free = spare_records_;
    spare_records_ = record;
  }
  n_spare_records_ += n_recycled;
  from.n_recycled -= n_recycled;
  from.n_fresh -= n_retired - n_recycled;
  stats_.n_blocks -= n_retired;
  stats_.n_retired += n_retired;
  record_history();
  return n_retired;
}

void PoolState::mark_used(std::span<const Block> blocks, std::int64_t n_tokens,
                          const char* argument) {
  const auto n_blocks = static_cast<std::int64_t>(blocks.size());
  const std::int64_t n_slots =
      n_blocks > kMost / config_.block_size ? kMost : n_blocks * config_.block_size;
  if (n_tokens < 0 || n_tokens > n_slots) {
    throw std::invalid_argument(message(argument, " must be 0 to ", n_slots, " (", n_blocks,
                                        " block(s) of ", config_.block_size, " slots), got ",
                                        n_tokens));
  }
  const Guard guard(mutex_);
  require_passable(blocks, "mark");
  for (const Block& block : blocks) {
    const std::int64_t n_used = std::min(n_tokens, config_.block_size);
    n_tokens -= n_used;
    if (is_live(block)) set_used(*block.record_, n_used);
  }
}

AllocationStats PoolState::stats() const {
  const Guard guard(mutex_);
  return stats_;
}

std::vector<AllocationStats> PoolState::history() const {
  const Guard guard(mutex_);
  std::vector<AllocationStats> ordered(history_);
  if (ordered.size() == BlockPoolAllocator::kHistorySize) {
    std::rotate(ordered.begin(), ordered.begin() + static_cast<std::ptrdiff_t>(history_next_),
                ordered.end());
  }
  return ordered;
}

}  // namespace kvpool::detail
