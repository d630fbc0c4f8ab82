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

bool BlockTable::make_room(Run& run, std::size_t n) {
  if (n == 0 || (run.log2 >= 0 && n <= std::size_t{1} << run.log2)) return true;
  const int log2 = std::max(kLeastLog2, static_cast<int>(std::bit_width(n - 1)));
  const auto first = arena_->take(log2);
  if (!first) return false;
  if (run.log2 >= 0) arena_->give_back(run.first, run.log2);
  run.first = *first;
  run.log2 = log2;
  run.entries.clear();  // Nothing of it lies there.
  return true;
}

bool BlockTable::set(Run& run, std::vector<cuda::BlockEntry> wanted, TableUpdates& updates) {
  if (!make_room(run, wanted.size())) return false;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (i < run.entries.size() && run.entries[i] == wanted[i]) continue;
    updates.places.push_back(run.first + static_cast<std::int32_t>(i));
    updates.entries.push_back(wanted[i]);
  }
  run.entries = std::move(wanted);
  return true;
}

bool BlockTable::update(const Sequence& sequence, const std::shared_ptr<TableArena>& arena,
                        TableUpdates& updates) {
  if (arena_ != arena) {
    release();
    arena_ = arena;
  }
  const auto blocks = sequence.blocks();
  Run& raw = runs_[0];
  const std::size_t n_new = blocks.size() - std::min(n_seen_, blocks.size());
  if (n_seen_ > 0 && n_rewrites_ == sequence.n_rewrites() && raw.log2 >= 0 &&
      raw.entries.size() + n_new <= std::size_t{1} << raw.log2) {
    // Only the last block seen has grown, and raw ones have come.
    const auto place_of = [&](std::size_t at) { return raw.first + static_cast<std::int32_t>(at); };
    if (!raw.entries.empty() && raw.entries.back().position == blocks[n_seen_ - 1].position &&
        raw.entries.back().end_token != blocks[n_seen_ - 1].n_tokens) {
      raw.entries.back().end_token = blocks[n_seen_ - 1].n_tokens;
      updates.grown_places.push_back(place_of(raw.entries.size() - 1));
      updates.grown_ends.push_back(raw.entries.back().end_token);
    }
    for (; n_seen_ < blocks.size(); ++n_seen_) {
      updates.places.push_back(place_of(raw.entries.size()));
      updates.entries.push_back(raw.entries.emplace_back(entry_of(blocks[n_seen_])));
    }
    return true;
  }
  std::vector<cuda::BlockEntry> wanted[2];
  for (const TokenBlock& block : blocks) {
    const cuda::BlockEntry entry = entry_of(block);
    wanted[is_sealed(entry) ? 1 : 0].push_back(entry);
  }
  for (int i = 0; i < 2; ++i) {
    if (!set(runs_[i], std::move(wanted[i]), updates)) return false;
  }
  n_seen_ = blocks.size();
  n_rewrites_ = sequence.n_rewrites();
  return true;
}

cuda::SequenceEntry BlockTable::entry() const noexcept {
  return {runs_[0].first, n_raw(), runs_[1].first, n_sealed()};
}

}  // namespace kvpool::detail
