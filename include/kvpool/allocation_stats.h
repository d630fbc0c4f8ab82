#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvpool {

/// Counters of a BlockPoolAllocator since it was made. All count blocks unless noted.
/// Plain data: a copy of the pool's counters at one moment.
struct AllocationStats {
  /// Blocks that the pool manages now.
  std::int64_t n_blocks = 0;
  std::int64_t n_allocations = 0;
  /// Blocks that went back to a free list.
  std::int64_t n_frees = 0;
  /// Allocations of a block that had been handed out before.
  std::int64_t n_reused = 0;
  /// Failed allocate() calls.
  std::int64_t n_exhausted = 0;
  std::int64_t n_grown = 0;
  std::int64_t n_retired = 0;
  std::int64_t peak_blocks_in_use = 0;
  /// Blocks in use that are not full.
  std::int64_t fragmented_count = 0;

  /// A block shared by several owners counts once.
  std::int64_t blocks_in_use() const noexcept { return n_allocations - n_frees; }
  /// Fraction of the managed blocks that are in use and not full; 0 for a pool of none.
  double fragmentation() const noexcept;
  AllocationStats snapshot() const { return *this; }

  /// Prometheus text exposition format 0.0.4, newline-terminated.
  /// @throws std::invalid_argument if `prefix` is no metric name.
  std::string to_prometheus(std::string_view prefix = "veloxquant_block_pool") const;

  bool operator==(const AllocationStats&) const = default;
};

/// One page for several pools: each metric has one HELP and TYPE and a sample a pool, told apart by
/// the label `pool`, whose value is escaped.
/// @throws std::invalid_argument if `prefix` is no metric name or two pools have one name.
std::string render_prometheus(const std::vector<std::pair<std::string, AllocationStats>>& pools,
                              std::string_view prefix = "kvpool_block_pool");

}  // namespace kvpool
