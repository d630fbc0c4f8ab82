#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backend/cuda/device.h"
#include "kernels/cuda/decode.h"
#include "sequence/sequence.h"

namespace kvpool::detail {

/// Entries of one array in device memory, handed out in runs of powers of two.
class TableArena {
 public:
  /// @param n_entries  a power of two.
  /// @param memory  of so many entries.
  TableArena(std::int32_t n_entries, OpMemory memory)
      : n_entries_(n_entries), memory_(std::move(memory)), free_(32) {}

  cuda::BlockEntry* entries() const noexcept {
    return reinterpret_cast<cuda::BlockEntry*>(memory_.address());
  }
  std::int32_t n_entries() const noexcept { return n_entries_; }
  /// The first of 2^log2 entries; none if there is no room.
  std::optional<std::int32_t> take(int log2);
  void give_back(std::int32_t first, int log2);

 private:
  const std::int32_t n_entries_;
  const OpMemory memory_;
  std::int32_t end_ = 0;
  std::vector<std::vector<std::int32_t>> free_;  ///< By log2 of their size.
};

/// What an op has to write to the arena before it reads it.
struct TableUpdates {
  std::vector<std::int32_t> places;
  std::vector<cuda::BlockEntry> entries;
  /// Entries that only have another end.
  std::vector<std::int32_t> grown_places, grown_ends;
};

/// A sequence's blocks as kernels take them: raw ones in one run, sealed ones in another. What lies
/// in the arena is known, so that from step to step only what has changed is sent.
class BlockTable {
 public:
  BlockTable() = default;
  ~BlockTable();
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  /// Brings the table up to date. @return false if the arena has no room: take another and call
  /// again.
  bool update(Sequence& sequence, const std::shared_ptr<TableArena>& arena,
              TableUpdates& updates);
  cuda::SequenceEntry entry() const noexcept;
  int n_raw() const noexcept { return static_cast<int>(runs_[0].entries.size()); }
  int n_sealed() const noexcept { return static_cast<int>(runs_[1].entries.size()); }

 private:
  struct Run {
    std::vector<cuda::BlockEntry> entries;  ///< As sent, by position.
    std::int32_t first = 0;
    int log2 = -1;  ///< Of the entries it has room for; -1: none.
  };

  bool has_room(const Run& run) const noexcept;
  /// Another place for all its entries if this has no room. @return false if the arena has none.
  bool make_room(Run& run);
  void release() noexcept;

  std::shared_ptr<TableArena> arena_;
  Run runs_[2];  ///< Raw, sealed.
  std::size_t n_seen_ = 0;  ///< Blocks of the sequence.
};

}  // namespace kvpool::detail
