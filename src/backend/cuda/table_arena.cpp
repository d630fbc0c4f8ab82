#include "backend/cuda/table_arena.h"

#include <algorithm>
#include <bit>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device.h"

namespace kvpool::detail {

namespace {

constexpr int kLeastLog2 = 4;

cuda::BlockEntry entry_of(const TokenBlock& block) {
  cuda::BlockEntry entry;
  entry.keys = on_device(block.bytes[0]).address();
  entry.values = on_device(block.bytes[1]).address();
  entry.end_token = block.n_tokens;
  entry.position = static_cast<std::int32_t>(block.position);
  entry.keys_sealed = block.format[0].is_raw() ? 0 : 1;
  entry.values_sealed = block.format[1].is_raw() ? 0 : 1;
  return entry;
}

bool is_sealed(const cuda::BlockEntry& entry) {
  return entry.keys_sealed != 0 || entry.values_sealed != 0;
}

}  // namespace

std::optional<std::int32_t> TableArena::take(int log2) {
  std::vector<std::int32_t>& free = free_[static_cast<std::size_t>(log2)];
  if (!free.empty()) {
    const std::int32_t first = free.back();
    free.pop_back();
    return first;
  }
  if (n_entries_ - end_ < std::int32_t{1} << log2) return std::nullopt;
  const std::int32_t first = end_;
  end_ += std::int32_t{1} << log2;
  return first;
}

void TableArena::give_back(std::int32_t first, int log2) {
  free_[static_cast<std::size_t>(log2)].push_back(first);
}

BlockTable::~BlockTable() { release(); }

void BlockTable::release() noexcept {
  for (Run& run : runs_) {
    if (run.log2 >= 0) arena_->give_back(run.first, run.log2);
    run = {};
  }
  n_seen_ = 0;
}

bool BlockTable::has_room(const Run& run) const noexcept {
  return run.log2 >= 0 && run.entries.size() <= std::size_t{1} << run.log2;
}

bool BlockTable::make_room(Run& run) {
  if (run.entries.empty() || has_room(run)) return true;
  const int log2 =
      std::max(kLeastLog2, static_cast<int>(std::bit_width(run.entries.size() - 1)));
  const auto first = arena_->take(log2);
  if (!first) return false;
  if (run.log2 >= 0) arena_->give_back(run.first, run.log2);
  run.first = *first;
  run.log2 = log2;
  return true;
}

bool BlockTable::update(Sequence& sequence, const std::shared_ptr<TableArena>& arena,
                        TableUpdates& updates) {
  if (arena_ != arena) {
    release();
    arena_ = arena;
  }
  const auto blocks = sequence.blocks();
  const std::size_t first =
      std::min({sequence.take_first_rewritten(), n_seen_, blocks.size()});
  const bool all_stay = first == n_seen_;
  n_seen_ = 0;  // Until it is all there.

  const std::int64_t from = first == 0 ? 0 : blocks[first - 1].end();
  std::vector<cuda::BlockEntry> added[2];
  for (const TokenBlock& block : blocks.subspan(first)) {
    const cuda::BlockEntry entry = entry_of(block);
    added[is_sealed(entry) ? 1 : 0].push_back(entry);
  }
  for (int i = 0; i < 2; ++i) {
    Run& run = runs_[i];
    const auto kept =
        first == 0 ? run.entries.begin()
                   : std::ranges::lower_bound(run.entries, from, {}, &cuda::BlockEntry::position);
    run.entries.erase(kept, run.entries.end());
    // Of the blocks that stay only the last may have grown.
    bool grown = false;
    if (i == 0 && all_stay && !run.entries.empty() &&
        run.entries.back().position == blocks[first - 1].position) {
      grown = run.entries.back().end_token != blocks[first - 1].n_tokens;
      run.entries.back().end_token = blocks[first - 1].n_tokens;
    }
    const std::size_t n_kept = run.entries.size();
    run.entries.insert(run.entries.end(), added[i].begin(), added[i].end());
    const std::size_t n_sent = has_room(run) ? n_kept : 0;
    if (n_sent == 0 && !make_room(run)) return false;
    const auto place_of = [&](std::size_t at) { return run.first + static_cast<std::int32_t>(at); };
    if (grown && n_sent > 0) {
      updates.grown_places.push_back(place_of(n_kept - 1));
      updates.grown_ends.push_back(run.entries[n_kept - 1].end_token);
    }
    for (std::size_t at = n_sent; at < run.entries.size(); ++at) {
      updates.places.push_back(place_of(at));
      updates.entries.push_back(run.entries[at]);
    }
  }
  n_seen_ = blocks.size();
  return true;
}

cuda::SequenceEntry BlockTable::entry() const noexcept {
  return {runs_[0].first, n_raw(), runs_[1].first, n_sealed()};
}

}  // namespace kvpool::detail
