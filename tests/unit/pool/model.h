#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kvpool/block_pool.h"

namespace kvpool::testing {

/// What a call must do.
enum class Outcome { kDone, kInvalid, kExhausted, kOwnerActive };

/// A pool as its contract describes it, written without a thought for speed. A handle is a number.
class Model {
 public:
  struct Handle {
    BlockId block = -1;
    int life = -1;
    Owner owner = 0;
    std::string format;
    bool live = false;
  };
  struct Block {
    Stream stream = Stream::kKeyValue;
    int life = -1;
    std::int64_t n_used = 0;
    std::string format;
    std::vector<std::size_t> holders;
  };
  struct Part {
    Stream stream;
    std::int64_t n_tokens;
  };
  /// Free blocks of a stream: those handed out before, the next one last, and how many never were.
  struct Free {
    std::vector<BlockId> used;
    std::int64_t n_fresh = 0;
    std::int64_t size() const { return static_cast<std::int64_t>(used.size()) + n_fresh; }
  };

  explicit Model(const PoolConfig& config) : config_(config) {
    stats.n_blocks = config.n_blocks;
    if (config.separate_kv) {
      free_lists[Stream::kKey].n_fresh = (config.n_blocks + 1) / 2;
      free_lists[Stream::kValue].n_fresh = config.n_blocks / 2;
    } else {
      free_lists[Stream::kKeyValue].n_fresh = config.n_blocks;
    }
  }

  std::optional<Stream> resolve(Stream stream) const {
    if (!config_.separate_kv) return Stream::kKeyValue;
    if (stream == Stream::kKeyValue) return std::nullopt;
    return stream;
  }

  Outcome can_allocate(const std::vector<Part>& parts) {
    std::map<Stream, double> wanted;  // Exact where it matters, and never overflows.
    for (const Part& part : parts) {
      const auto stream = resolve(part.stream);
      if (!stream || part.n_tokens < 1) return Outcome::kInvalid;
      wanted[*stream] += static_cast<double>(n_blocks_for(part.n_tokens));
    }
    double missing = 0;
    for (const auto& [stream, n] : wanted) {
      missing += std::max(0.0, n - static_cast<double>(free_lists[stream].size()));
    }
    const std::int64_t room = !config_.grow_on_exhaustion ? 0
                              : config_.max_blocks        ? *config_.max_blocks - stats.n_blocks
                                                          : 1'000'000'000;
    if (missing <= static_cast<double>(room)) return Outcome::kDone;
    ++stats.n_exhausted;
    note();
    return Outcome::kExhausted;
  }

  /// After can_allocate(): the block that must come next; none: one that never was handed out.
  std::optional<BlockId> next_block(Stream stream) {
    const auto& used = free_lists[*resolve(stream)].used;
    return used.empty() ? std::nullopt : std::optional(used.back());
  }

  void hand_out(Stream stream, BlockId id, std::int64_t n_used, Owner owner,
                const std::string& format) {
    Free& from = free_lists[*resolve(stream)];
    if (!from.used.empty()) {
      from.used.pop_back();
      ++stats.n_reused;
    } else if (from.n_fresh > 0) {
      --from.n_fresh;
    } else {
      ++stats.n_blocks;
      ++stats.n_grown;
    }
    blocks[id] = {*resolve(stream), n_lives++, n_used, format, {}};
    hold(id, owner);
    ++stats.n_allocations;
  }

  void end_allocate() {
    stats.peak_blocks_in_use = std::max(stats.peak_blocks_in_use, in_use());
    note();
  }

  void hold(BlockId id, Owner owner) {
    Block& block = blocks.at(id);
    block.holders.push_back(handles.size());
    owned[owner].push_back(handles.size());
    handles.push_back({id, block.life, owner, block.format, true});
  }

  /// Whether the block of a freed handle was handed out again and is held.
  bool stale(std::size_t handle) const {
    const Handle& h = handles[handle];
    const auto block = blocks.find(h.block);
    return !h.live && block != blocks.end() && !block->second.holders.empty() &&
           block->second.life != h.life;
  }

  /// Whether anyone holds the block in the life that the handle is of.
  bool held(std::size_t handle) const {
    const auto block = blocks.find(handles[handle].block);
    return block != blocks.end() && block->second.life == handles[handle].life &&
           !block->second.holders.empty();
  }

  void let_go(const std::vector<std::size_t>& list) {
    bool changed = false;
    for (const std::size_t handle : list) {
      Handle& h = handles[handle];
      if (!h.live) continue;
      h.live = false;
      changed = true;
      auto& own = owned[h.owner];
      std::erase(own, handle);
      if (own.empty()) owned.erase(h.owner);
      Block& block = blocks.at(h.block);
      std::erase(block.holders, handle);
      if (block.holders.empty()) {
        free_lists[block.stream].used.push_back(h.block);
        ++stats.n_frees;
      }
    }
    if (changed) note();
  }

  void free_all(Owner owner) {
    registered.erase(owner);
    if (owned.contains(owner)) let_go(std::vector(owned.at(owner)));
  }

  std::int64_t shrink(Stream stream, std::int64_t target) {
    Free& from = free_lists[*resolve(stream)];
    std::int64_t n_retired = 0;
    for (; from.size() > target; ++n_retired) {
      if (from.used.empty()) {
        --from.n_fresh;
      } else {
        blocks.erase(from.used.back());
        from.used.pop_back();
      }
    }
    stats.n_blocks -= n_retired;
    stats.n_retired += n_retired;
    if (n_retired > 0) note();
    return n_retired;
  }

  bool active(Owner owner) const { return registered.contains(owner) || owned.contains(owner); }

  std::int64_t n_blocks_for(std::int64_t n_tokens) const {
    return (n_tokens - 1) / config_.block_size + 1;
  }

  std::int64_t in_use() const {
    return std::count_if(blocks.begin(), blocks.end(),
                         [](const auto& block) { return !block.second.holders.empty(); });
  }

  AllocationStats counted() const {
    AllocationStats result = stats;
    result.fragmented_count = std::count_if(blocks.begin(), blocks.end(), [&](const auto& entry) {
      return !entry.second.holders.empty() && entry.second.n_used < config_.block_size;
    });
    return result;
  }

  void note() {
    history.push_back(counted());
    if (history.size() > 256) history.erase(history.begin());
  }

  AllocationStats stats;  ///< `fragmented_count` stands in counted() alone.
  std::vector<AllocationStats> history;
  std::map<BlockId, Block> blocks;  ///< Those handed out at least once and not retired.
  std::map<Stream, Free> free_lists;
  std::vector<Handle> handles;  ///< All that there ever were.
  std::map<Owner, std::vector<std::size_t>> owned;
  std::set<Owner> registered;
  int n_lives = 0;

 private:
  PoolConfig config_;
};

}  // namespace kvpool::testing
